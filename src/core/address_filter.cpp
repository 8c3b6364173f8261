#include "core/address_filter.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <stdexcept>

namespace retrysafe {

namespace {

struct Block {
  const char *address;
  unsigned bits;
};

// IANA's special-purpose registries, and the metadata service of one cloud that has a public address.
constexpr Block kSpecialIpv4[] = {
    {"0.0.0.0", 8},         // this network; Linux connects to loopback
    {"10.0.0.0", 8},        // private
    {"100.64.0.0", 10},     // carrier-grade NAT
    {"127.0.0.0", 8},       // loopback
    {"168.63.129.16", 32},  // Azure's platform services
    {"169.254.0.0", 16},    // link-local, metadata services
    {"172.16.0.0", 12},     // private
    {"192.0.0.0", 24},      // protocol assignments
    {"192.0.2.0", 24},      // documentation
    {"192.88.99.0", 24},    // 6to4 relays
    {"192.168.0.0", 16},    // private
    {"198.18.0.0", 15},     // benchmarks
    {"198.51.100.0", 24},   // documentation
    {"203.0.113.0", 24},    // documentation
    {"224.0.0.0", 4},       // multicast
    {"240.0.0.0", 4},       // reserved, broadcast
};

// Within 2000::/3, the only part of the address space that is public.
constexpr Block kSpecialIpv6[] = {
    {"2001::", 23},      // protocol assignments, Teredo
    {"2001:db8::", 32},  // documentation
    {"3fff::", 20},      // documentation
};

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\n\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\n\r") - first + 1);
}

std::string normal_name(std::string_view host) {
  if (host.ends_with('.')) host.remove_suffix(1);
  std::string name(host);
  for (char &c : name)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return name;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Letters, digits, hyphens and underscores in labels; the last label begins with no digit, which keeps out
// all the ways to write an IPv4 address.
bool is_host_name(std::string_view name) {
  const auto allowed = [](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || c == '-' || c == '_' || c == '.';
  };
  if (name.empty() || name.size() > 253 || name.front() == '.' || name.back() == '.') return false;
  if (!std::all_of(name.begin(), name.end(), allowed)) return false;
  if (name.find("..") != std::string_view::npos) return false;
  const size_t dot = name.rfind('.');
  return !is_digit(name[dot == std::string_view::npos ? 0 : dot + 1]);
}

}  // namespace

AddressFilter::AddressFilter(std::string_view allowed) {
  while (!allowed.empty()) {
    const size_t comma = allowed.find(',');
    const std::string_view entry = trim(allowed.substr(0, comma));
    allowed.remove_prefix(comma == std::string_view::npos ? allowed.size() : comma + 1);
    if (entry.empty()) continue;
    if (const auto range = parse_range(entry))
      ranges_.push_back(*range);
    else if (entry.front() == '/' || is_host_name(normal_name(entry)))
      names_.push_back(entry.front() == '/' ? std::string(entry) : normal_name(entry));
    else
      throw std::invalid_argument("retrysafe.allowed_addresses: \"" + std::string(entry) +
                                  "\" is neither an address, nor a range of addresses, nor a host name");
  }
}

bool AddressFilter::allows(std::string_view host, const sockaddr *address) const {
  const auto bytes = bytes_of(address);
  if (!bytes) return false;
  if (is_public(*bytes) || lists(*bytes)) return true;
  return std::find(names_.begin(), names_.end(), normal_name(host)) != names_.end();
}

bool AddressFilter::allows_folder(std::string_view folder) const {
  return std::find(names_.begin(), names_.end(), folder) != names_.end();
}

std::string AddressFilter::text(const sockaddr *address) {
  const auto bytes = bytes_of(address);
  if (!bytes) return "unknown";
  char text[INET6_ADDRSTRLEN];
  const bool ipv4 = address->sa_family == AF_INET;
  return inet_ntop(address->sa_family, ipv4 ? bytes->data() + 12 : bytes->data(), text, sizeof text);
}

std::string AddressFilter::refusal(const sockaddr *address) {
  return "address " + text(address) + " is not allowed; see allowed_addresses, of the server or of the relay";
}

bool AddressFilter::Range::contains(const Bytes &address) const {
  const unsigned whole = bits / 8;
  if (std::memcmp(bytes.data(), address.data(), whole) != 0) return false;
  if (bits % 8 == 0) return true;
  const unsigned mask = 0xff00u >> (bits % 8) & 0xffu;
  return (bytes[whole] & mask) == (address[whole] & mask);
}

std::optional<AddressFilter::Bytes> AddressFilter::bytes_of(const sockaddr *address) {
  Bytes bytes{};
  if (address->sa_family == AF_INET6) {
    sockaddr_in6 in6;
    std::memcpy(&in6, address, sizeof in6);
    std::memcpy(bytes.data(), &in6.sin6_addr, 16);
    return bytes;
  }
  if (address->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, address, sizeof in);
    bytes[10] = bytes[11] = 0xff;
    std::memcpy(bytes.data() + 12, &in.sin_addr, 4);
    return bytes;
  }
  return std::nullopt;
}

std::optional<AddressFilter::Range> AddressFilter::parse_range(std::string_view text) {
  const size_t slash = text.find('/');
  std::string_view host = text.substr(0, slash);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  Range range{};
  const std::string terminated(host);
  unsigned offset = 0;
  if (inet_pton(AF_INET, terminated.c_str(), range.bytes.data() + 12) == 1) {
    range.bytes[10] = range.bytes[11] = 0xff;
    offset = 96;
  } else if (inet_pton(AF_INET6, terminated.c_str(), range.bytes.data()) != 1) {
    return std::nullopt;
  }
  range.bits = 128;
  if (slash == std::string_view::npos) return range;
  const std::string_view digits = text.substr(slash + 1);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), range.bits);
  if (error != std::errc{} || end != digits.data() + digits.size() || range.bits > 128 - offset)
    return std::nullopt;
  range.bits += offset;
  return range;
}

// What an IPv6 address of a translator leads to: NAT64 (64:ff9b::/96) and 6to4 (2002::/16). The mapped form
// ::ffff:a.b.c.d needs nothing: it is how IPv4 addresses are kept here.
std::optional<AddressFilter::Bytes> AddressFilter::embedded_ipv4(const Bytes &address) {
  static constexpr uint8_t nat64[12] = {0x00, 0x64, 0xff, 0x9b};
  Bytes inner{};
  inner[10] = inner[11] = 0xff;
  if (std::memcmp(address.data(), nat64, sizeof nat64) == 0)
    std::memcpy(inner.data() + 12, address.data() + 12, 4);
  else if (address[0] == 0x20 && address[1] == 0x02)
    std::memcpy(inner.data() + 12, address.data() + 2, 4);
  else
    return std::nullopt;
  return inner;
}

bool AddressFilter::is_public(const Bytes &address) {
  static const auto parse = [](const Block &block) {
    return *parse_range(std::string(block.address) + "/" + std::to_string(block.bits));
  };
  static const Range mapped = *parse_range("::ffff:0:0/96");
  static const Range unicast = *parse_range("2000::/3");
  const auto special = [&](const Block &block) { return parse(block).contains(address); };

  if (mapped.contains(address))
    return std::none_of(std::begin(kSpecialIpv4), std::end(kSpecialIpv4), special);
  if (const auto inner = embedded_ipv4(address)) return is_public(*inner);
  return unicast.contains(address) && std::none_of(std::begin(kSpecialIpv6), std::end(kSpecialIpv6), special);
}

bool AddressFilter::lists(const Bytes &address) const {
  const auto contains = [&](const Range &range) { return range.contains(address); };
  if (std::any_of(ranges_.begin(), ranges_.end(), contains)) return true;
  const auto inner = embedded_ipv4(address);
  return inner && lists(*inner);
}

}  // namespace retrysafe
