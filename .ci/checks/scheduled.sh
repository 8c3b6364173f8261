#!/usr/bin/env bash
# Every file that looks like a test or a source is used by something, and everything that is listed exists.
set -euo pipefail
. "$(dirname "$0")/../../scripts/lib.sh"
cd "$top"
status=0
complain() { echo "$*"; status=1; }
has() { [ -e "$1" ] || complain "$2"; }

mapfile -t files < <(project_files)
for file in "${files[@]}"; do
  name=$(basename "$file")
  case $file in
    sql/*.sql) has "expected/${name%.sql}.out" "$file: there is no expected/${name%.sql}.out" ;;
    expected/*_[0-9].out) has "sql/${name%_[0-9].out}.sql" "$file belongs to no test" ;;
    expected/*.out) has "sql/${name%.out}.sql" "$file belongs to no test" ;;
    test/model/run | test/upgrade/run) grep -qE "step .*$file\$" scripts/check || complain "scripts/check does not run $file" ;;
    test/model/*) ;;
    test/isolation/specs/*.spec) has "test/isolation/expected/${name%.spec}.out" "$file: there is no expected output" ;;
    test/isolation/expected/*_[0-9].out) has "test/isolation/specs/${name%_[0-9].out}.spec" "$file belongs to no test" ;;
    test/isolation/expected/*.out) has "test/isolation/specs/${name%.out}.spec" "$file belongs to no test" ;;
    test/tap/*.pl | test/tap/*.pm) ;;
    test/unit/*_test.cpp) ;;
    test/fuzz/*.hpp) ;; # what the targets have in common
    test/fuzz/*.cpp) has "test/fuzz/corpus/${name%.cpp}" "$file: there are no inputs to begin with" ;;
    test/fuzz/corpus/*/*) has "test/fuzz/$(basename "$(dirname "$file")").cpp" "$file belongs to no target" ;;
    test/system/brokers/contract.py) ;; # tests that each kind of broker takes over
    test/system/test_*.py | test/sinks/test_*.py | test/upgrade/test_*.py)
      grep -qE '^ *def test_|^from brokers.contract import' "$file" || complain "$file has no test"
      ;;
    test/system/*.py | test/sinks/*.py) ! grep -qE '^ *def test_' "$file" || complain "$file has tests, but pytest reads test_*.py only" ;;
    test/torture/README.md) ;;
    test/torture/*.py) # reached from scripts/torture
      module=$(basename "$file" .py)
      grep -qE "^(from|import) $module\b|-m $module\b" test/torture/*.py scripts/torture || complain "nothing in test/torture imports $file"
      ;;
    test/*/conftest.py | test/pytest.ini | test/README.md) ;;
    test/*/*/*) ;; # what the tests of a folder bring along
    test/*) complain "$file: no runner reads it" ;;
    src/*.cpp) awk -v file="$file" '$2 == file { found = 1 } END { exit !found }' src/sources.txt || complain "$file is not in src/sources.txt" ;;
    .ci/checks/common.py) ;;
    .ci/checks/*.sh | .ci/checks/*.py)
      [ -x "$file" ] || complain "$file is not executable"
      grep -qxF "## ${name%.*}" .ci/checks/README.md || complain "$file is not explained in .ci/checks/README.md"
      ;;
  esac
done
while read -r _ file; do
  case $file in *.cpp) has "$file" "src/sources.txt names $file, which is not there" ;; esac
done < <(grep -v '^#' src/sources.txt)
awk '!/^#/ && seen[$0]++ { print "src/sources.txt names " $2 " twice"; found = 1 } END { exit found }' src/sources.txt || status=1
grep -qE 'step .*scripts/fuzz --seconds' scripts/check || complain "scripts/check does not run scripts/fuzz"
grep -qE 'step .*\.ci/checks/run$' scripts/check || complain "scripts/check does not run .ci/checks/run"
grep -qE 'step .*\.ci/checks/analysis\.sh$' scripts/check || complain "scripts/check does not run .ci/checks/analysis.sh"
version=$(sed -n "s/^default_version = '\(.*\)'/\1/p" retrysafe.control)
[ "$(grep -c "\"version\": \"$version\"" META.json)" = 2 ] || complain "META.json is not of version $version"
grep -q "$version" CHANGELOG.md || complain "CHANGELOG.md does not tell of version $version"
exit $status
