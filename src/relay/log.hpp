// Log lines on standard error, as text or JSON. Callers give no secrets and no payloads.
#pragma once

#include <initializer_list>
#include <optional>
#include <string_view>

namespace retrysafe::relay {

enum class Level { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

std::optional<Level> level_named(std::string_view name);
std::optional<LogFormat> format_named(std::string_view name);

void set_up_log(LogFormat format, Level least);

struct Field {
  std::string_view name;
  std::string_view value;
  bool number = false;  // in JSON without quotes
};

void log(Level level, std::string_view message, std::initializer_list<Field> fields = {});

}  // namespace retrysafe::relay
