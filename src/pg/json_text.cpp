#include "pg/json_text.hpp"

#include "core/json_string.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

// Takes the place of text that only its size is asked for.
struct TextSize {
  int64 bytes = 0;

  void append(std::string_view more) { bytes += static_cast<int64>(more.size()); }
};

// A few bytes of jsonb can be a number of 131,000 digits.
template <class Use>
void with_number(const JsonbValue &item, Use &&use) {
  char *digits = DatumGetCString(DirectFunctionCall1(numeric_out, NumericGetDatum(item.val.numeric)));
  use(std::string_view(digits));
  pfree(digits);
}

template <class Out>
void append_scalar(Out &out, const JsonbValue &item) {
  switch (item.type) {
    case jbvNull:
      return out.append("null");
    case jbvBool:
      return out.append(item.val.boolean ? "true" : "false");
    case jbvNumeric:
      return with_number(item, [&](std::string_view digits) { out.append(digits); });
    case jbvString:
      return write_json_string(out, {item.val.string.val, static_cast<size_t>(item.val.string.len)});
    default:
      elog(ERROR, "retrysafe: unknown type of jsonb scalar");
  }
}

// Until there is enough of it.
template <class Out, class IsEnough>
void write_json(Out &out, Jsonb *json, IsEnough &&is_enough) {
  const bool bare = JB_ROOT_IS_SCALAR(json);  // stored as an array of one
  bool first = true;                          // nothing to separate from
  const auto separate = [&] {
    if (!first) out.append(", ");
  };
  JsonbIterator *iterator = JsonbIteratorInit(&json->root);
  JsonbValue item;
  for (JsonbIteratorToken token; (token = JsonbIteratorNext(&iterator, &item, false)) != WJB_DONE;) {
    if (is_enough()) return;
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

// Cheaper to find out than the size, and true of most. The size in memory bounds nothing: 1e1000 takes a few
// bytes.
bool fits_in_any_case(Jsonb *json, int limit) {
  constexpr int kPunctuation = 4;  // quotes, colon or comma, space
  constexpr int kEscaped = 6;      // \u0001
  int64 most = 0;
  JsonbIterator *iterator = JsonbIteratorInit(&json->root);
  JsonbValue item;
  for (JsonbIteratorToken token; (token = JsonbIteratorNext(&iterator, &item, false)) != WJB_DONE;) {
    CHECK_FOR_INTERRUPTS();
    if (most > limit) return false;
    most += kPunctuation;
    if (token != WJB_KEY && token != WJB_VALUE && token != WJB_ELEM) continue;
    if (item.type == jbvString)
      most += int64{kEscaped} * item.val.string.len;
    else if (item.type == jbvNumeric)
      with_number(item, [&](std::string_view digits) { most += static_cast<int64>(digits.size()); });
    else
      most += sizeof "false";
  }
  return most <= limit;
}

}  // namespace

void append_json(StringInfo text, Jsonb *json) {
  ServerText out{text};
  write_json(out, json, [] {
    CHECK_FOR_INTERRUPTS();
    return false;
  });
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

bool json_exceeds(Jsonb *json, int limit) {
  if (fits_in_any_case(json, limit)) return false;
  TextSize size;
  write_json(size, json, [&] {
    CHECK_FOR_INTERRUPTS();
    return size.bytes > limit;
  });
  return size.bytes > limit;
}

bool json_is_deeper(Jsonb *json, int levels) {
  // Each has an entry in the one around it, and a header.
  constexpr Size kLeast = sizeof(JEntry) + sizeof(uint32);
  if (VARSIZE(json) <= kLeast * static_cast<Size>(levels)) return false;
  int level = 0;
  JsonbIterator *iterator = JsonbIteratorInit(&json->root);
  JsonbValue item;
  for (JsonbIteratorToken token; (token = JsonbIteratorNext(&iterator, &item, false)) != WJB_DONE;) {
    CHECK_FOR_INTERRUPTS();
    if (token == WJB_BEGIN_ARRAY || token == WJB_BEGIN_OBJECT) ++level;
    if (token == WJB_END_ARRAY || token == WJB_END_OBJECT) --level;
    if (level > levels) return true;
  }
  return false;
}

}  // namespace retrysafe::pg
