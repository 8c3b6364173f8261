#!/usr/bin/python3
"""Every error code is raised, is seen by a test, and is explained to users; every error has a hint."""
import re

from common import TOP, complain, cpp_files, finish, line_of

header = TOP / "src/core/error_codes.hpp"
text = header.read_text()
codes = [(m.group(1), m.group(2), line_of(text, m.start()))
         for m in re.finditer(r"ErrorCode\s+(k\w+)\s*\{\s*\"(RS\d{3})\"\s*\}", text)]
sources = "".join(p.read_text() for p in cpp_files() if p != header)
tests = "".join(p.read_text(errors="replace") for folder in ("expected", "test") for p in (TOP / folder).rglob("*")
                if p.suffix in (".out", ".py", ".pl", ".cpp"))
reference = TOP / "docs/reference.md"
explained = reference.read_text() if reference.exists() else None
hints = (TOP / "src/sql").rglob("*.sql")
sources += "".join(p.read_text() for p in hints)

seen = {}
for name, code, line in codes:
    if code in seen:
        complain(header, line, f"{code} is both {seen[code]} and {name}")
    seen[code] = name
    if not re.search(rf"\b{name}\b|\b{code}\b", sources):
        complain(header, line, f"{name} ({code}) is never raised: remove it")
    elif code not in tests:
        complain(header, line, f"{name} ({code}) is in no test")
    if explained is not None and code not in explained:
        complain(header, line, f"{name} ({code}) is not in docs/reference.md")
if not codes:
    complain(header, 1, "no error codes found")
for path in cpp_files():
    if path == header:
        continue
    source = path.read_text()
    for use in re.finditer(r'"(RS\d{3})"', source):
        complain(path, line_of(source, use.start()), f"{use.group(1)}: use its name from core/error_codes.hpp")
    for use in re.finditer(r'\b(raise|raise_insufficient_privilege|refuse|warn)\((\w+,\s*)?(nullptr|""),', source):
        complain(path, line_of(source, use.start()), f"{use.group(1)}: a hint is missing")
finish()
