// Dead letters: outbox_retry sends them again, outbox_discard gives them up.
#include "outbox/destinations.hpp"
#include "outbox/emit.hpp"
#include "outbox/engine.hpp"
#include "outbox/parked.hpp"
#include "outbox/shard.hpp"
#include "pg/boundary.hpp"
#include "pg/error.hpp"
#include "pg/statement.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// Which dead letters; the parameters are those of the SQL functions.
#define CHOSEN                                                                                             \
  "WITH chosen AS (SELECT p.shard, p.id FROM @.outbox_parked p WHERE p.destination = $1 AND p.state = "    \
  "'dead'"                                                                                                 \
  " AND ($2 IS NULL OR p.event_type = $2) AND ($3 IS NULL OR p.ordering_key = $3)"                         \
  " AND ($4 IS NULL OR @.outbox_event_id(p.event_key, p.scope) = $4) AND ($5 IS NULL OR p.reason LIKE $5)" \
  " ORDER BY p.id LIMIT $6), "

// The keys that were touched, each once, with the number of their events.
#define OF_CHOSEN                                                                                     \
  " FROM chosen c WHERE p.destination = $1 AND p.shard = c.shard AND p.id = c.id RETURNING p.shard, " \
  "p.ordering_key) SELECT shard, ordering_key, count(*) FROM changed GROUP BY shard, ordering_key"

// Those of an ordering key wait for their turn; which one is first is settled afterwards.
constinit pg::Statement revive{
    CHOSEN
    "changed AS (UPDATE @.outbox_parked p SET attempts = 0, given_back = p.given_back + p.attempts + 1,"
    " settled_at = NULL,"
    " state = CASE WHEN p.ordering_key IS NULL THEN 'retry' ELSE 'blocked' END,"
    " retry_at = CASE WHEN p.ordering_key IS NULL THEN clock_timestamp() END" OF_CHOSEN,
    {INT4OID, TEXTOID, TEXTOID, UUIDOID, TEXTOID, INT8OID}};

constinit pg::Statement discard{
    CHOSEN
    "changed AS (UPDATE @.outbox_parked p SET state = 'discarded', settled_at = clock_timestamp()" OF_CHOSEN,
    {INT4OID, TEXTOID, TEXTOID, UUIDOID, TEXTOID, INT8OID}};

#undef CHOSEN
#undef OF_CHOSEN

struct Key {
  int32 shard;
  const char *ordering_key;
};

pg::Parameter text_filter(FunctionCallInfo fcinfo, int number) {
  return PG_ARGISNULL(number) ? pg::null_value()
                              : pg::value(static_cast<const void *>(PG_GETARG_TEXT_PP(number)));
}

// Parked events change under the lock of their shard only: a worker that records a batch is waited for.
// What was parked since an older snapshot would stay blocked for ever.
int64 settle(FunctionCallInfo fcinfo, const char *function, pg::Statement *statement) {
  pg::require_read_committed(function);
  if (PG_ARGISNULL(0))
    pg::raise(kInvalidParameter, "The view outbox_status lists the destinations.",
              "destination must not be null");
  if (!PG_ARGISNULL(5) && PG_GETARG_INT64(5) < 1)
    pg::raise(kInvalidParameter, "It must be at least 1, or null for all.", "max_events is out of range");
  const char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
  const int32 number = locked_destination(name);
  const Destination *destination = load_destination(number);
  if (!destination) raise_unknown_destination(name);
  MemoryContext memory = CurrentMemoryContext;
  Key *keys = nullptr;
  uint64 key_count = 0;
  const int64 settled = pg::spi([&] {
    lock_all_shards(number);
    key_count = statement->run({pg::value(number), text_filter(fcinfo, 1), text_filter(fcinfo, 2),
                                PG_ARGISNULL(3) ? pg::null_value() : pg::value(PG_GETARG_DATUM(3)),
                                text_filter(fcinfo, 4),
                                PG_ARGISNULL(5) ? pg::null_value() : pg::value(PG_GETARG_INT64(5))});
    keys = static_cast<Key *>(MemoryContextAllocHuge(memory, (key_count + 1) * sizeof(Key)));
    int64 count = 0;
    for (uint64 i = 0; i < key_count; ++i) {
      const pg::Row row(i);
      keys[i] = {row.int32_at(1), row.text_at(2, memory)};
      count += row.int64_at(3);
    }
    return count;
  });
  pg::spi([&] {
    for (uint64 i = 0; i < key_count; ++i) restore_head(*destination, keys[i].shard, keys[i].ordering_key);
  });
  if (settled > 0) announce_at_commit();
  return settled;
}

}  // namespace

}  // namespace retrysafe::outbox

using namespace retrysafe;

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_retry) {
  PG_RETURN_INT64(outbox::settle(fcinfo, "outbox_retry()", &outbox::revive));
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_discard) {
  PG_RETURN_INT64(outbox::settle(fcinfo, "outbox_discard()", &outbox::discard));
}
