// What a client says of the events of a batch: the argument `outcomes` of outbox_record.
#pragma once

#include "core/batch_handle.hpp"
#include "outbox/engine.hpp"
#include "outbox/handed_out.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

void check_outcomes(Jsonb *outcomes);

// One for each event of the batch. An event that is not named was delivered.
Outcome *outcomes_of(Jsonb *outcomes, const BatchHandle &handle, const HandedOut &out);

}  // namespace retrysafe::outbox
