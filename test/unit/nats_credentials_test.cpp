#include "sinks/nats/credentials.hpp"

#include <string>

#include <gtest/gtest.h>

namespace retrysafe::nats {
namespace {

const std::string kToken = "eyJ0eXAiOiJKV1QifQ.eyJqdGkiOiJYIn0.c2ln-_A";
// A key of the documentation of NATS.
const std::string kSeed = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
const std::string kPublicKey = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";

TEST(NatsCredentials, File) {
  const auto found = parse_credentials("-----BEGIN NATS USER JWT-----\r\n" + kToken +
                                       "\r\n------END NATS USER JWT------\r\n\r\n"
                                       "*** IMPORTANT ***\nNKEYs are sensitive.\n\n"
                                       "-----BEGIN USER NKEY SEED-----\n" +
                                       kSeed + "\n------END USER NKEY SEED------\n");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->token, kToken);
  EXPECT_EQ(found->seed, kSeed);
}

TEST(NatsCredentials, TwoWords) {
  EXPECT_TRUE(parse_credentials(kToken + " " + kSeed));
  EXPECT_TRUE(parse_credentials(kSeed + "\n" + kToken));
}

TEST(NatsCredentials, Incomplete) {
  for (const std::string &text :
       std::initializer_list<std::string>{"", kToken, kSeed, kToken + kSeed, kToken + " " + kPublicKey,
                                          "eyJ.x " + kSeed, kToken + " " + kSeed + "A"})
    EXPECT_FALSE(parse_credentials(text)) << text;
}

TEST(NatsCredentials, Keys) {
  EXPECT_TRUE(is_seed(kSeed));
  EXPECT_FALSE(is_seed("SA" + kSeed.substr(2)));  // an account's
  EXPECT_FALSE(is_seed(kSeed.substr(1)));
  EXPECT_TRUE(is_public_key(kPublicKey));
  EXPECT_FALSE(is_public_key(kSeed));
  EXPECT_FALSE(is_public_key("U" + std::string(55, '1')));
}

}  // namespace
}  // namespace retrysafe::nats
