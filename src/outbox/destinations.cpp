#include "outbox/destinations.hpp"

#include <cstring>

#include "core/kinds/kinds.hpp"
#include "outbox/cursor.hpp"
#include "outbox/emit.hpp"
#include "outbox/eras.hpp"
#include "outbox/function_destination.hpp"
#include "outbox/log_identity.hpp"
#include "outbox/options.hpp"
#include "outbox/parked.hpp"
#include "outbox/shard.hpp"
#include "outbox/snapshot.hpp"
#include "outbox/status.hpp"
#include "pg/boundary.hpp"
#include "pg/interval.hpp"
#include "pg/secret_arguments.hpp"
#include "pg/statement.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constexpr int64 kMillisecond = 1000;

// A row of outbox_destinations as far as operators set it.
struct Definition {
  int32 destination;
  const char *name;
  const char *kind;
  Jsonb *options;
  ArrayType *event_types;  // null: all
  int32 shards;
  int32 max_attempts;
  Interval *backoff;
  Interval *backoff_max;
  const char *on_exhausted;
  int32 batch_events;
  int32 batch_bytes;
  Interval *lease;
  int32 workers;  // 0 or 1; negative where null was given
  const char *run_as;
};

[[noreturn]] void raise_null(const char *what) {
  pg::raise(kInvalidParameter, "Pass a value, or leave out an argument that has a default.",
            "%s must not be null", what);
}

const char *text_argument(FunctionCallInfo fcinfo, int number, const char *what) {
  if (PG_ARGISNULL(number)) raise_null(what);
  return text_to_cstring(PG_GETARG_TEXT_PP(number));
}

// Takes over the arguments from `first` on, event_types … workers, that are given. Null leaves a value as it
// is.
void overlay(FunctionCallInfo fcinfo, int first, Definition *d) {
  const auto given = [&](int offset) { return !PG_ARGISNULL(first + offset); };
  if (given(0)) d->event_types = PG_GETARG_ARRAYTYPE_P_COPY(first);
  if (given(1)) d->shards = PG_GETARG_INT32(first + 1);
  if (given(2)) d->max_attempts = PG_GETARG_INT32(first + 2);
  if (given(3)) d->backoff = PG_GETARG_INTERVAL_P(first + 3);
  if (given(4)) d->backoff_max = PG_GETARG_INTERVAL_P(first + 4);
  if (given(5)) d->on_exhausted = text_to_cstring(PG_GETARG_TEXT_PP(first + 5));
  if (given(6)) d->batch_events = PG_GETARG_INT32(first + 6);
  if (given(7)) d->batch_bytes = PG_GETARG_INT32(first + 7);
  if (given(8)) d->lease = PG_GETARG_INTERVAL_P(first + 8);
  if (given(9)) d->workers = PG_GETARG_BOOL(first + 9) ? 1 : 0;
}

// Also refuses what create was given as null.
void check_interval(const char *what, const Interval *interval, int64 min, int64 max, const char *range) {
  if (!interval) raise_null(what);
  const int64 us = pg::interval_us(*interval);
  if (us < min || us > max) pg::raise(kInvalidParameter, range, "%s is out of range", what);
}

void check_number(const char *what, int32 number, int32 min, int32 max) {
  if (number < min || number > max)
    pg::raise(kInvalidParameter, psprintf("It must be from %d to %d.", min, max), "%s is out of range", what);
}

void check_name(const char *name) {
  const size_t length = strlen(name);
  if (length == 0 || length > 63 ||
      strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") != length)
    pg::raise(kInvalidParameter, "A name has 1 to 63 letters, digits, \"_\", \".\" and \"-\".",
              "invalid name of a destination");
}

void check_event_types(Definition *d) {
  if (!d->event_types) return;
  const int count = ArrayGetNItems(ARR_NDIM(d->event_types), ARR_DIMS(d->event_types));
  if (count == 0) {
    d->event_types = nullptr;
    return;
  }
  constexpr const char *hint =
      "Give an array of event types, each of 1 to 255 bytes, or an empty one for all.";
  if (ARR_NDIM(d->event_types) != 1 || array_contains_nulls(d->event_types) || count > 1000)
    pg::raise(kInvalidParameter, hint, "invalid event_types");
  Datum *types;
  int type_count;
  deconstruct_array(d->event_types, TEXTOID, -1, false, TYPALIGN_INT, &types, nullptr, &type_count);
  for (int i = 0; i < type_count; ++i) {
    const Size length = VARSIZE_ANY_EXHDR(DatumGetTextPP(types[i]));
    if (length < 1 || length > 255) pg::raise(kInvalidParameter, hint, "invalid event_types");
  }
}

void check_policies(Definition *d) {
  check_event_types(d);
  check_number("shards", d->shards, 1, 256);
  check_number("max_attempts", d->max_attempts, 1, 1000000);
  check_interval("backoff", d->backoff, kMillisecond, USECS_PER_DAY,
                 "It must be from 1 millisecond to 1 day.");
  check_interval("backoff_max", d->backoff_max, kMillisecond, 30 * USECS_PER_DAY,
                 "It must be from backoff to 30 days.");
  if (pg::interval_us(*d->backoff_max) < pg::interval_us(*d->backoff))
    pg::raise(kInvalidParameter, "It must be from backoff to 30 days.", "backoff_max is below backoff");
  if (!d->on_exhausted ||
      (strcmp(d->on_exhausted, "dead_letter") != 0 && strcmp(d->on_exhausted, "block") != 0))
    pg::raise(kInvalidParameter, "It must be \"dead_letter\" or \"block\".", "invalid on_exhausted");
  check_number("batch_events", d->batch_events, 1, 10000);
  check_number("batch_bytes", d->batch_bytes, 1024, 256 * 1024 * 1024);
  check_interval("lease", d->lease, kShortestLeaseUs, kLongestLeaseUs,
                 "It must be from 100 milliseconds to 1 day.");
}

// --- what a kind asks of its creator -----------------------------------------------------------------------

// Resolves the function as the caller sees it and pins it by its full name; later search_paths do not matter.
const char *pinned_function(const char *given) {
  const char *signature = strchr(given, '(') ? given : psprintf("%s(jsonb)", given);
  LOCAL_FCINFO(call, 1);
  InitFunctionCallInfoData(*call, nullptr, 1, InvalidOid, nullptr, nullptr);
  call->args[0].value = CStringGetTextDatum(signature);
  call->args[0].isnull = false;
  const Datum found = to_regprocedure(call);
  const char *hint = "Create it as: FUNCTION name(event jsonb) RETURNS void.";
  if (call->isnull) pg::raise(kInvalidFunction, hint, "function %s does not exist", signature);
  const Oid function = DatumGetObjectId(found);
  if (!fits_a_destination(function))
    pg::raise(kInvalidFunction, hint, "function %s does not fit a destination", signature);
  if (!pg::may_execute(function, GetUserId()))
    pg::raise_insufficient_privilege("A destination calls its function as the role that created it.",
                                     "permission denied for function %s", signature);
  return format_procedure_qualified(function);
}

constinit pg::Statement set_function{"SELECT jsonb_set($1, '{function}', to_jsonb($2))", {JSONBOID, TEXTOID}};

void check_workers(Definition *d) {
  if (d->workers < 0) raise_null("workers");
  if (is_kind(d->kind, kinds::pull)) d->workers = 0;
  if (is_kind(d->kind, kinds::function) && d->workers == 0)
    pg::raise(kInvalidParameter, "Nobody else can call its function.",
              "workers cannot be false for kind \"function\"");
}

void check_options(Definition *d, MemoryContext memory) {
  const Kind *kind = find_kind(d->kind);
  if (!kind) raise_unknown_kind(d->kind);
  d->options = checked_options(*kind, d->options);
  if (is_kind(d->kind, kinds::postgres) && !superuser() && !string_option(d->options, "password") &&
      !string_option(d->options, "password_file") && !string_option(d->options, "password_env"))
    pg::raise_insufficient_privilege(
        "Otherwise the connection would use the rights of the server itself.",
        "option \"password\" is required unless a superuser makes the destination");
  if (is_kind(d->kind, kinds::function)) {
    const char *function = pinned_function(string_option(d->options, "function"));
    d->options = pg::spi([&] {
      set_function.run({pg::value(d->options), pg::value(function)});
      return reinterpret_cast<Jsonb *>(pg::Row(0).varlena_at(1, memory));
    });
  }
}

// Kinds that act with the rights of the role that made the destination.
bool acts_as_creator(const Definition &d) {
  return is_kind(d.kind, kinds::function) || is_kind(d.kind, kinds::postgres);
}

// Options say where secrets are sent, and no view shows the secrets: who could point somebody's destination
// at a server of its own would learn them. So options belong to the role that made the destination, whatever
// its kind.
void check_may_alter(const Definition &d, bool options) {
  if (!d.run_as || !(options || acts_as_creator(d))) return;
  const Oid role = get_role_oid(d.run_as, true);
  if (OidIsValid(role) ? !has_privs_of_role(GetUserId(), role) : !superuser())
    pg::raise_insufficient_privilege(
        "It was made with that role's rights and secrets: become a member of the role, or drop the "
        "destination and create your own.",
        "must be member of role \"%s\" to alter %sdestination \"%s\"", d.run_as, options ? "options of " : "",
        d.name);
}

// --- rows --------------------------------------------------------------------------------------------------

constinit pg::Statement insert_destination{
    "INSERT INTO @.outbox_destinations (name, kind, options, event_types, shards, max_attempts, backoff, "
    "backoff_max,"
    " on_exhausted, batch_events, batch_bytes, lease, workers, run_as) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) ON CONFLICT (name) DO NOTHING "
    "RETURNING destination",
    {TEXTOID, TEXTOID, JSONBOID, TEXTARRAYOID, INT4OID, INT4OID, INTERVALOID, INTERVALOID, TEXTOID, INT4OID,
     INT4OID, INTERVALOID, BOOLOID, TEXTOID}};

constinit pg::Statement select_destination{
    "SELECT destination, kind, options, event_types, shards, max_attempts, backoff, backoff_max, "
    "on_exhausted,"
    " batch_events, batch_bytes, lease, workers, run_as "
    "FROM @.outbox_destinations WHERE name = $1 FOR UPDATE",
    {TEXTOID}};

constinit pg::Statement update_destination{
    "UPDATE @.outbox_destinations SET options = $2, event_types = $3, shards = $4, max_attempts = $5, "
    "backoff = $6,"
    " backoff_max = $7, on_exhausted = $8, batch_events = $9, batch_bytes = $10, lease = $11, workers = $12 "
    "WHERE "
    "destination = $1",
    {INT4OID, JSONBOID, TEXTARRAYOID, INT4OID, INT4OID, INTERVALOID, INTERVALOID, TEXTOID, INT4OID, INT4OID,
     INTERVALOID, BOOLOID}};

constinit pg::Statement delete_destination{
    "DELETE FROM @.outbox_destinations WHERE name = $1 RETURNING destination", {TEXTOID}};

constinit pg::Statement set_paused{
    "UPDATE @.outbox_destinations SET paused = $2 WHERE name = $1 AND (paused IS DISTINCT FROM $2 OR $3)",
    {TEXTOID, BOOLOID, BOOLOID}};

// Somebody has done something about it: it is worth a try at once.
constinit pg::Statement end_rest{
    "UPDATE @.outbox_shards SET retry_at = NULL WHERE destination = $1 AND retry_at IS NOT NULL", {INT4OID}};

constinit pg::Statement lock_destination{
    "SELECT destination FROM @.outbox_destinations WHERE name = $1 FOR NO KEY UPDATE", {TEXTOID}};

constinit pg::Statement insert_shards{
    "INSERT INTO @.outbox_shards (destination, shard, token) "
    "SELECT $1, shard, $3 FROM generate_series(0, $2 - 1) AS shard",
    {INT4OID, INT4OID, INT8OID}};

constinit pg::Statement highest_token{"SELECT max(token) FROM @.outbox_shards WHERE destination = $1",
                                      {INT4OID}};

constinit pg::Statement delete_shards{"DELETE FROM @.outbox_shards WHERE destination = $1", {INT4OID}};
constinit pg::Statement delete_windows{"DELETE FROM @.outbox_windows WHERE destination = $1", {INT4OID}};
constinit pg::Statement delete_batches{"DELETE FROM @.outbox_batches WHERE destination = $1", {INT4OID}};
constinit pg::Statement delete_parked{"DELETE FROM @.outbox_parked WHERE destination = $1", {INT4OID}};

// Inside pg::spi. The shards come first: whoever records something holds the lock of its shard and is waited
// for.
void remove_shards(int32 destination) {
  for (pg::Statement *statement : {&delete_shards, &delete_windows, &delete_batches, &delete_parked})
    statement->run({pg::value(destination)});
}

Interval *interval_at(const pg::Row &row, int column, MemoryContext memory) {
  auto *copy = static_cast<Interval *>(MemoryContextAlloc(memory, sizeof(Interval)));
  *copy = *DatumGetIntervalP(row.datum(column));
  return copy;
}

void load_locked(const char *name, Definition *d, MemoryContext memory) {
  const bool found = pg::spi([&] {
    if (select_destination.run({pg::value(name)}) == 0) return false;
    const pg::Row row(0);
    d->destination = row.int32_at(1);
    d->name = name;
    d->kind = row.text_at(2, memory);
    d->options = reinterpret_cast<Jsonb *>(row.varlena_at(3, memory));
    d->event_types = reinterpret_cast<ArrayType *>(row.varlena_at(4, memory));
    d->shards = row.int32_at(5);
    d->max_attempts = row.int32_at(6);
    d->backoff = interval_at(row, 7, memory);
    d->backoff_max = interval_at(row, 8, memory);
    d->on_exhausted = row.text_at(9, memory);
    d->batch_events = row.int32_at(10);
    d->batch_bytes = row.int32_at(11);
    d->lease = interval_at(row, 12, memory);
    d->workers = row.bool_at(13) ? 1 : 0;
    d->run_as = row.text_at(14, memory);
    return true;
  });
  if (!found) raise_unknown_destination(name);
}

// --- where a destination starts ----------------------------------------------------------------------------

constinit pg::Statement last_position{
    "SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM @.outbox_log_id_seq", {}};

int64 read_last_position() {
  last_position.run({});
  return pg::Row(0).int64_at(1);
}

// The position to start at, 0 for now.
int64 start_position(const char *text) {
  if (strcmp(text, "now") == 0) return 0;
  if (strcmp(text, "earliest") == 0) return 1;
  constexpr const char *hint =
      "It must be \"now\", \"earliest\" or the position of an event, as outbox_emit returns "
      "it.";
  const size_t length = strlen(text);
  if (length == 0 || length > 18 || strspn(text, "0123456789") != length)
    pg::raise(kInvalidStart, hint, "invalid start_at");
  const int64 position = strtoll(text, nullptr, 10);
  const int64 last = pg::spi([] { return read_last_position(); });
  if (position < 1 || position > last + 1)
    pg::raise(kInvalidStart, hint, "start_at is not a position of the log");
  return position;
}

StoredSnapshot start_of(int64 position) {
  const Era era = ensure_era();
  return position > 0 ? start_at(era.era, era.first_id, position) : take_snapshot(era.era, era.first_id);
}

}  // namespace

int32 locked_destination(const char *name) {
  const int32 destination =
      pg::spi([&] { return lock_destination.run({pg::value(name)}) == 0 ? -1 : pg::Row(0).int32_at(1); });
  if (destination < 0) raise_unknown_destination(name);
  return destination;
}

void raise_lost(const char *name) {
  pg::raise(kDestinationLost,
            "Drop it and create it again, with start_at => 'earliest' for the events that are still there.",
            "destination \"%s\" is lost: events that it had not received were removed", name);
}

void raise_unknown_destination(const char *name) {
  pg::raise(kUnknownDestination, "The view outbox_status lists the destinations.",
            "destination \"%s\" does not exist", pg::shown_name(name));
}

}  // namespace retrysafe::outbox

using namespace retrysafe;
using namespace retrysafe::outbox;

static int32 create_destination(FunctionCallInfo fcinfo) {
  Definition d{};
  d.name = text_argument(fcinfo, 0, "name");
  d.kind = text_argument(fcinfo, 1, "kind");
  if (PG_ARGISNULL(2)) raise_null("options");
  d.options = PG_GETARG_JSONB_P(2);
  const char *start_at = text_argument(fcinfo, 3, "start_at");
  d.shards = d.max_attempts = d.batch_events = d.batch_bytes = d.workers =
      -1;  // null: refused as out of range
  overlay(fcinfo, 4, &d);
  check_name(d.name);
  check_policies(&d);
  check_options(&d, CurrentMemoryContext);
  check_workers(&d);
  check_identity();
  const int64 start = start_position(start_at);
  if (!is_kind(d.kind, kinds::pull)) d.run_as = GetUserNameFromId(GetUserId(), false);

  d.destination = pg::spi([&] {
    const uint64 inserted = insert_destination.run(
        {pg::value(d.name), pg::value(d.kind), pg::value(d.options), pg::value(d.event_types),
         pg::value(d.shards), pg::value(d.max_attempts), pg::value(d.backoff), pg::value(d.backoff_max),
         pg::value(d.on_exhausted), pg::value(d.batch_events), pg::value(d.batch_bytes), pg::value(d.lease),
         pg::value(d.workers == 1), pg::value(d.run_as)});
    return inserted == 0 ? -1 : pg::Row(0).int32_at(1);
  });
  if (d.destination < 0)
    pg::raise(kDestinationExists, "Change it with outbox_alter_destination, or choose another name.",
              "destination \"%s\" already exists", d.name);
  pg::spi([&] { insert_shards.run({pg::value(d.destination), pg::value(d.shards), pg::value(int64{0})}); });
  store_start(d.destination, start_of(start));
  announce_at_commit();
  return d.destination;
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_create_destination) {
  int32 number;
  pg::with_secret_arguments([&] { number = create_destination(fcinfo); });
  PG_RETURN_INT32(number);
}

// The new shards start where the old ones are: behind everything. Nobody claims or records meanwhile, since
// the rows of the shards are locked; an event that commits meanwhile is not in `now`, so the new shards will
// read it.
static void change_shards(const Definition &d, int32 old_shards, ArrayType *old_event_types) {
  check_identity();
  pg::require_read_committed("changing the number of shards");
  const int64 token = pg::spi([&] {
    lock_all_shards(d.destination);
    highest_token.run({pg::value(d.destination)});
    return pg::Row(0).int64_at(1);
  });
  const StoredSnapshot now = start_of(0);
  if (has_pending(d.destination, old_shards, old_event_types, now))
    pg::raise(kEventsPending,
              "Wait until outbox_status shows no backlog; settle dead letters with outbox_retry or "
              "outbox_discard.",
              "the shards of destination \"%s\" cannot change while events are pending", d.name);
  // Where retention took the window of the start, none of the events that are left is from before it.
  const StoredWindow *first = load_window(d.destination, 0, 0);
  const StoredSnapshot start = first ? first->snapshot : start_of(1);
  int64 delivered = 0;
  int64 parked = 0;
  for (int32 shard = 0; shard < old_shards; ++shard) {
    const Cursor cursor = load_cursor(d.destination, shard);
    delivered += cursor.total_delivered;
    parked += cursor.total_parked;
  }
  pg::spi([&] {
    remove_shards(d.destination);
    // A fencing token never comes back: whoever still holds a shard of old is refused.
    insert_shards.run({pg::value(d.destination), pg::value(d.shards), pg::value(token + 1)});
  });
  store_continuation(d.destination, start, now, delivered, parked);
}

static void alter_destination(FunctionCallInfo fcinfo) {
  const char *name = text_argument(fcinfo, 0, "name");
  Definition d{};
  load_locked(name, &d, CurrentMemoryContext);
  check_may_alter(d, !PG_ARGISNULL(1));
  const int32 old_shards = d.shards;
  ArrayType *const old_event_types = d.event_types;
  const char *const old_on_exhausted = d.on_exhausted;
  overlay(fcinfo, 2, &d);
  check_policies(&d);
  check_workers(&d);
  if (!PG_ARGISNULL(1)) {
    Jsonb *patch = PG_GETARG_JSONB_P(1);
    if (!JB_ROOT_IS_OBJECT(patch))
      pg::raise(kInvalidOption, "Give an object with a member for each option that changes.",
                "options must be a JSON object");
    d.options =
        DatumGetJsonbP(DirectFunctionCall2(jsonb_concat, JsonbPGetDatum(d.options), JsonbPGetDatum(patch)));
    check_options(&d, CurrentMemoryContext);
  }
  pg::spi([&] {
    update_destination.run({pg::value(d.destination), pg::value(d.options), pg::value(d.event_types),
                            pg::value(d.shards), pg::value(d.max_attempts), pg::value(d.backoff),
                            pg::value(d.backoff_max), pg::value(d.on_exhausted), pg::value(d.batch_events),
                            pg::value(d.batch_bytes), pg::value(d.lease), pg::value(d.workers == 1)});
    end_rest.run({pg::value(d.destination)});
  });
  if (d.shards != old_shards) change_shards(d, old_shards, old_event_types);
  if (strcmp(d.on_exhausted, old_on_exhausted) != 0) {
    pg::require_read_committed("changing on_exhausted");  // as for outbox_retry
    pg::spi([&] {
      lock_all_shards(d.destination);
      if (const Destination *altered = load_destination(d.destination)) restore_heads_behind_dead(*altered);
    });
  }
  announce_at_commit();
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_alter_destination) {
  pg::with_secret_arguments([&] { alter_destination(fcinfo); });
  PG_RETURN_VOID();
}

// Waits for a claim or a record that is under way; a batch that is being published then finds its claim gone.
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_drop_destination) {
  const char *name = text_argument(fcinfo, 0, "name");
  pg::require_read_committed("outbox_drop_destination()");
  PG_RETURN_BOOL(pg::spi([&] {
    if (delete_destination.run({pg::value(name)}) == 0) return false;
    remove_shards(pg::Row(0).int32_at(1));
    return true;
  }));
}

static void pause(const char *name, bool paused) {
  const int32 destination = locked_destination(name);
  const Destination *locked = load_destination(destination);
  if (locked && locked->lost) raise_lost(name);
  pg::spi([&] {
    // Whoever rests sees by the row of the destination that it need not: it is written then in any case.
    const bool rested = !paused && end_rest.run({pg::value(destination)}) > 0;
    set_paused.run({pg::value(name), pg::value(paused), pg::value(rested)});
  });
  announce_at_commit();
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_pause) {
  pause(text_argument(fcinfo, 0, "name"), true);
  PG_RETURN_VOID();
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_resume) {
  pause(text_argument(fcinfo, 0, "name"), false);
  PG_RETURN_VOID();
}
