// The worker: one process that works shards of one database. README.md has its states.
#include <malloc.h>
#include <sys/epoll.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "idempotency/expiry.hpp"
#include "outbox/engine.hpp"
#include "outbox/retention.hpp"
#include "pg/boundary.hpp"
#include "pg/extension.hpp"
#include "pg/latch.hpp"
#include "pg/statement.hpp"
#include "pg/text.hpp"
#include "pg/worker_transaction.hpp"
#include "runtime/destination_log.hpp"
#include "runtime/doorbell.hpp"
#include "runtime/lane.hpp"
#include "runtime/processes.hpp"
#include "runtime/waiting_session.hpp"
#include "runtime/worker_slot.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

extern "C" PGDLLEXPORT void retrysafe_worker_main(Datum);

namespace retrysafe::runtime {

namespace {

// Destinations are read anew at most this often while commits keep ringing.
constexpr Milliseconds kRefreshInterval = 1000;
// Where sessions commit one after the other the bell never stops, and to look each time would take from them
// the cores that they share with the worker. What rings sooner than this after the last time it rang waits so
// long, and as the bell rings meanwhile, nobody has to wake anybody. A first event after a silence does not
// wait.
constexpr Milliseconds kBreather = 2;
// What is new and moves no counter that a poll compares is found so long after the last look.
constexpr Milliseconds kDoubt = 5000;
// Shards that ought to be ours and cannot be had are tried again after this time.
constexpr Milliseconds kClaimAgain = 5000;
// What others do not work for so long, though there is something to do, is not left to them.
constexpr Milliseconds kNeglect = 5000;
// All delayed events that are due may be held by others. To go over them in vain is not to take all the time:
// it rests so many times longer.
constexpr int kVainRest = 4;
constexpr Milliseconds kVainRestMax = 2000;
constexpr Milliseconds kFailureRest = 1000;
constexpr Milliseconds kFailureRestMax = 60'000;
// Clean-up: while there is work, when work ends, and now and then at any rate, since rows grow old by
// themselves.
constexpr Milliseconds kCleanUpBusy = 60'000;
constexpr Milliseconds kCleanUpIdle = 10'000;
constexpr Milliseconds kCleanUpAnyway = 3'600'000;
constexpr int32 kCleanUpRows = 1000;

struct DestinationRow {
  int32 destination;
  TransactionId version;
  int32 shards;
  int64 lease_us;
  TimestampTz retry_at;  // of its first shard that comes out of back-off; 0: none is in it
};

constinit pg::Statement select_destinations{
    "SELECT d.destination, d.xmin, d.shards, (extract(epoch FROM d.lease) * 1000000)::bigint,"
    " (SELECT min(s.retry_at) FROM @.outbox_shards s"
    "   WHERE s.destination = d.destination AND s.retry_at > clock_timestamp())"
    " FROM @.outbox_destinations d WHERE NOT d.paused AND d.workers ORDER BY d.destination",
    {}};

// Inside a transaction; into `memory`.
DestinationRow *read_destinations(MemoryContext memory, int *count) {
  return pg::spi([&] {
    *count = static_cast<int>(select_destinations.run({}));
    auto *rows =
        static_cast<DestinationRow *>(MemoryContextAlloc(memory, sizeof(DestinationRow) * (*count + 1)));
    for (int i = 0; i < *count; ++i) {
      const pg::Row row(i);
      rows[i] = {row.int32_at(1), DatumGetTransactionId(row.datum(2)), row.int32_at(3), row.int64_at(4),
                 row.is_null(5) ? 0 : DatumGetTimestampTz(row.datum(5))};
    }
    return rows;
  });
}

class Worker {
 public:
  explicit Worker(MemoryContext scratch) : scratch_(scratch), epoll_(epoll_create1(EPOLL_CLOEXEC)) {}

  Verdict run() {
    pg::call([&] { set_ = pg::make_wait_set(epoll_); });
    for (;;) {
      MemoryContextSwitchTo(scratch_);
      MemoryContextReset(scratch_);
      if (ShutdownRequestPending) return wind_up(Verdict::kTerminated);
      if (asked_to_leave()) return wind_up(Verdict::kLetGo);
      const Milliseconds now = now_ms();
      listen(now);
      if (look_at_ <= now) look(now);
      if (verdict_) return *verdict_;
      show_activity(activity_, static_cast<int>(lanes_.size()));  // before they read: see announce_commit
      const Milliseconds lanes_at = turn_lanes(now);
      clean_up(now);
      if (verdict_) return *verdict_;
      show();
      const Milliseconds rung_at = bell_rings() ? listen_at_ : kNever;
      wait_until(std::min({lanes_at, look_at_, clean_up_at_, poll_at_, rung_at}));
    }
  }

 private:
  // --- what is new
  // ---------------------------------------------------------------------------------------------

  void listen(Milliseconds now) {
    if (now >= listen_at_) {
      const uint32 bell = take_bell();
      if (bell & kBellWorkers) refresh_at_ = now;
      if (bell != 0) {
        look_at_ = std::min(look_at_, now);
        listen_at_ = now + kBreather;
      }
    }
    if (now < poll_at_) return;
    poll_at_ = now + settings::poll_interval;
    if (look_at_ <= now || doorbell_.silent()) return;
    if (failures_ > 0) {  // what was missing may be there again
      look_at_ = std::min(look_at_, std::max(now, looked_at_ + kFailureRest));
      return;
    }
    look_at_ = std::min(look_at_, std::max(now, looked_at_ + kDoubt));
    if (look_at_ == now) return;
    bool worth = true;
    // Where nothing is published the position says nothing; what is waited for is somebody's consent.
    if (lanes_wanted_)
      (void)pg::in_transaction("checking for new events", nullptr, [&] {
        worth = pg::extension_if_installed() == nullptr || doorbell_.worth_a_look();
      });
    if (worth) look_at_ = now;
  }

  void look(Milliseconds now) {
    look_at_ = kNever;
    looked_at_ = now;
    const bool refresh = refresh_at_ <= now || now - refreshed_at_ >= kRefreshInterval;
    struct Seen {
      Oid extension;
      bool installed;
      bool right_version;
      bool suspended;
      char why[256];
      DestinationRow *rows;
      int count;
      TimestampTz due;
    } seen{};
    std::vector<outbox::Claim> claims;
    for (const auto &lane : lanes_)
      if (!lane->gone()) claims.push_back(lane->claim());

    const auto error = pg::in_transaction("looking for work", nullptr, [&] {
      seen.installed = pg::extension_if_installed() || OidIsValid(get_extension_oid("retrysafe", true));
      seen.right_version = seen.installed && pg::extension_version_matches().value_or(true);
      if (!seen.right_version) return;
      doorbell_.looked();
      seen.extension = pg::extension().oid;  // an error where a table or index of it is not there just now
      const char *why = nullptr;
      seen.suspended = outbox::publishing_suspended(&why);
      if (seen.suspended) pg::copy_text(seen.why, why ? why : "");
      if (seen.suspended) return;
      seen.due = outbox::next_due(claims.data(), static_cast<int32>(claims.size()));
      if (seen.due <= GetCurrentTimestamp() && move_at_ <= now) {
        const Milliseconds begun = now_ms();
        if (outbox::move_due_events() == 0)
          move_at_ = now_ms() + std::min(kVainRest * (now_ms() - begun), kVainRestMax);
        seen.due = outbox::next_due(claims.data(), static_cast<int32>(claims.size()));
      }
      if (refresh) seen.rows = read_destinations(scratch_, &seen.count);
    });
    if (seen.right_version) slot_is_running();
    if (error) {
      for (const auto &lane : lanes_) lane->wake();
      return failed("look for work", *error, now);
    }
    if (!seen.right_version) {
      lanes_.clear();
      if (seen.installed)
        log_line(
            "the extension in this database is not of version %s, which the library has: nothing is "
            "published; "
            "run ALTER EXTENSION retrysafe UPDATE",
            RETRYSAFE_VERSION);
      verdict_ = seen.installed ? Verdict::kOtherVersion : Verdict::kNotInstalled;
      return;
    }
    failures_ = 0;
    // Dropped and created again: destinations are numbered anew, so claims from before mean nothing.
    if (seen.extension != std::exchange(extension_, seen.extension)) lanes_.clear();
    lanes_wanted_ = !seen.suspended;
    note_suspension(seen.suspended, seen.why);
    if (!lanes_wanted_) {
      for (const auto &lane : lanes_) lane->leave();
      return;
    }
    // Due ones that are there now are read by the lanes at once, or wait for a lane that is busy or backing
    // off.
    if (const Milliseconds due = to_ms(seen.due); due != kNever)
      look_at_ = std::min(look_at_, std::max(due, now + kRefreshInterval / 4));
    for (const auto &lane : lanes_) lane->wake();
    if (refresh) {
      refreshed_at_ = now;
      refresh_at_ = kNever;
      take_share({seen.rows, static_cast<size_t>(seen.count)}, now);
    } else {
      // Something may have changed besides events.
      refresh_at_ = refreshed_at_ + kRefreshInterval;
    }
    if (refresh_at_ != kNever) look_at_ = std::min(look_at_, refresh_at_);
  }

  // --- shares
  // --------------------------------------------------------------------------------------------------

  // Every worker of the database comes to the same division: shards are spread evenly, those with the lower
  // slot take the odd ones. Of a destination that others publish to as well, each of them counts as a worker
  // more, and the workers keep the part of the workers. When one of them counts no longer, they divide anew.
  void take_share(std::span<const DestinationRow> rows, Milliseconds now) {
    int64 shards = 0;
    bool left_to_others = false;
    const Crew c = crew();
    std::vector<int> parts;
    for (const DestinationRow &row : rows) {
      const Publishers others = count_publishers(row.destination);
      if (others.until != DT_NOEND) refresh_at_ = std::min(refresh_at_, to_ms(others.until));
      const int crowd = c.size + others.count;
      left_to_others = left_to_others || others.count > 0;
      parts.push_back((row.shards * c.size + crowd - 1) / crowd);
      shards += parts.back();
    }
    const auto part_of = [&](int32 destination) {
      const auto row = std::find_if(rows.begin(), rows.end(),
                                    [&](const DestinationRow &r) { return r.destination == destination; });
      return row == rows.end() ? 0 : parts[static_cast<size_t>(row - rows.begin())];
    };
    const auto share = static_cast<size_t>(shards / c.size + (c.rank < shards % c.size ? 1 : 0));

    for (const auto &lane : lanes_) {
      const auto row = std::find_if(rows.begin(), rows.end(), [&](const DestinationRow &r) {
        return r.destination == lane->destination();
      });
      if (row == rows.end())
        lane->leave();
      else if (row->version != lane->version())
        lane->reload();
    }
    size_t staying = 0;
    std::map<int32, int> kept;
    for (const auto &lane : lanes_) {
      if (lane->leaving() || lane->gone()) continue;
      if (lane->substitute()) {
        if (lane->idle()) lane->leave();
        refresh_at_ = std::min(refresh_at_, now + kRefreshInterval);
        continue;
      }
      int &of_destination = kept[lane->destination()];
      if (staying == share || of_destination == part_of(lane->destination())) {
        lane->leave();
      } else {
        ++staying;
        ++of_destination;
      }
    }
    Milliseconds again = kNever;
    for (const DestinationRow &row : rows) {
      int own = 0;
      for (const auto &lane : lanes_)
        own += lane->destination() == row.destination && !lane->gone() && !lane->substitute();
      const int part = part_of(row.destination);
      while (staying < share && own < part) {
        std::optional<pg::StepError> error;
        auto lane = Lane::claim(row.destination, row.lease_us, epoll_, &error);
        if (error) return failed("claim a shard", *error, now);
        if (!lane) break;
        lanes_.push_back(std::move(lane));
        ++staying;
        ++own;
      }
      if (own < part && row.retry_at != 0) again = std::min(again, to_ms(row.retry_at));
    }
    if (staying < share) refresh_at_ = std::min({refresh_at_, again, now + kClaimAgain});
    if (left_to_others) substitute(rows, now);
  }

  // The division is a guess about others: who waits for events does not have to fetch them. A while after
  // something was committed the worker looks whether they do, and works itself what they leave.
  void substitute(std::span<const DestinationRow> rows, Milliseconds now) {
    if (neglect_at_ == kNever) {
      neglect_at_ = now + kNeglect;
    } else if (neglect_at_ <= now) {
      neglect_at_ = kNever;
      for (const DestinationRow &row : rows)
        for (int i = 0; i < row.shards; ++i) {
          std::optional<pg::StepError> error;
          auto lane = Lane::claim_neglected(row.destination, row.lease_us, kNeglect, epoll_, &error);
          if (error) return failed("claim a shard", *error, now);
          if (!lane) break;
          lanes_.push_back(std::move(lane));
          refresh_at_ = std::min(refresh_at_, now + kRefreshInterval);
        }
    }
    refresh_at_ = std::min(refresh_at_, neglect_at_);
  }

  Milliseconds turn_lanes(Milliseconds now) {
    epoll_event ready[32];
    const int count = epoll_wait(epoll_, ready, lengthof(ready), 0);
    for (int i = 0; i < count; ++i) static_cast<Lane *>(ready[i].data.ptr)->ready();
    Milliseconds at = kNever;
    bool any_gone = false;
    for (const auto &lane : lanes_) {
      MemoryContextSwitchTo(scratch_);
      at = std::min(at, lane->turn(now, lanes_));
      if (lane->take_recorded()) {
        worked_ = true;
        // Something may have been parked, and its time is not known yet.
        look_at_ = std::min(look_at_, now + kRefreshInterval);
      }
      any_gone = any_gone || (lane->gone() && !lane->leaving());
    }
    std::erase_if(lanes_, [](const auto &lane) { return lane->gone(); });
    if (any_gone) {
      refresh_at_ = now + kRefreshInterval / 4;
      look_at_ = std::min(look_at_, refresh_at_);
    }
    return at;
  }

  // --- clean-up
  // ------------------------------------------------------------------------------------------------

  void clean_up(Milliseconds now) {
    const bool idle =
        std::all_of(lanes_.begin(), lanes_.end(), [](const auto &lane) { return lane->idle(); });
    if (worked_ && !idle) clean_up_at_ = std::min(clean_up_at_, cleaned_up_at_ + kCleanUpBusy);
    if (worked_ && idle) clean_up_at_ = std::min(clean_up_at_, std::max(now, cleaned_up_at_ + kCleanUpIdle));
    if (idle) worked_ = false;
    if (now < clean_up_at_) return;
    const CleanUp result = clean_up_once(now);
    cleaned_up_at_ = now_ms();
    clean_up_at_ = cleaned_up_at_ + (result == CleanUp::kMore      ? 0
                                     : result == CleanUp::kBlocked ? kCleanUpIdle
                                                                   : kCleanUpAnyway);
  }

  enum class CleanUp { kNothing, kMore, kBlocked };

  CleanUp clean_up_once(Milliseconds now) {
    int64 removed = 0;
    bool installed = false;
    auto error = pg::in_transaction("removing what is old", nullptr, [&] {
      installed = pg::extension_if_installed() != nullptr;
      if (!installed) return;
      if (lanes_wanted_) removed = outbox::remove_settled(kCleanUpRows);
      removed += idempotency::remove_expired(kCleanUpRows);
    });
    if (!error && !installed) look_at_ = now;
    CleanUp result = removed >= kCleanUpRows ? CleanUp::kMore : CleanUp::kNothing;
    for (auto *turn_ring : {&idempotency::turn_record_ring, &outbox::turn_outbox_rings}) {
      if (error || !installed) break;
      // Of a log that is not to be published nothing is taken away.
      if (turn_ring == &outbox::turn_outbox_rings && !lanes_wanted_) continue;
      storage::Turn turn = storage::Turn::kNothing;
      error = pg::in_transaction("turning a ring", nullptr, [&] {
        if (pg::extension_if_installed()) turn = turn_ring();
      });
      if (turn == storage::Turn::kDone) result = CleanUp::kMore;
      if (turn == storage::Turn::kBlocked && result == CleanUp::kNothing) result = CleanUp::kBlocked;
    }
    if (error) failed("remove what is old", *error, now);
    return error ? CleanUp::kNothing : result;
  }

  // --- state
  // ---------------------------------------------------------------------------------------------------

  void failed(const char *what, const pg::StepError &error, Milliseconds now) {
    if (failures_ == 0 && !ShutdownRequestPending) {
      log_line("could not %s: %s", what, error.message.c_str());
      show_error(error.message.c_str());
    }
    look_at_ = now + std::min(kFailureRest << std::min(failures_, 10), kFailureRestMax);
    refresh_at_ = look_at_;
    ++failures_;
  }

  void note_suspension(bool suspended, const char *why) {
    if (suspended && !suspended_) log_line("publishing is suspended: %s", why);
    if (!suspended && suspended_) log_line("publishing goes on");
    suspended_ = suspended;
  }

  void show() {
    Activity activity = Activity::kIdle;
    if (suspended_)
      activity = Activity::kSuspended;
    else if (std::any_of(lanes_.begin(), lanes_.end(), [](const auto &lane) {
               return !lane->idle() && !lane->resting() && !lane->awaits_standby();
             }))
      activity = Activity::kPublishing;
    else if (std::any_of(lanes_.begin(), lanes_.end(),
                         [](const auto &lane) { return lane->awaits_standby(); }))
      activity = Activity::kAwaitingStandby;
    else if (std::any_of(lanes_.begin(), lanes_.end(), [](const auto &lane) { return lane->resting(); }))
      activity = Activity::kBackingOff;
    show_activity(activity, static_cast<int>(lanes_.size()));
    activity_ = activity;
  }

  void wait_until(Milliseconds until) {
    const Milliseconds now = now_ms();
    const long timeout = static_cast<long>(std::clamp<Milliseconds>(until - now, 0, 3'600'000));
    const bool reloaded = pg::call([&] {
      if (timeout > 0) {
        const bool publishing = activity_ == Activity::kPublishing;
        if (publishing || MyBEEntry->st_state != STATE_IDLE)
          pgstat_report_activity(publishing ? STATE_RUNNING : STATE_IDLE,
                                 publishing ? "publishing"
                                 : activity_ == Activity::kAwaitingStandby
                                     ? "waiting for the synchronous standby"
                                     : "idle");
        if (!publishing) pgstat_report_stat(true);
      }
      return pg::wait(set_, timeout, pg::Wait::kWorkerMain);
    });
    if (!reloaded) return;
    for (const auto &lane : lanes_) lane->reload();
    look_at_ = refresh_at_ = now_ms();
  }

  // Waits a little for what is in flight, records it and gives the shards back.
  Verdict wind_up(Verdict verdict) {
    show_activity(Activity::kStopping, static_cast<int>(lanes_.size()));
    const Milliseconds give_up = now_ms() + settings::worker_shutdown_timeout;
    for (const auto &lane : lanes_) lane->stop();
    for (;;) {
      const Milliseconds now = now_ms();
      Milliseconds at = give_up;
      bool sending = false;
      epoll_event ready[32];
      const int count = epoll_wait(epoll_, ready, lengthof(ready), 0);
      for (int i = 0; i < count; ++i) static_cast<Lane *>(ready[i].data.ptr)->ready();
      for (const auto &lane : lanes_)
        if (lane->sending()) {
          at = std::min(at, lane->turn(now, lanes_));
          sending = sending || lane->sending();
        }
      if (!sending || now >= give_up) break;
      wait_until(std::max(at, now + 1));
    }
    for (const auto &lane : lanes_) lane->wind_up(2000);
    return verdict;
  }

  MemoryContext scratch_;
  int epoll_;
  WaitEventSet *set_ = nullptr;
  Lanes lanes_;
  std::optional<Verdict> verdict_;
  Doorbell doorbell_;

  Oid extension_ = InvalidOid;  // that the lanes belong to
  bool lanes_wanted_ = false;
  bool suspended_ = false;
  bool worked_ = true;
  Activity activity_ = Activity::kIdle;
  int failures_ = 0;            // steps in a row that ended with an error
  Milliseconds listen_at_ = 0;  // to the bell
  Milliseconds look_at_ = 0;
  Milliseconds looked_at_ = 0;
  Milliseconds poll_at_ = 0;
  Milliseconds move_at_ = 0;  // delayed events
  Milliseconds refresh_at_ = 0;
  Milliseconds neglect_at_ = kNever;  // to look what others leave
  Milliseconds refreshed_at_ = -kRefreshInterval;
  Milliseconds clean_up_at_ = kNever;
  Milliseconds cleaned_up_at_ = -kCleanUpIdle;
};

// Batches come and go. Without this the C library gives their memory back to the system after each, and every
// page of the next one is a page fault.
void keep_memory() {
  constexpr int kKept = 16 << 20;
  (void)mallopt(M_MMAP_THRESHOLD, kKept);
  (void)mallopt(M_TRIM_THRESHOLD, kKept);
}

}  // namespace

}  // namespace retrysafe::runtime

using namespace retrysafe;
using namespace retrysafe::runtime;

void retrysafe_worker_main(Datum) {
  pg::handle_signals();
  BackgroundWorkerUnblockSignals();
  const auto arguments = pg::worker_extra<WorkerArguments>();
  if (!attach_slot(arguments)) proc_exit(0);
  if (asked_to_leave()) {
    set_verdict(Verdict::kLetGo);
    proc_exit(0);
  }
  BackgroundWorkerInitializeConnectionByOid(arguments.database, InvalidOid, 0);
  pg::pin_settings();
  pgstat_report_appname("retrysafe worker");
  keep_memory();
  MemoryContext scratch = AllocSetContextCreate(TopMemoryContext, "retrysafe worker", ALLOCSET_DEFAULT_SIZES);
  pg::boundary([&] {
    set_verdict(Worker(scratch).run());
    return Datum{0};
  });
  proc_exit(0);
}
