// Events as parameters of a statement, and what a server reports.
#include "sinks/postgres/delivery_statement.hpp"

#include <deque>

#include "core/header_list.hpp"
#include "input.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const fuzz::InputEvent event(&input);
  for (int field = 0; field <= static_cast<int>(sink::Field::kEnvelope); ++field) {
    std::string text = "left over";
    const bool given = sink::parameter_text(static_cast<sink::Field>(field), *event, "shop", &text);
    fuzz::require(given || text.empty());
    if (static_cast<sink::Field>(field) != sink::Field::kHeaders) continue;
    std::vector<retrysafe_pair> pairs;
    std::deque<std::string> unescaped;
    fuzz::require(read_headers(text, &pairs, &unescaped) && pairs.size() == event->header_count);
    for (size_t i = 0; i < pairs.size(); ++i)
      fuzz::require(fuzz::view(pairs[i].value) == fuzz::view(event->headers[i].value));
  }
  return 0;
}
