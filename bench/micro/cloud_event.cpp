// What the HTTP worker computes for each event.
#include "core/cloud_event.hpp"

#include <benchmark/benchmark.h>

#include "core/event_id.hpp"

namespace {

retrysafe_text text(std::string_view view) {
  return {view.data(), view.size()};
}

retrysafe_event order_placed(const std::string &payload) {
  retrysafe_event event{};
  event.id = text("7c9e6679-7425-80de-944b-e07fc1f90ae7");
  event.source = text("retrysafe/shop");
  event.type = text("order.placed");
  event.time = text("2026-01-02T03:04:05.678901Z");
  event.event_key = text("req-1234567890123456789:placed");
  event.ordering_key = text("customer-12345");
  event.scope = text("");
  event.payload = text(payload);
  return event;
}

void structured(benchmark::State &state) {
  const std::string payload(static_cast<size_t>(state.range(0)), '1');
  const retrysafe_event event = order_placed(payload);
  std::string out;
  for (auto _ : state) {
    out.clear();
    retrysafe::CloudEvent(event, {}).append_json(&out);
    benchmark::DoNotOptimize(out.data());
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(structured)->Arg(200)->Arg(20'000);

void binary(benchmark::State &state) {
  const std::string payload(200, '1');
  const retrysafe_event event = order_placed(payload);
  std::string out;
  for (auto _ : state) {
    out.clear();
    const retrysafe::CloudEvent cloud_event(event, {});
    for (const auto &attribute : cloud_event.attributes())
      retrysafe::CloudEvent::append_header_value(attribute.value, &out);
    benchmark::DoNotOptimize(out.data());
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(binary);

void event_id(benchmark::State &state) {
  retrysafe::Sha256Digest digest{};
  for (auto _ : state) {
    ++digest[0];
    benchmark::DoNotOptimize(retrysafe::format_uuid(retrysafe::event_id_from_digest(digest)));
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(event_id);

}  // namespace
