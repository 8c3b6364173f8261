#include "sinks/kafka/message.hpp"

#include <new>

#include "core/cloud_event.hpp"

namespace retrysafe::kafka {

Message::Message(const retrysafe_event &event, std::string_view source, bool structured)
    : key_(event.ordering_key), value_(event.payload) {
  const CloudEvent cloud_event(event, source);
  const auto &attributes = cloud_event.attributes();
  headers_.reset(rd_kafka_headers_new(attributes.size() + 4));
  if (!headers_) throw std::bad_alloc();
  add_header("event-id", {event.id.data, event.id.size});
  if (structured) {
    cloud_event.append_json(&body_);
    value_ = {body_.data(), body_.size()};
    add_header("content-type", "application/cloudevents+json; charset=UTF-8");
  } else {
    if (cloud_event.has_data()) add_header("content-type", "application/json");
    std::string name = "ce_";
    for (const CloudEvent::Attribute &attribute : attributes) {
      name.resize(3);
      add_header(name += attribute.name, attribute.value);
    }
  }
  for (const CloudEvent::Attribute &attribute : attributes)
    if (attribute.name == "traceparent" || attribute.name == "tracestate")
      add_header(attribute.name, attribute.value);
}

void Message::add_header(std::string_view name, std::string_view value) {
  // Without a value it would be null, which is something else than empty.
  const char *bytes = value.data() ? value.data() : "";
  const rd_kafka_resp_err_t error =
      rd_kafka_header_add(headers_.get(), name.data(), static_cast<ssize_t>(name.size()), bytes,
                          static_cast<ssize_t>(value.size()));
  if (error != RD_KAFKA_RESP_ERR_NO_ERROR) throw std::bad_alloc();
}

}  // namespace retrysafe::kafka
