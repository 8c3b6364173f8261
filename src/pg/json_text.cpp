#include "pg/json_text.hpp"

#include "core/json_string.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

const char *numeric_text(const JsonbValue &item) {
  return DatumGetCString(DirectFunctionCall1(numeric_out, NumericGetDatum(item.val.numeric)));
}

void append_scalar(ServerText &out, const JsonbValue &item) {
  switch (item.type) {
    case jbvNull:
      return out.append("null");
    case jbvBool:
      return out.append(item.val.boolean ? "true" : "false");
    case jbvNumeric:
      return out.append(numeric_text(item));
    case jbvString:
      return write_json_string(out, {item.val.string.val, static_cast<size_t>(item.val.string.len)});
    default:
      elog(ERROR, "retrysafe: unknown type of jsonb scalar");
  }
}

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
      bytes += static_cast<int64>(strlen(numeric_text(item)));
    else
      bytes += sizeof "false";
  }
  return bytes;
}

}  // namespace

void append_json(StringInfo text, Jsonb *json) {
  ServerText out{text};
  const bool bare = JB_ROOT_IS_SCALAR(json);  // stored as an array of one
  bool first = true;                          // nothing to separate from
  const auto separate = [&] {
    if (!first) out.append(", ");
  };
  JsonbIterator *iterator = JsonbIteratorInit(&json->root);
  JsonbValue item;
  for (JsonbIteratorToken token; (token = JsonbIteratorNext(&iterator, &item, false)) != WJB_DONE;) {
    switch (token) {
      case WJB_BEGIN_OBJECT:
      case WJB_BEGIN_ARRAY:
        separate();
        if (!bare) out.append(token == WJB_BEGIN_OBJECT ? "{" : "[");
        first = true;
        break;
      case WJB_END_OBJECT:
      case WJB_END_ARRAY:
        if (!bare) out.append(token == WJB_END_OBJECT ? "}" : "]");
        first = false;
        break;
      case WJB_KEY:
        separate();
        append_scalar(out, item);
        out.append(": ");
        first = true;
        break;
      default:
        separate();
        append_scalar(out, item);
        first = false;
    }
  }
}

std::string_view json_text(Jsonb *json) {
  StringInfoData text;
  initStringInfo(&text);
  append_json(&text, json);
  return {text.data, static_cast<size_t>(text.len)};
}

bool same_json(Jsonb *a, Jsonb *b) {
  return a && b ? json_text(a) == json_text(b) : a == b;
}

bool json_exceeds(Jsonb *json, int limit, int *size) {
  if (most_bytes(json) <= limit) return false;
  *size = static_cast<int>(json_text(json).size());
  return *size > limit;
}

}  // namespace retrysafe::pg
