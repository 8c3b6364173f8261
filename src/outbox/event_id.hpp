// Event ids in the server: core/event_id.hpp with the server's texts.
#pragma once

#include "core/event_id.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

// `scope` and `event_key` are in the server's encoding. Allocates only to convert that to UTF-8.
Uuid event_id(const Uuid &log, std::string_view scope, std::string_view event_key);

}  // namespace retrysafe::outbox
