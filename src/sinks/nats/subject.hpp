// Which subjects an event may be published on.
#pragma once

#include <string>
#include <string_view>

namespace retrysafe::nats {

// Why a message cannot be published on it; empty when it can.
std::string subject_problem(std::string_view subject);

// Why an event may not be published on it, empty when it may. Subjects that begin with "$" or "_INBOX." are
// not an event's to choose: what is published to one of JetStream's API is a command, and what is published
// on an inbox is the answer to somebody's request.
std::string event_subject_problem(std::string_view subject);

}  // namespace retrysafe::nats
