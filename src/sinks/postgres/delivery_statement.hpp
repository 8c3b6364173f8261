// The statement that delivers one event: remember its id, and only if that is new there call the function.
//
// One statement for both, so that a whole batch needs one round trip. The function's call takes its argument
// from what the insert returns, and so can only come after it. Each event has a statement of its own: the
// function sees what it did for the events before, they run in order, and an error tells which event it
// belongs to.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sink/abi.h"

namespace retrysafe::sink {

enum class Field {
  kConsumer,
  kEventId,
  kEventType,
  kSource,
  kEventKey,
  kScope,
  kOrderingKey,
  kPayload,
  kHeaders,
  kCreatedAt,
  kEnvelope,  // the event as one JSON object
};

// What the far side has, as found there; names are quoted for SQL.
struct FarSide {
  std::string inbox;                 // table
  std::vector<std::string> columns;  // of the table, those that are known and can be filled
  std::string accept;                // function of (consumer, event id); instead of a table
  std::string handler;               // function of (jsonb); empty: none
};

struct DeliveryStatement {
  std::string sql;
  std::vector<Field> parameters;
};

// The columns that an inbox table may have, and the types with which they are filled, as a list for VALUES.
extern const char kInboxColumns[];

DeliveryStatement delivery_statement(const FarSide &far_side);

// The value of a parameter in text form. False: null.
bool parameter_text(Field field, const retrysafe_event &event, std::string_view consumer, std::string *text);

}  // namespace retrysafe::sink
