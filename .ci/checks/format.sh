#!/usr/bin/env bash
# C and C++ are formatted by clang-format-14 with .clang-format.
set -euo pipefail
. "$(dirname "$0")/../../scripts/lib.sh"
cd "$top"
project_files | grep -E '^(src|test|bench|examples)/.*\.(c|cpp|hpp|h)$' | xargs clang-format-14 --dry-run -Werror 2>&1 | { grep -E '^[^ ].*error:' || true; } |
  cut -d: -f1 | sort | uniq -c | awk '{ print $2 ": clang-format-14 -i would change it"; found = 1 } END { exit found }'
