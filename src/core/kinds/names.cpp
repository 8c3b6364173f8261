#include "core/kinds/names.hpp"

#include <algorithm>

namespace retrysafe::kinds {

namespace {

// With the reply subject and two lengths it stands on one line, of which a server reads 4096 bytes.
constexpr size_t kMaxSubject = 1024;
constexpr size_t kMaxTopic = 249;

bool is_blank_or_control(char c) {
  return static_cast<unsigned char>(c) <= ' ' || c == 0x7f;
}

bool is_topic_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
         c == '-';
}

}  // namespace

const char *topic_problem(std::string_view name) {
  const bool legal = !name.empty() && name.size() <= kMaxTopic && name != "." && name != ".." &&
                     std::all_of(name.begin(), name.end(), is_topic_character);
  return legal ? nullptr
               : "is not a name of a topic: 1 to 249 letters, digits, dots, underscores and hyphens";
}

const char *subject_problem(std::string_view subject) {
  if (subject.empty()) return "is empty";
  if (subject.size() > kMaxSubject) return "is longer than the 1024 bytes of a subject";
  if (subject.find_first_of("*>") != std::string_view::npos) return "has a wildcard";
  if (std::any_of(subject.begin(), subject.end(), is_blank_or_control))
    return "has a blank or a control character";
  if (subject.front() == '.' || subject.back() == '.' || subject.find("..") != std::string_view::npos)
    return "has an empty part";
  return nullptr;
}

const char *event_subject_problem(std::string_view subject) {
  if (const char *problem = subject_problem(subject)) return problem;
  return subject.front() == '$' || subject.starts_with("_INBOX.") ? "is reserved for the server" : nullptr;
}

const char *stream_problem(std::string_view name) {
  const bool legal = !name.empty() && name.find_first_of(".*>/\\") == std::string_view::npos &&
                     std::none_of(name.begin(), name.end(), is_blank_or_control);
  return legal ? nullptr : "is not a name of a stream, which has no blanks, dots, slashes and wildcards";
}

const char *message_id_problem(std::string_view text) {
  const bool legal = std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
  return legal ? nullptr : "is not printable ASCII without blanks";
}

const char *short_string_problem(std::string_view name) {
  return name.size() <= kLongestShortString ? nullptr : "is longer than the 255 bytes that AMQP allows";
}

}  // namespace retrysafe::kinds
