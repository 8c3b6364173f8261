#include "relay/log.hpp"

#include <unistd.h>

#include <chrono>
#include <string>

#include "core/event_time.hpp"
#include "core/json_string.hpp"
#include "core/printable.hpp"

namespace retrysafe::relay {

namespace {

constexpr std::string_view level_names[] = {"debug", "info", "warning", "error"};
constexpr std::int64_t kEpoch = 946'684'800'000'000;  // the beginning of 2000, in microseconds of Unix time

constinit LogFormat format = LogFormat::kText;
constinit Level least = Level::kInfo;

std::string now() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  char text[kEventTimeSize];
  return {text,
          event_time(std::chrono::duration_cast<std::chrono::microseconds>(since).count() - kEpoch, text)};
}

std::string one_line(std::string_view text) {
  std::string line(text.size(), '\0');
  line.resize(printable(text, line.data(), line.size()));
  return line;
}

std::string as_text(Level level, std::string_view message, std::initializer_list<Field> fields) {
  std::string line = now();
  line.append(" ").append(level_names[static_cast<int>(level)]).append(": ").append(one_line(message));
  for (const Field &field : fields)
    line.append(" ").append(field.name).append("=").append(one_line(field.value));
  return line;
}

std::string as_json(Level level, std::string_view message, std::initializer_list<Field> fields) {
  std::string line = "{\"time\":";
  write_json_string(line, now());
  line += ",\"level\":";
  write_json_string(line, level_names[static_cast<int>(level)]);
  line += ",\"message\":";
  write_json_string(line, one_line(message));
  for (const Field &field : fields) {
    line += ",";
    write_json_string(line, field.name);
    line += ":";
    if (field.number)
      line += field.value;
    else
      write_json_string(line, one_line(field.value));
  }
  return line += "}";
}

}  // namespace

std::optional<Level> level_named(std::string_view name) {
  for (int i = 0; i < 4; ++i)
    if (level_names[i] == name) return static_cast<Level>(i);
  return std::nullopt;
}

std::optional<LogFormat> format_named(std::string_view name) {
  if (name == "text") return LogFormat::kText;
  if (name == "json") return LogFormat::kJson;
  return std::nullopt;
}

void set_up_log(LogFormat wanted_format, Level wanted_least) {
  format = wanted_format;
  least = wanted_least;
}

void log(Level level, std::string_view message, std::initializer_list<Field> fields) {
  if (level < least) return;
  const std::string line =
      (format == LogFormat::kJson ? as_json : as_text)(level, message, fields).append("\n");
  (void)!write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace retrysafe::relay
