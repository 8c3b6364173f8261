#include "core/secret_mask.hpp"

#include <algorithm>

#include "core/printable.hpp"

namespace retrysafe {

namespace {

constexpr std::string_view kStars = "***";
constexpr size_t kShortest = 4;
constexpr size_t kShortestWord = 8;

}  // namespace

void SecretMask::add(std::string_view secret) {
  if (secret.size() < kShortest) return;
  add_one(secret);
  add_one(printable(secret, secret.size()));  // as it would be shown
  // "Bearer TOKEN", several keys, a token and a seed: each tells enough by itself.
  while (!secret.empty()) {
    const std::string_view word = secret.substr(0, secret.find_first_of(" \t\r\n"));
    if (word.size() >= kShortestWord) add_one(word);
    secret.remove_prefix(std::min(word.size() + 1, secret.size()));
  }
}

void SecretMask::add_one(std::string_view secret) {
  if (secret.size() < kShortest || std::find(secrets_.begin(), secrets_.end(), secret) != secrets_.end())
    return;
  const auto place = std::find_if(secrets_.begin(), secrets_.end(),
                                  [&](const std::string &other) { return other.size() < secret.size(); });
  secrets_.emplace(place, secret);
}

void SecretMask::apply(std::string *text) const {
  for (const std::string &secret : secrets_)
    for (size_t at = 0; (at = text->find(secret, at)) != std::string::npos; at += kStars.size())
      text->replace(at, secret.size(), kStars);
  for (const std::string &secret : secrets_) {
    for (size_t size = std::min(secret.size(), text->size()); size >= kShortest; --size) {
      if (!text->ends_with(std::string_view(secret).substr(0, size))) continue;
      text->replace(text->size() - size, size, kStars);
      return;
    }
  }
}

}  // namespace retrysafe
