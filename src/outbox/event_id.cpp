#include "outbox/event_id.hpp"

#include <cstring>

#include "outbox/log_identity.hpp"
#include "pg/boundary.hpp"
#include "pg/digest.hpp"
#include "pg/text.hpp"

namespace retrysafe::outbox {

// In UTF-8, so that the id does not change when the database moves to a server with another encoding.
Uuid event_id(const Uuid &log, std::string_view scope, std::string_view event_key) {
  pg::Sha256 sha;
  sha.update(log.data(), log.size());
  sha.update(pg::to_utf8(scope));
  sha.update("\0", 1);
  sha.update(pg::to_utf8(event_key));
  return event_id_from_digest(sha.finish());
}

}  // namespace retrysafe::outbox

using namespace retrysafe;

// outbox_event_id(event_key text, scope text) → uuid
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_event_id) {
  // The log's UUID is read once per query, not once per row.
  auto *log = static_cast<Uuid *>(fcinfo->flinfo->fn_extra);
  if (!log) {
    outbox::Era era;
    if (!outbox::current_era(&era)) PG_RETURN_NULL();
    log = static_cast<Uuid *>(MemoryContextAlloc(fcinfo->flinfo->fn_mcxt, sizeof(Uuid)));
    *log = era.log;
    fcinfo->flinfo->fn_extra = log;
  }
  const Uuid id =
      outbox::event_id(*log, pg::bytes_of(PG_GETARG_TEXT_PP(1)), pg::bytes_of(PG_GETARG_TEXT_PP(0)));
  auto *result = static_cast<pg_uuid_t *>(palloc(sizeof(pg_uuid_t)));
  std::memcpy(result->data, id.data(), id.size());
  PG_RETURN_UUID_P(result);
}
