// The installed extension: its schema, its owner, and the relations that the code works on, pinned by OID.
#pragma once

#include <optional>
#include <type_traits>

#include "pg/server.hpp"

namespace retrysafe::pg {

// X-macro of the relations that C++ opens by itself; each is looked up once by name in the extension's schema
// and must be a member of the extension. SQL statements name the schema instead (see statement.hpp).
#define RETRYSAFE_RELATIONS(X)      \
  X(ring_pieces)                    \
  X(ring_pieces_pkey)               \
  X(idem_records)                   \
  X(idem_records_with_ttl)          \
  X(idem_records_with_ttl_pkey)     \
  X(idempotency_records)            \
  X(outbox_log)                     \
  X(outbox_log_id_seq)              \
  X(outbox_eras)                    \
  X(outbox_eras_pkey)               \
  X(outbox_destinations)            \
  X(outbox_destinations_pkey)       \
  X(outbox_scheduled)               \
  X(outbox_scheduled_event_key)     \
  X(outbox_scheduled_deliver_after) \
  X(outbox_scheduled_ordering_key)  \
  X(outbox_shards)                  \
  X(outbox_shards_pkey)             \
  X(outbox_parked)                  \
  X(outbox_parked_pkey)             \
  X(outbox_parked_due)              \
  X(outbox_parked_waiting)          \
  X(outbox_parked_retry)            \
  X(outbox_parked_dead)

// The pieces of rings, see storage/ring.hpp: name_1, name_2, …
#define RETRYSAFE_RING_RELATIONS(X) \
  X(idem_records)                   \
  X(idem_records_pkey)              \
  X(outbox_log)                     \
  X(outbox_log_pkey)                \
  X(outbox_log_event_key)           \
  X(outbox_log_txid)                \
  X(outbox_batches)                 \
  X(outbox_batches_pkey)            \
  X(outbox_windows)                 \
  X(outbox_windows_pkey)

inline constexpr int kRingPieces = 3;  // the Makefile reads it for the install script

struct Extension {
  Oid oid;
  Oid schema;
  Oid owner;
  NameData schema_name;
  // Grows whenever anything above or below may have changed; kept plans of an older generation are dropped.
  uint64 generation;
#define X(name) Oid name;
  RETRYSAFE_RELATIONS(X)
#undef X
#define X(name) Oid name##_pieces[kRingPieces];
  RETRYSAFE_RING_RELATIONS(X)
#undef X
};

// The extension of this database. Cached; raises kNotInstalled. Needs a transaction.
const Extension &extension();

// The same, null where the extension is not there. For workers, which outlive it.
const Extension *extension_if_installed();

// Are its SQL objects of the version of this library? Read anew each time; needs a transaction. Waits for
// nobody: no answer where somebody has pg_extension for himself.
std::optional<bool> extension_version_matches();

// Called once from _PG_init.
void watch_for_extension_changes();

// Runs the jumpable `body` as the owner of the extension, for work on our own tables. On an error the end of
// the (sub)transaction restores the caller, as it does for the server's own code.
template <class Body>
auto as_owner(Body &&body) {
  Oid caller;
  int context;
  GetUserIdAndSecContext(&caller, &context);
  SetUserIdAndSecContext(extension().owner, context | SECURITY_LOCAL_USERID_CHANGE | SECURITY_NOFORCE_RLS);
  if constexpr (std::is_void_v<decltype(body())>) {
    body();
    SetUserIdAndSecContext(caller, context);
  } else {
    auto result = body();
    static_assert(std::is_trivially_destructible_v<decltype(result)>);
    SetUserIdAndSecContext(caller, context);
    return result;
  }
}

}  // namespace retrysafe::pg
