#include "core/route_template.hpp"

#include <algorithm>
#include <stdexcept>

#include "core/event_fields.hpp"

namespace retrysafe {

namespace {

constexpr std::string_view kHeaderPrefix = "header:";
constexpr size_t kLongestShown = 100;  // reasons have little room

bool is_placeholder(std::string_view name) {
  return name == "type" || name == "ordering_key" ||
         (name.starts_with(kHeaderPrefix) && is_header_name(name.substr(kHeaderPrefix.size())));
}

// Hands over the pieces in turn; false at the first that is wrong.
template <class OnLiteral, class OnPlaceholder>
bool parse(std::string_view text, OnLiteral &&on_literal, OnPlaceholder &&on_placeholder) {
  while (!text.empty()) {
    if (text.starts_with("{{") || text.starts_with("}}")) {
      on_literal(text.substr(0, 1));
      text.remove_prefix(2);
    } else if (text.front() == '}') {
      return false;
    } else if (text.front() == '{') {
      const size_t end = text.find('}');
      if (end == std::string_view::npos || !is_placeholder(text.substr(1, end - 1))) return false;
      on_placeholder(text.substr(1, end - 1));
      text.remove_prefix(end + 1);
    } else {
      const size_t end = std::min(text.find_first_of("{}"), text.size());
      on_literal(text.substr(0, end));
      text.remove_prefix(end);
    }
  }
  return true;
}

const retrysafe_text *find_header(const retrysafe_event &event, std::string_view name) {
  for (size_t i = 0; i < event.header_count; ++i) {
    const retrysafe_pair &header = event.headers[i];
    if (same_header_name({header.name.data, header.name.size}, name)) return &header.value;
  }
  return nullptr;
}

}  // namespace

bool is_route_template(std::string_view text) {
  const auto ignore = [](std::string_view) {};
  return !text.empty() && parse(text, ignore, ignore);
}

RouteTemplate::RouteTemplate(std::string_view text, NameRule rule) : rule_(rule) {
  const auto literal = [&](std::string_view piece) {
    if (parts_.empty() || parts_.back().source != Source::kLiteral) parts_.push_back({Source::kLiteral, {}});
    parts_.back().text += piece;
  };
  const auto placeholder = [&](std::string_view name) {
    if (name == "type")
      parts_.push_back({Source::kType, {}});
    else if (name == "ordering_key")
      parts_.push_back({Source::kOrderingKey, {}});
    else
      parts_.push_back({Source::kHeader, std::string(name.substr(kHeaderPrefix.size()))});
  };
  if (!parse(text, literal, placeholder) || parts_.empty())
    throw std::invalid_argument("not a template: \"" + std::string(text) + "\"");
}

bool RouteTemplate::is_constant() const {
  return parts_.size() == 1 && parts_.front().source == Source::kLiteral;
}

const char *RouteTemplate::problem() const {
  return rule_ && is_constant() ? rule_(parts_.front().text) : nullptr;
}

bool RouteTemplate::expand(const retrysafe_event &event, std::string *name, std::string *reason) const {
  name->clear();
  for (const Part &part : parts_) {
    const retrysafe_text *value = nullptr;
    switch (part.source) {
      case Source::kLiteral:
        name->append(part.text);
        continue;
      case Source::kType:
        value = &event.type;
        break;
      case Source::kOrderingKey:
        if (event.ordering_key.data) value = &event.ordering_key;
        break;
      case Source::kHeader:
        value = find_header(event, part.text);
        break;
    }
    if (!value) {
      *reason = part.source == Source::kHeader
                    ? "the event has no header \"" + part.text + "\", which its route is made from"
                    : "the event has no ordering key, which its route is made from";
      return false;
    }
    name->append(value->data, value->size);
  }
  if (name->empty()) {
    *reason = "the route of the event is empty";
    return false;
  }
  const char *problem = rule_ ? rule_(*name) : nullptr;
  if (!problem) return true;
  *reason = name->size() <= kLongestShown ? "\"" + *name + "\" "
                                          : "a name of " + std::to_string(name->size()) + " bytes ";
  *reason += problem;
  return false;
}

}  // namespace retrysafe
