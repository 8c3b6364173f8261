#include "sinks/nats/target.hpp"

#include <stdexcept>

#include "core/kinds/names.hpp"

namespace retrysafe::nats {

namespace {

[[noreturn]] void refuse(const char *what) {
  throw std::invalid_argument(what);
}

void check_identity(const Target &target) {
  const int ways = !target.user.empty() + !target.token.empty() + target.credentials.has_value() +
                   !target.nkey_seed.empty();
  if (ways > 1)
    refuse("only one of the options \"user\", \"token\", \"credentials\" and \"nkey_seed\" may be given");
  if (target.user.empty() != target.password.empty())
    refuse("options \"user\" and \"password\" need each other");
  if (target.nkey.empty() != target.nkey_seed.empty())
    refuse("options \"nkey\" and \"nkey_seed\" need each other");
  if (!target.nkey.empty() && !is_public_key(target.nkey))
    refuse("option \"nkey\" is not a user's public key");
  if (!target.nkey_seed.empty() && !is_seed(target.nkey_seed))
    refuse("option \"nkey_seed\" is not the seed of a user's key");
}

}  // namespace

Target::Target(const sink::Options &options)
    : destination(options.destination()),
      servers(parse_servers(options.required("servers"))),
      subject(options.required("subject"), kinds::event_subject_problem),
      stream(options.text("stream")),
      id_prefix(options.text("id_prefix")),
      source(options.text("source")),
      structured(options.text("mode") == "structured"),
      user(options.text("user")),
      password(options.text("password")),
      token(options.text("token")),
      nkey(options.text("nkey")),
      nkey_seed(options.text("nkey_seed")),
      tls(options.flag("tls", false)),
      ca_file(options.text("ca_file")),
      cert_file(options.text("cert_file")),
      key_file(options.text("key_file")),
      inbox_prefix(options.text("inbox_prefix", "_INBOX")),
      connect_timeout(options.number("connect_timeout", 5'000)),
      timeout(options.number("timeout", 10'000)),
      max_in_flight(static_cast<size_t>(options.number("max_in_flight", 1000))),
      filter(options.allowed_addresses()) {
  if (options.has("credentials")) {
    credentials = parse_credentials(options.text("credentials"));
    if (!credentials) refuse("option \"credentials\" does not hold a user's JWT and the seed of its key");
  }
  check_identity(*this);
  if (cert_file.empty() != key_file.empty()) refuse("options \"cert_file\" and \"key_file\" need each other");
}

}  // namespace retrysafe::nats
