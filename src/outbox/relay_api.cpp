// What a publisher outside of the server has to know of a destination. The events themselves it gets by the
// pull API.
#include "outbox/destinations.hpp"

#include "core/kinds/kinds.hpp"
#include "outbox/engine.hpp"
#include "outbox/options.hpp"
#include "pg/boundary.hpp"
#include "pg/database_name.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

const Destination *destination_argument(FunctionCallInfo fcinfo) {
  if (PG_ARGISNULL(0))
    pg::raise(kUnknownDestination, "The view outbox_status lists the destinations.",
              "the name of the destination must not be null");
  const char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
  const Destination *destination = load_destination(name);
  if (!destination) raise_unknown_destination(name);
  return destination;
}

const char *name_of(OptionSource source) {
  switch (source) {
    case OptionSource::kServerFile:
      return "file";
    case OptionSource::kEnvironment:
      return "environment";
    case OptionSource::kInline:
      break;
  }
  return "inline";
}

}  // namespace

}  // namespace retrysafe::outbox

using namespace retrysafe;
using namespace retrysafe::outbox;

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_relay_destination) {
  InitMaterializedSRF(fcinfo, 0);
  auto *result = reinterpret_cast<ReturnSetInfo *>(fcinfo->resultinfo);
  const Destination &d = *destination_argument(fcinfo);
  if (is_kind(d.kind, kinds::function))
    pg::raise(kNotFetchable, "Workers call its function inside the database.",
              "destination \"%s\" of kind \"function\" cannot be published to by a relay", d.name);
  const Kind *kind = find_kind(d.kind);
  Datum values[10];
  bool nulls[10]{};
  values[0] = CStringGetTextDatum(d.kind);
  nulls[1] = !kind || !kind->library;
  if (!nulls[1]) values[1] = CStringGetTextDatum(kind->library);
  // A destination that was dropped and made again has another number.
  values[2] = CStringGetTextDatum(psprintf("%d.%u", d.destination, d.version));
  values[3] = Int32GetDatum(d.shards);
  values[4] = Int32GetDatum(d.batch_events);
  values[5] = Int32GetDatum(d.batch_bytes);
  values[6] = Int64GetDatum(d.lease_us / 1000);
  values[7] = CStringGetTextDatum(d.block_when_exhausted ? "block" : "dead_letter");
  values[8] = BoolGetDatum(d.paused);
  values[9] = CStringGetTextDatum(pg::own_database_name());
  tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
  return Datum{0};
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_relay_options) {
  InitMaterializedSRF(fcinfo, 0);
  auto *result = reinterpret_cast<ReturnSetInfo *>(fcinfo->resultinfo);
  const Destination &d = *destination_argument(fcinfo);
  int count;
  const ResolvedOption *options = resolved_options(d, SecretReader::kRelay, &count);
  for (int i = 0; i < count; ++i) {
    const auto length = [](const char *string) { return static_cast<int>(strlen(string)); };
    const char *value = options[i].value;
    Datum values[] = {CStringGetTextDatum(options[i].name),
                      CStringGetTextDatum(pg_any_to_server(value, length(value), PG_UTF8)),
                      CStringGetTextDatum(name_of(options[i].source))};
    bool nulls[3]{};
    tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
  }
  return Datum{0};
}
