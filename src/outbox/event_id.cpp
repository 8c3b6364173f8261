#include "outbox/event_id.hpp"

#include <cstring>

#include "outbox/log_identity.hpp"
#include "pg/boundary.hpp"
#include "pg/digest.hpp"
#include "pg/text.hpp"

namespace retrysafe::outbox {

namespace {

// The id must not change when the database moves to a server with another encoding.
std::string_view to_utf8(std::string_view text) {
  const char *converted = pg_server_to_any(text.data(), static_cast<int>(text.size()), PG_UTF8);
  return converted == text.data() ? text : std::string_view(converted);
}

}  // namespace

Uuid event_id(const Uuid &log, std::string_view scope, std::string_view event_key) {
  pg::Sha256 sha;
  sha.update(log.data(), log.size());
  sha.update(to_utf8(scope));
  sha.update("\0", 1);
  sha.update(to_utf8(event_key));
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
