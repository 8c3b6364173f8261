#!/usr/bin/env bash
# No object runs code when its library is loaded (that is in the postmaster) or when the process exits (that is while
# threads of client libraries still run). Reads the objects that `make` built.
set -euo pipefail
cd "$(dirname "$0")/../.."
mapfile -t objects < <(find src -name '*.o' | sort)
[ ${#objects[@]} -gt 0 ] || { echo "there is no build: run make"; exit 1; }
! nm -A "${objects[@]}" | awk '/_GLOBAL__(sub_)?I_/ { print $1 " has an initializer that runs at load"; found = 1 }
                                / __cxa_atexit$/ { print $1 " registers a destructor that runs at exit"; found = 1 }
                                END { exit !found }'
