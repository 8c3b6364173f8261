// Hooks into the commands that concern whole databases, for a server that preloads the library.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

struct DatabaseCommands {
  // Around DROP DATABASE, ALTER DATABASE RENAME and SET TABLESPACE, and CREATE DATABASE … TEMPLATE: each
  // fails while anybody else is connected to `database`. May raise. Only called when the user owns the
  // database.
  void (*before_exclusive_use)(Oid database);
  // Also after an error.
  void (*after_exclusive_use)() noexcept;
  // The extension was created or updated in this database, or a database was created, altered or dropped. In
  // the transaction that does it, or at its COMMIT PREPARED; `database` invalid: any. May raise.
  void (*changed)(Oid database);
};

// Called once from _PG_init; `commands` lives as long as the process.
void watch_database_commands(const DatabaseCommands *commands);

}  // namespace retrysafe::pg
