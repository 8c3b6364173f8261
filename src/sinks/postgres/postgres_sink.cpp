#include "sinks/postgres/postgres_sink.hpp"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/handler_error.hpp"
#include "sinks/copy_result.hpp"
#include "sinks/postgres/message.hpp"

namespace retrysafe::sink {

namespace {

// Beyond statement_timeout, for the way there and back.
constexpr std::chrono::seconds kGrace{5};

constexpr const char *kBegin = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

bool send_command(PGconn *connection, const char *command) {
  return PQsendQueryParams(connection, command, 0, nullptr, nullptr, nullptr, nullptr, 0) == 1;
}

}  // namespace

PostgresSink::PostgresSink(const Options &options)
    : consumer_(options.text("consumer", options.destination())), session_(options) {}

size_t PostgresSink::collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) {
  advance();
  const size_t count = queue_.take_outcomes(outcomes);
  *timeout_ms = -1;
  const bool opening =
      session_.state() != Session::State::kClosed && session_.state() != Session::State::kReady;
  if (queue_.has_outcomes()) {
    *timeout_ms = 0;
  } else if (opening || phase_ != Phase::kIdle) {
    const auto deadline = opening ? session_.deadline() : deadline_;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    *timeout_ms = static_cast<int>(std::clamp<int64_t>(left, 0, INT32_MAX));
  }
  return count;
}

void PostgresSink::advance() {
  if (session_.state() == Session::State::kReady) {
    receive();
  } else if (session_.state() == Session::State::kClosed) {
    session_.advance();
    if (queue_.empty()) return;
    was_idle_ = false;
    session_.open();
  }
  if (session_.state() != Session::State::kReady) {
    if (session_.advance() == Session::State::kClosed) return lost(session_.error());
    if (session_.state() != Session::State::kReady) return;
    if (suspicion_) {
      queue_.rejected(suspicion_->statement - 1, RETRYSAFE_FAILED_RETRY, suspicion_->message);
      suspicion_.reset();
    }
  }
  while (session_.state() == Session::State::kReady && phase_ == Phase::kIdle && !queue_.empty()) begin();
}

void PostgresSink::begin() {
  queue_.begin();
  sent_ = queue_.next_size();
  start_phase(Phase::kDelivering);
  PGconn *const connection = session_.connection();
  bool sent = send_command(connection, kBegin);
  for (size_t i = 0; i < sent_ && sent; ++i) sent = send(queue_.next(i));
  sent = sent && send_command(connection, "COMMIT") && PQpipelineSync(connection) == 1;
  if (!sent) return lost(message_of(connection));
  receive();
}

void PostgresSink::start_phase(Phase phase) {
  phase_ = phase;
  answered_ = 0;
  heard_ = false;
  error_.reset();
  patience();
}

bool PostgresSink::send(const retrysafe_event &event) {
  const std::vector<Field> &fields = session_.statement().parameters;
  std::vector<std::string> texts(fields.size());
  std::vector<const char *> values(fields.size());
  for (size_t i = 0; i < fields.size(); ++i)
    values[i] = parameter_text(fields[i], event, consumer_, &texts[i]) ? texts[i].c_str() : nullptr;
  return PQsendQueryPrepared(session_.connection(), Session::kStatementName, static_cast<int>(values.size()),
                             values.data(), nullptr, nullptr, 0) == 1;
}

void PostgresSink::send_rollback() {
  PGconn *const connection = session_.connection();
  start_phase(Phase::kRollingBack);
  if (!send_command(connection, "ROLLBACK") || PQpipelineSync(connection) != 1 || !session_.push())
    lost(message_of(connection));
}

void PostgresSink::receive() {
  PGconn *const connection = session_.connection();
  if (!session_.push()) return lost(message_of(connection));
  if (std::string reason; !session_.consume(&reason)) return lost(reason);
  bool at_end = false;
  bool answered = false;
  while (session_.state() == Session::State::kReady && !PQisBusy(connection)) {
    const std::unique_ptr<PGresult, void (*)(PGresult *)> result(PQgetResult(connection), PQclear);
    // One null ends the results of a statement, a second one means that there are no more statements.
    if (!result && std::exchange(at_end, true)) break;
    if (!result) continue;
    at_end = false;
    answered = true;
    patience();
    take(result.get());
  }
  if (session_.state() != Session::State::kReady) return;
  if (answered) session_.answered();
  if (PQstatus(connection) == CONNECTION_BAD) return lost(error_ ? error_->message : message_of(connection));
  if (phase_ != Phase::kIdle && Clock::now() >= deadline_) lost("no answer within statement_timeout");
}

void PostgresSink::take(const PGresult *result) {
  const ExecStatusType status = PQresultStatus(result);
  if (is_copy(status)) return lost(message_of(result));
  switch (status) {
    case PGRES_PIPELINE_SYNC:
      return finish_phase();
    case PGRES_COMMAND_OK:
      heard_ = true;
      // A COMMIT that found the transaction failed says ROLLBACK.
      if (answered_ == sent_ + 1 && phase_ == Phase::kDelivering &&
          std::strcmp(PQcmdStatus(const_cast<PGresult *>(result)), "COMMIT") != 0)
        error_ = Error{answered_, "25P02", "the transaction was rolled back"};
      break;
    case PGRES_TUPLES_OK:
      heard_ = true;
      break;
    case PGRES_PIPELINE_ABORTED:
      break;
    default:
      if (!error_) error_ = Error{answered_, sqlstate_of(result), message_of(result)};
  }
  ++answered_;
}

void PostgresSink::finish_phase() {
  if (phase_ == Phase::kDelivering) return finish_delivery();
  if (error_) return lost(error_->message);
  phase_ = Phase::kIdle;
}

void PostgresSink::finish_delivery() {
  if (!error_) {
    phase_ = Phase::kIdle;
    was_idle_ = true;
    return queue_.committed();
  }
  const Error error = *error_;
  const HandlerError kind = handler_error(error.sqlstate);
  const bool at_event = error.statement >= 1 && error.statement <= sent_;
  if (error.sqlstate.empty() || kind == HandlerError::kUnreachable || error.statement == 0)
    return lost(error.message);
  phase_ = Phase::kIdle;
  was_idle_ = true;
  if (kind == HandlerError::kMisconfigured && at_event) {
    suspicion_ = error;
    session_.close();
    was_idle_ = false;
    return session_.open();
  }
  const retrysafe_status status =
      kind == HandlerError::kFinal ? RETRYSAFE_FAILED_FINAL : RETRYSAFE_FAILED_RETRY;
  if (!at_event)
    queue_.not_committed(kind == HandlerError::kConflict, status, error.message);
  else if (kind == HandlerError::kConflict)
    queue_.conflicted(error.statement - 1, error.message);
  else
    queue_.rejected(error.statement - 1, status, error.message);
  if (PQtransactionStatus(session_.connection()) != PQTRANS_IDLE) send_rollback();
}

void PostgresSink::lost(const std::string &given) {
  // close() ends what it may be a part of.
  const std::string reason = given;  // NOLINT(performance-unnecessary-copy-initialization)
  const bool unnoticed = was_idle_ && (phase_ == Phase::kIdle || (phase_ == Phase::kDelivering && !heard_));
  session_.close();
  phase_ = Phase::kIdle;
  was_idle_ = false;
  if (queue_.empty()) return;
  if (unnoticed) return session_.open();
  suspicion_.reset();
  queue_.unreachable(reason);
}

void PostgresSink::patience() {
  deadline_ = Clock::now() + session_.target().statement_timeout + kGrace;
}

}  // namespace retrysafe::sink
