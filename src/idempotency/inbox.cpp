// The inbox of a consumer: which events it has had, written in its own transaction.
#include "pg/boundary.hpp"
#include "pg/error.hpp"
#include "pg/statement.hpp"

namespace retrysafe::idempotency {

namespace {

constexpr Size kMaxBytes = 255;

// A second transaction with the same event waits in the unique index until the first has ended.
constinit pg::Statement kAccept{
    "INSERT INTO @.inbox_messages (consumer, event_id) VALUES ($1, $2) ON CONFLICT DO NOTHING",
    {TEXTOID, TEXTOID}};

// In byte order, so that two consumers with the same events wait for each other and do not deadlock.
constinit pg::Statement kAcceptAll{
    "INSERT INTO @.inbox_messages (consumer, event_id)"
    " SELECT $1, id FROM (SELECT DISTINCT u.id COLLATE \"C\" AS id FROM unnest($2) AS u (id)) AS given"
    " ORDER BY id ON CONFLICT DO NOTHING RETURNING event_id",
    {TEXTOID, TEXTARRAYOID}};

void check(const char *what, const text *value) {
  const char *const hint = "It is 1 to 255 bytes.";
  if (!value) pg::raise(kInvalidInboxMessage, hint, "%s must not be null", what);
  const Size size = VARSIZE_ANY_EXHDR(value);
  if (size == 0) pg::raise(kInvalidInboxMessage, hint, "%s must not be empty", what);
  if (size > kMaxBytes) pg::raise(kInvalidInboxMessage, hint, "%s is too long: %zu bytes", what, size);
}

text *text_argument(FunctionCallInfo fcinfo, int argument, const char *what) {
  text *value = PG_ARGISNULL(argument) ? nullptr : PG_GETARG_TEXT_PP(argument);
  check(what, value);
  return value;
}

}  // namespace

}  // namespace retrysafe::idempotency

using namespace retrysafe;
using namespace retrysafe::idempotency;

// inbox_accept(consumer, event_id) → bool
RETRYSAFE_SQL_FUNCTION(retrysafe_inbox_accept) {
  const text *consumer = text_argument(fcinfo, 0, "consumer");
  const text *event_id = text_argument(fcinfo, 1, "event id");
  PG_RETURN_BOOL(pg::spi([&] { return kAccept.run({pg::value(consumer), pg::value(event_id)}); }) == 1);
}

// inbox_accept(consumer, event_ids) → setof text
RETRYSAFE_SQL_FUNCTION(retrysafe_inbox_accept_all) {
  const text *consumer = text_argument(fcinfo, 0, "consumer");
  if (PG_ARGISNULL(1))
    pg::raise(kInvalidInboxMessage, "Pass an array of the ids that the messages carry; it may be empty.",
              "event ids must not be null");
  ArrayType *event_ids = PG_GETARG_ARRAYTYPE_P(1);
  Datum *elements;
  bool *nulls;
  int count;
  deconstruct_array(event_ids, TEXTOID, -1, false, TYPALIGN_INT, &elements, &nulls, &count);
  for (int i = 0; i < count; ++i)
    check("event id", nulls[i] ? nullptr : reinterpret_cast<text *>(DatumGetPointer(elements[i])));

  InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
  auto *result = reinterpret_cast<ReturnSetInfo *>(fcinfo->resultinfo);
  pg::spi([&] {
    const uint64 accepted = kAcceptAll.run({pg::value(consumer), pg::value(event_ids)});
    for (uint64 i = 0; i < accepted; ++i) {
      Datum id = pg::Row(i).datum(1);
      bool null = false;
      tuplestore_putvalues(result->setResult, result->setDesc, &id, &null);
    }
  });
  return Datum{0};
}
