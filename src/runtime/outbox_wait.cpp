// outbox_wait: a publisher outside of the server sleeps until there may be something to fetch.
//
// It is a procedure, since it must not hold a snapshot while it waits: that of the CALL goes with the commit
// that it makes first, and the transaction that begins then has neither snapshot nor number. So vacuum goes
// on, whoever waits.
//
// No wake-up is lost. Commits ring the bell of the session; it is taken before outbox_wait returns from a
// wait, and whatever was committed before that is visible to the fetch that follows. The first call of a
// session returns at once: nobody rang for it before.
#include <algorithm>

#include "outbox/destinations.hpp"
#include "outbox/durability.hpp"
#include "outbox/engine.hpp"
#include "outbox/scheduled.hpp"
#include "pg/boundary.hpp"
#include "pg/guard.hpp"
#include "pg/latch.hpp"
#include "runtime/lane.hpp"
#include "runtime/waiting_session.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

constexpr int64 kSecondUs = 1'000'000;
constexpr int32 kMaxDestinations = 1000;

// What this session knew when it last returned: later times and counters are news.
constinit TimestampTz returned_at = DT_NOBEGIN;
constinit uint64 completed = 0;

Milliseconds timeout_argument(FunctionCallInfo fcinfo, int number) {
  const Interval *interval = PG_ARGISNULL(number) ? nullptr : PG_GETARG_INTERVAL_P(number);
  const bool good = interval && interval->month == 0 && interval->day == 0 && interval->time >= 0 &&
                    interval->time <= 3600 * kSecondUs;
  if (!good) pg::raise(kInvalidParameter, "It must be between zero and one hour.", "invalid timeout");
  return interval->time / 1000;
}

// The numbers of the destinations.
int32 destinations_argument(FunctionCallInfo fcinfo, int number, int32 **numbers) {
  Datum *names = nullptr;
  bool *nulls = nullptr;
  int count = 0;
  if (!PG_ARGISNULL(number))
    deconstruct_array(PG_GETARG_ARRAYTYPE_P(number), TEXTOID, -1, false, TYPALIGN_INT, &names, &nulls,
                      &count);
  if (count == 0 || count > kMaxDestinations || std::find(nulls, nulls + count, true) != nulls + count)
    pg::raise(kInvalidParameter, "Name the destinations to fetch from, as in '{billing}'.",
              "invalid destinations");
  *numbers = static_cast<int32 *>(palloc(sizeof(int32) * static_cast<Size>(count)));
  for (int i = 0; i < count; ++i) {
    const char *name = TextDatumGetCString(names[i]);
    const outbox::Destination *d = outbox::load_destination(name);
    if (!d) outbox::raise_unknown_destination(name);
    (*numbers)[i] = d->destination;
  }
  return count;
}

// The transaction that the wait is in must end in time, though it holds nothing.
Milliseconds within_transaction(Milliseconds timeout) {
  const Milliseconds longest = pg::transaction_timeout();
  return longest == 0 ? timeout : std::min(timeout, longest / 2);
}

void wait(bool joined, TimestampTz due, Milliseconds timeout) {
  const Milliseconds until = now_ms() + within_transaction(timeout);
  const Milliseconds due_at = to_ms(due);
  // The floor for what nobody rings for: COMMIT PREPARED, sessions without the shared memory, and standbys
  // that catch up.
  const XLogRecPtr behind = outbox::position_to_catch_up();
  Milliseconds poll_at = now_ms() + settings::poll_interval;
  if (outbox::let_standby_catch_up(0, 0)) return;
  for (;;) {
    if (joined && take_waiting_bell()) return;
    const Milliseconds now = now_ms();
    if (now >= until || now >= due_at) return;
    if (now >= poll_at) {
      if (pg::transactions_completed() != completed || !pg::client_is_there()) return;
      if (behind != InvalidXLogRecPtr && outbox::standbys_have(behind)) return;
      if (outbox::let_standby_catch_up(0, 0)) return;
      poll_at = now + settings::poll_interval;
    }
    pg::wait_for_latch(static_cast<long>(std::min({until, due_at, poll_at}) - now), pg::Wait::kOutboxWait);
  }
}

// A session that was cancelled waits no more either.
struct Waiting {
  Waiting() = default;
  Waiting(const Waiting &) = delete;
  Waiting &operator=(const Waiting &) = delete;
  ~Waiting() { leave_waiting(); }
};

}  // namespace

}  // namespace retrysafe::runtime

using namespace retrysafe;
using namespace retrysafe::runtime;

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_wait) {
  const auto *call = fcinfo->context && IsA(fcinfo->context, CallContext)
                         ? reinterpret_cast<const CallContext *>(fcinfo->context)
                         : nullptr;
  PreventCommandDuringRecovery("outbox_wait()");
  PreventInTransactionBlock(call && !call->atomic, "outbox_wait()");
  const Milliseconds timeout = timeout_argument(fcinfo, 1);
  int32 *numbers;
  const int32 count = destinations_argument(fcinfo, 0, &numbers);
  const TimestampTz due = outbox::next_chance(numbers, count, returned_at);
  const bool unfinished = outbox::take_unfinished_move();
  const Joined joined = join_waiting(numbers, count);
  {
    const Waiting however_it_ends;
    pg::call([&] {
      SPI_connect_ext(SPI_OPT_NONATOMIC);
      SPI_commit();
      if (joined != Joined::kNow && !unfinished) wait(joined == Joined::kBefore, due, timeout);
      SPI_finish();
    });
  }
  // It has not looked yet at all that it was told of: the bell stays as it is.
  if (unfinished) PG_RETURN_VOID();
  completed = pg::transactions_completed();
  returned_at = GetCurrentTimestamp();
  PG_RETURN_VOID();
}
