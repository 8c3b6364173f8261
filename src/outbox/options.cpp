#include "outbox/options.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>

#include "core/kinds/kinds.hpp"
#include "core/library_path.hpp"
#include "pg/boundary.hpp"
#include "pg/statement.hpp"
#include "pg/text.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constexpr off_t kMaxSecretBytes = 64 * 1024;

std::string_view view_of(const JsonbValue &value) {
  return {value.val.string.val, static_cast<size_t>(value.val.string.len)};
}

char *copy_of(std::string_view text) {
  return pnstrdup(text.data(), text.size());
}

struct GivenOptions {
  GivenOption *items;
  size_t count;
  std::span<const GivenOption> span() const { return {items, count}; }
};

GivenOptions members_of(JsonbContainer *object);

GivenOption given_option(std::string_view name, const JsonbValue &value) {
  switch (value.type) {
    case jbvString:
      return {name, JsonKind::kString, view_of(value)};
    case jbvNumeric:
      return {name, JsonKind::kNumber,
              DatumGetCString(DirectFunctionCall1(numeric_out, NumericGetDatum(value.val.numeric)))};
    case jbvBool:
      return {name, JsonKind::kBoolean, value.val.boolean ? "true" : "false"};
    case jbvBinary:
      if (JsonContainerIsObject(value.val.binary.data))
        return {name, JsonKind::kObject, {}, members_of(value.val.binary.data).span()};
      return {name, JsonKind::kArray, {}};
    default:
      return {name, JsonKind::kNull, {}};
  }
}

// Views into `object`, which must stay.
GivenOptions members_of(JsonbContainer *object) {
  GivenOptions result{nullptr, 0};
  const size_t capacity = JsonContainerSize(object);
  result.items = static_cast<GivenOption *>(palloc0((capacity + 1) * sizeof(GivenOption)));
  JsonbIterator *iterator = JsonbIteratorInit(object);
  JsonbValue value;
  std::string_view name;
  for (;;) {
    const JsonbIteratorToken token = JsonbIteratorNext(&iterator, &value, true);
    if (token == WJB_DONE) return result;
    if (token == WJB_KEY) name = view_of(value);
    if (token == WJB_VALUE) result.items[result.count++] = given_option(name, value);
  }
}

GivenOptions members_of(Jsonb *options, const char *what) {
  if (!JB_ROOT_IS_OBJECT(options) || JB_ROOT_IS_SCALAR(options))
    pg::raise(kInvalidOption, "Example: {\"url\": \"https://example.com/events\"}.",
              "%s must be a JSON object", what);
  return members_of(&options->root);
}

[[noreturn]] void raise_problem(const OptionProblem &problem, const char *kind) {
  pg::raise(kInvalidOption, problem.hint, "%s for destinations of kind \"%s\"", problem.message, kind);
}

// --- options of registered kinds ---------------------------------------------------------------------------

[[noreturn]] void raise_bad_list(const char *message) {
  pg::raise(
      kInvalidOption,
      "A list of options is an array of objects with the members name, type, description, required, default, "
      "min, max and choices.",
      "%s", message);
}

const GivenOption *member(const GivenOptions &members, std::string_view name) {
  for (const GivenOption &m : members.span())
    if (m.name == name && m.kind != JsonKind::kNull) return &m;
  return nullptr;
}

std::string_view text_member(const GivenOptions &members, std::string_view name) {
  const GivenOption *m = member(members, name);
  if (!m) return {};
  if (m->kind != JsonKind::kString) raise_bad_list("name, type and description of an option must be strings");
  return m->text;
}

int64 number_member(const GivenOptions &members, const char *name, int64 otherwise) {
  const GivenOption *m = member(members, name);
  if (!m) return otherwise;
  if (m->kind == JsonKind::kNumber)
    return DatumGetInt64(DirectFunctionCall1(
        numeric_int8, DirectFunctionCall3(numeric_in, CStringGetDatum(m->text.data()),
                                          ObjectIdGetDatum(InvalidOid), Int32GetDatum(-1))));
  if (const auto ms = m->kind == JsonKind::kString ? parse_duration(m->text) : std::nullopt) return *ms;
  raise_bad_list("min and max of an option must be numbers, or durations such as \"30s\"");
}

// The members of an array of strings, joined by '|'.
std::string_view choices_member(JsonbContainer *description) {
  JsonbValue *list = getKeyJsonValueFromContainer(description, "choices", 7, nullptr);
  if (!list) return {};
  if (list->type != jbvBinary || !JsonContainerIsArray(list->val.binary.data))
    raise_bad_list("choices of an option must be an array of strings");
  StringInfoData text;
  initStringInfo(&text);
  const uint32 count = JsonContainerSize(list->val.binary.data);
  for (uint32 i = 0; i < count; ++i) {
    JsonbValue *choice = getIthJsonbValueFromContainer(list->val.binary.data, i);
    if (choice->type != jbvString || memchr(choice->val.string.val, '|', choice->val.string.len))
      raise_bad_list("choices of an option must be an array of strings without \"|\"");
    if (i > 0) appendStringInfoChar(&text, '|');
    appendBinaryStringInfo(&text, choice->val.string.val, choice->val.string.len);
  }
  return {text.data, static_cast<size_t>(text.len)};
}

std::string_view canonical_default(OptionType type, const GivenOption *given) {
  if (!given) return {};
  if (given->kind == JsonKind::kObject || given->kind == JsonKind::kArray)
    raise_bad_list("the default of an option must be a string, a number or a boolean");
  if (type == OptionType::kDuration && given->kind == JsonKind::kString)
    if (const auto ms = parse_duration(given->text)) return psprintf(INT64_FORMAT, *ms);
  return given->text;
}

OptionDescription parse_description(const JsonbValue *item) {
  if (item->type != jbvBinary || !JsonContainerIsObject(item->val.binary.data))
    raise_bad_list("the list of options holds something that is not an object");
  const GivenOptions members = members_of(item->val.binary.data);
  constexpr std::string_view known[] = {"name",    "type", "description", "required",
                                        "default", "min",  "max",         "choices"};
  for (const GivenOption &m : members.span()) {
    bool found = false;
    for (std::string_view name : known) found = found || name == m.name;
    if (!found) raise_bad_list("the list of options holds an object with an unknown member");
  }
  const auto type = option_type(text_member(members, "type"));
  if (!type)
    pg::raise(kInvalidOption,
              "Types: string, integer, boolean, duration, url, enum, secret, file, template, headers.",
              "the list of options holds an unknown type");
  const bool is_text = *type != OptionType::kInteger && *type != OptionType::kDuration;
  const GivenOption *required = member(members, "required");
  if (required && required->kind != JsonKind::kBoolean) raise_bad_list("required must be true or false");
  return {.name = text_member(members, "name"),
          .type = *type,
          .description = text_member(members, "description"),
          .required = required && required->text == "true",
          .default_value = canonical_default(*type, member(members, "default")),
          .min = number_member(members, "min", 0),
          .max = number_member(members, "max", is_text ? 8192 : std::numeric_limits<int64_t>::max()),
          .choices = choices_member(item->val.binary.data)};
}

OptionList parse_list(Jsonb *list, const char *kind) {
  if (!JB_ROOT_IS_ARRAY(list) || JB_ROOT_IS_SCALAR(list))
    raise_bad_list("the list of options must be a JSON array");
  const uint32 count = JB_ROOT_COUNT(list);
  auto *descriptions = static_cast<OptionDescription *>(palloc0((count + 1) * sizeof(OptionDescription)));
  for (uint32 i = 0; i < count; ++i) {
    descriptions[i] = parse_description(getIthJsonbValueFromContainer(&list->root, i));
    OptionProblem problem;
    if (!check_description(descriptions[i], &problem)) raise_problem(problem, kind);
    if (find_option({descriptions, i}, descriptions[i].name).description)
      raise_bad_list("the list of options names one option twice");
  }
  return {descriptions, count};
}

constinit pg::Statement select_kind{"SELECT library, options FROM @.outbox_kinds WHERE kind = $1", {TEXTOID}};
constinit pg::Statement select_kinds{"SELECT kind FROM @.outbox_kinds ORDER BY kind", {}};
constinit pg::Statement insert_kind{
    "INSERT INTO @.outbox_kinds (kind, library, options) VALUES ($1, $2, $3) ON CONFLICT (kind) DO NOTHING",
    {TEXTOID, TEXTOID, JSONBOID}};
// A destination of the kind would never be worked again.
constinit pg::Statement delete_kind{
    "DELETE FROM @.outbox_kinds WHERE kind = $1 RETURNING EXISTS "
    "(SELECT FROM @.outbox_destinations d WHERE d.kind = $1)",
    {TEXTOID}};

// --- files and environment ---------------------------------------------------------------------------------

// Both canonical.
bool is_below(const char *directory, const char *path) {
  return path_is_prefix_of_path(directory, path) && strcmp(directory, path) != 0;
}

// The path below retrysafe.allowed_secret_directory; relative ones start there. Looks at the text only.
const char *path_below_secret_directory(const char *option, const char *path) {
  if (settings::allowed_secret_directory[0] == '\0')
    pg::raise(kInvalidOption,
              "A superuser allows a directory with the setting retrysafe.allowed_secret_directory.",
              "option \"%s\" names a file, and no directory is allowed for such files", option);
  char *directory = pstrdup(settings::allowed_secret_directory);
  canonicalize_path(directory);
  char *full = is_absolute_path(path) ? pstrdup(path) : psprintf("%s/%s", directory, path);
  // Before the path is made canonical, which would swallow "x/../y".
  const bool climbs = path_contains_parent_reference(full);
  canonicalize_path(full);
  if (climbs || !is_below(directory, full))
    pg::raise(kInvalidOption,
              "Name a file below the directory of the setting retrysafe.allowed_secret_directory.",
              "option \"%s\" names a file outside of the allowed directory", option);
  return full;
}

// The file itself, after all symbolic links, is below the directory as well.
const char *real_path_below_secret_directory(const char *option, const char *path) {
  const char *full = path_below_secret_directory(option, path);
  char directory[PATH_MAX];
  char real[PATH_MAX];
  if (!realpath(settings::allowed_secret_directory, directory) || !realpath(full, real))
    pg::raise(kInvalidOption, "The server reads it as its own operating system user.",
              "the file of option \"%s\" cannot be found", option);
  if (!is_below(directory, real))
    pg::raise(kInvalidOption, "A symbolic link must not lead out of retrysafe.allowed_secret_directory.",
              "option \"%s\" names a file outside of the allowed directory", option);
  return pstrdup(real);
}

const char *read_secret_file(const char *option, const char *path) {
  const char *real = real_path_below_secret_directory(option, path);
  const int file = OpenTransientFile(real, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat status;
  if (file < 0 || fstat(file, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size > kMaxSecretBytes)
    pg::raise(kInvalidOption,
              "It must be a plain file of at most 64 kB that the server's operating system user can "
              "read.",
              "the file of option \"%s\" cannot be read", option);
  auto *text = static_cast<char *>(palloc0(kMaxSecretBytes + 1));
  ssize_t length = read(file, text, kMaxSecretBytes);
  CloseTransientFile(file);
  while (length > 0 && (text[length - 1] == '\n' || text[length - 1] == '\r')) text[--length] = '\0';
  if (length <= 0 || strlen(text) != static_cast<size_t>(length))
    pg::raise(kInvalidOption, "It must hold the secret as text; a line break at the end is dropped.",
              "the file of option \"%s\" is empty or not text", option);
  return text;
}

const char *read_environment(const char *option, const char *variable) {
  const char *value = getenv(variable);
  if (!value || value[0] == '\0')
    pg::raise(kInvalidOption,
              "The variable is looked up in the environment that the server was started with.",
              "the environment variable of option \"%s\" is not set", option);
  return value;
}

void check_server_side_sources(OptionList list, std::span<const GivenOption> given) {
  for (const GivenOption &option : given) {
    if (option.kind == JsonKind::kNull) continue;
    const OptionName name = find_option(list, option.name);
    if (name.source == OptionSource::kInline) continue;
    const char *shown = copy_of(option.name);
    if (!superuser() && !has_privs_of_role(GetUserId(), ROLE_PG_READ_SERVER_FILES))
      pg::raise_insufficient_privilege(
          "Only superusers and members of pg_read_server_files may name a file or an "
          "environment variable of the server.",
          "permission denied for option \"%s\"", shown);
    if (name.source == OptionSource::kServerFile) path_below_secret_directory(shown, copy_of(option.text));
  }
}

// --- what a sink gets --------------------------------------------------------------------------------------

struct Resolved {
  ResolvedOption *items;
  int count;
  int capacity;

  void add(const char *name, const char *value, OptionSource source = OptionSource::kInline,
           bool is_masked = false) {
    if (count == capacity) {
      capacity *= 2;
      items = static_cast<ResolvedOption *>(repalloc(items, capacity * sizeof(ResolvedOption)));
    }
    const int length = static_cast<int>(strlen(value));
    items[count++] = {name, pg_server_to_any(value, length, PG_UTF8), source, is_masked};
  }
};

const char *read_source(const OptionName &name, const char *option, const char *text) {
  if (name.source == OptionSource::kInline) return text;
  if (name.source == OptionSource::kEnvironment) return read_environment(option, text);
  return name.description->type == OptionType::kFile ? real_path_below_secret_directory(option, text)
                                                     : read_secret_file(option, text);
}

// A superuser may rely on how the far side trusts this server (peer, trust); others may not.
bool must_show_a_password(const Destination &destination) {
  const Oid role = destination.run_as ? get_role_oid(destination.run_as, true) : InvalidOid;
  return !OidIsValid(role) || !superuser_arg(role);
}

}  // namespace

const Kind *find_kind(const char *name) {
  auto *kind = static_cast<Kind *>(palloc0(sizeof(Kind)));
  kind->name = pstrdup(name);
  if (const BuiltInKind *built_in = find_built_in_kind(name)) {
    kind->library = built_in->library;
    kind->options = built_in->options;
    return kind;
  }
  MemoryContext memory = CurrentMemoryContext;
  Jsonb *list = pg::spi([&]() -> Jsonb * {
    if (select_kind.run({pg::value(name)}) == 0) return nullptr;
    const pg::Row row(0);
    kind->library = row.text_at(1, memory);
    return reinterpret_cast<Jsonb *>(row.varlena_at(2, memory));
  });
  if (!list) return nullptr;
  kind->options = parse_list(list, name);
  return kind;
}

void raise_unknown_kind(const char *name) {
  StringInfoData known;
  initStringInfo(&known);
  for (const BuiltInKind *kind : built_in_kinds()) {
    if (known.len > 0) appendStringInfoString(&known, ", ");
    appendBinaryStringInfo(&known, kind->name.data(), static_cast<int>(kind->name.size()));
  }
  MemoryContext memory = CurrentMemoryContext;
  pg::spi([&] {
    const uint64 count = select_kinds.run({});
    for (uint64 i = 0; i < count; ++i) appendStringInfo(&known, ", %s", pg::Row(i).text_at(1, memory));
  });
  pg::raise(kUnknownKind, psprintf("Known kinds: %s.", known.data), "unknown kind of destination \"%s\"",
            pg::shown_name(name));
}

Jsonb *checked_options(const Kind &kind, Jsonb *options) {
  const GivenOptions given = members_of(options, "options of a destination");
  OptionProblem problem;
  if (!check_options(kind.options, given.span(), &problem)) raise_problem(problem, kind.name);
  check_server_side_sources(kind.options, given.span());
  return DatumGetJsonbP(DirectFunctionCall1(jsonb_strip_nulls, JsonbPGetDatum(options)));
}

const char *string_option(Jsonb *options, const char *name) {
  const GivenOptions given = members_of(options, "options of a destination");
  const GivenOption *option = member(given, name);
  return option && option->kind == JsonKind::kString ? copy_of(option->text) : nullptr;
}

Jsonb *redacted_options(const Kind *kind, Jsonb *options) {
  const GivenOptions given = members_of(options, "options of a destination");
  StringInfoData text;
  initStringInfo(&text);
  for (const GivenOption &option : given.span()) {
    appendStringInfoChar(&text, text.len == 0 ? '{' : ',');
    escape_json(&text, copy_of(option.name));
    appendStringInfoChar(&text, ':');
    // Of a kind that is not registered any more nothing is known, so nothing is shown.
    const bool hidden = !kind || is_confidential(find_option(kind->options, option.name));
    if (hidden && option.kind == JsonKind::kObject) {
      const char *separator = "{";
      for (const GivenOption &inner : option.members) {
        appendStringInfoString(&text, separator);
        escape_json(&text, copy_of(inner.name));
        appendStringInfoString(&text, ":\"***\"");
        separator = ",";
      }
      appendStringInfoString(&text, option.members.empty() ? "{}" : "}");
    } else if (hidden) {
      appendStringInfoString(&text, "\"***\"");
    } else if (option.kind == JsonKind::kString) {
      escape_json(&text, copy_of(option.text));
    } else {
      appendBinaryStringInfo(&text, option.text.data(), static_cast<int>(option.text.size()));
    }
  }
  appendStringInfoString(&text, text.len == 0 ? "{}" : "}");
  return DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(text.data)));
}

ResolvedOption *resolved_options(const Destination &destination, SecretReader reader, int *count) {
  const Kind *kind = find_kind(destination.kind);
  if (!kind) raise_unknown_kind(destination.kind);
  auto *options = DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(destination.options)));
  const GivenOptions given = members_of(options, "options of a destination");
  Resolved resolved{static_cast<ResolvedOption *>(palloc(16 * sizeof(ResolvedOption))), 0, 16};
  for_each_option(kind->options, given.span(),
                  [&](const OptionName &name, std::string_view member, std::string_view value) {
                    const char *option = copy_of(name.description->name);
                    const char *text = copy_of(value);
                    if (reader == SecretReader::kServer) text = read_source(name, option, text);
                    resolved.add(member.data() ? psprintf("%s.%s", option, copy_of(member)) : option, text,
                                 name.source, is_masked(name.description->type));
                  });
  if (is_kind(kind->name, kinds::postgres))
    resolved.add("require_password", must_show_a_password(destination) ? "true" : "false");
  *count = resolved.count;
  return resolved.items;
}

}  // namespace retrysafe::outbox

using namespace retrysafe;

namespace {

void require_superuser(const char *function) {
  if (!superuser())
    pg::raise_insufficient_privilege("The library of a kind is code that the server runs.",
                                     "must be superuser to call %s", function);
}

// Safe inside dynamic_library_path: no folder, no suffix to trick with.
bool is_plain_name(const char *name, size_t limit) {
  const size_t length = strlen(name);
  return length > 0 && length <= limit && strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") == length &&
         name[0] != '_';
}

}  // namespace

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_register_kind) {
  require_superuser("outbox_register_kind");
  if (PG_ARGISNULL(0) || PG_ARGISNULL(1) || PG_ARGISNULL(2))
    pg::raise(kInvalidParameter, "The options of a kind that takes none are '[]'.",
              "kind, library and options must not be null");
  const char *kind = text_to_cstring(PG_GETARG_TEXT_PP(0));
  const char *library = text_to_cstring(PG_GETARG_TEXT_PP(1));
  if (!is_plain_name(kind, 63) || !is_plain_name(library, 63))
    pg::raise(kInvalidParameter,
              "Use 1 to 63 lower-case letters, digits and underscores; the library is a file name "
              "without folder and suffix that the server finds by dynamic_library_path.",
              "invalid name of a kind or of its library");
  Jsonb *options = PG_GETARG_JSONB_P(2);
  (void)outbox::parse_list(options, kind);
  const bool inserted = !find_built_in_kind(kind) && pg::spi([&] {
    return outbox::insert_kind.run({pg::value(kind), pg::value(library), pg::value(options)}) == 1;
  });
  if (!inserted)
    pg::raise(kInvalidParameter,
              "Unregister the kind first with outbox_unregister_kind; the built-in kinds cannot be "
              "replaced.",
              "kind \"%s\" exists already", kind);
  // Only warned about: the kind may be for relays, and it may come later.
  LibrarySearch search;
  find_library(library, {Dynamic_library_path, pkglib_path}, &search);
  if (search.file[0] == '\0')
    pg::warn(kMissingLibrary,
             "Workers cannot publish to this kind until it is; dynamic_library_path says where they look. A "
             "relay looks on its "
             "own machine.",
             "library \"%s.so\" is not installed in %s", library, search.folders);
  PG_RETURN_VOID();
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_unregister_kind) {
  require_superuser("outbox_unregister_kind");
  if (PG_ARGISNULL(0))
    pg::raise(kInvalidParameter, "Name a kind that outbox_register_kind made.", "kind must not be null");
  const char *kind = text_to_cstring(PG_GETARG_TEXT_PP(0));
  enum class Removal { kNone, kUsed, kDone };
  const Removal removal = pg::spi([&] {
    if (outbox::delete_kind.run({pg::value(kind)}) == 0) return Removal::kNone;
    return pg::Row(0).bool_at(1) ? Removal::kUsed : Removal::kDone;
  });
  if (removal == Removal::kUsed)
    pg::raise(kInvalidParameter, "Drop its destinations first.", "kind \"%s\" has destinations", kind);
  PG_RETURN_BOOL(removal == Removal::kDone);
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_redacted_options) {
  const outbox::Kind *kind = outbox::find_kind(text_to_cstring(PG_GETARG_TEXT_PP(0)));
  PG_RETURN_JSONB_P(outbox::redacted_options(kind, PG_GETARG_JSONB_P(1)));
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_built_in_kinds) {
  InitMaterializedSRF(fcinfo, 0);
  auto *result = reinterpret_cast<ReturnSetInfo *>(fcinfo->resultinfo);
  for (const BuiltInKind *kind : built_in_kinds()) {
    Datum values[] = {
        PointerGetDatum(cstring_to_text_with_len(kind->name.data(), static_cast<int>(kind->name.size()))),
        kind->library ? CStringGetTextDatum(kind->library) : Datum{0}};
    bool nulls[] = {false, !kind->library};
    tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
  }
  return Datum{0};
}

// One row for each option that a kind takes.
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_options_of_kind) {
  const outbox::Kind *kind = outbox::find_kind(text_to_cstring(PG_GETARG_TEXT_PP(0)));
  InitMaterializedSRF(fcinfo, 0);
  if (!kind) return Datum{0};
  auto *result = reinterpret_cast<ReturnSetInfo *>(fcinfo->resultinfo);
  for (const OptionDescription &option : kind->options) {
    const auto as_text = [](std::string_view view) {
      return PointerGetDatum(cstring_to_text_with_len(view.data(), static_cast<int>(view.size())));
    };
    const bool has_range = option.type != OptionType::kBoolean && option.type != OptionType::kEnum &&
                           option.type != OptionType::kUrl;
    const bool has_max = has_range && option.max != std::numeric_limits<int64_t>::max();
    const bool has_default = option.default_value.data() != nullptr;
    Datum values[] = {as_text(option.name),          as_text(option_type_name(option.type)),
                      BoolGetDatum(option.required), as_text(option.default_value),
                      Int64GetDatum(option.min),     Int64GetDatum(option.max),
                      as_text(option.choices),       as_text(option.description)};
    bool nulls[] = {false, false, false, !has_default, !has_range, !has_max, option.choices.empty(), false};
    tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
  }
  return Datum{0};
}
