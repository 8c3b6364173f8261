// A broker of kind rabbitmq, from its greeting on.
#include "sinks/rabbitmq/rabbitmq_sink.hpp"

#include "far_side.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static fuzz::FarSide far_side;
  fuzz::InputOptions options;
  options.add("host", "127.0.0.1");
  options.add("port", far_side.port());
  options.add("user", "guest");
  options.add("password", "guest");
  options.add("exchange", "events");
  options.add("connect_timeout", "1000");
  options.add("timeout", "1000");
  fuzz::converse<rabbitmq::RabbitmqSink>(far_side, {reinterpret_cast<const char *>(data), size},
                                         options.with_addresses("127.0.0.1"));
  return 0;
}
