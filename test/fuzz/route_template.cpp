// Templates of topics, subjects and routing keys: one up to a NUL, then an event.
#include "core/route_template.hpp"

#include <stdexcept>

#include "core/kinds/names.hpp"
#include "input.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const std::string text = input.until('\0');
  const fuzz::InputEvent event(&input);
  const bool good = is_route_template(text);
  for (const NameRule rule : {NameRule{nullptr}, &kinds::topic_problem, &kinds::event_subject_problem}) {
    try {
      const RouteTemplate route(text, rule);
      fuzz::require(good);
      std::string name = "left over", reason;
      const bool found = route.expand(*event, &name, &reason);
      fuzz::require(found ? !name.empty() : !reason.empty());
      if (found && rule) fuzz::require(rule(name) == nullptr);
      if (route.is_constant()) fuzz::require(found == (route.problem() == nullptr));
    } catch (const std::invalid_argument &) {
      fuzz::require(!good);
    }
  }
  return 0;
}
