// Handing out and taking away rights on the functions and views, with the rights of the owner of the
// extension. In C, because a SECURITY DEFINER function is not told who called it.
#include "pg/boundary.hpp"
#include "pg/error.hpp"
#include "pg/statement.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::access {

namespace {

constinit pg::Statement grant{"SELECT @.retrysafe_apply_grant($1, $2)", {REGROLEOID, TEXTOID}};
constinit pg::Statement revoke{"SELECT @.retrysafe_apply_revoke($1, $2)", {REGROLEOID, TEXTOID}};

// outbox_relay_options, which tells secrets.
bool may_read_secrets(Oid role) {
  const Oid types[] = {TEXTOID};
  const Oid function =
      GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid, CStringGetDatum("outbox_relay_options"),
                      PointerGetDatum(buildoidvector(types, 1)), ObjectIdGetDatum(pg::extension().schema));
  return OidIsValid(function) && pg::may_execute(function, role);
}

// Null arguments are refused over there.
void run(pg::Statement *statement, FunctionCallInfo fcinfo) {
  const auto argument = [&](int number) {
    return PG_ARGISNULL(number) ? pg::null_value() : pg::value(PG_GETARG_DATUM(number));
  };
  pg::spi([&] { statement->run({argument(0), argument(1)}); });
}

}  // namespace

}  // namespace retrysafe::access

using namespace retrysafe;

// retrysafe_grant(role, access). Whoever may not read the secrets of destinations cannot have them read by
// others.
RETRYSAFE_SQL_FUNCTION(retrysafe_grant) {
  if (!PG_ARGISNULL(1) && pg::bytes_of(PG_GETARG_TEXT_PP(1)) == "relay" &&
      !access::may_read_secrets(GetUserId()))
    pg::raise_insufficient_privilege(
        "A relay reads the secrets of every destination. A superuser, or a role that has the "
        "access itself, can hand it on.",
        "permission denied to give the access \"relay\"");
  access::run(&access::grant, fcinfo);
  PG_RETURN_VOID();
}

// retrysafe_revoke(role, access)
RETRYSAFE_SQL_FUNCTION(retrysafe_revoke) {
  access::run(&access::revoke, fcinfo);
  PG_RETURN_VOID();
}
