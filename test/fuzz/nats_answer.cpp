// What comes to the reply subject of a message.
#include "sinks/nats/publish_answer.hpp"

#include "input.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const std::string body(reinterpret_cast<const char *>(data), size);
  const nats::PublishAnswer answer = nats::parse_answer(body);
  const bool stored = answer.verdict == nats::PublishAnswer::Verdict::kStored;
  fuzz::require(stored == answer.reason.empty());
  fuzz::require(fuzz::is_one_line(answer.reason));
  // Nobody says so by accident.
  if (stored)
    fuzz::require(body.find("\"stream\"") != std::string::npos && body.find("\"seq\"") != std::string::npos);
  return 0;
}
