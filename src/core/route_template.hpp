// Where an event goes within its destination: topic, subject, routing key or stream, made from the event.
//
// A template is text with placeholders: {type}, {ordering_key}, {header:NAME}; {{ and }} stand for braces.
// Which results are legal names is each broker's own rule, and checked by its sink.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sink/abi.h"

namespace retrysafe {

// Whether the text is a template. Neither allocates nor throws, so that server code may ask.
bool is_route_template(std::string_view text);

class RouteTemplate {
 public:
  explicit RouteTemplate(std::string_view text);  // throws std::invalid_argument

  // True when every event goes to the same place.
  bool is_constant() const;
  // Which one: of a constant template.
  const std::string &constant() const { return parts_.front().text; }

  // Replaces `*name` by the place of this event. False when it has none, and never will: `*reason` tells why.
  bool expand(const retrysafe_event &event, std::string *name, std::string *reason) const;

 private:
  enum class Source { kLiteral, kType, kOrderingKey, kHeader };
  struct Part {
    Source source;
    std::string text;  // of a literal; name of a header
  };

  std::vector<Part> parts_;
};

}  // namespace retrysafe
