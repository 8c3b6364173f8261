// Events as messages of AMQP: a byte for the mode, a byte for the size of a frame, templates of exchange and
// routing key up to a NUL each, then an event.
#include "sinks/rabbitmq/message.hpp"

#include "input.hpp"
#include "options.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::InputOptions options;
  options.add("mode", input.number<uint8_t>() % 2 ? "structured" : "binary");
  const size_t frame_max = rabbitmq::kSmallestFrameMax + input.number<uint8_t>() * 512;
  options.add_unless_empty("exchange", input.until('\0'));
  options.add_unless_empty("routing_key", input.until('\0'));
  const fuzz::InputEvent event(&input);
  try {
    rabbitmq::MessageWriter writer(options.with_addresses(""));
    std::string out, reason;
    if (!writer.append(*event, 1, frame_max, &out, &reason)) {
      fuzz::require(out.empty() && !reason.empty());
      return 0;
    }
    // A broker can read it: publish, header with the id, as many bytes as were promised.
    rabbitmq::FrameReader reader;
    reader.set_frame_max(frame_max);
    for (std::string_view rest = out; !rest.empty();) {
      const std::span<char> room = reader.room();
      const size_t count = rest.copy(room.data(), room.size());
      reader.received(count);
      rest.remove_prefix(count);
    }
    const auto publish = reader.next(), header = reader.next();
    fuzz::require(publish && publish->type == AMQP_FRAME_METHOD);
    fuzz::require(header && header->type == AMQP_FRAME_HEADER);
    fuzz::require(rabbitmq::message_id_of(header->payload) == fuzz::view(event->id));
    uint64_t promised = 0, sent = 0;
    for (size_t i = 4; i < 12; ++i) promised = promised << 8 | static_cast<unsigned char>(header->payload[i]);
    while (const auto body = reader.next()) {
      fuzz::require(body->type == AMQP_FRAME_BODY);
      sent += body->payload.size();
    }
    fuzz::require(sent == promised);
  } catch (const std::invalid_argument &) {
  }
  return 0;
}
