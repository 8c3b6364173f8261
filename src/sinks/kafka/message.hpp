// An event as a message: the Kafka binding of CloudEvents.
//
// Binary mode: the payload is the value, and each attribute a header `ce_NAME`. Structured mode: the value is
// one JSON object. In both, the header `event-id` carries the event id, and trace headers go under their own
// names as well. The key is the ordering key. An SQL null is a message without a value, which compacted
// topics take for a removal of the key.
#pragma once

#include <librdkafka/rdkafka.h>

#include <memory>
#include <string>
#include <string_view>

#include "sink/abi.h"

namespace retrysafe::kafka {

class Message {
 public:
  // Views the event, which must stay. `source` as of CloudEvent.
  Message(const retrysafe_event &event, std::string_view source, bool structured);

  const retrysafe_text &key() const { return key_; }
  const retrysafe_text &value() const { return value_; }

  // For the library, which owns them once it has taken the message.
  rd_kafka_headers_t *headers() const { return headers_.get(); }
  void release_headers() { (void)headers_.release(); }

 private:
  struct Free {
    void operator()(rd_kafka_headers_t *headers) const { rd_kafka_headers_destroy(headers); }
  };
  void add_header(std::string_view name, std::string_view value);

  retrysafe_text key_;
  retrysafe_text value_;
  std::string body_;  // structured mode only
  std::unique_ptr<rd_kafka_headers_t, Free> headers_;
};

}  // namespace retrysafe::kafka
