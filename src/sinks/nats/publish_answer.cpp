#include "sinks/nats/publish_answer.hpp"

#include <charconv>
#include <optional>

#include "core/printable.hpp"

namespace retrysafe::nats {

namespace {

using Verdict = PublishAnswer::Verdict;

constexpr size_t kMaxReason = 200;
constexpr int kMaxDepth = 16;

// JetStream's own numbers of errors, the same in all versions of the server.
constexpr long kMessageTooLarge = 10054;
constexpr long kHeadersTooLarge = 10097;
constexpr long kStoreFailed = 10077;
constexpr long kOtherStream = 10060;

// Walks over a JSON object and shows its members one after the other.
class Members {
 public:
  explicit Members(std::string_view text) : text_(text) { valid_ = take('{'); }

  bool next(std::string_view *name, std::string_view *value) {
    if (!valid_ || take('}')) return false;
    if (!first_ && !take(',')) return fail();
    first_ = false;
    skip_blanks();
    if (!string(name) || !take(':')) return fail();
    skip_blanks();
    const size_t begin = at_;
    if (!skip_value(0)) return fail();
    *value = text_.substr(begin, at_ - begin);
    return true;
  }

  // False when the text is no JSON object. Known once next() has returned false.
  bool valid() const { return valid_; }

 private:
  bool fail() { return valid_ = false; }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip_blanks() {
    while (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r') ++at_;
  }
  bool take(char c) {
    skip_blanks();
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  // The text between the quotes, escapes and all.
  bool string(std::string_view *inner) {
    if (peek() != '"') return false;
    const size_t begin = ++at_;
    for (; at_ < text_.size(); ++at_) {
      if (text_[at_] == '\\') {
        ++at_;
      } else if (text_[at_] == '"') {
        *inner = text_.substr(begin, at_++ - begin);
        return true;
      }
    }
    return false;
  }

  bool skip_value(int depth) {
    if (depth > kMaxDepth) return false;
    skip_blanks();
    std::string_view ignored;
    if (peek() == '"') return string(&ignored);
    const char open = peek();
    if (open == '{' || open == '[') {
      ++at_;
      const char close = open == '{' ? '}' : ']';
      if (take(close)) return true;
      do {
        skip_blanks();
        if (open == '{' && (!string(&ignored) || !take(':'))) return false;
        if (!skip_value(depth + 1)) return false;
      } while (take(','));
      return take(close);
    }
    const size_t begin = at_;
    while (at_ < text_.size() && std::string_view(",}] \t\r\n").find(text_[at_]) == std::string_view::npos)
      ++at_;
    return at_ > begin;
  }

  std::string_view text_;
  size_t at_ = 0;
  bool first_ = true;
  bool valid_;
};

long number(std::string_view digits) {
  long value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return value;
}

bool is_string(std::string_view value) {
  return value.size() >= 2 && value.front() == '"';
}

PublishAnswer judge_error(std::string_view error) {
  Members members(error);
  long code = 0;
  std::string_view description, name, value;
  while (members.next(&name, &value)) {
    if (name == "err_code") code = number(value);
    if (name == "description" && is_string(value)) description = value.substr(1, value.size() - 2);
  }
  std::string reason = printable(description, kMaxReason);
  if (reason.empty()) reason = "JetStream error " + std::to_string(code);
  if (code == kMessageTooLarge || code == kHeadersTooLarge) return {Verdict::kFailedFinal, reason};
  // A full stream refuses everybody, a full subject those that go there.
  if (code == kStoreFailed && description.find("per subject") != std::string_view::npos)
    return {Verdict::kFailedRetry, reason};
  if (code == kOtherStream) reason = "another stream than the option \"stream\" names takes the subject";
  return {Verdict::kRefused, reason};
}

}  // namespace

PublishAnswer parse_answer(std::string_view body) {
  Members members(body);
  std::string_view name, value, error;
  bool has_stream = false, has_sequence = false;
  while (members.next(&name, &value)) {
    if (name == "error") error = value;
    if (name == "stream") has_stream = is_string(value) && value.size() > 2;
    if (name == "seq") has_sequence = number(value) > 0;
  }
  if (members.valid() && !error.empty() && error != "null") return judge_error(error);
  if (members.valid() && has_stream && has_sequence) return {Verdict::kStored, {}};
  return {Verdict::kRefused, "somebody else than JetStream answers on the subject"};
}

}  // namespace retrysafe::nats
