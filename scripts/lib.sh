# Sourced by the scripts: where things are, and how to run as an ordinary user.
# shellcheck shell=bash

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pg_config=${PG_CONFIG:-$(command -v /usr/lib/postgresql/15/bin/pg_config || command -v pg_config || true)}
pg_bindir=${pg_config:+$("$pg_config" --bindir)}
pg_libdir=${pg_config:+$("$pg_config" --pkglibdir)}
stage=$top/build/stage # make install puts the extension here, and test servers load it from here

say() { printf '%s\n' "$*" >&2; }
die() { say "$(basename "$0"): $*"; exit 1; }

# The server refuses to run as root.
as_user() {
  if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi
}

build() { # build [MAKE VARIABLES…]
  make -C "$top" -s -j"$(nproc)" PG_CONFIG="$pg_config" WERROR=1 FAULT_POINTS=1 "$@" >"$top/build/make.log" 2>&1 &&
    make -C "$top" -s PG_CONFIG="$pg_config" WERROR=1 FAULT_POINTS=1 install DESTDIR="$stage" "$@" >>"$top/build/make.log" 2>&1 ||
    { tail -40 "$top/build/make.log" >&2; die "the build failed, see build/make.log"; }
  chmod -R a+rX "$stage"
}

# The lines of postgresql.conf that let a server find the staged extension.
staged_settings() {
  printf "extension_destdir = '%s'\n" "$stage"
  printf "dynamic_library_path = '%s:%s'\n" "$stage$pg_libdir" "$pg_libdir"
}

free_port() {
  /usr/bin/python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
