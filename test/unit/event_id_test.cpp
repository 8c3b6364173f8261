#include "core/event_id.hpp"

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

Sha256Digest counting_digest() {
  Sha256Digest digest;
  for (std::size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<std::uint8_t>(i * 0x11);
  return digest;
}

TEST(EventId, KeepsTheDigestButForVersionAndVariant) {
  EXPECT_EQ(view(format_uuid(event_id_from_digest(counting_digest()))),
            "00112233-4455-8677-8899-aabbccddeeff");
}

TEST(EventId, OverwritesAllVersionAndVariantBits) {
  Sha256Digest ones;
  ones.fill(0xff);
  EXPECT_EQ(view(format_uuid(event_id_from_digest(ones))), "ffffffff-ffff-8fff-bfff-ffffffffffff");
  EXPECT_EQ(view(format_uuid(event_id_from_digest(Sha256Digest{}))), "00000000-0000-8000-8000-000000000000");
}

TEST(EventId, RandomUuidIsVersionFour) {
  Uuid ones;
  ones.fill(0xff);
  EXPECT_EQ(view(format_uuid(random_uuid_from_bits(ones))), "ffffffff-ffff-4fff-bfff-ffffffffffff");
  EXPECT_EQ(view(format_uuid(random_uuid_from_bits(Uuid{}))), "00000000-0000-4000-8000-000000000000");
}

}  // namespace
}  // namespace retrysafe
