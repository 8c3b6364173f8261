// Where an event goes within its destination: topic, subject, routing key or stream, made from the event.
//
// A template is text with placeholders: {type}, {ordering_key}, {header:NAME}; {{ and }} stand for braces.
// Which results are legal names is each broker's own rule, see kinds/names.hpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sink/abi.h"

namespace retrysafe {

// What is wrong with a name, to be read behind it; null: nothing. Neither allocates nor throws.
using NameRule = const char *(*)(std::string_view);

// Whether the text is a template. Neither allocates nor throws, so that server code may ask.
bool is_route_template(std::string_view text);

class RouteTemplate {
 public:
  // Throws std::invalid_argument where the text is no template. Without a rule every name is legal.
  explicit RouteTemplate(std::string_view text, NameRule rule = nullptr);

  // True when every event goes to the same place.
  bool is_constant() const;
  // Then, what is wrong with that place; null: nothing, or it depends on the event.
  const char *problem() const;

  // Replaces `*name` by the place of this event. False when it has none, and never will: `*reason` tells why.
  bool expand(const retrysafe_event &event, std::string *name, std::string *reason) const;

 private:
  enum class Source { kLiteral, kType, kOrderingKey, kHeader };
  struct Part {
    Source source;
    std::string text;  // of a literal; name of a header
  };

  std::vector<Part> parts_;
  NameRule rule_;
};

}  // namespace retrysafe
