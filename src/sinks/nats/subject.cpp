#include "sinks/nats/subject.hpp"

namespace retrysafe::nats {

namespace {

// With the reply subject and two lengths it stands on one line, of which a server reads 4096 bytes.
constexpr size_t kMaxSubject = 1024;

}  // namespace

std::string subject_problem(std::string_view subject) {
  if (subject.empty()) return "its subject is empty";
  if (subject.size() > kMaxSubject)
    return "its subject is longer than " + std::to_string(kMaxSubject) + " bytes";
  for (const char c : subject) {
    if (c == '*' || c == '>') return "its subject has a wildcard";
    if (static_cast<unsigned char>(c) <= ' ' || c == 0x7f)
      return "its subject has a blank or a control character";
  }
  if (subject.front() == '.' || subject.back() == '.' || subject.find("..") != std::string_view::npos)
    return "its subject has an empty part";
  return {};
}

std::string event_subject_problem(std::string_view subject) {
  std::string problem = subject_problem(subject);
  if (problem.empty() && (subject.front() == '$' || subject.starts_with("_INBOX.")))
    problem = "its subject is reserved for the server";
  return problem;
}

}  // namespace retrysafe::nats
