// A batch through the dispatcher, with a sink that delivers at once: what it costs to keep the order of each
// key.
#include "core/dispatcher.hpp"

#include <benchmark/benchmark.h>

namespace {

class Echo : public retrysafe::SinkPort {
 public:
  bool keeps_order() const override { return false; }
  bool submit(const retrysafe_event &event) override {
    tags_.push_back(event.tag);
    return true;
  }
  void flush() override {}
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) override {
    *timeout_ms = -1;
    size_t count = 0;
    for (; count < outcomes.size() && !tags_.empty(); tags_.pop_back()) {
      retrysafe_outcome &outcome = outcomes[count++];
      outcome.tag = tags_.back();
      outcome.status = RETRYSAFE_DELIVERED;
      outcome.reason[0] = '\0';
    }
    return count;
  }

 private:
  std::vector<uint64_t> tags_;
};

void batch(benchmark::State &state) {
  const auto size = static_cast<size_t>(state.range(0));
  const auto keys = static_cast<size_t>(state.range(1));
  std::vector<std::string> names;
  for (size_t i = 0; i < size; ++i) names.push_back("customer-" + std::to_string(keys ? i % keys : i));
  std::vector<retrysafe::Dispatcher::Item> items(size);
  for (size_t i = 0; i < size; ++i) {
    items[i].event.id = {names[i].data(), names[i].size()};
    if (keys) items[i].event.ordering_key = {names[i].data(), names[i].size()};
  }
  Echo sink;
  retrysafe::Dispatcher dispatcher(sink);
  for (auto _ : state) {
    dispatcher.begin(items);
    while (!dispatcher.done()) dispatcher.step();
    benchmark::DoNotOptimize(dispatcher.outcomes().data());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(batch)
    ->ArgNames({"events", "keys"})
    ->Args({500, 0})
    ->Args({500, 500})
    ->Args({500, 10})
    ->Args({10'000, 1'000});

}  // namespace
