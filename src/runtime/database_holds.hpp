// Letting go of a database that somebody needs for himself: DROP, RENAME, SET TABLESPACE, and CREATE DATABASE
// with it as the template. The session that runs the command puts up a hold; the workers of that database
// leave, and the launcher starts none until the hold is gone.
#pragma once

namespace retrysafe::runtime {

// Called from _PG_init while preloading.
void watch_databases();

}  // namespace retrysafe::runtime
