// Events in the form of CloudEvents 1.0, for every sink that speaks it.
//
// An event has the attributes specversion, id, source, type and time; partitionkey is its ordering key; the
// extensions eventkey and scope tell how the emitter called it. Headers of the event become extensions too,
// with their names brought into the form that CloudEvents allows (lower-case letters and digits:
// "X-Tenant-Id" becomes "xtenantid"). They cannot replace an attribute named above; the first of two that
// become alike wins.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sink/abi.h"

namespace retrysafe {

class CloudEvent {
 public:
  struct Attribute {
    std::string name;
    std::string_view value;
  };

  // Views the event, which must stay. `source`: instead of the event's own, unless empty.
  CloudEvent(const retrysafe_event &event, std::string_view source);

  const std::vector<Attribute> &attributes() const { return attributes_; }
  bool has_data() const { return event_.payload.data != nullptr; }

  // Structured mode: one JSON object with the payload as member `data` (absent for an SQL null), appended.
  void append_json(std::string *out) const;

  // Binary mode: the value of the header `ce-NAME`, appended. Percent-encoded as the HTTP binding demands, so
  // that nothing but printable ASCII without blanks, quotes and percent signs gets into a header.
  static void append_header_value(std::string_view value, std::string *out);

 private:
  void add(std::string_view name, const retrysafe_text &value);
  bool has(std::string_view name) const;

  const retrysafe_event &event_;
  std::vector<Attribute> attributes_;
};

}  // namespace retrysafe
