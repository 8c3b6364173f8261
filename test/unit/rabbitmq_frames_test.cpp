#include "sinks/rabbitmq/frames.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace retrysafe::rabbitmq {
namespace {

using namespace std::string_literals;

struct Copy {
  int type;
  int channel;
  std::string payload;
  bool operator==(const Copy &) const = default;
};

// All frames of a stream that arrives in pieces of that size.
std::vector<Copy> read(FrameReader &reader, std::string_view stream, size_t piece) {
  std::vector<Copy> frames;
  while (!stream.empty()) {
    const std::string_view part = stream.substr(0, piece);
    const auto room = reader.room();
    const size_t count = std::min(part.size(), room.size());
    std::copy_n(part.begin(), count, room.begin());
    reader.received(count);
    stream.remove_prefix(count);
    while (const auto frame = reader.next())
      frames.push_back({frame->type, frame->channel, std::string(frame->payload)});
  }
  return frames;
}

TEST(FramesTest, FramesAreFoundInPiecesOfAnySize) {
  std::string stream;
  append_heartbeat(&stream);
  amqp_basic_ack_t ack{.delivery_tag = 7, .multiple = 1};
  append_method(1, AMQP_BASIC_ACK_METHOD, &ack, &stream);
  append_heartbeat(&stream);
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{8}, size_t{9}, stream.size()}) {
    FrameReader reader;
    const auto frames = read(reader, stream, piece);
    ASSERT_EQ(frames.size(), 3u);
    EXPECT_EQ(frames[0], (Copy{AMQP_FRAME_HEARTBEAT, 0, ""}));
    EXPECT_EQ(frames[1].channel, 1);
    Decoder decoder;
    const Method method = decoder.method(frames[1].payload);
    ASSERT_EQ(method.id, AMQP_BASIC_ACK_METHOD);
    EXPECT_EQ(method.as<amqp_basic_ack_t>().delivery_tag, 7u);
    EXPECT_TRUE(method.as<amqp_basic_ack_t>().multiple);
  }
}

TEST(FramesTest, WhatIsNoFrameIsRefused) {
  for (const std::string &stream :
       {"AMQP\0\0\x09\x01"s, "HTTP/1.1 400"s, "\x09\0\0\0\0\0\0\xce"s, "\x01\0\0\xff\xff\xff\xff"s,
        "\x01\0\0\0\0\x0f\xf9"s, "\x01\0\0\0\0\0\x01xy"s}) {
    FrameReader reader;
    EXPECT_THROW(read(reader, stream, 3), ProtocolError) << stream;
  }
}

TEST(FramesTest, AFrameOfTheAgreedSizeIsTaken) {
  const std::string payload(10'000 - kFrameOverhead, 'x');
  const std::string stream = "\x03\0\x01\0\0\x27\x08"s + payload + '\xce';
  FrameReader small;
  EXPECT_THROW(read(small, stream, 100), ProtocolError);
  FrameReader reader;
  reader.set_frame_max(10'000);
  EXPECT_EQ(read(reader, stream, 100), std::vector<Copy>({{AMQP_FRAME_BODY, 1, payload}}));
  reader.clear();
  EXPECT_THROW(read(reader, stream, 100), ProtocolError) << "a new connection begins with little";
}

TEST(FramesTest, WhatCannotBeDecodedIsRefused) {
  Decoder decoder;
  for (const std::string &payload : {""s, "\0\x3c\0"s, "\0\x3c\0\x50"s, "\0\x3c\0\x50\0\0\0\0"s,
                                     "\xff\xff\xff\xff"s, "\0\x0a\0\x0a\0\x09\xff\xff\xff\xff"s})
    EXPECT_THROW(decoder.method(payload), ProtocolError);
  for (const std::string &payload :
       {""s, "\0\x3c\0\0\0\0\0\0\0\0\0"s, "\0\x3d\0\0\0\0\0\0\0\0\0\0\0\0"s,
        "\0\x3c\0\0\0\0\0\0\0\0\0\0\x80\0\x09x"s, "\0\x3c\0\0\0\0\0\0\0\0\0\0\x20\x80\xff\xff\xff\xff\x01x"s})
    EXPECT_THROW(message_id_of(payload), ProtocolError);
}

TEST(FramesTest, TablesWithinTablesDoNotUseUpTheStack) {
  std::string nested;
  for (size_t left = 120'000; left > 10; left -= 5) {
    const auto inside = static_cast<uint32_t>(left - 5);
    nested += 'A';
    for (const int shift : {24, 16, 8, 0}) nested += static_cast<char>(inside >> shift & 0xff);
  }
  nested += "VVVVVVVVVV";
  std::string size;
  for (const int shift : {24, 16, 8, 0}) size += static_cast<char>((nested.size() + 2) >> shift & 0xff);
  const std::string table = size + "\x01k" + nested;

  Decoder decoder;
  const std::string rest =
      "\0\0\0\x05PLAIN\0\0\0\x05"
      "en_US"s;
  EXPECT_THROW(decoder.method("\0\x0a\0\x0a\0\x09"s + table + rest), ProtocolError) << "connection.start";
  EXPECT_THROW(decoder.method("\0\x32\0\x0a\0\0\x01q\0"s + table), ProtocolError) << "queue.declare";
  EXPECT_EQ(message_id_of("\0\x3c\0\0\0\0\0\0\0\0\0\0\x20\x80"s + table + "\x02id"), "id");
}

TEST(FramesTest, TheMessageIdIsFoundBehindAllThatMayComeBeforeIt) {
  amqp_table_entry_t entry{};
  entry.key = bytes("name");
  entry.value.kind = AMQP_FIELD_KIND_UTF8;
  entry.value.value.bytes = bytes("value");
  amqp_basic_properties_t properties{};
  properties.headers = {1, &entry};
  properties.content_type = properties.content_encoding = properties.correlation_id = properties.reply_to =
      properties.expiration = properties.type = bytes("something");
  properties.message_id = bytes("an id");
  constexpr amqp_flags_t others[] = {AMQP_BASIC_CONTENT_TYPE_FLAG, AMQP_BASIC_CONTENT_ENCODING_FLAG,
                                     AMQP_BASIC_HEADERS_FLAG,      AMQP_BASIC_DELIVERY_MODE_FLAG,
                                     AMQP_BASIC_PRIORITY_FLAG,     AMQP_BASIC_CORRELATION_ID_FLAG,
                                     AMQP_BASIC_REPLY_TO_FLAG,     AMQP_BASIC_EXPIRATION_FLAG,
                                     AMQP_BASIC_TIMESTAMP_FLAG,    AMQP_BASIC_TYPE_FLAG};
  for (unsigned chosen = 0; chosen < 1u << std::size(others); ++chosen) {
    for (const amqp_flags_t own : {amqp_flags_t{0}, amqp_flags_t{AMQP_BASIC_MESSAGE_ID_FLAG}}) {
      properties._flags = own;
      for (size_t i = 0; i < std::size(others); ++i)
        if (chosen >> i & 1) properties._flags |= others[i];
      std::string stream;
      ASSERT_TRUE(append_content(1, &properties, "", kSmallestFrameMax, &stream));
      FrameReader reader;
      EXPECT_EQ(message_id_of(read(reader, stream, 1000)[0].payload), own ? "an id" : "");
    }
  }
}

TEST(FramesTest, ABodyIsCutIntoFrames) {
  constexpr size_t frame_max = 5000;
  constexpr size_t room = frame_max - kFrameOverhead;
  for (const size_t size : {size_t{0}, size_t{1}, room - 1, room, room + 1, 2 * room, 2 * room + 1}) {
    amqp_basic_properties_t properties{};
    properties._flags = AMQP_BASIC_MESSAGE_ID_FLAG;
    properties.message_id = bytes("an id");
    std::string stream;
    ASSERT_TRUE(append_content(1, &properties, std::string(size, 'x'), frame_max, &stream));
    FrameReader reader;
    reader.set_frame_max(frame_max);
    const auto frames = read(reader, stream, 1000);
    ASSERT_EQ(frames.size(), 1 + (size + room - 1) / room);
    EXPECT_EQ(message_id_of(frames[0].payload), "an id");
    std::string body, told = frames[0].payload.substr(4, 8);
    uint64_t told_size = 0;
    for (const char c : told) told_size = told_size << 8 | static_cast<unsigned char>(c);
    EXPECT_EQ(told_size, size);
    for (size_t i = 1; i < frames.size(); ++i) body += frames[i].payload;
    EXPECT_EQ(body, std::string(size, 'x'));
  }
}

TEST(FramesTest, PropertiesThatAreLargerThanAFrameAreLeftOut) {
  for (const auto &[size, fits] : {std::pair{3000, true}, {8000, true}, {9990, false}, {100'000, false}}) {
    const std::string value(static_cast<size_t>(size), 'v');
    amqp_table_entry_t entry{};
    entry.key = bytes("name");
    entry.value.kind = AMQP_FIELD_KIND_UTF8;
    entry.value.value.bytes = bytes(value);
    amqp_basic_properties_t properties{};
    properties._flags = AMQP_BASIC_HEADERS_FLAG;
    properties.headers = {1, &entry};
    std::string stream = "before";
    EXPECT_EQ(append_content(1, &properties, "body", 10'000, &stream), fits) << size;
    EXPECT_EQ(stream == "before", !fits);
  }
}

}  // namespace
}  // namespace retrysafe::rabbitmq
