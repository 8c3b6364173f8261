#include "core/option_list.hpp"

#include <algorithm>
#include <charconv>
#include <cstdarg>
#include <cstdio>
#include <string>

namespace retrysafe {

namespace {

using enum OptionType;

struct TypeName {
  OptionType type;
  const char *name;
};

constexpr TypeName type_names[] = {
    {kString, "string"},     {kInteger, "integer"}, {kBoolean, "boolean"}, {kDuration, "duration"},
    {kUrl, "url"},           {kEnum, "enum"},       {kSecret, "secret"},   {kFile, "file"},
    {kTemplate, "template"}, {kHeaders, "headers"},
};

__attribute__((__format__(__printf__, 3, 4))) bool refuse(OptionProblem *problem, const std::string &hint,
                                                          const char *format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(problem->message, sizeof problem->message, format, args);
  va_end(args);
  std::snprintf(problem->hint, sizeof problem->hint, "%s", hint.c_str());
  return false;
}

std::string known_names(OptionList list) {
  if (list.empty()) return "This kind takes no options.";
  std::string text = "Known options:";
  for (const OptionDescription &option : list) {
    text += text.back() == ':' ? " " : ", ";
    text += option.name;
    if (option.type == kSecret) {
      text.append(" (or ").append(option.name).append("_file, ").append(option.name).append("_env)");
    }
  }
  return text += ".";
}

std::string duration_text(int64_t ms) {
  if (ms % kHour == 0 && ms > 0) return std::to_string(ms / kHour) + "h";
  if (ms % kMinute == 0 && ms > 0) return std::to_string(ms / kMinute) + "min";
  if (ms % kSecond == 0 && ms > 0) return std::to_string(ms / kSecond) + "s";
  return std::to_string(ms) + "ms";
}

std::string expectation(const OptionDescription &option) {
  const bool bounded = option.max != std::numeric_limits<int64_t>::max();
  switch (option.type) {
    case kInteger:
      return "It must be an integer" +
             (bounded ? " from " + std::to_string(option.min) + " to " + std::to_string(option.max) + "."
                      : ", at least " + std::to_string(option.min) + ".");
    case kBoolean:
      return "It must be true or false.";
    case kDuration:
      return "It must be a string such as \"250ms\", \"30s\" or \"5min\"" +
             (bounded ? ", from " + duration_text(option.min) + " to " + duration_text(option.max) + "."
                      : ", at least " + duration_text(option.min) + ".");
    case kUrl:
      return "It must be a URL that begins with http:// or https:// and names a host, without user and "
             "password.";
    case kEnum: {
      std::string text = "It must be one of: ";
      for (char c : option.choices) {
        if (c == '|')
          text += ", ";
        else
          text += c;
      }
      return text += ".";
    }
    case kHeaders:
      return "It must be an object whose members are header names and strings without control characters.";
    case kFile:
      return "It must be the path of a file, as a string.";
    case kTemplate:
      return "It must be a string of " + std::to_string(option.min) + " to " + std::to_string(option.max) +
             " bytes, in which {type}, {ordering_key} and {header:NAME} stand for parts of the event, and {{ "
             "and }} for braces.";
    case kString:
    case kSecret:
      break;
  }
  return "It must be a string of " + std::to_string(option.min) + " to " + std::to_string(option.max) +
         " bytes without control characters" +
         (option.addresses ? ", and without user and password, which have options of their own." : ".");
}

bool has_control_character(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

bool within(const OptionDescription &option, int64_t number) {
  return number >= option.min && number <= option.max;
}

// A plain decimal integer, as jsonb writes it.
std::optional<int64_t> parse_integer(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// Enough to refuse what can never work; the sink's library judges the rest. Credentials do not belong into a
// text that views show.
bool is_url(std::string_view url) {
  std::string_view rest;
  if (url.starts_with("http://"))
    rest = url.substr(7);
  else if (url.starts_with("https://"))
    rest = url.substr(8);
  else
    return false;
  const std::string_view authority = rest.substr(0, rest.find_first_of("/?#"));
  if (authority.empty() || authority.front() == ':' || authority.find('@') != std::string_view::npos)
    return false;
  return url.size() <= 2048 && url.find_first_of(" \\\"<>") == std::string_view::npos &&
         !has_control_character(url);
}

bool is_choice(std::string_view choices, std::string_view text) {
  while (true) {
    const size_t bar = choices.find('|');
    if (choices.substr(0, bar) == text) return true;
    if (bar == std::string_view::npos) return false;
    choices.remove_prefix(bar + 1);
  }
}

// RFC 9110: token.
bool is_header_name(std::string_view name) {
  constexpr std::string_view marks = "!#$%&'*+-.^_`|~";
  return !name.empty() && name.size() <= 255 && std::all_of(name.begin(), name.end(), [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           marks.find(c) != std::string_view::npos;
  });
}

bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= 63 && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '_';
  });
}

bool is_good(const OptionDescription &option, OptionSource source, const GivenOption &given) {
  const std::string_view text = given.text;
  if (option.type == kHeaders) {
    if (given.kind != JsonKind::kObject) return false;
    return std::all_of(given.members.begin(), given.members.end(), [&](const GivenOption &member) {
      return is_header_name(member.name) && member.kind == JsonKind::kString &&
             within(option, member.text.size()) && !has_control_character(member.text);
    });
  }
  if (option.type == kInteger) {
    const auto number = parse_integer(text);
    return given.kind == JsonKind::kNumber && number && within(option, *number);
  }
  if (option.type == kBoolean) return given.kind == JsonKind::kBoolean;

  if (given.kind != JsonKind::kString || has_control_character(text)) return false;
  if (source == OptionSource::kServerFile) return !text.empty() && text.size() <= 1024;
  if (source == OptionSource::kEnvironment)
    return text.starts_with(kEnvironmentPrefix) && text.find('=') == std::string_view::npos;
  if (option.type == kDuration) {
    const auto ms = parse_duration(text);
    return ms && within(option, *ms);
  }
  if (option.type == kUrl) return is_url(text);
  if (option.type == kTemplate && !is_route_template(text)) return false;
  if (option.type == kEnum) return is_choice(option.choices, text);
  if (option.addresses && text.find('@') != std::string_view::npos) return false;
  return within(option, text.size());
}

bool is_given(OptionList list, std::span<const GivenOption> given, std::string_view name) {
  return std::any_of(given.begin(), given.end(), [&](const GivenOption &g) {
    if (g.kind == JsonKind::kNull) return false;
    const OptionDescription *option = find_option(list, g.name).description;
    return option && option->name == name;
  });
}

// An option that the given ones need and that is not among them; empty: there is none.
std::string_view missing_companion(OptionList list, std::span<const GivenOption> given,
                                   const OptionDescription &option) {
  for (std::string_view rest = option.needs; !rest.empty();) {
    const std::string_view name = rest.substr(0, rest.find('|'));
    if (!is_given(list, given, name)) return name;
    rest.remove_prefix(std::min(name.size() + 1, rest.size()));
  }
  return {};
}

// By the rule of the option's broker; null: nothing is wrong.
const char *name_problem(const OptionName &name, std::string_view text) {
  const OptionDescription &option = *name.description;
  if (!option.rule || name.source != OptionSource::kInline) return nullptr;
  return option.type == kTemplate ? RouteTemplate(text, option.rule).problem() : option.rule(text);
}

std::string expectation(const OptionName &name) {
  if (name.description->type == kSecret && name.source == OptionSource::kServerFile)
    return "It must be the path of a file, as a string.";
  if (name.source == OptionSource::kEnvironment)
    return "It must be the name of an environment variable of the server that begins with " +
           std::string(kEnvironmentPrefix) + ".";
  return expectation(*name.description);
}

}  // namespace

const char *option_type_name(OptionType type) {
  return std::find_if(std::begin(type_names), std::end(type_names), [&](auto &t) { return t.type == type; })
      ->name;
}

std::optional<OptionType> option_type(std::string_view name) {
  for (const TypeName &t : type_names)
    if (name == t.name) return t.type;
  return std::nullopt;
}

OptionName find_option(OptionList list, std::string_view name) {
  for (const OptionDescription &option : list) {
    if (name == option.name)
      return {&option, option.type == kFile ? OptionSource::kServerFile : OptionSource::kInline};
    if (option.type != kSecret || !name.starts_with(option.name)) continue;
    const std::string_view suffix = name.substr(option.name.size());
    if (suffix == "_file") return {&option, OptionSource::kServerFile};
    if (suffix == "_env") return {&option, OptionSource::kEnvironment};
  }
  return {nullptr, OptionSource::kInline};
}

bool is_confidential(const OptionName &name) {
  if (!name.description) return true;
  return name.description->type == kHeaders ||
         (name.description->type == kSecret && name.source == OptionSource::kInline);
}

bool check_options(OptionList list, std::span<const GivenOption> given, OptionProblem *problem) {
  for (const GivenOption &option : given) {
    const OptionName name = find_option(list, option.name);
    if (!name.description && option.name.size() > 63)
      return refuse(problem, known_names(list), "unknown option");
    if (!name.description)
      return refuse(problem, known_names(list), "unknown option \"%.*s\"",
                    static_cast<int>(option.name.size()), option.name.data());
    if (option.kind == JsonKind::kNull) continue;
    if (!is_good(*name.description, name.source, option))
      return refuse(problem, expectation(name), "invalid value of option \"%.*s\"",
                    static_cast<int>(option.name.size()), option.name.data());
    if (const char *why = name_problem(name, option.text))
      return refuse(problem, std::string("It ") + why + ".", "invalid value of option \"%.*s\"",
                    static_cast<int>(option.name.size()), option.name.data());
  }
  for (const OptionDescription &option : list) {
    const auto forms = std::count_if(given.begin(), given.end(), [&](const GivenOption &g) {
      return g.kind != JsonKind::kNull && find_option(list, g.name).description == &option;
    });
    const int length = static_cast<int>(option.name.size());
    if (forms > 1)
      return refuse(problem, "Give the secret itself, a file that holds it, or an environment variable.",
                    "option \"%.*s\" is given more than once", length, option.name.data());
    if (forms == 0 && option.required)
      return refuse(problem, known_names(list), "option \"%.*s\" is missing", length, option.name.data());
    const std::string_view companion =
        forms > 0 ? missing_companion(list, given, option) : std::string_view();
    if (!companion.empty())
      return refuse(problem, "Give that one too, or leave this one out.",
                    "option \"%.*s\" needs option \"%.*s\"", length, option.name.data(),
                    static_cast<int>(companion.size()), companion.data());
  }
  return true;
}

bool check_description(const OptionDescription &option, OptionProblem *problem) {
  if (!is_name(option.name))
    return refuse(problem, "A name has 1 to 63 lower-case letters, digits and underscores.",
                  "invalid name of an option in the list");
  const int length = static_cast<int>(option.name.size());
  if (option.min > option.max)
    return refuse(problem, "Give a min that is not above max.", "option \"%.*s\": min is above max", length,
                  option.name.data());
  if (option.type == kEnum && option.choices.empty())
    return refuse(problem, "List its values as member \"choices\".", "option \"%.*s\": an enum needs choices",
                  length, option.name.data());
  if (!option.default_value.data()) return true;
  if (option.type == kSecret || option.type == kHeaders || option.type == kFile)
    return refuse(problem, "Describe it without \"default\".",
                  "option \"%.*s\": this type cannot have a default", length, option.name.data());
  bool good = true;
  if (option.type == kInteger || option.type == kDuration) {
    const auto number = parse_integer(option.default_value);
    good = number && within(option, *number);
  } else if (option.type == kBoolean) {
    good = option.default_value == "true" || option.default_value == "false";
  } else {
    good = is_good(option, OptionSource::kInline, {option.name, JsonKind::kString, option.default_value});
  }
  return good ||
         refuse(problem, expectation(option), "option \"%.*s\": the default is not a value of its type",
                length, option.name.data());
}

std::optional<int64_t> parse_duration(std::string_view text) {
  struct Unit {
    std::string_view name;
    int64_t ms;
  };
  constexpr Unit units[] = {{"ms", 1}, {"s", kSecond}, {"min", kMinute}, {"h", kHour}, {"d", 24 * kHour}};
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || number < 0) return std::nullopt;
  const std::string_view suffix(end, static_cast<size_t>(text.data() + text.size() - end));
  for (const Unit &unit : units) {
    if (suffix != unit.name) continue;
    if (number > std::numeric_limits<int64_t>::max() / unit.ms) return std::nullopt;
    return number * unit.ms;
  }
  return std::nullopt;
}

}  // namespace retrysafe
