// What the library's word on a message means for its event.
#pragma once

#include <librdkafka/rdkafka.h>

#include <string>
#include <string_view>

namespace retrysafe::kafka {

enum class Verdict {
  kDelivered,
  kDestination,  // the cluster, or the way to it
  kTopic,        // the topic: missing, or closed to us
  kEvent,        // this event can never pass
  kBatch,        // one event of those that went together can never pass
  kUnknown,      // a failure that may speak of the event or of everything
};

Verdict judge(rd_kafka_resp_err_t error);

// The library's text on a connection without what changes from one attempt to the next: how many milliseconds
// it took and how often it came before.
std::string stable_text(std::string_view text);

}  // namespace retrysafe::kafka
