// A server of kind nats, from its INFO on.
#include "sinks/nats/nats_sink.hpp"

#include "far_side.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static fuzz::FarSide far_side;
  fuzz::InputOptions options;
  options.add("servers", "127.0.0.1:" + far_side.port());
  options.add("subject", "events");
  options.add("connect_timeout", "1000");
  options.add("timeout", "1000");
  fuzz::converse<nats::NatsSink>(far_side, {reinterpret_cast<const char *>(data), size},
                                 options.with_addresses("127.0.0.1"));
  return 0;
}
