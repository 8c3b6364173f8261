// What a sink answers, as a program of its own: the first byte says what it promises, then each byte is what
// it does next. Whatever that is, every event gets one outcome that is true, in the order of its key.
#include "core/dispatcher.hpp"

#include <deque>
#include <map>

#include "input.hpp"

using namespace retrysafe;

namespace {

using Status = Dispatcher::Status;
constexpr size_t kMaxEvents = 12;
constexpr const char *kKeys[] = {nullptr, "a", "b", "c"};

class ScriptedSink : public SinkPort {
 public:
  ScriptedSink(fuzz::Input *script, bool ordered) : script_(script), ordered_(ordered) {}

  void begin(std::span<Dispatcher::Item> items) {
    items_ = items;
    said_.assign(items.size(), -1);
    in_flight_.clear();
  }

  bool keeps_order() const override { return ordered_; }

  bool submit(const retrysafe_event &event) override {
    const auto index = static_cast<uint32_t>(event.tag);
    fuzz::require(index < items_.size() && !items_[index].held);
    fuzz::require(said_[index] == -1);
    for (const auto &[tag, other] : in_flight_) {
      fuzz::require(tag != event.tag);
      fuzz::require(ordered_ || !event.ordering_key.data || other != fuzz::view(event.ordering_key));
    }
    // All before it of its key went out, and none has failed.
    for (uint32_t i = 0; i < index && event.ordering_key.data; ++i) {
      if (items_[i].event.ordering_key.data != event.ordering_key.data) continue;
      fuzz::require(said_[i] != RETRYSAFE_FAILED_RETRY && !items_[i].held);
      fuzz::require(said_[i] != -1 || in_flight_.count(items_[i].event.tag) > 0);
    }
    if (script_->empty() ? false : script_->number<uint8_t>() % 8 == 0) return false;
    in_flight_.emplace(event.tag, fuzz::view(event.ordering_key));
    return true;
  }

  void flush() override {}

  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) override {
    *timeout_ms = 0;
    size_t count = 0;
    // Once its script is over it delivers.
    while (count < outcomes.size() && !in_flight_.empty()) {
      const uint8_t what = script_->empty() ? 0 : script_->number<uint8_t>();
      if (what % 16 == 15) break;
      retrysafe_outcome &outcome = outcomes[count++];
      outcome = {};
      outcome.retry_after_ms = what % 3 ? -1 : what;
      if (what % 16 == 14) {  // of an event that is not under way
        outcome.tag = what;
        outcome.status = what % 4;
        continue;
      }
      auto one = in_flight_.begin();
      std::advance(one, (what >> 4) % in_flight_.size());
      outcome.tag = one->first;
      outcome.status = what % 16 < 8 ? RETRYSAFE_DELIVERED : static_cast<retrysafe_status>(what % 4);
      said_[static_cast<uint32_t>(outcome.tag)] = outcome.status;
      in_flight_.erase(one);
    }
    return count;
  }

  int said(size_t index) const { return said_[index]; }

 private:
  fuzz::Input *script_;
  const bool ordered_;
  std::span<Dispatcher::Item> items_;
  std::vector<int> said_;  // -1: nothing yet
  std::map<uint64_t, std::string_view> in_flight_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input script(data, size);
  const auto flags = script.number<uint8_t>();
  ScriptedSink sink(&script, flags & 1);
  Dispatcher dispatcher(sink,
                        flags & 2 ? Dispatcher::DeadLetters::kStepOver : Dispatcher::DeadLetters::kBlock);
  for (int batch = 0; batch < 16 && !script.empty(); ++batch) {
    std::vector<Dispatcher::Item> items(script.number<uint8_t>() % (kMaxEvents + 1));
    std::vector<std::string> ids;
    for (size_t i = 0; i < items.size(); ++i) ids.push_back(std::to_string(i));
    for (size_t i = 0; i < items.size(); ++i) {
      const auto what = script.number<uint8_t>();
      const char *key = kKeys[what % 4];
      items[i].event.id = {ids[i].data(), ids[i].size()};
      items[i].event.ordering_key = {key, key ? 1u : 0u};
      items[i].held = what % 32 == 31;
    }
    sink.begin(items);
    dispatcher.begin(items);
    int steps = 0;
    for (; !dispatcher.done(); ++steps) {
      if (script.empty() ? false : script.number<uint8_t>() % 64 == 63) dispatcher.stop();
      dispatcher.step();
      fuzz::require(steps < 10'000);
    }
    const auto outcomes = dispatcher.outcomes();
    fuzz::require(outcomes.size() == items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      fuzz::require((outcomes[i].status == Status::kDelivered) == (sink.said(i) == RETRYSAFE_DELIVERED));
      if (items[i].held) fuzz::require(outcomes[i].status == Status::kBlocked);
      if (outcomes[i].status == Status::kFailedFinal) fuzz::require(sink.said(i) == RETRYSAFE_FAILED_FINAL);
      // An attempt is counted where one was made.
      if (outcomes[i].status == Status::kFailedRetry) fuzz::require(sink.said(i) > RETRYSAFE_DELIVERED);
    }
  }
  return 0;
}
