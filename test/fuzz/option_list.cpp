// Options of a destination, of every kind: a byte for the kind, then a line for each option: its name, a
// letter for the type of JSON, its text. Members of an object follow it, with a blank before their names.
#include "core/option_list.hpp"

#include <deque>
#include <vector>

#include "core/kinds/kinds.hpp"
#include "input.hpp"

using namespace retrysafe;

namespace {

struct Line {
  std::string name, text;
  JsonKind kind;
  bool is_member;
};

Line parse(std::string line) {
  Line parsed{};
  parsed.is_member = line.starts_with(' ');
  if (parsed.is_member) line.erase(0, 1);
  const size_t equals = line.find('=');
  parsed.name = line.substr(0, equals);
  if (equals == std::string::npos || equals + 1 == line.size()) return parsed;
  switch (line[equals + 1]) {
    case 's':
      parsed.kind = JsonKind::kString;
      break;
    case 'n':
      parsed.kind = JsonKind::kNumber;
      break;
    case 'b':
      parsed.kind = JsonKind::kBoolean;
      break;
    case 'o':
      parsed.kind = JsonKind::kObject;
      break;
    case 'a':
      parsed.kind = JsonKind::kArray;
      break;
    default:
      break;
  }
  parsed.text = line.substr(equals + 2);
  if (parsed.kind == JsonKind::kBoolean) parsed.text = parsed.text.starts_with('t') ? "true" : "false";
  return parsed;
}

void require_explained(const OptionProblem &problem) {
  const auto closed = [](const char *text, size_t size) { return std::memchr(text, '\0', size) != nullptr; };
  fuzz::require(closed(problem.message, sizeof problem.message) && closed(problem.hint, sizeof problem.hint));
  fuzz::require(problem.message[0] != '\0');
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const auto kinds = built_in_kinds();
  const OptionList list = kinds[input.number<uint8_t>() % kinds.size()]->options;

  std::deque<Line> lines;
  while (!input.empty()) lines.push_back(parse(input.line()));
  std::deque<std::vector<GivenOption>> objects;
  std::vector<GivenOption> given;
  for (const Line &line : lines) {
    if (!line.is_member) {
      given.push_back({line.name, line.kind, line.text, {}});
      objects.emplace_back();
    } else if (!given.empty()) {
      objects.back().push_back({line.name, line.kind, line.text, {}});
      given.back().members = objects.back();
    }
    if (const auto ms = parse_duration(line.text)) fuzz::require(*ms >= 0);
    OptionProblem problem{};
    const OptionDescription description{.name = line.name,
                                        .type = option_type(line.text).value_or(OptionType::kString),
                                        .description = "",
                                        .default_value = line.text};
    if (!check_description(description, &problem)) require_explained(problem);
  }

  OptionProblem problem{};
  if (!check_options(list, given, &problem)) {
    require_explained(problem);
    return 0;
  }
  // What is good reaches the sink within its bounds, and never with a line break in it.
  for_each_option(list, given, [](const OptionName &name, std::string_view member, std::string_view value) {
    fuzz::require(name.description != nullptr);
    for (const char c : value) fuzz::require(static_cast<unsigned char>(c) >= 0x20);
    for (const char c : member) fuzz::require(static_cast<unsigned char>(c) > 0x20);
    const OptionDescription &option = *name.description;
    if (option.type != OptionType::kInteger && option.type != OptionType::kDuration) return;
    int64_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    fuzz::require(error == std::errc{} && end == value.data() + value.size());
    fuzz::require(number >= option.min && number <= option.max);
  });
  return 0;
}
