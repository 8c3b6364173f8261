#include "pg/xact_events.hpp"

#include "pg/boundary.hpp"

namespace retrysafe::pg {

namespace {

constexpr int kMaxSubscribers = 5;
constinit const XactSubscriber *subscribers[kMaxSubscribers]{};
constinit int subscriber_count = 0;

template <class Member, class... Args>
void notify(Member XactSubscriber::*member, Args... args) {
  for (int i = 0; i < subscriber_count; ++i)
    if (auto *function = subscribers[i]->*member) function(args...);
}

// --- before the end ----------------------------------------------------------------------------------------

constinit bool asked = false;  // in this transaction; the subscribers are asked once

void ask(XactEvent event) {
  if (asked) return;
  asked = true;
  boundary([&] {
    notify(event == XACT_EVENT_PRE_PREPARE ? &XactSubscriber::before_prepare
                                           : &XactSubscriber::before_commit);
    return Datum{0};
  });
}

// The server calls first what was registered last. So a transaction that may be refused gets callbacks that
// are registered late. They are only taken away when it has ended, by the callback that stands behind them
// all: the server keeps its place in the list while it calls, and must not find that gone.
constinit int early_callbacks = 0;

void on_early_event(XactEvent event, void *) {
  if (event == XACT_EVENT_PRE_COMMIT || event == XACT_EVENT_PRE_PREPARE) ask(event);
}

void register_early() {
  RegisterXactCallback(on_early_event, nullptr);
  ++early_callbacks;
}

void forget() noexcept {
  for (; early_callbacks > 0; --early_callbacks) UnregisterXactCallback(on_early_event, nullptr);
  asked = false;
}

constinit ProcessUtility_hook_type next_utility = nullptr;

bool ends_transaction(const Node *statement) {
  if (!IsA(statement, TransactionStmt)) return false;
  const auto kind = reinterpret_cast<const TransactionStmt *>(statement)->kind;
  return kind == TRANS_STMT_COMMIT || kind == TRANS_STMT_PREPARE;
}

// Others may have come since: an extension registers when a session first needs it.
void on_utility(PlannedStmt *statement, const char *text, bool read_only, ProcessUtilityContext context,
                ParamListInfo parameters, QueryEnvironment *environment, DestReceiver *receiver,
                QueryCompletion *done) {
  if (early_callbacks > 0 && ends_transaction(statement->utilityStmt)) register_early();
  (next_utility ? next_utility : standard_ProcessUtility)(statement, text, read_only, context, parameters,
                                                          environment, receiver, done);
}

// --- what the server calls ---------------------------------------------------------------------------------

void on_xact_event(XactEvent event, void *) {
  switch (event) {
    case XACT_EVENT_PRE_COMMIT:
    case XACT_EVENT_PARALLEL_PRE_COMMIT:
    case XACT_EVENT_PRE_PREPARE:
      ask(event);
      break;
    case XACT_EVENT_COMMIT:
    case XACT_EVENT_PARALLEL_COMMIT:
      notify(&XactSubscriber::after_commit);
      forget();
      break;
    case XACT_EVENT_PREPARE:
      notify(&XactSubscriber::after_prepare);
      forget();
      break;
    case XACT_EVENT_ABORT:
    case XACT_EVENT_PARALLEL_ABORT:
      notify(&XactSubscriber::after_abort);
      forget();
      break;
  }
}

void on_subxact_event(SubXactEvent event, SubTransactionId sub, SubTransactionId parent, void *) {
  switch (event) {
    case SUBXACT_EVENT_COMMIT_SUB:
      notify(&XactSubscriber::sub_commit, sub, parent);
      break;
    case SUBXACT_EVENT_ABORT_SUB:
      notify(&XactSubscriber::sub_abort, sub, parent);
      break;
    case SUBXACT_EVENT_START_SUB:
    case SUBXACT_EVENT_PRE_COMMIT_SUB:
      break;
  }
}

}  // namespace

void subscribe_to_transactions(const XactSubscriber *subscriber) {
  if (subscriber_count == 0) {
    RegisterXactCallback(on_xact_event, nullptr);
    RegisterSubXactCallback(on_subxact_event, nullptr);
    next_utility = ProcessUtility_hook;
    ProcessUtility_hook = on_utility;
  }
  Assert(subscriber_count < kMaxSubscribers);
  subscribers[subscriber_count++] = subscriber;
}

void ask_before_others() {
  if (early_callbacks == 0) register_early();
}

}  // namespace retrysafe::pg
