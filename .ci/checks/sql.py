#!/usr/bin/python3
"""The install script runs as a superuser: nothing in it may resolve to an object that somebody else made."""
import re

from common import TOP, complain, finish, line_of

BUILT_IN_SYNTAX = {  # look like calls, but the grammar resolves them to pg_catalog
    "coalesce", "greatest", "least", "nullif", "exists", "cast", "extract", "row", "array", "overlay", "position",
    "substring", "trim", "xmlelement", "grouping", "any", "all", "some", "in", "values", "interval", "numeric", "char",
    "varchar", "bit", "timestamp", "timestamptz", "time",
    "over", "filter", "within", "on", "using", "as", "key", "check", "references", "default", "with", "and", "or", "not",
    "when", "then", "else", "if", "elsif", "case", "loop", "return", "returns", "table", "unique", "where", "select",
    "from", "join", "by", "set", "into", "distinct", "lateral", "call", "function", "conflict", "include",
    "materialized", "execute", "perform", "view", "raise", "union", "except", "intersect", "is", "like", "between",
    "limit", "index", "btree", "hash", "having", "end", "begin", "while", "for",
}

def blank_comments(text):
    return re.sub(r"--[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S)


def blank_strings(text):
    return re.sub(r"'(?:''|[^'])*'", lambda m: "'" + re.sub(r"[^\n]", " ", m.group(0)[1:-1]) + "'", text)


def statements(code):
    """(offset, text) of each statement; dollar quotes hold semicolons."""
    start, i, quote = 0, 0, None
    while i < len(code):
        dollar = re.compile(r"\$\w*\$").match(code, i)
        if dollar:
            quote = None if quote == dollar.group(0) else quote or dollar.group(0)
            i = dollar.end()
            continue
        if code[i] == ";" and quote is None:
            yield start, code[start:i + 1]
            start = i + 1
        i += 1


first_of_install = min((TOP / "src/sql/install").glob("*.sql"))
for path in sorted((TOP / "src/sql").rglob("*.sql")):
    if re.fullmatch(r"retrysafe--\d+\.\d+\.\d+\.sql", path.name):
        continue  # made of the others
    code = blank_strings(blank_comments(path.read_text()))
    upgrade = path.name.startswith("retrysafe--")
    if (upgrade or path == first_of_install) and not re.search(r"^SET LOCAL search_path = pg_catalog, pg_temp;", code, re.M):
        complain(path, 1, "the script must begin with SET LOCAL search_path = pg_catalog, pg_temp")
    for offset, statement in statements(code):
        line = line_of(code, offset + len(statement) - len(statement.lstrip()))
        upper = statement.upper()
        if re.search(r"\b(PG_)?NOTIFY\b", upper):
            complain(path, line, "NOTIFY takes a lock of the whole server at commit: workers are woken by latches")
        if re.search(r"\bIF\s+NOT\s+EXISTS\b", upper):
            complain(path, line, "IF NOT EXISTS takes over an object that somebody else made")
        if re.search(r"\bCREATE\s+OR\s+REPLACE\b", upper) and not upgrade:
            complain(path, line, "CREATE OR REPLACE takes over an object that somebody else made")
        made = re.match(r"\s*CREATE\s+(?:OR\s+REPLACE\s+)?(?:UNIQUE\s+)?(TABLE|VIEW|SEQUENCE|FUNCTION|PROCEDURE|TYPE|AGGREGATE|DOMAIN)\s+(\S+)",
                        statement, re.I)
        if made and not made.group(2).startswith("@extschema@."):
            complain(path, line, f"{made.group(2)}: name the schema, @extschema@")
        if made and made.group(1).upper() in ("FUNCTION", "PROCEDURE"):
            language = re.search(r"\bLANGUAGE\s+'?(\w+)", statement, re.I)
            path_set = re.search(r"\bSET\s+search_path\s*(?:=|TO)\s*([\w, ]+)", statement, re.I)
            names = [n.strip() for n in path_set.group(1).split(",")] if path_set else []
            # C looks names up by itself, and BEGIN ATOMIC binds them when the function is made.
            if not language:
                complain(path, line, f"{made.group(2)}: no LANGUAGE")
            elif language.group(1).lower() != "c" and "BEGIN ATOMIC" not in upper and (names[:1] != ["pg_catalog"] or names[-1].split()[0] != "pg_temp"):
                complain(path, line, f"{made.group(2)}: SET search_path = pg_catalog, pg_temp is missing")
            if re.search(r"\bSECURITY\s+DEFINER\b", upper):
                if language and language.group(1).lower() == "c":
                    complain(path, line, f"{made.group(2)}: C functions switch to the owner themselves, around our tables only")
                elif not names:
                    complain(path, line, f"{made.group(2)}: SECURITY DEFINER without a search_path of its own")
            for word in ("VOLATILE|STABLE|IMMUTABLE", "PARALLEL"):
                if made.group(1).upper() == "FUNCTION" and not re.search(rf"\b({word})\b", upper):
                    complain(path, line, f"{made.group(2)}: state {word.replace('|', ', ')}")
    # Calls. What runs under a pinned search_path is safe, but one rule is easier to see than two.
    for call in re.finditer(r"(?<![\w.@\"$])([a-z_][a-z0-9_]*)\s*\(", code):
        name = call.group(1)
        before = code[:call.start()].rstrip()
        if name in BUILT_IN_SYNTAX:
            continue
        if re.search(r"(\)|\bAS)$", before, re.I):
            continue  # the columns of an alias
        complain(path, line_of(code, call.start()), f"{name}(…) is not qualified: pg_catalog.{name} or @extschema@.{name}")
finish()
