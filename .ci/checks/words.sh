#!/usr/bin/env bash
# The project speaks of itself alone: no paths of somebody's machine, no marks of unfinished work.
set -euo pipefail
. "$(dirname "$0")/../../scripts/lib.sh"
cd "$top"
status=0
while IFS= read -r file; do
  if grep -nIE '(^|[^A-Za-z0-9_.])/(home|root|work|Users)/[A-Za-z]|\b(TODO|FIXME|XXX)\b' "$file" | sed "s|^|$file:|"; then status=1; fi
done < <(project_files | grep -v '^\.ci/checks/')
exit $status
