#include "pg/extension.hpp"

#include "pg/error.hpp"
#include "pg/fault_point.hpp"

namespace retrysafe::pg {

namespace {

constinit Extension cached{};
constinit bool cache_valid = false;
constinit uint64 changes = 0;  // heard of
constinit uint64 generation = 0;
constinit NameData missing{};  // what was not there when the extension was read last

void forget() {
  cache_valid = false;
  ++changes;
}

bool is_ours(Oid relation) {
#define X(name) \
  if (relation == cached.name) return true;
  RETRYSAFE_RELATIONS(X)
#undef X
#define X(name)                                \
  for (const Oid piece : cached.name##_pieces) \
    if (relation == piece) return true;
  RETRYSAFE_RING_RELATIONS(X)
#undef X
  return false;
}

void on_relation_change(Datum, Oid relation) {
  // While nothing is cached it is not known which relations are ours.
  if (!cache_valid || relation == InvalidOid || is_ours(relation)) forget();
}

void on_catalog_change(Datum, SyscacheNumber, uint32) {
  forget();
}

// pg_extension has no syscache before 18.
bool read_extension_row(Extension &e) {
  e.oid = get_extension_oid("retrysafe", true);
  if (!OidIsValid(e.oid)) return false;
  Relation catalog = table_open(ExtensionRelationId, AccessShareLock);
  ScanKeyData key;
  ScanKeyInit(&key, Anum_pg_extension_oid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(e.oid));
  SysScanDesc scan = systable_beginscan(catalog, ExtensionOidIndexId, true, nullptr, 1, &key);
  HeapTuple row = systable_getnext(scan);
  const bool found = HeapTupleIsValid(row);
  if (found) {
    const auto *form = reinterpret_cast<Form_pg_extension>(GETSTRUCT(row));
    e.schema = form->extnamespace;
    e.owner = form->extowner;
  }
  systable_endscan(scan);
  table_close(catalog, AccessShareLock);
  return found;
}

// While an index is being made or dropped concurrently, and after that failed, rows are missing from it.
bool is_valid_index(Oid index) {
  HeapTuple row = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(index));
  if (!HeapTupleIsValid(row)) return false;
  const bool valid = reinterpret_cast<Form_pg_index>(GETSTRUCT(row))->indisvalid;
  ReleaseSysCache(row);
  return valid;
}

// InvalidOid unless the relation is a member of the extension: a table that somebody else put into our schema
// under one of our names is not touched.
Oid find_member(const Extension &e, const char *name) {
  namestrcpy(&missing, name);
  const Oid relation = get_relname_relid(name, e.schema);
  if (!OidIsValid(relation)) return InvalidOid;
  Oid table = relation;
  if (get_rel_relkind(relation) == RELKIND_INDEX) {
    RETRYSAFE_FAULT_POINT("extension.before_index");
    if (!is_valid_index(relation)) return InvalidOid;
    table = IndexGetRelation(relation, true);
  }
  if (!OidIsValid(table) || getExtensionOfObject(RelationRelationId, table) != e.oid) return InvalidOid;
  return relation;
}

bool find_pieces(const Extension &e, const char *name, Oid (&pieces)[kRingPieces]) {
  for (int i = 0; i < kRingPieces; ++i) {
    pieces[i] = find_member(e, psprintf("%s_%d", name, i + 1));
    if (!OidIsValid(pieces[i])) return false;
  }
  return true;
}

bool read_extension(Extension &e) {
  missing = {};
  if (!read_extension_row(e)) return false;
  const char *schema = get_namespace_name(e.schema);
  if (!schema) return false;
  namestrcpy(&e.schema_name, schema);
#define X(name)                   \
  e.name = find_member(e, #name); \
  if (!OidIsValid(e.name)) return false;
  RETRYSAFE_RELATIONS(X)
#undef X
#define X(name) \
  if (!find_pieces(e, #name, e.name##_pieces)) return false;
  RETRYSAFE_RING_RELATIONS(X)
#undef X
  return true;
}

}  // namespace

const Extension *extension_if_installed() {
  if (cache_valid) return &cached;
  constexpr int kTries = 3;  // others may change something all the time
  for (int tries = 1;; ++tries) {
    const uint64 before = changes;
    Extension fresh{};
    if (read_extension(fresh)) {
      fresh.generation = ++generation;
      cached = fresh;
      // Reading takes locks, and with each one hears of changes by others: what was read before may be old
      // by then.
      cache_valid = changes == before;
      return &cached;
    }
    // A name may have passed from one index to another (REINDEX CONCURRENTLY) while we looked at the first.
    AcceptInvalidationMessages();
    if (changes == before || tries == kTries) return nullptr;
  }
}

const Extension &extension() {
  const Extension *e = extension_if_installed();
  if (!e && NameStr(missing)[0])
    raise(kNotInstalled,
          "Run ALTER EXTENSION retrysafe UPDATE. Where somebody has dropped an index, or an index is not "
          "valid, make it again as it was, or REINDEX it.",
          "relation \"%s\" of extension \"retrysafe\" is missing or not valid", NameStr(missing));
  if (!e)
    raise(kNotInstalled, "Run CREATE EXTENSION retrysafe, or ALTER EXTENSION retrysafe UPDATE.",
          "extension \"retrysafe\" is not installed in this database in a version that this library knows");
  return *e;
}

std::optional<bool> extension_version_matches() {
  if (!ConditionalLockRelationOid(ExtensionRelationId, AccessShareLock)) return std::nullopt;
  Relation catalog = table_open(ExtensionRelationId, NoLock);
  ScanKeyData key;
  ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber, F_NAMEEQ, CStringGetDatum("retrysafe"));
  SysScanDesc scan = systable_beginscan(catalog, InvalidOid, false, nullptr, 1, &key);
  bool matches = false;
  if (HeapTuple row = systable_getnext(scan)) {
    bool null;
    const Datum version = heap_getattr(row, Anum_pg_extension_extversion, RelationGetDescr(catalog), &null);
    matches = !null && strcmp(TextDatumGetCString(version), RETRYSAFE_VERSION) == 0;
  }
  systable_endscan(scan);
  table_close(catalog, AccessShareLock);
  return matches;
}

void watch_for_extension_changes() {
  CacheRegisterRelcacheCallback(on_relation_change, Datum{0});
  CacheRegisterSyscacheCallback(NAMESPACEOID, on_catalog_change, Datum{0});
}

}  // namespace retrysafe::pg
