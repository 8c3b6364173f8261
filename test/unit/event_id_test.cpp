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

TEST(EventId, IsReadAsTheServerReadsAUuid) {
  constexpr char kId[] = "00112233-4455-8677-8899-aabbccddeeff";
  for (const char *text :
       {kId, "00112233-4455-8677-8899-AABBCCDDEEFF", "00112233445586778899aabbccddeeff",
        "{00112233-4455-8677-8899-aabbccddeeff}", "0011-2233-4455-8677-8899-aabb-ccdd-eeff"}) {
    const std::optional<Uuid> id = parse_uuid(text);
    ASSERT_TRUE(id) << text;
    EXPECT_EQ(view(format_uuid(*id)), kId) << text;
  }
  for (const char *text : {"", "x", "{", "{}", "00112233-4455-8677-8899-aabbccddeef",
                           "00112233-4455-8677-8899-aabbccddeeff0", "00112233-4455-8677-8899-aabbccddeefg",
                           "{00112233-4455-8677-8899-aabbccddeeff", "00112233-4455-8677-8899-aabbccddeeff}",
                           "001-12233-4455-8677-8899-aabbccddeeff", "00112233--4455-8677-8899-aabbccddeeff",
                           "00112233-4455-8677-8899-aabbccddeeff-", " 00112233-4455-8677-8899-aabbccddeeff"})
    EXPECT_FALSE(parse_uuid(text)) << text;
}

}  // namespace
}  // namespace retrysafe
