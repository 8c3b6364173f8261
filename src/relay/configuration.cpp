#include "relay/configuration.hpp"

#include <charconv>
#include <set>

#include "core/address_filter.hpp"
#include "core/option_list.hpp"

namespace retrysafe::relay {

namespace {

constexpr int kMaxConnections = 256;

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view blanks = " \t\r";
  const size_t begin = text.find_first_not_of(blanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

[[noreturn]] void refuse(std::string_view name, const char *expected) {
  throw ConfigurationError(std::string(name).append(" must be ").append(expected));
}

int connections_of(std::string_view value) {
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || number < 1 || number > kMaxConnections)
    refuse("connections", "a number from 1 to 256");
  return number;
}

std::int64_t duration_of(std::string_view name, std::string_view value) {
  const auto ms = parse_duration(value);
  if (!ms || *ms > 24 * kHour) refuse(name, "a duration such as 500ms, 30s or 5min, up to 24h");
  return *ms;
}

// Sinks read the list again; what is wrong in it is better said once and here.
std::string_view checked_addresses(std::string_view value) {
  try {
    (void)AddressFilter(value);
  } catch (const std::invalid_argument &error) {
    std::string message = error.what();
    constexpr std::string_view prefix = "retrysafe.";
    if (message.starts_with(prefix)) message.erase(0, prefix.size());
    throw ConfigurationError(message);
  }
  return value;
}

void set_in_section(std::string_view name, std::string_view value, DestinationSection *section) {
  if (name == "kind")
    section->kind = value;
  else if (name == "library")
    section->library = value;
  else if (name == "connections")
    section->connections = connections_of(value);
  else
    section->options.emplace_back(name, value);
}

}  // namespace

DestinationSection &section(std::string_view name, Configuration *configuration) {
  if (name.empty()) throw ConfigurationError("a destination needs a name");
  for (DestinationSection &known : configuration->destinations)
    if (known.name == name) return known;
  return configuration->destinations.emplace_back(DestinationSection{std::string(name), {}, {}, 0, {}});
}

bool set(std::string_view name, std::string_view value, Configuration *c) {
  if (name == "connection") {
    c->connection = value;
  } else if (name == "connections") {
    c->connections = connections_of(value);
  } else if (name == "allowed_addresses") {
    c->allowed_addresses = checked_addresses(value);
  } else if (name == "secret_directory") {
    c->secret_directory = value;
  } else if (name == "library_path") {
    c->library_path = value;
  } else if (name == "log_format") {
    const auto format = format_named(value);
    if (!format) refuse(name, "text or json");
    c->log_format = *format;
  } else if (name == "log_level") {
    const auto level = level_named(value);
    if (!level) refuse(name, "debug, info, warning or error");
    c->log_level = *level;
  } else if (name == "statistics_interval") {
    c->statistics_interval_ms = duration_of(name, value);
  } else if (name == "stop_timeout") {
    c->stop_timeout_ms = duration_of(name, value);
  } else {
    return false;
  }
  return true;
}

void read_configuration(std::string_view text, Configuration *configuration) {
  std::string current;  // destination; empty: none
  std::set<std::pair<std::string, std::string>, std::less<>> seen;
  for (int line_number = 1; !text.empty(); ++line_number) {
    const size_t end = text.find('\n');
    const std::string_view line = trimmed(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.empty() || line.front() == '#') continue;
    try {
      constexpr std::string_view begin = "[destination";
      if (line.front() == '[') {
        if (!line.starts_with(begin) || line.back() != ']')
          throw ConfigurationError("a section is written as [destination NAME]");
        current = trimmed(line.substr(begin.size(), line.size() - begin.size() - 1));
        (void)section(current, configuration);
        continue;
      }
      const size_t equals = line.find('=');
      const std::string_view name = trimmed(line.substr(0, equals));
      if (equals == std::string_view::npos || name.empty())
        throw ConfigurationError("a setting is written as NAME = VALUE");
      const std::string_view value = trimmed(line.substr(equals + 1));
      if (!seen.emplace(current, name).second)
        throw ConfigurationError("\"" + std::string(name) + "\" is set twice");
      if (!current.empty())
        set_in_section(name, value, &section(current, configuration));
      else if (!set(name, value, configuration))
        throw ConfigurationError("unknown setting \"" + std::string(name) +
                                 "\"; options of a destination belong below its line [destination NAME]");
    } catch (const ConfigurationError &error) {
      throw ConfigurationError("line " + std::to_string(line_number) + ": " + error.what());
    }
  }
}

}  // namespace retrysafe::relay
