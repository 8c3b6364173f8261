// The loadable module. _PG_init runs in the postmaster when preloaded, else in the first backend that calls
// us.
#include "idempotency/claims.hpp"
#include "outbox/append.hpp"
#include "outbox/emit.hpp"
#include "outbox/eras.hpp"
#include "pg/boundary.hpp"
#include "pg/extension.hpp"
#include "runtime/control_area.hpp"
#include "runtime/database_holds.hpp"
#include "runtime/processes.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

extern "C" {
#ifdef PG_MODULE_MAGIC_EXT
PG_MODULE_MAGIC_EXT(.name = "retrysafe", .version = RETRYSAFE_VERSION);
#else
PG_MODULE_MAGIC;
#endif
PGDLLEXPORT void _PG_init(void);
}

void _PG_init(void) {
  retrysafe::pg::boundary([] {
    retrysafe::settings::define();
    retrysafe::pg::watch_for_extension_changes();
    retrysafe::outbox::note_restore_at_start();
    retrysafe::outbox::watch_appending_transactions();
    retrysafe::outbox::watch_emitting_transactions();
    retrysafe::idempotency::watch_claims();
    if (process_shared_preload_libraries_in_progress) {
      retrysafe::runtime::request_control_area();
      retrysafe::runtime::watch_databases();
      // pg_upgrade moves databases; nothing may write to them meanwhile.
      if (!IsBinaryUpgrade) retrysafe::runtime::register_launcher();
    }
    return Datum{0};
  });
}
