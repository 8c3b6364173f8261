// An event as a message of AMQP: where it goes, its properties and its body.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/cloud_event.hpp"
#include "core/route_template.hpp"
#include "sink/kit.hpp"
#include "sinks/rabbitmq/frames.hpp"

namespace retrysafe::rabbitmq {

class MessageWriter {
 public:
  explicit MessageWriter(const sink::Options &options);

  // Appends basic.publish and its content. False, and nothing appended, when the event cannot be carried:
  // `*reason` tells why.
  bool append(const retrysafe_event &event, uint16_t channel, size_t frame_max, std::string *out,
              std::string *reason);

  // True when every event goes to one exchange, or even with one routing key: what is wrong with these is no
  // event's fault.
  bool has_one_exchange() const;
  bool has_one_route() const;

 private:
  bool fill_headers(const CloudEvent &cloud_event, std::string *reason);

  const std::optional<RouteTemplate> exchange_template_;  // nothing: the default exchange
  const RouteTemplate routing_key_template_;
  const std::string source_;
  const bool structured_;
  const bool mandatory_;

  // Kept from event to event for their memory.
  std::string exchange_, routing_key_, names_, body_;
  std::vector<amqp_table_entry_t> headers_;
};

}  // namespace retrysafe::rabbitmq
