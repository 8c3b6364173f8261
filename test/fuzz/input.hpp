// What the targets have in common: cutting the fuzzer's bytes up, and stopping where something does not hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "sink/abi.h"

namespace retrysafe::fuzz {

// The fuzzer takes this for a crash and keeps the input.
inline void require(bool holds) {
  if (!holds) std::abort();
}

class Input {
 public:
  Input(const uint8_t *data, size_t size) : rest_(reinterpret_cast<const char *>(data), size) {}

  bool empty() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }

  // Up to the next `end`, which is passed over, or all there is. A copy: whatever reads behind it is found.
  std::string until(char end) {
    const size_t at = rest_.find(end);
    std::string piece(rest_.substr(0, at));
    rest_.remove_prefix(at == std::string_view::npos ? rest_.size() : at + 1);
    return piece;
  }
  std::string line() { return until('\n'); }

  // Zero bytes where nothing is left.
  template <class Number>
  Number number() {
    Number value = 0;
    const size_t count = rest_.size() < sizeof value ? rest_.size() : sizeof value;
    if (count > 0) std::memcpy(&value, rest_.data(), count);
    rest_.remove_prefix(count);
    return value;
  }

 private:
  std::string_view rest_;
};

// An event of texts that are separated by NUL, which text of the server cannot hold: id, type, source, time,
// ordering key, event key, scope and payload, then names and values of headers. An empty ordering key or
// payload is none.
class InputEvent {
 public:
  explicit InputEvent(Input *input) {
    event_.tag = 1;
    event_.attempt = 1;
    event_.id = text(input);
    event_.type = text(input);
    event_.source = text(input);
    event_.time = text(input);
    event_.ordering_key = absent_if_empty(text(input));
    event_.event_key = text(input);
    event_.scope = text(input);
    event_.payload = absent_if_empty(text(input));
    while (!input->empty()) {
      const retrysafe_text name = text(input);
      headers_.push_back({name, text(input)});
    }
    event_.headers = headers_.data();
    event_.header_count = headers_.size();
  }
  ~InputEvent() {
    for (char *copy : texts_) delete[] copy;
  }
  InputEvent(const InputEvent &) = delete;
  InputEvent &operator=(const InputEvent &) = delete;

  const retrysafe_event &operator*() const { return event_; }
  const retrysafe_event *operator->() const { return &event_; }

 private:
  // In memory of its own without a closing NUL, as events have it.
  retrysafe_text text(Input *input) {
    const std::string piece = input->until('\0');
    char *copy = new char[piece.size()];
    piece.copy(copy, piece.size());
    texts_.push_back(copy);
    return {copy, piece.size()};
  }
  static retrysafe_text absent_if_empty(retrysafe_text text) {
    return text.size == 0 ? retrysafe_text{nullptr, 0} : text;
  }

  retrysafe_event event_{};
  std::vector<char *> texts_;
  std::vector<retrysafe_pair> headers_;
};

inline std::string_view view(const retrysafe_text &text) {
  return {text.data, text.size};
}

// Well-formed, by the table of the Unicode standard: written anew here, so that it is no copy of what is
// tested.
inline bool is_utf8(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto tail = [&](size_t i) { return byte(i) >= 0x80 && byte(i) <= 0xbf; };
  while (!text.empty()) {
    const unsigned a = byte(0), b = byte(1);
    size_t length = 0;
    if (a < 0x80)
      length = 1;
    else if (a >= 0xc2 && a <= 0xdf && tail(1))
      length = 2;
    else if (a >= 0xe0 && a <= 0xef && tail(1) && tail(2) && !(a == 0xe0 && b < 0xa0) &&
             !(a == 0xed && b > 0x9f))
      length = 3;
    else if (a >= 0xf0 && a <= 0xf4 && tail(1) && tail(2) && tail(3) && !(a == 0xf0 && b < 0x90) &&
             !(a == 0xf4 && b > 0x8f))
      length = 4;
    if (length == 0 || length > text.size()) return false;
    text.remove_prefix(length);
  }
  return true;
}

// One line that a log or a view can show.
inline bool is_one_line(std::string_view text) {
  for (const char c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return false;
  return is_utf8(text);
}

}  // namespace retrysafe::fuzz
