#include "core/address_filter.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <cstring>

using retrysafe::AddressFilter;

namespace {

struct Address {
  sockaddr_storage storage{};
  explicit Address(const char *text) {
    auto *in = reinterpret_cast<sockaddr_in *>(&storage);
    auto *in6 = reinterpret_cast<sockaddr_in6 *>(&storage);
    if (inet_pton(AF_INET, text, &in->sin_addr) == 1)
      storage.ss_family = AF_INET;
    else if (inet_pton(AF_INET6, text, &in6->sin6_addr) == 1)
      storage.ss_family = AF_INET6;
    else
      ADD_FAILURE() << text;
  }
  const sockaddr *get() const { return reinterpret_cast<const sockaddr *>(&storage); }
};

bool allows(const char *list, const char *address, const char *host = "example.org") {
  return AddressFilter(list).allows(host, Address(address).get());
}

}  // namespace

TEST(AddressFilter, PublicAddressesNeedNoEntry) {
  for (const char *address : {"1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0",
                              "172.15.0.1", "172.32.0.1", "223.255.255.255", "2606:4700::1111", "2a00::1",
                              "::ffff:1.1.1.1", "64:ff9b::1.1.1.1", "2002:0101:0101::1"})
    EXPECT_TRUE(allows("", address)) << address;
}

TEST(AddressFilter, SpecialAddressesAreRefused) {
  for (const char *address : {"0.0.0.0",
                              "0.1.2.3",
                              "10.0.0.1",
                              "100.64.0.1",
                              "100.100.100.200",
                              "127.0.0.1",
                              "127.255.255.254",
                              "168.63.129.16",
                              "169.254.169.254",
                              "172.16.0.1",
                              "172.31.255.255",
                              "192.0.0.192",
                              "192.168.1.1",
                              "198.18.0.1",
                              "224.0.0.1",
                              "255.255.255.255",
                              "::",
                              "::1",
                              "fe80::1",
                              "fec0::1",
                              "fc00::1",
                              "fd00:ec2::254",
                              "ff02::1",
                              "::127.0.0.1",
                              "2001::1",
                              "2001:db8::1",
                              "64:ff9b:1::1"})
    EXPECT_FALSE(allows("", address)) << address;
}

TEST(AddressFilter, FormsOfIpv4InIpv6AreSeenThrough) {
  for (const char *address : {"::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::127.0.0.1",
                              "64:ff9b::10.0.0.1", "2002:7f00:1::", "2002:a9fe:a9fe::1"})
    EXPECT_FALSE(allows("", address)) << address;
  EXPECT_TRUE(allows("127.0.0.1", "::ffff:127.0.0.1"));
  EXPECT_TRUE(allows("127.0.0.1", "64:ff9b::127.0.0.1"));
  EXPECT_TRUE(allows("::ffff:127.0.0.0/104", "127.0.0.1"));
}

TEST(AddressFilter, Ranges) {
  EXPECT_TRUE(allows("10.1.0.0/16", "10.1.255.255"));
  EXPECT_FALSE(allows("10.1.0.0/16", "10.2.0.0"));
  EXPECT_TRUE(allows(" 192.168.0.0/24 ,, 10.0.0.128/25,", "10.0.0.200"));
  EXPECT_FALSE(allows("192.168.0.0/24, 10.0.0.128/25", "10.0.0.127"));
  EXPECT_TRUE(allows("fd00::/8", "fdff::1"));
  EXPECT_FALSE(allows("fd00::/8", "fc00::1"));
  EXPECT_TRUE(allows("[::1]", "::1"));
  EXPECT_FALSE(allows("0.0.0.0/0", "::1"));
  EXPECT_TRUE(allows("0.0.0.0/0", "127.0.0.1"));
}

TEST(AddressFilter, NamesAdmitWhatTheyResolveTo) {
  EXPECT_TRUE(allows("Hooks.internal", "10.0.0.1", "hooks.INTERNAL."));
  EXPECT_TRUE(allows("hooks.internal.", "10.0.0.1", "hooks.internal"));
  EXPECT_FALSE(allows("hooks.internal", "10.0.0.1", "hooks.internal.evil.org"));
  EXPECT_FALSE(allows("hooks.internal", "10.0.0.1", "evil.org"));
  EXPECT_FALSE(allows("hooks.internal", "10.0.0.1", ""));
  EXPECT_TRUE(AddressFilter("/run/postgresql").allows_folder("/run/postgresql"));
  EXPECT_FALSE(AddressFilter("").allows_folder("/run/postgresql"));
}

TEST(AddressFilter, WhatIsNeitherIsAnError) {
  for (const char *list : {"10.0.0.0/33", "::/129", "10.0.0", "2130706433", "0x7f.1", "10.0.0.0/",
                           "10.0.0.0/8x", "a..b", "*.internal", "http://x", "10.0.0.1:80", "a b"})
    EXPECT_THROW(AddressFilter{list}, std::invalid_argument) << list;
}

TEST(AddressFilter, OtherFamiliesAreRefused) {
  sockaddr unix_socket{};
  unix_socket.sa_family = AF_UNIX;
  EXPECT_FALSE(AddressFilter("0.0.0.0/0, ::/0").allows("x", &unix_socket));
}

TEST(AddressFilter, SaysWhichAddressAndWhere) {
  EXPECT_EQ(AddressFilter::refusal(Address("127.0.0.1").get()),
            "address 127.0.0.1 is not allowed; see allowed_addresses, of the server or of the relay");
  EXPECT_EQ(AddressFilter::text(Address("fe80::1").get()), "fe80::1");
}
