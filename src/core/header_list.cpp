#include "core/header_list.hpp"

#include <cstdint>

namespace retrysafe {

namespace {

class Reader {
 public:
  Reader(std::string_view json, std::deque<std::string> *unescaped) : rest_(json), unescaped_(unescaped) {}

  bool eat(char c) {
    skip_space();
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  bool at_end() {
    skip_space();
    return rest_.empty();
  }

  bool string(retrysafe_text *text) {
    if (!eat('"')) return false;
    const size_t end = rest_.find_first_of("\"\\");
    if (end == std::string_view::npos) return false;
    if (rest_[end] == '"') {
      *text = {rest_.data(), end};
      rest_.remove_prefix(end + 1);
      return true;
    }
    std::string &copy = unescaped_->emplace_back();
    if (!unescape(&copy)) return false;
    *text = {copy.data(), copy.size()};
    return true;
  }

 private:
  void skip_space() {
    while (!rest_.empty() && (rest_.front() == ' ' || rest_.front() == '\n' || rest_.front() == '\t'))
      rest_.remove_prefix(1);
  }

  // Up to the closing quote.
  bool unescape(std::string *out) {
    while (!rest_.empty()) {
      const char c = rest_.front();
      rest_.remove_prefix(1);
      if (c == '"') return true;
      if (c != '\\')
        *out += c;
      else if (!escape(out))
        return false;
    }
    return false;
  }

  bool escape(std::string *out) {
    if (rest_.empty()) return false;
    const char c = rest_.front();
    rest_.remove_prefix(1);
    constexpr std::string_view letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
    if (const size_t i = letters.find(c); i != std::string_view::npos) {
      *out += meanings[i];
      return true;
    }
    std::uint32_t code = 0;
    if (c != 'u' || !hex(&code)) return false;
    if (code >= 0xdc00 && code <= 0xdfff) return false;  // the second half of a pair without the first
    if (code >= 0xd800 && code < 0xdc00) {
      std::uint32_t low = 0;
      if (!rest_.starts_with("\\u")) return false;
      rest_.remove_prefix(2);
      if (!hex(&low) || low < 0xdc00 || low > 0xdfff) return false;
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    append_utf8(code, out);
    return true;
  }

  bool hex(std::uint32_t *code) {
    if (rest_.size() < 4) return false;
    *code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = rest_[static_cast<size_t>(i)];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return false;
      *code = *code << 4 | static_cast<std::uint32_t>(digit);
    }
    rest_.remove_prefix(4);
    return true;
  }

  static void append_utf8(std::uint32_t code, std::string *out) {
    const auto byte = [&](std::uint32_t value) { *out += static_cast<char>(value); };
    if (code < 0x80) return byte(code);
    if (code < 0x800) {
      byte(0xc0 | code >> 6);
    } else {
      if (code < 0x10000) {
        byte(0xe0 | code >> 12);
      } else {
        byte(0xf0 | code >> 18);
        byte(0x80 | (code >> 12 & 0x3f));
      }
      byte(0x80 | (code >> 6 & 0x3f));
    }
    byte(0x80 | (code & 0x3f));
  }

  std::string_view rest_;
  std::deque<std::string> *unescaped_;
};

}  // namespace

bool read_headers(std::string_view json, std::vector<retrysafe_pair> *pairs,
                  std::deque<std::string> *unescaped) {
  Reader reader(json, unescaped);
  if (!reader.eat('{')) return false;
  if (reader.eat('}')) return reader.at_end();
  do {
    retrysafe_pair pair;
    if (!reader.string(&pair.name) || !reader.eat(':') || !reader.string(&pair.value)) return false;
    pairs->push_back(pair);
  } while (reader.eat(','));
  return reader.eat('}') && reader.at_end();
}

}  // namespace retrysafe
