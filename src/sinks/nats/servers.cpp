#include "sinks/nats/servers.hpp"

#include <charconv>
#include <stdexcept>

namespace retrysafe::nats {

namespace {

constexpr uint16_t kDefaultPort = 4222;

// Says what is wrong without the text: it may hold a password that does not belong there.
[[noreturn]] void refuse(const char *what) {
  throw std::invalid_argument(std::string("option \"servers\": ") + what);
}

uint16_t parse_port(std::string_view digits) {
  unsigned port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc{} || end != digits.data() + digits.size() || port == 0 || port > UINT16_MAX)
    refuse("a port is a number from 1 to 65535");
  return static_cast<uint16_t>(port);
}

std::string_view trim(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

Server parse_server(std::string_view text) {
  Server server{{}, kDefaultPort, false};
  if (const size_t scheme = text.find("://"); scheme != std::string_view::npos) {
    server.tls = text.substr(0, scheme) == "tls";
    if (!server.tls && text.substr(0, scheme) != "nats") refuse("an address begins with nats:// or tls://");
    text.remove_prefix(scheme + 3);
  }
  if (text.ends_with('/')) text.remove_suffix(1);
  if (text.find('@') != std::string_view::npos) refuse("user and password have options of their own");
  if (text.starts_with('[')) {
    const size_t bracket = text.find(']');
    if (bracket == std::string_view::npos) refuse("a bracket is not closed");
    server.host = text.substr(1, bracket - 1);
    text.remove_prefix(bracket + 1);
    if (!text.empty() && text.front() != ':') refuse("only a port may follow a bracket");
  } else {
    server.host = text.substr(0, text.find(':'));
    text.remove_prefix(server.host.size());
  }
  if (!text.empty()) server.port = parse_port(text.substr(1));
  if (server.host.empty() || server.host.find_first_of("/?#[] ") != std::string::npos)
    refuse("an address is HOST or HOST:PORT");
  return server;
}

}  // namespace

std::vector<Server> parse_servers(std::string_view list) {
  std::vector<Server> servers;
  while (true) {
    const size_t comma = list.find(',');
    servers.push_back(parse_server(trim(list.substr(0, comma))));
    if (comma == std::string_view::npos) return servers;
    list.remove_prefix(comma + 1);
  }
}

}  // namespace retrysafe::nats
