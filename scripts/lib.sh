# Sourced by the scripts: where things are, and how to run as an ordinary user.
# shellcheck shell=bash

umask 022 # the server's user reads what root builds
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pg_config=${PG_CONFIG:-$(command -v /usr/lib/postgresql/15/bin/pg_config || command -v pg_config || true)}
pg_bindir=${pg_config:+$("$pg_config" --bindir)}
pg_libdir=${pg_config:+$("$pg_config" --pkglibdir)}

say() { printf '%s\n' "$*" >&2; }
die() { say "$(basename "$0"): $*"; exit 1; }

# The server refuses to run as root.
as_user() {
  if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi
}

# The files of the project, as git sees them, for those that copy or look through them.
project_files() {
  git -c safe.directory="$top" -C "$top" ls-files --cached --others --exclude-standard --deduplicate 2>/dev/null |
    while IFS= read -r file; do [ ! -e "$top/$file" ] || printf '%s\n' "$file"; done | grep . ||
    (cd "$top" && find . \( -path ./build -o -path ./.git -o -name __pycache__ \) -prune -o -type f ! -name '*.[od]' ! -name '*.so' \
      ! -path './src/sql/retrysafe--*.sql' ! -path ./retrysafe-relay -printf '%P\n')
}

# A copy of the project in a folder of its own, or a newer state of it: what was built there stays, what is not in the
# project any more goes.
copy_project() {
  mkdir -p "$1"
  project_files | tar -C "$top" -c -T - | tar -C "$1" -x
  comm -13 <(project_files | sort) <(cd "$1" && find src scripts test -type f ! -name '*.pyc' ! -name '*.[do]' ! -name '*.gc*' ! -name 'retrysafe--*.sql' | sort) |
    while IFS= read -r file; do rm "$1/$file"; done
}

# `make install` puts the extension here, and test servers load it from here: below build/ when the server's user can
# read that, else (a clone in root's home) in a folder that only root can write.
stage=$top/build/stage
if [ "$(id -u)" = 0 ] && ! as_user test -r "$top/retrysafe.control"; then
  stage=/var/cache/retrysafe/stage-$(printf '%s' "$top" | sha256sum | cut -c1-12)
fi

build() { # build [MAKE VARIABLES…]
  [ -z "${RETRYSAFE_BUILT:-}" ] || return 0
  mkdir -p "$top/build" "$stage"
  make -C "$top" -s -j"$(nproc)" PG_CONFIG="$pg_config" WERROR=1 FAULT_POINTS=1 "$@" >"$top/build/make.log" 2>&1 &&
    make -C "$top" -s PG_CONFIG="$pg_config" WERROR=1 FAULT_POINTS=1 install DESTDIR="$stage" "$@" >>"$top/build/make.log" 2>&1 ||
    { tail -40 "$top/build/make.log" >&2; die "the build failed, see build/make.log"; }
  chmod -R a+rX "$stage"
}

# The lines of postgresql.conf that let a server find the staged extension.
staged_settings() {
  local version
  version=$("$pg_config" --version | sed 's/[^0-9]*\([0-9]*\).*/\1/')
  if [ "$version" -ge 18 ]; then
    printf "extension_control_path = '%s:\$system'\n" "$stage$("$pg_config" --sharedir)"
  else
    printf "extension_destdir = '%s'\n" "$stage" # Debian's own, before the server had such a setting
  fi
  printf "dynamic_library_path = '%s:%s'\n" "$stage$pg_libdir" "$pg_libdir"
}

# The PostgreSQL driver of Node.js, from its registry, for what runs only where Node.js is.
node_driver() {
  [ ! -d "$top/build/node/node_modules/pg" ] || return 0
  command -v npm >/dev/null || return 1
  mkdir -p "$top/build/node"
  npm install --prefix "$top/build/node" --no-save --no-audit --no-fund pg@8 >"$top/build/node-driver.log" 2>&1 </dev/null
}

# Where this machine's apt gets Debian from.
debian_mirror() {
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 'Component: main' | grep -m 1 .
}

# Below those that the system gives to outgoing connections, one of which could take it while the server is down.
free_port() {
  /usr/bin/python3 -c '
import contextlib, random, socket
while True:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", random.randrange(15000, 32000)))
        print(probe.getsockname()[1])
        break'
}

# A folder with a pg_config and all programs of the server's version, in which the server itself is started by way of
# the given command: below a checker of memory, say. Prints the path of the pg_config.
wrapped_server() { # FOLDER COMMAND…
  local folder=$1 program
  shift
  rm -rf "$folder" && mkdir -p "$folder"
  for program in "$pg_bindir"/*; do ln -s "$program" "$folder/"; done
  rm -f "$folder/postgres" "$folder/pg_config" "$folder/pg_ctl"
  # A restart would start what the server wrote down of itself, which is not how it was called.
  cat >"$folder/pg_ctl" <<SCRIPT
#!/bin/sh
exec "$pg_bindir/pg_ctl" -p "$folder/postgres" "\$@"
SCRIPT
  cp --remove-destination -L "$pg_bindir/initdb" "$folder/initdb" # looks for the server beside itself
  cat >"$folder/postgres" <<SCRIPT
#!/bin/sh
case \$1 in -V | --version | --boot | --single | -C | --check) exec "$pg_bindir/postgres" "\$@" ;; esac
exec $* "$pg_bindir/postgres" "\$@"
SCRIPT
  cat >"$folder/pg_config" <<SCRIPT
#!/bin/sh
if [ "\$*" = --bindir ]; then echo "$folder"; else exec "$pg_config" "\$@"; fi
SCRIPT
  chmod +x "$folder/postgres" "$folder/pg_config" "$folder/pg_ctl"
  echo "$folder/pg_config"
}
