#!/usr/bin/python3
"""Includes go one way: core <- pg <- storage <- {idempotency, outbox, sink} <- runtime <- module.cpp, and sinks see only core and
the sink interface. Headers of the server come through pg/server.hpp, last; client libraries stay in their sink."""
import re

from common import TOP, complain, cpp_files, finish, line_of, without_comments

ALLOWED = {  # folder of the file -> folders and files that it may include, besides its own
    "core": ["sink/abi.h"],
    "pg": ["core", "settings.hpp"],
    "settings.cpp": ["settings.hpp", "pg"],
    "settings.hpp": [],
    "storage": ["core", "pg", "settings.hpp"],
    "idempotency": ["core", "pg", "storage", "settings.hpp"],
    # An emit needs the key to be owned, and tells the workers at commit: these two headers and no others.
    "outbox": ["core", "pg", "storage", "settings.hpp", "idempotency/claims.hpp", "runtime/wakeup.hpp"],
    "access": ["core", "pg"],
    "sink": ["core"],
    "runtime": ["core", "pg", "storage", "settings.hpp", "idempotency", "outbox", "sink"],
    "module.cpp": ["core", "pg", "settings.hpp", "idempotency", "outbox", "sink", "runtime"],
    "relay": ["core", "sink", "sinks/connector.hpp", "sinks/copy_result.hpp"],
    "sinks": ["core", "sink/abi.h", "sink/kit.hpp", "sinks/resolver.hpp", "sinks/flood_guard.hpp", "sinks/tls_context.hpp",
              "sinks/connector.hpp", "sinks/copy_result.hpp", "sinks/handshake_limit.hpp", "sinks/process_end.hpp"],
}
CLIENT_HEADERS = {  # header -> the only folder, or folders, for it
    r"curl/": "sinks/http/",
    r"openssl/": ("pg/digest.cpp", "sinks/connector.", "sinks/http/", "sinks/kafka/certificate_check.", "sinks/kafka/producer.", "sinks/rabbitmq/",
                  "sinks/redis/", "sinks/handshake_limit.", "sinks/tls_context."),
    r"libpq-fe\.h": ("sinks/postgres/", "sinks/connector.", "sinks/copy_result.", "relay/"),
    r"librdkafka/": "sinks/kafka/",
    r"nats/": "sinks/nats/",
    r"hiredis/": "sinks/redis/",
    r"(amqp|rabbitmq-c/)": "sinks/rabbitmq/",
}

for path in cpp_files():
    name = path.relative_to(TOP / "src").as_posix()
    folder = name.split("/")[0]
    text = path.read_text()
    code = without_comments(text, strings=False)
    own = "/".join(name.split("/")[:2]) if folder == "sinks" else folder
    if folder not in ALLOWED:
        complain(path, 1, f"{folder} has no place in the layers: give it one in .ci/checks/layering.py")
        continue
    server_seen = False
    for include in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', code, re.M):
        kind, header = include.groups()
        line = line_of(code, include.start())
        if server_seen and name != "pg/server.hpp":
            complain(path, line, f'{header} comes after "pg/server.hpp", which must be last')
        server_seen = header == "pg/server.hpp"
        for pattern, place in CLIENT_HEADERS.items():
            if re.match(pattern, header) and not name.startswith(place):
                complain(path, line, f"{header} is for {place} only")
        if kind == "<":
            continue
        if (TOP / "src" / header).exists():
            if not any(header == a or header.startswith(a + "/") for a in [*ALLOWED[folder], own]):
                complain(path, line, f"{folder} must not include {header}")
        elif name != "pg/server.hpp":
            complain(path, line, f"{header} is no header of ours; the server's come through pg/server.hpp only")
    if name not in ("pg/compat.hpp", "pg/server.hpp"):
        for use in re.finditer(r"\bPG_(VERSION_NUM|MAJORVERSION_NUM)\b", code):
            complain(path, line_of(code, use.start()), "version differences live in pg/compat.hpp")
finish()
