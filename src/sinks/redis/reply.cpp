#include "sinks/redis/reply.hpp"

#include <new>

#include "core/printable.hpp"

namespace retrysafe::redis {

namespace {

// As much as fits into an outcome.
constexpr size_t kMaxReason = 240;

Reply *own(const redisReadTask *task) {
  return static_cast<Reply *>(task->privdata);
}

// Called by a C library, which takes null for want of memory and stops there.
void *make_text(const redisReadTask *task, char *text, size_t size) {
  try {
    Reply *const reply = own(task);
    reply->type = task->type == REDIS_REPLY_ERROR    ? Reply::Type::kError
                  : task->type == REDIS_REPLY_STATUS ? Reply::Type::kStatus
                                                     : Reply::Type::kText;
    reply->text.assign(text, size);
    return reply;
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void *make_integer(const redisReadTask *task, long long value) {
  own(task)->type = Reply::Type::kInteger;
  own(task)->integer = value;
  return own(task);
}

void *make_nil(const redisReadTask *task) {
  own(task)->type = Reply::Type::kNil;
  return own(task);
}

void free_nothing(void *) {}

// Null for what nobody asks for. Version 1 of the library counts parts in another type than earlier ones, and
// reads types that a server sends only to those who want them.
template <typename Functions>
constexpr Functions make_functions() noexcept {
  Functions make{};
  make.createString = make_text;
  make.createArray = [](const redisReadTask *, auto) -> void * { return nullptr; };
  make.createInteger = make_integer;
  make.createNil = make_nil;
  make.freeObject = free_nothing;
  if constexpr (requires { make.createDouble; }) {
    make.createDouble = [](const redisReadTask *, double, char *, size_t) -> void * { return nullptr; };
    make.createBool = [](const redisReadTask *, int) -> void * { return nullptr; };
  }
  return make;
}

constinit redisReplyObjectFunctions functions = make_functions<redisReplyObjectFunctions>();

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace

ReplyReader::ReplyReader() : reader_(redisReaderCreateWithFunctions(&functions)) {
  if (!reader_) throw std::bad_alloc();
  reader_->privdata = &reply_;
}

void ReplyReader::feed(std::string_view bytes) {
  garbage_ = garbage_ || redisReaderFeed(reader_.get(), bytes.data(), bytes.size()) != REDIS_OK;
}

ReplyReader::Result ReplyReader::next(Reply *reply) {
  void *found = nullptr;
  garbage_ = garbage_ || redisReaderGetReply(reader_.get(), &found) != REDIS_OK;
  if (garbage_) return Result::kGarbage;
  if (!found) {
    garbage_ = reader_->len - reader_->pos > kMaxBytes;
    return garbage_ ? Result::kGarbage : Result::kIncomplete;
  }
  *reply = std::move(reply_);
  reply_ = {};
  return Result::kReply;
}

Verdict judge(std::string_view error) {
  const std::string_view code = error.substr(0, error.find(' '));
  for (const char *known : {"READONLY", "NOAUTH", "MOVED", "ASK", "DENIED"})
    if (code == known) return Verdict::kElsewhere;
  for (const char *known : {"OOM", "LOADING", "MASTERDOWN", "BUSY", "UNKILLABLE", "MISCONF", "NOREPLICAS",
                            "CLUSTERDOWN", "TRYAGAIN", "CROSSSLOT"})
    if (code == known) return Verdict::kDestination;
  if (code == "WRONGTYPE") return Verdict::kStream;
  // A user may have the right to use some streams and not others.
  if (code == "NOPERM") return has(error, " key") ? Verdict::kStream : Verdict::kDestination;
  if (has(error, "Protocol error: invalid bulk length") || has(error, "Elements are too large"))
    return Verdict::kTooLarge;
  if (has(error, "exhausted the last possible ID") || has(error, "equal or smaller than the target stream"))
    return Verdict::kStream;
  if (has(error, "Protocol error") || has(error, "unknown command") || has(error, "max number of clients"))
    return Verdict::kElsewhere;
  return Verdict::kUnclear;
}

bool ends_connection(std::string_view error) {
  return has(error, "Protocol error");
}

std::string reason_of(std::string_view error) {
  std::string text(error.substr(0, error.find(", with args beginning with")));
  if (text.starts_with("MOVED ") || text.starts_with("ASK "))
    text = "the server is part of a Redis Cluster, which this kind does not support: " + text;
  text = printable(text, kMaxReason);
  return text.empty() ? "the server answered with an error without a text" : text;
}

}  // namespace retrysafe::redis
