// retrysafe.allowed_addresses, and the judgement on an address: a line with the list, one with the host of
// the destination, then 16 bytes of an IPv6 address.
#include "core/address_filter.hpp"

#include <netinet/in.h>

#include <cstring>
#include <stdexcept>

#include "input.hpp"

using namespace retrysafe;

namespace {

sockaddr_in ipv4(const uint8_t *bytes) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  std::memcpy(&address.sin_addr, bytes, 4);
  return address;
}

sockaddr_in6 ipv6(const uint8_t *bytes) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  std::memcpy(&address.sin6_addr, bytes, 16);
  return address;
}

// Open to everybody: no host, no list.
bool is_public(const sockaddr *address) {
  return AddressFilter("").allows("", address);
}

template <class Address>
const sockaddr *generic(const Address &address) {
  return reinterpret_cast<const sockaddr *>(&address);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const std::string list = input.line(), host = input.line();
  uint8_t bytes[16] = {};
  for (uint8_t &byte : bytes) byte = input.number<uint8_t>();
  const sockaddr_in six_in_four = ipv4(bytes + 12);
  const sockaddr_in6 whole = ipv6(bytes);

  // An address of IPv4 is judged alike in all the forms in which IPv6 can lead to it.
  uint8_t mapped[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, bytes[12], bytes[13], bytes[14], bytes[15]};
  uint8_t nat64[16] = {0, 0x64, 0xff, 0x9b, 0,         0,         0,         0,
                       0, 0,    0,    0,    bytes[12], bytes[13], bytes[14], bytes[15]};
  uint8_t six_to_four[16] = {0x20,     0x02,     bytes[12], bytes[13], bytes[14], bytes[15],
                             bytes[0], bytes[1], bytes[2],  bytes[3],  bytes[4],  bytes[5],
                             bytes[6], bytes[7], bytes[8],  bytes[9]};
  const bool open = is_public(generic(six_in_four));
  for (const uint8_t *form : {mapped, nat64, six_to_four})
    fuzz::require(is_public(generic(ipv6(form))) == open);

  // Its text, listed, opens exactly this.
  for (const sockaddr *address : {generic(six_in_four), generic(whole)}) {
    const AddressFilter only(AddressFilter::text(address));
    fuzz::require(only.allows("", address));
    const AddressFilter none("");
    fuzz::require(none.allows(host, address) == is_public(address));
  }

  try {
    const AddressFilter filter(list);
    for (const sockaddr *address : {generic(six_in_four), generic(whole)}) {
      // A list opens, it does not close.
      fuzz::require(filter.allows(host, address) || !is_public(address));
    }
    (void)filter.allows_folder(host);
  } catch (const std::invalid_argument &) {
  }
  return 0;
}
