// Events as messages of Kafka: a byte for the mode, then an event.
#include "sinks/kafka/message.hpp"

#include "input.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const bool structured = input.number<uint8_t>() % 2;
  const fuzz::InputEvent event(&input);
  const kafka::Message message(*event, {}, structured);
  const void *value;
  size_t length;
  fuzz::require(rd_kafka_header_get_last(message.headers(), "event-id", &value, &length) ==
                RD_KAFKA_RESP_ERR_NO_ERROR);
  fuzz::require(std::string_view(static_cast<const char *>(value), length) == fuzz::view(event->id));
  fuzz::require(fuzz::view(message.key()) == fuzz::view(event->ordering_key));
  if (!structured) fuzz::require(message.value().data == event->payload.data);
  return 0;
}
