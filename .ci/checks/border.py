#!/usr/bin/python3
"""The border between C++ and the server's jumps stays in src/pg."""
import re

from common import TOP, complain, cpp_files, finish, line_of, without_comments

# Where a construct is right outside of its folder, and why.
EXCEPTIONS = {
    ("src/outbox/eras.cpp", "ereport"): "FATAL while the server starts, before there is anything pg::raise could end",
    ("src/outbox/append.cpp", "pg_usleep"): "widens the race that a fault point opens",
}

RULES = [  # pattern, folders where it may stand, what to do instead
    (r"\bereport\s*\(", ["src/pg/"], "raise with pg::raise, pg::warn or pg::log"),
    (r"\b(PG_TRY|PG_CATCH|PG_FINALLY|PG_RE_THROW|PG_THROW|ReThrowError)\b", ["src/pg/"], "catch with pg::call"),
    (r"\b(sigsetjmp|siglongjmp|setjmp|longjmp)\s*\(", ["src/pg/"], "catch with pg::call"),
    (r"\b(std::j?thread|std::async|pthread_create)\b", ["src/sinks/"], "only sinks may have threads"),
    (r"\b(sleep|usleep|nanosleep|pg_usleep|sleep_for|sleep_until)\s*\(", [], "wait with WaitLatch or poll"),
    (r"\b(fork|vfork|system|popen|execv[pe]*|execl[pe]*)\s*\(", [], "no processes from a server process"),
    (r"\b(Async_Notify|NOTIFY|pg_notify)\b", [], "wake with a latch: NOTIFY takes a lock of the whole server at commit"),
    (r"\b(std::(cout|cerr|clog)|puts|printf)\b", [], "log through pg::log or the sink's log"),
]
ELOG = re.compile(r"\belog\s*\(\s*(\w+)\s*,")
RAISING = re.compile(r"\b(ereport|elog|palloc\w*|pstrdup|psprintf|repalloc|CHECK_FOR_INTERRUPTS|ReThrowError|PG_RE_THROW"
                     r"|raise\w*|pg::\w+|SPI_\w+|AbortCurrentTransaction|CopyErrorData|FlushErrorState)\s*\(")


def block_end(code, start):
    """The offset after the brace that closes the first one at or after `start`."""
    depth = 0
    for i in range(code.index("{", start), len(code)):
        depth += {"{": 1, "}": -1}.get(code[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced braces")


for path in cpp_files():
    name = path.relative_to(TOP).as_posix()
    text = path.read_text()
    code = without_comments(text)
    for pattern, folders, instead in RULES:
        for use in re.finditer(pattern, code):
            word = re.match(r"[\w: ]+", use.group(0)).group(0).strip()
            if any(name.startswith(f) for f in folders) or (name, word) in EXCEPTIONS:
                continue
            complain(path, line_of(code, use.start()), f"{word}: {instead}")
    if not name.startswith("src/pg/"):
        for use in ELOG.finditer(code):
            if use.group(1) != "ERROR" or not text[use.end():].lstrip().startswith('"retrysafe: '):
                complain(path, line_of(code, use.start()),
                         'elog is for what cannot happen: elog(ERROR, "retrysafe: …"); else pg::raise, pg::warn, pg::log')
    for handler in re.finditer(r"\bcatch\s*\(", code):
        body = code[handler.end():block_end(code, handler.end())]
        for call in RAISING.finditer(body):
            complain(path, line_of(code, handler.end() + call.start()),
                     f"{call.group(1)} inside a catch block: a jump would leave the exception object alive; "
                     "copy what is needed, leave the block, then raise")
finish()
