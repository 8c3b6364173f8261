#include "pg/json_size.hpp"

namespace retrysafe::pg {

namespace {

// An upper bound, cheap to have. The size in memory bounds nothing: 1e1000 takes a few bytes.
int64 most_bytes(Jsonb *json) {
  constexpr int kPunctuation = 4;  // quotes, colon or comma, space
  constexpr int kEscaped = 6;      // \u0001
  int64 bytes = 0;
  JsonbIterator *iterator = JsonbIteratorInit(&json->root);
  JsonbValue item;
  for (JsonbIteratorToken token; (token = JsonbIteratorNext(&iterator, &item, false)) != WJB_DONE;) {
    bytes += kPunctuation;
    if (token != WJB_KEY && token != WJB_VALUE && token != WJB_ELEM) continue;
    if (item.type == jbvString)
      bytes += int64{kEscaped} * item.val.string.len;
    else if (item.type == jbvNumeric)
      bytes += static_cast<int64>(
          strlen(DatumGetCString(DirectFunctionCall1(numeric_out, NumericGetDatum(item.val.numeric)))));
    else
      bytes += sizeof "false";
  }
  return bytes;
}

}  // namespace

bool json_exceeds(Jsonb *json, int limit, int *size) {
  if (most_bytes(json) <= limit) return false;
  StringInfoData text;
  initStringInfo(&text);
  JsonbToCString(&text, &json->root, static_cast<int>(VARSIZE(json)));
  *size = text.len;
  pfree(text.data);
  return *size > limit;
}

}  // namespace retrysafe::pg
