// A server of kind postgres, from its question for the password on.
#include "sinks/postgres/postgres_sink.hpp"

#include "far_side.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static fuzz::FarSide far_side;
  fuzz::InputOptions options;
  options.add("host", "127.0.0.1");
  options.add("port", far_side.port());
  options.add("dbname", "shop");
  options.add("user", "me");
  options.add("password", "secret");
  options.add("sslmode", "disable");
  options.add("function", "public.handle");
  options.add("connect_timeout", "1000");
  options.add("statement_timeout", "1000");
  fuzz::converse<sink::PostgresSink>(far_side, {reinterpret_cast<const char *>(data), size},
                                     options.with_addresses("127.0.0.1"));
  return 0;
}
