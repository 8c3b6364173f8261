#include "sinks/nats/credentials.hpp"

#include <algorithm>

namespace retrysafe::nats {

namespace {

constexpr size_t kPublicKeySize = 56;
constexpr size_t kSeedSize = 58;

bool is_base32(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= 'A' && c <= 'Z') || (c >= '2' && c <= '7'); });
}

// Three parts in base64url, the first of which begins with `{"`.
bool is_token(std::string_view word) {
  return word.starts_with("eyJ") && std::count(word.begin(), word.end(), '.') == 2 &&
         std::all_of(word.begin(), word.end(), [](char c) {
           return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' ||
                  c == '_' || c == '.';
         });
}

}  // namespace

bool is_seed(std::string_view text) {
  return text.size() == kSeedSize && text.starts_with("SU") && is_base32(text);
}

bool is_public_key(std::string_view text) {
  return text.size() == kPublicKeySize && text.starts_with("U") && is_base32(text);
}

std::optional<Credentials> parse_credentials(std::string_view text) {
  Credentials found;
  constexpr std::string_view blanks = " \t\r\n";
  while (true) {
    const size_t begin = text.find_first_not_of(blanks);
    if (begin == std::string_view::npos) break;
    text.remove_prefix(begin);
    const std::string_view word = text.substr(0, text.find_first_of(blanks));
    text.remove_prefix(word.size());
    if (found.token.empty() && is_token(word)) found.token = word;
    if (found.seed.empty() && is_seed(word)) found.seed = word;
  }
  if (found.token.empty() || found.seed.empty()) return std::nullopt;
  return found;
}

}  // namespace retrysafe::nats
