// What the server answers: replies out of bytes, and what an error among them means. Knows no network.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include <hiredis/read.h>

namespace retrysafe::redis {

struct Reply {
  enum class Type { kText, kStatus, kError, kInteger, kNil };
  Type type = Type::kNil;
  std::string text;
  long long integer = 0;
};

// The parser of hiredis, bounded: nothing that we ask for has a long answer, or one of several parts, so that
// who sends such is no server that we can work with.
class ReplyReader {
 public:
  static constexpr size_t kMaxBytes = 64 * 1024;

  enum class Result { kReply, kIncomplete, kGarbage };

  ReplyReader();
  ~ReplyReader() = default;
  ReplyReader(const ReplyReader &) = delete;
  ReplyReader &operator=(const ReplyReader &) = delete;
  void feed(std::string_view bytes);
  Result next(Reply *reply);

 private:
  struct Free {
    void operator()(redisReader *reader) const { redisReaderFree(reader); }
  };
  std::unique_ptr<redisReader, Free> reader_;
  Reply reply_;  // where the parser puts what it has found
  bool garbage_ = false;
};

enum class Verdict {
  kTooLarge,     // this event never passes
  kStream,       // the stream of this event cannot take it
  kDestination,  // nothing passes for now
  kElsewhere,    // … and this connection leads to the wrong place or is not good any more
  kUnclear,
};

// An error reply to XADD.
Verdict judge(std::string_view error);

// Whether the server says no more after this error: what was sent behind the command it answers was not read.
bool ends_connection(std::string_view error);

// An error reply as it may be shown: without arguments of commands, which some errors repeat.
std::string reason_of(std::string_view error);

}  // namespace retrysafe::redis
