// AMQP 0-9-1 between frames and bytes. What is inside of a frame is encoded and decoded by rabbitmq-c.
#pragma once

#if __has_include(<rabbitmq-c/amqp.h>)
#include <rabbitmq-c/amqp.h>
#include <rabbitmq-c/framing.h>
#else  // before version 0.12
#include <amqp.h>
#include <amqp_framing.h>
#endif

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace retrysafe::rabbitmq {

// The far side does not keep to the protocol.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What every peer must take before it was agreed on something else.
inline constexpr size_t kSmallestFrameMax = 4096;
// Around the payload: type, channel and size before it, an end mark behind it.
inline constexpr size_t kFrameOverhead = 8;

inline amqp_bytes_t bytes(std::string_view text) {
  return {text.size(), const_cast<char *>(text.data())};
}

inline std::string_view view(const amqp_bytes_t &text) {
  return {static_cast<const char *>(text.bytes), text.len};
}

struct Frame {
  uint8_t type;
  uint16_t channel;
  std::string_view payload;
};

// Cuts what comes in into frames.
class FrameReader {
 public:
  void set_frame_max(size_t bytes) { frame_max_ = bytes; }
  void clear();

  // Where the next bytes go; received() tells how many came.
  std::span<char> room();
  void received(size_t count) { end_ += count; }

  // The next complete frame, valid until room() is called. Throws ProtocolError.
  std::optional<Frame> next();

 private:
  size_t frame_max_ = kSmallestFrameMax;
  std::vector<char> buffer_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

// Decoded with the memory of a Decoder; valid until the next call of it.
struct Method {
  amqp_method_number_t id;
  void *decoded;

  template <class T>
  const T &as() const {
    return *static_cast<const T *>(decoded);
  }
};

class Decoder {
 public:
  Decoder();
  ~Decoder();
  Decoder(const Decoder &) = delete;
  Decoder &operator=(const Decoder &) = delete;

  // Throws ProtocolError.
  Method method(std::string_view payload);

 private:
  amqp_pool_t pool_;
};

// The property message-id of a content header, empty when there is none. Throws ProtocolError.
std::string_view message_id_of(std::string_view header_payload);

// These append to `out`.
void append_protocol_header(std::string *out);
void append_heartbeat(std::string *out);
void append_method(uint16_t channel, amqp_method_number_t id, void *method, std::string *out,
                   size_t frame_max = kSmallestFrameMax);
// Header and body of a message. False, and nothing appended, when the properties do not fit into one frame.
bool append_content(uint16_t channel, amqp_basic_properties_t *properties, std::string_view body,
                    size_t frame_max, std::string *out);

}  // namespace retrysafe::rabbitmq
