// Kinds of destinations and their options, as this database knows them: the built-in kinds and registered
// ones.
#pragma once

#include "core/option_list.hpp"
#include "outbox/engine.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

struct Kind {
  const char *name;
  const char *library;  // of the sink; null for kinds that need none: function and pull
  OptionList options;
};

// Null for an unknown kind. The result is palloc'd.
const Kind *find_kind(const char *name);
[[noreturn]] void raise_unknown_kind(const char *name);

// Checks the options of one destination and returns them without JSON nulls. Raises kInvalidOption, or 42501
// when an option names a file or an environment variable of the server and the caller may not read such.
Jsonb *checked_options(const Kind &kind, Jsonb *options);

// The string value of one option, palloc'd; null when it is not given.
const char *string_option(Jsonb *options, const char *name);

// The options with everything replaced by "***" that views must not show.
Jsonb *redacted_options(const Kind *kind, Jsonb *options);

// One option as a sink gets it, in UTF-8: defaults filled in, durations in milliseconds, secrets read from
// where they are kept, members of headers as "headers.NAME". Kind postgres gets require_password (true or
// false) besides.
struct ResolvedOption {
  const char *name;
  const char *value;
  OptionSource source;
  bool is_masked;  // in whatever a sink says
};

// Who reads secrets that are kept in a file or in the environment.
enum class SecretReader {
  kServer,  // a worker: `value` is the secret
  kRelay,   // `value` is the path or the name of the variable, on the relay's own machine
};

// For whoever opens a destination. Raises kInvalidOption where the server cannot read a secret.
ResolvedOption *resolved_options(const Destination &destination, SecretReader reader, int *count);

}  // namespace retrysafe::outbox
