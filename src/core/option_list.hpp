// What options a kind of destination takes, and whether given ones are good.
//
// The lists of the built-in kinds are in core/kinds/. Sinks get every option with its default filled in.
// Everything here is trivially destructible, so that server code may use it.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

#include "core/route_template.hpp"

namespace retrysafe {

// Milliseconds.
inline constexpr int64_t kSecond = 1000;
inline constexpr int64_t kMinute = 60 * kSecond;
inline constexpr int64_t kHour = 60 * kMinute;

enum class OptionType {
  kString,
  kInteger,
  kBoolean,
  kDuration,  // JSON string with a unit, "250ms"; sinks get milliseconds
  kUrl,       // http or https
  kEnum,
  kSecret,    // never shown; may be given as NAME_file or NAME_env instead
  kFile,      // of the server, below the directory that a superuser allowed
  kTemplate,  // of a name, see route_template.hpp
  kHeaders,   // object of strings; sinks get one option NAME.MEMBER for each; values are never shown
};

struct OptionDescription {
  std::string_view name;
  OptionType type = OptionType::kString;
  std::string_view description;
  bool required = false;
  std::string_view needs{};          // options without which this one means nothing, separated by '|'
  std::string_view default_value{};  // in the form that sinks get; no data: none
  int64_t min = 0;                   // integer: the value; duration: milliseconds; else length in bytes
  int64_t max = std::numeric_limits<int64_t>::max();
  std::string_view choices{};  // enum: separated by '|'
  bool addresses = false;      // string: hosts, where user and password do not belong
  NameRule rule = nullptr;     // string, and template that is the same for all events: what names are legal
};

using OptionList = std::span<const OptionDescription>;

enum class JsonKind { kNull, kString, kNumber, kBoolean, kObject, kArray };

// A member of the options object. `text` is the string itself, or the JSON text of a number or boolean.
struct GivenOption {
  std::string_view name;
  JsonKind kind = JsonKind::kNull;
  std::string_view text;
  std::span<const GivenOption> members{};  // of an object
};

// What is wrong with an option, for an error of the server. Holds no value of any option.
struct OptionProblem {
  char message[256];
  char hint[1024];
};

// Where the value of an option comes from.
enum class OptionSource { kInline, kServerFile, kEnvironment };

struct OptionName {
  const OptionDescription *description;  // null: unknown
  OptionSource source;
};

inline constexpr std::string_view kEnvironmentPrefix = "RETRYSAFE_";

const char *option_type_name(OptionType type);
std::optional<OptionType> option_type(std::string_view name);

// Finds what `name` stands for: an option, or the _file or _env form of a secret one.
OptionName find_option(OptionList list, std::string_view name);

// True when what a sink gets is not to be shown, wherever it was kept: a secret, or where the machine keeps
// its files, which only superusers may know.
inline bool is_masked(OptionType type) {
  return type == OptionType::kSecret || type == OptionType::kHeaders || type == OptionType::kFile;
}

// True when views must not show the value.
bool is_confidential(const OptionName &name);

// Checks all given options of one destination. JSON null counts as not given. False: `problem` tells.
bool check_options(OptionList list, std::span<const GivenOption> given, OptionProblem *problem);

// Checks the description of one option, as another package registers it.
bool check_description(const OptionDescription &description, OptionProblem *problem);

// "250ms", "30s", "5min", "2h", "1d": milliseconds.
std::optional<int64_t> parse_duration(std::string_view text);

// The options of one destination as its sink gets them, defaults filled in and durations in milliseconds:
// calls each(name, member, value). `member` has no data but for those of an object. Whoever calls reads what
// is named by a file or a variable.
template <class Each>
void for_each_option(OptionList list, std::span<const GivenOption> given, Each &&each) {
  for (const OptionDescription &option : list) {
    const GivenOption *found = nullptr;
    OptionName name{&option, OptionSource::kInline};
    for (const GivenOption &g : given) {
      const OptionName candidate = find_option(list, g.name);
      if (candidate.description != &option || g.kind == JsonKind::kNull) continue;
      found = &g;
      name = candidate;
    }
    if (!found) {
      if (option.default_value.data()) each(name, std::string_view{}, option.default_value);
    } else if (option.type == OptionType::kHeaders) {
      for (const GivenOption &member : found->members) each(name, member.name, member.text);
    } else if (option.type == OptionType::kDuration) {
      char digits[24];
      const auto end =
          std::to_chars(digits, digits + sizeof digits, parse_duration(found->text).value_or(0)).ptr;
      each(name, std::string_view{}, std::string_view(digits, static_cast<size_t>(end - digits)));
    } else {
      each(name, std::string_view{}, found->text);
    }
  }
}

}  // namespace retrysafe
