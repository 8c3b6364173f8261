// Events as sinks get them: in UTF-8, with everything that goes on the wire spelled out.
#pragma once

#include "outbox/engine.hpp"
#include "sink/abi.h"

#include "pg/server.hpp"

namespace retrysafe::runtime {

// One for each event, in the current memory context, into which they point; the events must stay too.
// Jumpable; needs a transaction.
retrysafe_event *make_envelopes(const outbox::Event *events, int32 count);

// Text of a sink as it is stored and shown: valid in the encoding of the database, on one line, palloc'd.
// Null for none.
const char *text_of_sink(const char *utf8);

}  // namespace retrysafe::runtime
