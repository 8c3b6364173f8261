// What a server of kind redis answers: a byte for the size of the pieces in which it comes, then the bytes.
#include "sinks/redis/reply.hpp"

#include "input.hpp"

using namespace retrysafe;
using redis::Reply;
using redis::ReplyReader;

namespace {

struct Seen {
  std::vector<std::string> replies;
  bool garbage = false;
  bool operator==(const Seen &) const = default;
};

Seen read(std::string_view bytes, size_t piece) {
  Seen seen;
  ReplyReader reader;
  while (!bytes.empty() && !seen.garbage) {
    reader.feed(std::string(bytes.substr(0, piece)));
    bytes.remove_prefix(std::min(piece, bytes.size()));
    for (Reply reply;;) {
      const ReplyReader::Result result = reader.next(&reply);
      seen.garbage = result == ReplyReader::Result::kGarbage;
      if (result != ReplyReader::Result::kReply) break;
      seen.replies.push_back(reply.text + std::to_string(reply.integer));
      fuzz::require(reply.text.size() <= 2 * ReplyReader::kMaxBytes + piece);
      (void)redis::judge(reply.text);
      (void)redis::ends_connection(reply.text);
      fuzz::require(fuzz::is_one_line(redis::reason_of(reply.text)));
    }
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
