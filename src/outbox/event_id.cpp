#include "outbox/event_id.hpp"

#include <cstring>

#include "outbox/log_identity.hpp"
#include "pg/boundary.hpp"
#include "pg/digest.hpp"
#include "pg/text.hpp"

namespace retrysafe::outbox {

// In UTF-8, so that the id does not change when the database moves to a server with another encoding.
Uuid event_id(const Uuid &log, std::string_view scope, std::string_view event_key) {
  const std::string_view log_bytes{reinterpret_cast<const char *>(log.data()), log.size()};
  return event_id_from_digest(pg::sha256({log_bytes, pg::to_utf8(scope), {"\0", 1}, pg::to_utf8(event_key)}));
}

}  // namespace retrysafe::outbox

using namespace retrysafe;

// outbox_event_id(event_key text, scope text) → uuid
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_event_id) {
  // The log's UUID is read once per query, not once per row. PL/pgSQL keeps expressions from one to the next.
  struct Known {
    CommandId command;
    Uuid log;
  };
  auto *known = static_cast<Known *>(fcinfo->flinfo->fn_extra);
  const CommandId command = GetCurrentCommandId(false);
  if (!known || known->command != command) {
    outbox::Era era;
    if (!outbox::current_era(&era)) PG_RETURN_NULL();
    if (!known) known = static_cast<Known *>(MemoryContextAlloc(fcinfo->flinfo->fn_mcxt, sizeof(Known)));
    *known = {command, era.log};
    fcinfo->flinfo->fn_extra = known;
  }
  const Uuid id =
      outbox::event_id(known->log, pg::bytes_of(PG_GETARG_TEXT_PP(1)), pg::bytes_of(PG_GETARG_TEXT_PP(0)));
  auto *result = static_cast<pg_uuid_t *>(palloc(sizeof(pg_uuid_t)));
  std::memcpy(result->data, id.data(), id.size());
  PG_RETURN_UUID_P(result);
}
