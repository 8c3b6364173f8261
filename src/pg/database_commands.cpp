#include "pg/database_commands.hpp"

#include "pg/extension.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

constinit const DatabaseCommands *watcher = nullptr;
constinit ProcessUtility_hook_type next_utility = nullptr;
constinit object_access_hook_type next_object_access = nullptr;

const DefElem *find_option(const List *options, const char *name) {
  ListCell *cell;
  foreach (cell, options) {
    const auto *option = static_cast<const DefElem *>(lfirst(cell));
    if (strcmp(option->defname, name) == 0) return option;
  }
  return nullptr;
}

// The name of the database that nobody else may be connected to during the command, or null.
const char *exclusively_used(Node *statement) {
  switch (nodeTag(statement)) {
    case T_DropdbStmt:
      return reinterpret_cast<DropdbStmt *>(statement)->dbname;
    case T_RenameStmt: {
      auto *rename = reinterpret_cast<RenameStmt *>(statement);
      return rename->renameType == OBJECT_DATABASE ? rename->subname : nullptr;
    }
    case T_AlterDatabaseStmt: {
      auto *alter = reinterpret_cast<AlterDatabaseStmt *>(statement);
      return find_option(alter->options, "tablespace") ? alter->dbname : nullptr;
    }
    case T_CreatedbStmt: {
      const DefElem *source = find_option(reinterpret_cast<CreatedbStmt *>(statement)->options, "template");
      return source && source->arg ? defGetString(const_cast<DefElem *>(source)) : nullptr;
    }
    default:
      return nullptr;
  }
}

bool commits_prepared(Node *statement) {
  return IsA(statement, TransactionStmt) &&
         reinterpret_cast<TransactionStmt *>(statement)->kind == TRANS_STMT_COMMIT_PREPARED;
}

void run_next(PlannedStmt *statement, const char *text, bool read_only, ProcessUtilityContext context,
              ParamListInfo parameters, QueryEnvironment *environment, DestReceiver *receiver,
              QueryCompletion *done) {
  (next_utility ? next_utility : standard_ProcessUtility)(statement, text, read_only, context, parameters,
                                                          environment, receiver, done);
}

void on_utility(PlannedStmt *statement, const char *text, bool read_only, ProcessUtilityContext context,
                ParamListInfo parameters, QueryEnvironment *environment, DestReceiver *receiver,
                QueryCompletion *done) {
  if (commits_prepared(statement->utilityStmt)) {
    // Another session noted what is in it, perhaps before a restart. So it is looked what has come with it.
    const bool was_there = extension_version_matches().value_or(false);
    run_next(statement, text, read_only, context, parameters, environment, receiver, done);
    if (was_there) return;
    // It is committed: that must not end in an error. Not by the macros, which increment what is volatile.
    QueryCancelHoldoffCount = QueryCancelHoldoffCount + 1;
    if (extension_version_matches().value_or(true)) watcher->changed(MyDatabaseId);
    QueryCancelHoldoffCount = QueryCancelHoldoffCount - 1;
    return;
  }
  const char *name = exclusively_used(statement->utilityStmt);
  // Whoever may not run the command shall not disturb anybody by trying. The server itself reports the error.
  const Oid database = name && IsTransactionState() ? get_database_oid(name, true) : InvalidOid;
  if (!OidIsValid(database) || !owns_database(database, GetUserId())) {
    run_next(statement, text, read_only, context, parameters, environment, receiver, done);
    return;
  }
  PG_TRY();
  {
    watcher->before_exclusive_use(database);
    run_next(statement, text, read_only, context, parameters, environment, receiver, done);
  }
  PG_FINALLY();
  { watcher->after_exclusive_use(); }
  PG_END_TRY();
}

void on_object_access(ObjectAccessType access, Oid class_id, Oid object_id, int sub_id, void *argument) {
  if (next_object_access) next_object_access(access, class_id, object_id, sub_id, argument);
  if (access != OAT_POST_CREATE && access != OAT_POST_ALTER && access != OAT_DROP) return;
  if (class_id == DatabaseRelationId) {
    watcher->changed(InvalidOid);
  } else if (class_id == ExtensionRelationId && access != OAT_DROP) {
    // Of any extension: the name is not visible to look-ups yet. A look too many costs little.
    watcher->changed(MyDatabaseId);
  }
}

}  // namespace

void watch_database_commands(const DatabaseCommands *commands) {
  watcher = commands;
  next_utility = ProcessUtility_hook;
  ProcessUtility_hook = on_utility;
  next_object_access = object_access_hook;
  object_access_hook = on_object_access;
}

}  // namespace retrysafe::pg
