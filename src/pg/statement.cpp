#include "pg/statement.hpp"

#include "core/error_codes.hpp"
#include "pg/error.hpp"

namespace retrysafe::pg {

namespace {

char *with_schema(const char *sql) {
  const char *schema = quote_identifier(NameStr(extension().schema_name));
  StringInfoData text;
  initStringInfo(&text);
  for (const char *p = sql; *p; ++p) {
    if (p[0] == '@' && p[1] == '.')
      appendStringInfoString(&text, schema);
    else
      appendStringInfoChar(&text, *p);
  }
  return text.data;
}

}  // namespace

void Statement::prepare() {
  if (plan_ && running_ == 0) SPI_freeplan(plan_);
  plan_ = nullptr;
  generation_ = extension().generation;  // before: what changes while it is prepared makes it old
  SPIPlanPtr plan = SPI_prepare(with_schema(sql_), type_count_, types_);
  if (!plan) elog(ERROR, "retrysafe: cannot prepare \"%s\": %s", sql_, SPI_result_code_string(SPI_result));
  SPI_keepplan(plan);
  plan_ = plan;
}

Statement::Arguments Statement::prepare_for(std::initializer_list<Parameter> parameters) {
  if (!plan_ || generation_ != extension().generation) prepare();
  Arguments arguments;
  int count = 0;
  for (const Parameter &p : parameters) {
    arguments.values[count] = p.value;
    arguments.nulls[count++] = p.null ? 'n' : ' ';
  }
  Assert(count == type_count_);
  return arguments;
}

uint64 Statement::run(std::initializer_list<Parameter> parameters, long limit) {
  Arguments arguments = prepare_for(parameters);
  int result;
  ++running_;
  PG_TRY();
  result = SPI_execute_plan(plan_, arguments.values, arguments.nulls, false, limit);
  PG_FINALLY();
  --running_;
  PG_END_TRY();
  if (result < 0) elog(ERROR, "retrysafe: cannot execute \"%s\": %s", sql_, SPI_result_code_string(result));
  return SPI_processed;
}

Portal Statement::open(std::initializer_list<Parameter> parameters) {
  Arguments arguments = prepare_for(parameters);
  return SPI_cursor_open(nullptr, plan_, arguments.values, arguments.nulls, false);
}

Row::Row(uint64 number) {
  if (!SPI_tuptable || number >= SPI_tuptable->numvals)
    raise(kRowRefused, kRowRefusedHint, "a statement on a table of retrysafe had no effect");
  tuple_ = SPI_tuptable->vals[number];
  descriptor_ = SPI_tuptable->tupdesc;
}

char *Row::text_at(int column, MemoryContext memory) const {
  bool null;
  const Datum d = SPI_getbinval(tuple_, descriptor_, column, &null);
  if (null) return nullptr;
  MemoryContext old = MemoryContextSwitchTo(memory);
  char *copy = TextDatumGetCString(d);
  MemoryContextSwitchTo(old);
  return copy;
}

struct varlena *Row::varlena_at(int column, MemoryContext memory) const {
  bool null;
  const Datum d = SPI_getbinval(tuple_, descriptor_, column, &null);
  if (null) return nullptr;
  MemoryContext old = MemoryContextSwitchTo(memory);
  struct varlena *copy = PG_DETOAST_DATUM_COPY(d);
  MemoryContextSwitchTo(old);
  return copy;
}

namespace detail {

int enter_spi() {
  const int nest = NewGUCNestLevel();
  (void)set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
                          true, 0, false);
  if (SPI_connect() != SPI_OK_CONNECT) elog(ERROR, "retrysafe: SPI_connect failed");
  return nest;
}

void leave_spi(int nest) {
  SPI_finish();
  AtEOXact_GUC(true, nest);
}

}  // namespace detail

}  // namespace retrysafe::pg
