#include "sinks/rabbitmq/message.hpp"

#include "core/kinds/names.hpp"

namespace retrysafe::rabbitmq {

using kinds::kLongestShortString;

namespace {

// The prefix of the AMQP binding of CloudEvents.
constexpr std::string_view kPrefix = "cloudEvents:";
constexpr uint8_t kPersistent = 2;

std::optional<RouteTemplate> exchange(const sink::Options &options) {
  if (!options.has("exchange")) return std::nullopt;
  return RouteTemplate(options.text("exchange"), kinds::short_string_problem);
}

bool expand(const RouteTemplate &from, const char *what, const retrysafe_event &event, std::string *to,
            std::string *reason) {
  if (from.expand(event, to, reason)) return true;
  reason->insert(0, std::string(what) + ": ");
  return false;
}

}  // namespace

MessageWriter::MessageWriter(const sink::Options &options)
    : exchange_template_(exchange(options)),
      routing_key_template_(options.text("routing_key", "{type}"), kinds::short_string_problem),
      source_(options.text("source")),
      structured_(options.text("mode") == "structured"),
      mandatory_(options.flag("mandatory", true)) {}

bool MessageWriter::has_one_exchange() const {
  return !exchange_template_ || exchange_template_->is_constant();
}

bool MessageWriter::has_one_route() const {
  return has_one_exchange() && routing_key_template_.is_constant();
}

bool MessageWriter::fill_headers(const CloudEvent &cloud_event, std::string *reason) {
  const auto &attributes = cloud_event.attributes();
  names_.clear();
  size_t bytes_of_names = 0;
  for (const auto &attribute : attributes) bytes_of_names += kPrefix.size() + attribute.name.size();
  names_.reserve(bytes_of_names);  // the entries point into it
  headers_.clear();
  const auto add = [&](std::string_view name, std::string_view value) {
    amqp_table_entry_t &entry = headers_.emplace_back();
    entry.key = bytes(name);
    entry.value.kind = AMQP_FIELD_KIND_UTF8;
    entry.value.value.bytes = bytes(value);
  };
  for (const auto &attribute : attributes) {
    const size_t size = kPrefix.size() + attribute.name.size();
    if (size > kLongestShortString) {
      *reason = "a header has a name of " + std::to_string(attribute.name.size()) + " bytes; AMQP allows " +
                std::to_string(kLongestShortString - kPrefix.size());
      return false;
    }
    // In structured mode the attributes are in the body.
    if (!structured_) {
      names_.append(kPrefix).append(attribute.name);
      add(std::string_view(names_).substr(names_.size() - size), attribute.value);
    }
    // Tracing tools look for the W3C headers themselves.
    if (attribute.name == "traceparent" || attribute.name == "tracestate")
      add(attribute.name, attribute.value);
  }
  return true;
}

bool MessageWriter::append(const retrysafe_event &event, uint16_t channel, size_t frame_max, std::string *out,
                           std::string *reason) {
  if ((exchange_template_ && !expand(*exchange_template_, "exchange", event, &exchange_, reason)) ||
      !expand(routing_key_template_, "routing key", event, &routing_key_, reason))
    return false;
  const CloudEvent cloud_event(event, source_);
  if (!fill_headers(cloud_event, reason)) return false;
  std::string_view body(event.payload.data ? event.payload.data : "", event.payload.size);
  if (structured_) {
    body_.clear();
    cloud_event.append_json(&body_);
    body = body_;
  }

  amqp_basic_properties_t properties{};
  properties._flags = AMQP_BASIC_HEADERS_FLAG | AMQP_BASIC_DELIVERY_MODE_FLAG | AMQP_BASIC_MESSAGE_ID_FLAG |
                      AMQP_BASIC_APP_ID_FLAG;
  properties.headers = {static_cast<int>(headers_.size()), headers_.data()};
  properties.delivery_mode = kPersistent;
  properties.message_id = bytes(sink::view(event.id));
  properties.app_id = bytes("retrysafe");
  if (structured_ || cloud_event.has_data()) {
    properties._flags |= AMQP_BASIC_CONTENT_TYPE_FLAG;
    properties.content_type =
        bytes(structured_ ? "application/cloudevents+json; charset=utf-8" : "application/json");
  }
  // A longer one is in the headers.
  if (event.type.size <= kLongestShortString) {
    properties._flags |= AMQP_BASIC_TYPE_FLAG;
    properties.type = bytes(sink::view(event.type));
  }

  const size_t before = out->size();
  amqp_basic_publish_t publish{};
  publish.exchange = bytes(exchange_);
  publish.routing_key = bytes(routing_key_);
  publish.mandatory = mandatory_;
  append_method(channel, AMQP_BASIC_PUBLISH_METHOD, &publish, out);
  if (append_content(channel, &properties, body, frame_max, out)) return true;
  out->resize(before);
  *reason = "the headers of the event are larger than a frame of this broker (" + std::to_string(frame_max) +
            " bytes)";
  return false;
}

}  // namespace retrysafe::rabbitmq
