#include "pg/xact_events.hpp"

#include "pg/boundary.hpp"

namespace retrysafe::pg {

namespace {

constexpr int kMaxSubscribers = 4;
constinit const XactSubscriber *subscribers[kMaxSubscribers]{};
constinit int subscriber_count = 0;

template <class Member, class... Args>
void notify(Member XactSubscriber::*member, Args... args) {
  for (int i = 0; i < subscriber_count; ++i)
    if (auto *function = subscribers[i]->*member) function(args...);
}

void on_xact_event(XactEvent event, void *) {
  switch (event) {
    case XACT_EVENT_PRE_COMMIT:
    case XACT_EVENT_PARALLEL_PRE_COMMIT:
      boundary([] {
        notify(&XactSubscriber::before_commit);
        return Datum{0};
      });
      break;
    case XACT_EVENT_PRE_PREPARE:
      boundary([] {
        notify(&XactSubscriber::before_prepare);
        return Datum{0};
      });
      break;
    case XACT_EVENT_COMMIT:
    case XACT_EVENT_PARALLEL_COMMIT:
      notify(&XactSubscriber::after_commit);
      break;
    case XACT_EVENT_PREPARE:
      notify(&XactSubscriber::after_prepare);
      break;
    case XACT_EVENT_ABORT:
    case XACT_EVENT_PARALLEL_ABORT:
      notify(&XactSubscriber::after_abort);
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
  }
  Assert(subscriber_count < kMaxSubscribers);
  subscribers[subscriber_count++] = subscriber;
}

}  // namespace retrysafe::pg
