// What a broker of kind rabbitmq sends: a byte for the size of the pieces in which it comes, then the bytes.
#include "sinks/rabbitmq/frames.hpp"

#include <algorithm>

#include "input.hpp"

using namespace retrysafe;

namespace {

// What came of it, as text.
std::string read(std::string_view bytes, size_t piece) {
  std::string seen;
  rabbitmq::FrameReader reader;
  rabbitmq::Decoder decoder;
  try {
    while (!bytes.empty()) {
      const std::span<char> room = reader.room();
      const size_t count = std::min({piece, bytes.size(), room.size()});
      bytes.copy(room.data(), count);
      reader.received(count);
      bytes.remove_prefix(count);
      while (const auto frame = reader.next()) {
        seen.append(1, static_cast<char>(frame->type)).append(std::to_string(frame->channel));
        const std::string payload(frame->payload);
        if (frame->type == AMQP_FRAME_METHOD) {
          const rabbitmq::Method method = decoder.method(payload);
          seen += std::to_string(method.id);
          if (method.id == AMQP_CONNECTION_CLOSE_METHOD)
            seen += rabbitmq::view(method.as<amqp_connection_close_t>().reply_text);
          if (method.id == AMQP_BASIC_RETURN_METHOD)
            seen += rabbitmq::view(method.as<amqp_basic_return_t>().reply_text);
          if (method.id == AMQP_CONNECTION_START_METHOD)
            seen += rabbitmq::view(method.as<amqp_connection_start_t>().mechanisms);
        }
        if (frame->type == AMQP_FRAME_HEADER) seen += rabbitmq::message_id_of(payload);
      }
    }
  } catch (const rabbitmq::ProtocolError &error) {
    seen += error.what();
  }
  return seen;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const size_t piece = 1 + input.number<uint8_t>();
  // How it is cut on its way changes nothing.
  fuzz::require(read(input.rest(), piece) == read(input.rest(), input.rest().size() + 1));
  return 0;
}
