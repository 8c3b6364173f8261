// A batch as the database hands it out in binary form: for each value two bytes of its length (the largest:
// it is null), then its bytes.
#include "relay/event_batch.hpp"

#include "input.hpp"

using namespace retrysafe;

namespace {

constexpr const char *kNames[] = {"batch", "event_id",     "attempt", "event_type", "event_key",
                                  "scope", "ordering_key", "payload", "headers",    "created_at"};
constexpr int kColumns = std::size(kNames);

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  relay::Result rows(PQmakeEmptyPGresult(nullptr, PGRES_TUPLES_OK));
  PGresAttDesc columns[kColumns] = {};
  for (int i = 0; i < kColumns; ++i) {
    columns[i].name = const_cast<char *>(kNames[i]);
    columns[i].format = 1;
  }
  fuzz::require(PQsetResultAttrs(rows.get(), kColumns, columns) != 0);
  for (int row = 0; row < 8 && !input.empty(); ++row) {
    for (int column = 0; column < kColumns; ++column) {
      const auto length = input.number<uint16_t>();
      if (length == UINT16_MAX) {
        fuzz::require(PQsetvalue(rows.get(), row, column, nullptr, -1) != 0);
        continue;
      }
      std::string value;
      while (value.size() < length && !input.empty()) value += static_cast<char>(input.number<uint8_t>());
      fuzz::require(PQsetvalue(rows.get(), row, column, value.data(), static_cast<int>(value.size())) != 0);
    }
  }
  try {
    relay::EventBatch batch(std::move(rows), "shop");
    std::vector<Dispatcher::Outcome> outcomes(batch.items().size());
    for (size_t i = 0; i < outcomes.size(); ++i) {
      outcomes[i].status = static_cast<Dispatcher::Status>(i % 5);
      outcomes[i].reason = batch.handle();
      const retrysafe_event &event = batch.items()[i].event;
      fuzz::require(fuzz::is_one_line(fuzz::view(event.id)) && fuzz::is_one_line(fuzz::view(event.source)));
    }
    for (const bool utf8 : {false, true})
      fuzz::require(fuzz::is_one_line(relay::outcomes_json(batch, outcomes, utf8)));
  } catch (const std::runtime_error &) {
  }
  return 0;
}
