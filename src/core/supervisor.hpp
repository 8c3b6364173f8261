// Which workers to start and to stop now. A pure decision over what the launcher knows: no server, no clock.
//
// A database is in one of these states:
//
//   state     meaning                                         left when
//   unknown   nobody has looked inside yet                    a worker looked
//   present   it has the extension: workers belong there      a worker found otherwise
//   absent    a worker looked and found nothing to do         evidence: announced(), or its catalog row
//   changed
//
// Only a worker can look inside a database. So the answer is kept, and a database is looked at once and then
// only on evidence: a cluster of hundreds of databases without the extension costs nothing.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace retrysafe {

class Supervisor {
 public:
  using Database = uint32_t;
  using Milliseconds = int64_t;  // of a clock that only goes forward

  // A row of the catalog of databases. Those that are closed to connections, and templates, are not open.
  struct Row {
    Database database;
    uint64_t version;  // changes with the row
    bool open;
  };

  // A worker that is starting or running.
  struct Worker {
    int slot;
    Database database;
    bool starting;  // it has not looked into its database yet
    bool stopping;
  };

  enum class Ending {
    kNothingToDo,  // no extension, or one of another version
    kAsked,        // somebody asked it to leave, or terminated it, or the cause is not met again at once
    kFailed,
  };

  struct Decision {
    std::vector<Database> start;
    std::vector<int> stop;   // slots
    Milliseconds wait = -1;  // decide again after this time even when nothing happens; -1: no need
  };

  static constexpr Milliseconds kRestartDelay = 1000;       // after a worker was asked to leave
  static constexpr Milliseconds kFailureDelayMax = 60'000;  // of a database whose workers fail
  static constexpr Milliseconds kNoSlotDelay = 2000;
  static constexpr Milliseconds kNoSlotDelayMax = 120'000;
  static constexpr int kStartingAtOnce = 2;

  // All rows of the catalog, as they are now.
  void catalog(std::span<const Row> rows);
  // Evidence that the extension was created or updated there.
  void announced(Database database);
  void everything_announced();
  // A worker found the extension.
  void found(Database database, Milliseconds now);
  void ended(Database database, Ending ending, Milliseconds now);
  // No process could be had. True: that is news.
  bool start_failed(Milliseconds now);
  // One was had. True: that is news.
  bool start_succeeded();

  // `held`: databases that somebody needs for himself.
  Decision decide(Milliseconds now, std::span<const Worker> workers, std::span<const Database> held,
                  int workers_per_database) const;

 private:
  enum class State { kUnknown, kPresent, kAbsent };
  struct Entry {
    State state = State::kUnknown;
    uint64_t version = 0;
    bool open = false;
    bool announced = false;
    int failures = 0;  // in a row, without a worker that lasted in between
    Milliseconds found_at = 0;
    Milliseconds not_before = 0;
  };

  std::map<Database, Entry> entries_;
  int start_failures_ = 0;
  Milliseconds no_start_before_ = 0;
};

}  // namespace retrysafe
