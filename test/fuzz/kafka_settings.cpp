// Options of kind kafka that have a form of their own, a line each: brokers, topic, addresses; then what the
// library says about a connection.
#include "sinks/kafka/settings.hpp"

#include "input.hpp"
#include "options.hpp"
#include "sinks/kafka/delivery.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::InputOptions options;
  options.add("brokers", input.line());
  options.add("topic", input.line());
  const std::string addresses = input.line();
  try {
    const kafka::Settings settings(options.with_addresses(addresses));
    // Whatever is let through the library takes too.
    rd_kafka_conf_t *configuration = rd_kafka_conf_new();
    char error[512];
    for (const auto &[name, value] : settings.properties)
      fuzz::require(rd_kafka_conf_set(configuration, name.c_str(), value.c_str(), error, sizeof error) ==
                    RD_KAFKA_CONF_OK);
    rd_kafka_conf_destroy(configuration);
  } catch (const std::invalid_argument &) {
  }
  fuzz::require(kafka::stable_text(input.rest()).size() <= input.rest().size());
  return 0;
}
