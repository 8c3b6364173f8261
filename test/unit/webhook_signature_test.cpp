#include "sinks/http/webhook_signature.hpp"

#include <gtest/gtest.h>

#include <stdexcept>

using retrysafe::http::WebhookSigner;

namespace {

// The example of the Standard Webhooks specification's reference libraries.
constexpr char kSecret[] = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
constexpr char kId[] = "msg_p5jXN8AQM9LWM0D4loKWxJek";
constexpr char kTimestamp[] = "1614265330";
constexpr char kBody[] = R"({"test": 2432232314})";
constexpr char kSignature[] = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

std::string sign(std::string_view secrets) {
  WebhookSigner signer(secrets);
  std::string out;
  signer.append_signature(kId, kTimestamp, kBody, &out);
  return out;
}

}  // namespace

TEST(WebhookSigner, KnownAnswer) {
  EXPECT_EQ(sign(kSecret), kSignature);
}

TEST(WebhookSigner, SignsAgainWithTheSameKey) {
  WebhookSigner signer(kSecret);
  std::string out;
  signer.append_signature("other", "1", "body", &out);
  out.clear();
  signer.append_signature(kId, kTimestamp, kBody, &out);
  EXPECT_EQ(out, kSignature);
}

TEST(WebhookSigner, SeveralSecretsSignEach) {
  const std::string both = sign(std::string("plain-secret ") + kSecret);
  EXPECT_EQ(both, sign("plain-secret") + " " + kSignature);
}

TEST(WebhookSigner, PaddingMayBeLeftOut) {
  EXPECT_EQ(sign("whsec_YWJjZA=="), sign("whsec_YWJjZA"));
  EXPECT_EQ(sign("whsec_YWJjZA"), sign("abcd"));
}

TEST(WebhookSigner, BadBase64IsAnError) {
  EXPECT_THROW(WebhookSigner("whsec_!!!!"), std::invalid_argument);
  EXPECT_THROW(WebhookSigner("whsec_"), std::invalid_argument);
}
