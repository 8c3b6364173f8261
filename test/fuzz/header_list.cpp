// Headers of an event, as the JSON text that the server hands out.
#include "core/header_list.hpp"

#include "core/json_string.hpp"
#include "input.hpp"

using namespace retrysafe;

namespace {

using Pairs = std::vector<retrysafe_pair>;

std::string write(const Pairs &pairs) {
  std::string json = "{";
  for (const retrysafe_pair &pair : pairs) {
    if (json.size() > 1) json += ',';
    write_json_string(json, fuzz::view(pair.name));
    json += ':';
    write_json_string(json, fuzz::view(pair.value));
  }
  return json += '}';
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const std::string json(reinterpret_cast<const char *>(data), size);
  Pairs pairs;
  std::deque<std::string> unescaped;
  if (!read_headers(json, &pairs, &unescaped)) return 0;
  // Written and read again they are the same.
  const std::string written = write(pairs);
  Pairs again;
  std::deque<std::string> unescaped_again;
  fuzz::require(read_headers(written, &again, &unescaped_again) && again.size() == pairs.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    fuzz::require(fuzz::view(again[i].name) == fuzz::view(pairs[i].name));
    fuzz::require(fuzz::view(again[i].value) == fuzz::view(pairs[i].value));
  }
  // UTF-8 stays UTF-8, whatever was escaped.
  if (fuzz::is_utf8(json))
    for (const retrysafe_pair &pair : pairs)
      fuzz::require(fuzz::is_utf8(fuzz::view(pair.name)) && fuzz::is_utf8(fuzz::view(pair.value)));
  return 0;
}
