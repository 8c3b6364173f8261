#include "idempotency/request_hash.hpp"

#include <string_view>

#include "core/hex.hpp"
#include "idempotency/key.hpp"
#include "pg/digest.hpp"
#include "pg/error.hpp"
#include "pg/json_text.hpp"

namespace retrysafe::idempotency {

namespace {

constexpr std::size_t kMaxHashBytes = 64;
constexpr const char *kHint =
    "A digest is 1 to 64 bytes that differ when the request differs, for example idem_hash(request). "
    "As text it is taken as UTF-8 bytes, or after \\x as bytes in hexadecimal.";

// SQL_ASCII means that nobody knows the encoding: the bytes are taken as they are.
std::string_view in_utf8(const char *string, std::size_t size) {
  if (GetDatabaseEncoding() == PG_SQL_ASCII) return {string, size};
  const char *converted = pg_server_to_any(string, static_cast<int>(size), PG_UTF8);
  return converted == string ? std::string_view{string, size} : std::string_view{converted};
}

bytea *to_bytea(std::string_view bytes) {
  auto *result = static_cast<bytea *>(palloc(VARHDRSZ + bytes.size()));
  SET_VARSIZE(result, VARHDRSZ + bytes.size());
  memcpy(VARDATA(result), bytes.data(), bytes.size());
  return result;
}

bytea *checked(std::string_view bytes) {
  if (bytes.empty()) pg::raise(kInvalidRequestHash, kHint, "request hash must not be empty");
  if (bytes.size() > kMaxHashBytes)
    pg::raise(kInvalidRequestHash, kHint, "request hash is too long: %zu bytes", bytes.size());
  return to_bytea(bytes);
}

bytea *from_datum(Datum value, HashForm form) {
  std::string_view given = bytes_of(PG_DETOAST_DATUM_PACKED(value));
  if (form == HashForm::kBytes) return checked(given);
  if (!given.starts_with("\\x")) return checked(in_utf8(given.data(), given.size()));
  given.remove_prefix(2);
  if (given.size() / 2 > kMaxHashBytes)
    pg::raise(kInvalidRequestHash, kHint, "request hash is too long: %zu bytes", given.size() / 2);
  char decoded[kMaxHashBytes];
  if (!decode_hex(given, decoded))
    pg::raise(kInvalidRequestHash, kHint, "request hash begins with \\x and is not valid hexadecimal");
  return checked({decoded, given.size() / 2});
}

}  // namespace

bytea *request_hash_argument(FunctionCallInfo fcinfo, int argument, HashForm form) {
  if (PG_ARGISNULL(argument)) pg::raise(kInvalidRequestHash, kHint, "request hash must not be null");
  return from_datum(PG_GETARG_DATUM(argument), form);
}

HashList request_hash_list_argument(FunctionCallInfo fcinfo, int argument, HashForm form) {
  if (PG_ARGISNULL(argument)) return {};
  Datum *elements;
  bool *nulls;
  HashList list{};
  deconstruct_array(PG_GETARG_ARRAYTYPE_P(argument), form == HashForm::kBytes ? BYTEAOID : TEXTOID, -1, false,
                    TYPALIGN_INT, &elements, &nulls, &list.count);
  list.hashes = static_cast<bytea **>(palloc(sizeof(bytea *) * static_cast<Size>(list.count)));
  for (int i = 0; i < list.count; ++i) {
    if (nulls[i]) pg::raise(kInvalidRequestHash, kHint, "also_accept must not contain nulls");
    list.hashes[i] = from_datum(elements[i], form);
  }
  return list;
}

bool same_bytes(const bytea *a, const bytea *b) {
  return bytes_of(a) == bytes_of(b);
}

bytea *hash_request(Jsonb *request) {
  const std::string_view canonical = pg::json_text(request);
  const Sha256Digest digest = pg::sha256({in_utf8(canonical.data(), canonical.size())});
  return to_bytea({reinterpret_cast<const char *>(digest.data()), digest.size()});
}

}  // namespace retrysafe::idempotency
