// What names brokers take: of topics, subjects, exchanges and the like.
//
// Options are checked by these rules when a destination is made, and sinks check by them what their templates
// yield. Each tells what is wrong with a name, to be read behind it; null: nothing.
#pragma once

#include <cstddef>
#include <string_view>

namespace retrysafe::kinds {

// Kafka.
const char *topic_problem(std::string_view name);

// NATS: what a message can be published on.
const char *subject_problem(std::string_view subject);
// And an event. Subjects that begin with "$" or "_INBOX." are not an event's to choose: what is published to
// one of JetStream's API is a command, and what is published on an inbox is the answer to somebody's request.
const char *event_subject_problem(std::string_view subject);
const char *stream_problem(std::string_view name);
// What stands in a header as it is.
const char *message_id_problem(std::string_view text);

// AMQP: exchanges and routing keys are short strings, as are names of headers.
inline constexpr size_t kLongestShortString = 255;
const char *short_string_problem(std::string_view name);

}  // namespace retrysafe::kinds
