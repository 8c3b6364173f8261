// SQL that runs on our own tables, with typed parameters and kept plans.
//
//   constinit pg::Statement kInsert{"INSERT INTO @.inbox_messages … VALUES ($1, $2)", {TEXTOID, TEXTOID}};
//   pg::spi([&] { return kInsert.run({pg::value(consumer), pg::value(event_id)}); });
//
// `@` stands for the quoted schema of the extension; other names are the server's own. Everything here is
// jumpable code.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "pg/extension.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

struct Parameter {
  Datum value;
  bool null;
};

inline Parameter null_value() {
  return {Datum{0}, true};
}
inline Parameter value(Datum datum) {
  return {datum, false};
}
inline Parameter value(int64 number) {
  return {Int64GetDatum(number), false};
}
inline Parameter value(int32 number) {
  return {Int32GetDatum(number), false};
}
inline Parameter value(bool flag) {
  return {BoolGetDatum(flag), false};
}
inline Parameter value(const void *varlena) {
  return varlena ? Parameter{PointerGetDatum(varlena), false} : null_value();
}
inline Parameter value(const char *string) {
  return string ? Parameter{CStringGetTextDatum(string), false} : null_value();
}

class Statement {
 public:
  static constexpr int kMaxParameters = 24;

  constexpr Statement(const char *sql, std::initializer_list<Oid> types) noexcept : sql_(sql) {
    for (Oid type : types) types_[type_count_++] = type;
  }

  // Runs inside pg::spi; returns the number of rows, which are in SPI_tuptable. `limit` 0: all rows.
  uint64 run(std::initializer_list<Parameter> parameters, long limit = 0);
  // For results that are too many at once: see SPI_cursor_fetch and SPI_cursor_close.
  Portal open(std::initializer_list<Parameter> parameters);

 private:
  struct Arguments {
    Datum values[kMaxParameters];
    char nulls[kMaxParameters];
  };
  Arguments prepare_for(std::initializer_list<Parameter> parameters);
  void prepare();

  const char *sql_;
  Oid types_[kMaxParameters]{};
  int type_count_ = 0;
  SPIPlanPtr plan_ = nullptr;
  int running_ = 0;  // it may run inside of itself, by a trigger on our tables; then no plan is freed
  uint64 generation_ = 0;
};

// A column of a result row (columns count from 1), valid until the end of pg::spi unless copied.
class Row {
 public:
  // Raises where there is no such row, as when a trigger kept it from being written.
  explicit Row(uint64 number);
  bool is_null(int column) const {
    bool null;
    SPI_getbinval(tuple_, descriptor_, column, &null);
    return null;
  }
  Datum datum(int column) const {
    bool null;
    return SPI_getbinval(tuple_, descriptor_, column, &null);
  }
  int64 int64_at(int column) const { return DatumGetInt64(datum(column)); }
  int32 int32_at(int column) const { return DatumGetInt32(datum(column)); }
  bool bool_at(int column) const { return DatumGetBool(datum(column)); }
  // Copied into `memory`; null for SQL null.
  char *text_at(int column, MemoryContext memory) const;
  // A detoasted copy of a bytea, jsonb, text … in `memory`; null for SQL null.
  struct varlena *varlena_at(int column, MemoryContext memory) const;

 private:
  HeapTuple tuple_;
  TupleDesc descriptor_;
};

namespace detail {
int enter_spi();
void leave_spi(int nest);
}  // namespace detail

// Runs the jumpable `body` as the owner of the extension with SPI connected, under search_path = pg_catalog,
// pg_temp. The path has to hold for every execution, not only for the first parse: the plan cache parses a
// statement again under the path of the moment, and the caller's could lead to functions and operators of the
// caller, which would run as the owner.
template <class Body>
auto spi(Body &&body) {
  return as_owner([&] {
    const int nest = detail::enter_spi();
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      detail::leave_spi(nest);
    } else {
      auto result = body();
      detail::leave_spi(nest);
      return result;
    }
  });
}

}  // namespace retrysafe::pg
