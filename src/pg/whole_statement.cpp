#include "pg/whole_statement.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

// The one expression that a plan without rows of others evaluates, once.
const Node *only_expression(const Plan *plan) {
  if (list_length(plan->targetlist) != 1 || plan->qual || plan->lefttree) return nullptr;
  auto *shown = reinterpret_cast<const Node *>(linitial_node(TargetEntry, plan->targetlist)->expr);
  if (IsA(plan, Result)) return reinterpret_cast<const Result *>(plan)->resconstantqual ? nullptr : shown;
  if (!IsA(plan, FunctionScan) || !IsA(shown, Var)) return nullptr;
  const List *functions = reinterpret_cast<const FunctionScan *>(plan)->functions;
  return list_length(functions) == 1 ? linitial_node(RangeTblFunction, functions)->funcexpr : nullptr;
}

}  // namespace

bool is_whole_statement(FunctionCallInfo fcinfo) {
  // Cursors have names, those of functions too. The portal of a statement that is simply sent has none.
  if (!ActivePortal || ActivePortal->name[0]) return false;
  if (list_length(ActivePortal->stmts) != 1) return false;
  const auto *statement = linitial_node(PlannedStmt, ActivePortal->stmts);
  // What a modifying WITH has left to do comes after the call.
  if (statement->commandType != CMD_SELECT || statement->hasModifyingCTE) return false;
  const Node *call = fcinfo->flinfo->fn_expr;
  return call && call == only_expression(statement->planTree);
}

}  // namespace retrysafe::pg
