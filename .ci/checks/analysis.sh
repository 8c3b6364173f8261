#!/usr/bin/env bash
# clang-tidy (.clang-tidy) and cppcheck over every source of the libraries, with no findings allowed. One pass or
# failure per file for clang-tidy, one for cppcheck. Needs the compilation database of the `clang` preset.
#
# ANALYZER_NODES bounds how far the analyzer follows the paths through one function. Its own default, 225000, takes twice
# as long: worth it before a release.
set -euo pipefail
. "$(dirname "$0")/../../scripts/lib.sh"
cd "$top"
database=build/cmake-clang
[ -e $database/compile_commands.json ] || cmake --preset clang -DPG_CONFIG="$pg_config" >/dev/null
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

mapfile -t sources < <(awk '$2 ~ /\.cpp$/ { print $2 }' src/sources.txt)
tidy() { # FILE
  local log=$2/${1//\//_}
  if clang-tidy-14 --quiet -p "$3" --extra-arg={-Xclang,-analyzer-config,-Xclang,max-nodes="${ANALYZER_NODES:-75000}"} "$1" >"$log" 2>/dev/null && ! grep -q 'warning:\|error:' "$log"; then
    touch "$log.ok"
  fi
}
export -f tidy
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} bash -c 'tidy "$@"' tidy {} "$out" "$database"

passed=0 failed=0
for source in "${sources[@]}"; do
  if [ -e "$out/${source//\//_}.ok" ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    grep -A3 'warning:\|error:' "$out/${source//\//_}" | sed "s|^$top/||" | head -n 40 || true
    echo "  FAIL clang-tidy $source"
  fi
done

# cppcheck does not see that pg::raise ends its caller; null pointers are clang-tidy's part.
if cppcheck --quiet --std=c++20 --language=c++ --enable=warning,performance,portability --inline-suppr -j "$(nproc)" \
  --error-exitcode=1 --suppress=missingIncludeSystem --suppress=nullPointerRedundantCheck --suppress=ctunullpointer -Isrc -DRETRYSAFE_FAULT_POINTS -DRETRYSAFE_VERSION='""' \
  "${sources[@]}" >"$out/cppcheck" 2>&1; then
  passed=$((passed + 1))
else
  failed=$((failed + 1))
  head -n 40 "$out/cppcheck"
  echo '  FAIL cppcheck'
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
