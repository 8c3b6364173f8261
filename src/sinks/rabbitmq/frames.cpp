#include "sinks/rabbitmq/frames.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace retrysafe::rabbitmq {

namespace {

constexpr size_t kReadAtOnce = 64 * 1024;
constexpr size_t kFrameHead = 7;
constexpr size_t kMethodNumber = 4;
constexpr size_t kContentHead = 12;  // class, weight, size of the body
constexpr size_t kPoolPage = 4096;

template <class Integer>
void put(Integer number, char *out) {
  for (size_t i = sizeof number; i > 0; --i) {
    out[i - 1] = static_cast<char>(number & 0xff);
    if constexpr (sizeof number > 1) number = static_cast<Integer>(number >> 8);
  }
}

template <class Integer>
Integer get(const char *in) {
  uint64_t number = 0;
  for (size_t i = 0; i < sizeof(Integer); ++i) number = number << 8 | static_cast<unsigned char>(in[i]);
  return static_cast<Integer>(number);
}

// Opens a frame with room for a payload of at most so many bytes; where its payload begins.
size_t open_frame(uint8_t type, uint16_t channel, size_t room, std::string *out) {
  const size_t begin = out->size();
  out->resize(begin + kFrameHead + room);
  put(type, out->data() + begin);
  put(channel, out->data() + begin + 1);
  return begin + kFrameHead;
}

void close_frame(size_t payload, size_t size, std::string *out) {
  put(static_cast<uint32_t>(size), out->data() + payload - sizeof(uint32_t));
  out->resize(payload + size);
  out->push_back(static_cast<char>(AMQP_FRAME_END));
}

// rabbitmq-c decodes tables within tables by recursion, as deep as the far side likes: a large frame of
// nested ones would use up the stack. Of what a broker has to say only its greeting holds a table.
bool may_be_decoded(amqp_method_number_t id, size_t size) {
  switch (id) {
    case AMQP_CONNECTION_START_METHOD:
      return size <= kSmallestFrameMax;
    case AMQP_CONNECTION_TUNE_METHOD:
    case AMQP_CONNECTION_OPEN_OK_METHOD:
    case AMQP_CONNECTION_BLOCKED_METHOD:
    case AMQP_CONNECTION_UNBLOCKED_METHOD:
    case AMQP_CONNECTION_CLOSE_METHOD:
    case AMQP_CHANNEL_OPEN_OK_METHOD:
    case AMQP_CHANNEL_FLOW_METHOD:
    case AMQP_CHANNEL_CLOSE_METHOD:
    case AMQP_CONFIRM_SELECT_OK_METHOD:
    case AMQP_BASIC_ACK_METHOD:
    case AMQP_BASIC_NACK_METHOD:
    case AMQP_BASIC_RETURN_METHOD:
      return true;
    default:
      return false;
  }
}

}  // namespace

void FrameReader::clear() {
  frame_max_ = kSmallestFrameMax;
  begin_ = end_ = 0;
}

std::span<char> FrameReader::room() {
  if (begin_ > 0) {
    std::copy(buffer_.begin() + static_cast<std::ptrdiff_t>(begin_),
              buffer_.begin() + static_cast<std::ptrdiff_t>(end_), buffer_.begin());
    end_ -= begin_;
    begin_ = 0;
  }
  if (buffer_.size() < end_ + kReadAtOnce) buffer_.resize(end_ + kReadAtOnce);
  return {buffer_.data() + end_, buffer_.size() - end_};
}

std::optional<Frame> FrameReader::next() {
  const size_t size = end_ - begin_;
  if (size < kFrameHead) return std::nullopt;
  const char *head = buffer_.data() + begin_;
  const auto type = static_cast<uint8_t>(head[0]);
  if (type != AMQP_FRAME_METHOD && type != AMQP_FRAME_HEADER && type != AMQP_FRAME_BODY &&
      type != AMQP_FRAME_HEARTBEAT)
    throw ProtocolError("the far side answered with something that is not AMQP 0-9-1");
  const auto payload = get<uint32_t>(head + 3);
  if (payload + kFrameOverhead > frame_max_) throw ProtocolError("the broker sent a frame that is too large");
  if (size < payload + kFrameOverhead) return std::nullopt;
  if (static_cast<uint8_t>(head[kFrameHead + payload]) != AMQP_FRAME_END)
    throw ProtocolError("the broker sent a frame without an end");
  begin_ += payload + kFrameOverhead;
  return Frame{type, get<uint16_t>(head + 1), {head + kFrameHead, payload}};
}

Decoder::Decoder() {
  init_amqp_pool(&pool_, kPoolPage);
}

Decoder::~Decoder() {
  empty_amqp_pool(&pool_);
}

Method Decoder::method(std::string_view payload) {
  recycle_amqp_pool(&pool_);
  if (payload.size() < kMethodNumber) throw ProtocolError("the broker sent a method without a number");
  Method method{get<amqp_method_number_t>(payload.data()), nullptr};
  payload.remove_prefix(kMethodNumber);
  if (!may_be_decoded(method.id, payload.size()))
    throw ProtocolError("the broker sent a method that is not expected from it");
  const int status = amqp_decode_method(method.id, &pool_, bytes(payload), &method.decoded);
  if (status == AMQP_STATUS_NO_MEMORY) throw std::bad_alloc();
  if (status != AMQP_STATUS_OK) throw ProtocolError("the broker sent a method that cannot be read");
  return method;
}

// Read by hand: the table of headers, which comes first, is whatever the broker wants it to be.
std::string_view message_id_of(std::string_view payload) {
  const auto take = [&](size_t count) {
    if (payload.size() < count) throw ProtocolError("the broker sent a header that cannot be read");
    const std::string_view taken = payload.substr(0, count);
    payload.remove_prefix(count);
    return taken;
  };
  const auto short_string = [&] { return take(get<uint8_t>(take(1).data())); };
  if (get<uint16_t>(take(kContentHead).data()) != AMQP_BASIC_CLASS)
    throw ProtocolError("the broker sent a header that cannot be read");
  const auto flags = get<uint16_t>(take(2).data());
  if (flags & AMQP_BASIC_CONTENT_TYPE_FLAG) short_string();
  if (flags & AMQP_BASIC_CONTENT_ENCODING_FLAG) short_string();
  if (flags & AMQP_BASIC_HEADERS_FLAG) take(get<uint32_t>(take(4).data()));
  if (flags & AMQP_BASIC_DELIVERY_MODE_FLAG) take(1);
  if (flags & AMQP_BASIC_PRIORITY_FLAG) take(1);
  if (flags & AMQP_BASIC_CORRELATION_ID_FLAG) short_string();
  if (flags & AMQP_BASIC_REPLY_TO_FLAG) short_string();
  if (flags & AMQP_BASIC_EXPIRATION_FLAG) short_string();
  return flags & AMQP_BASIC_MESSAGE_ID_FLAG ? short_string() : std::string_view();
}

void append_protocol_header(std::string *out) {
  out->append("AMQP\0\0\x09\x01", 8);
}

void append_heartbeat(std::string *out) {
  close_frame(open_frame(AMQP_FRAME_HEARTBEAT, 0, 0, out), 0, out);
}

// What we send is far below the smallest frame that a broker takes, but for a long password.
void append_method(uint16_t channel, amqp_method_number_t id, void *method, std::string *out,
                   size_t frame_max) {
  const size_t room = frame_max - kFrameOverhead;
  const size_t payload = open_frame(AMQP_FRAME_METHOD, channel, room, out);
  put(static_cast<uint32_t>(id), out->data() + payload);
  const int size =
      amqp_encode_method(id, method, {room - kMethodNumber, out->data() + payload + kMethodNumber});
  if (size < 0) throw std::logic_error("a method does not fit into a frame");
  close_frame(payload, kMethodNumber + static_cast<size_t>(size), out);
}

bool append_content(uint16_t channel, amqp_basic_properties_t *properties, std::string_view body,
                    size_t frame_max, std::string *out) {
  const size_t before = out->size();
  const size_t room = frame_max - kFrameOverhead;
  // Nearly all fit into little; room is made by filling it with zeros.
  bool fits = false;
  for (size_t tried = kSmallestFrameMax - kFrameOverhead; !fits; tried = room) {
    const size_t payload = open_frame(AMQP_FRAME_HEADER, channel, tried, out);
    char *head = out->data() + payload;
    put(uint16_t{AMQP_BASIC_CLASS}, head);
    put(uint16_t{0}, head + 2);
    put(uint64_t{body.size()}, head + 4);
    const int size =
        amqp_encode_properties(AMQP_BASIC_CLASS, properties, {tried - kContentHead, head + kContentHead});
    fits = size >= 0;
    if (fits)
      close_frame(payload, kContentHead + static_cast<size_t>(size), out);
    else
      out->resize(before);
    if (tried >= room) break;
  }
  if (!fits) return false;
  for (; !body.empty(); body.remove_prefix(std::min(room, body.size()))) {
    const std::string_view part = body.substr(0, room);
    const size_t at = open_frame(AMQP_FRAME_BODY, channel, part.size(), out);
    std::memcpy(out->data() + at, part.data(), part.size());
    close_frame(at, part.size(), out);
  }
  return true;
}

}  // namespace retrysafe::rabbitmq
