// Whether a row of the log belongs to a window: asked for each row that is read, with many transactions
// running.
#include <benchmark/benchmark.h>

#include <vector>

#include "core/routing.hpp"
#include "core/snapshot.hpp"

namespace {

void holds(benchmark::State &state) {
  const auto running = static_cast<std::uint64_t>(state.range(0));
  std::vector<std::uint64_t> xip;
  for (std::uint64_t i = 0; i < running; ++i) xip.push_back(1'000 + 2 * i);
  const auto count = static_cast<std::int32_t>(running);
  const std::uint64_t end = 1'000 + 2 * running;
  const retrysafe::StoredSnapshot before{1, 1, 0, 1'000, end, end, 100'000, count, xip.data()};
  const retrysafe::StoredSnapshot now{1, 1, 0, end, end + 1'000, end + 1'000, 200'000, 0, nullptr};
  const retrysafe::Done done{&before, nullptr, 0};
  const retrysafe::Window window{&done, &now};
  std::uint64_t txid = 900;
  for (auto _ : state) {
    txid = txid < end ? txid + 1 : 900;
    benchmark::DoNotOptimize(window.holds(50'000, txid));
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(holds)->Arg(0)->Arg(16)->Arg(1'000);

void shard(benchmark::State &state) {
  for (auto _ : state) benchmark::DoNotOptimize(retrysafe::shard_of("customer-12345", 16));
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(shard);

void pattern(benchmark::State &state) {
  for (auto _ : state) benchmark::DoNotOptimize(retrysafe::type_matches("order.*", "order.placed"));
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(pattern);

}  // namespace
