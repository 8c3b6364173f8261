// A server of kind redis, from its greeting on.
#include "sinks/redis/redis_sink.hpp"

#include "far_side.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static fuzz::FarSide far_side;
  fuzz::InputOptions options;
  options.add("host", "127.0.0.1");
  options.add("port", far_side.port());
  options.add("password", "secret");
  options.add("database", "1");
  options.add("stream", "events");
  options.add("replicas", size % 2 ? "1" : "0");
  options.add("connect_timeout", "1000");
  options.add("timeout", "1000");
  fuzz::converse<redis::RedisSink>(far_side, {reinterpret_cast<const char *>(data), size},
                                   options.with_addresses("127.0.0.1"));
  return 0;
}
