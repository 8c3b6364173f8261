#!/usr/bin/env bash
# The libraries export what src/exports.map names. Reads what `make` built, here or in the folder given.
set -euo pipefail
cd "${1:-$(dirname "$0")/../..}"
status=0
for library in retrysafe*.so; do
  [ -e "$library" ] || { echo "there is no build: run make"; exit 1; }
  # An older build says nothing about the list as it is now.
  [ "$library" -nt src/exports.map ] || { echo "$library is older than src/exports.map: run make, or remove what make does not make any more"; exit 1; }
  allowed='retrysafe_sink_module'
  [ "$library" != retrysafe.so ] || allowed='Pg_magic_func|_PG_init|pg_finfo_retrysafe_[a-z0-9_]+|retrysafe_[a-z0-9_]+'
  if nm -D --defined-only --format=posix "$library" | awk '{ print $1 }' | grep -vxE "$allowed" | sed "s/^/$library exports /"; then
    status=1
  fi
done
exit $status
