// Which addresses a destination may connect to.
//
// Destinations are made by people who may not be trusted with the network that the database server stands in.
// So loopback, link-local, private and other special addresses are refused unless retrysafe.allowed_addresses
// lists them. A sink asks with the address that it is about to connect to, not with a name: what a name
// resolves to can change between a check and its use, and 127.1, 0177.0.0.1 or 2130706433 are all the same
// address.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace retrysafe {

class AddressFilter {
 public:
  // Comma-separated: addresses, CIDR ranges, host names, and folders of Unix sockets. Throws
  // std::invalid_argument for anything else, so that a slip of the pen opens nothing.
  explicit AddressFilter(std::string_view allowed);

  // Whether a connection to `address` may be made, for a destination that was given as `host`. A listed host
  // name admits whatever it resolves to.
  bool allows(std::string_view host, const sockaddr *address) const;

  // The folder of a Unix socket, which has no address.
  bool allows_folder(std::string_view folder) const;

  // For messages: "127.0.0.1", "fe80::1", "unknown".
  static std::string text(const sockaddr *address);

  // The same for every sink, so that operators can search for it.
  static std::string refusal(const sockaddr *address);

 private:
  // An IPv4 address is kept in the form ::ffff:a.b.c.d.
  using Bytes = std::array<uint8_t, 16>;
  struct Range {
    Bytes bytes;
    unsigned bits;
    bool contains(const Bytes &address) const;
  };

  static std::optional<Bytes> bytes_of(const sockaddr *address);
  static std::optional<Range> parse_range(std::string_view text);
  static std::optional<Bytes> embedded_ipv4(const Bytes &address);
  static bool is_public(const Bytes &address);
  bool lists(const Bytes &address) const;

  std::vector<Range> ranges_;
  std::vector<std::string> names_;  // in lower case, without the final dot
};

}  // namespace retrysafe
