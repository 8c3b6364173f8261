// The two parts of a credentials file, as the tool nsc writes it: a token that the account has signed, and
// the seed of the key that proves who shows it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace retrysafe::nats {

struct Credentials {
  std::string token;
  std::string seed;
};

// Nothing when the text does not have both. It need not be a whole file: the token and the seed, separated by
// a blank, serve.
std::optional<Credentials> parse_credentials(std::string_view text);

// A seed of a user's key, as nsc and nk write it.
bool is_seed(std::string_view text);
// A user's public key.
bool is_public_key(std::string_view text);

}  // namespace retrysafe::nats
