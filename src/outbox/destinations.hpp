// Destinations as operators make and change them. The SQL functions are in destinations.cpp; this is for the
// rest.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::outbox {

// The destination of that name, locked against changes of its shards and options; raises kUnknownDestination.
int32 locked_destination(const char *name);

[[noreturn]] void raise_unknown_destination(const char *name);

[[noreturn]] void raise_lost(const char *name);

}  // namespace retrysafe::outbox
