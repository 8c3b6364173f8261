"""Adds up what gcov has counted below a folder, for the sources in its src/: coverage_report.py FOLDER REPORT"""
import collections
import itertools
import json
import pathlib
import subprocess
import sys

folder, report = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
counted = collections.defaultdict(lambda: collections.defaultdict(int))  # file: line: times it ran
owner = {}  # file, line: function
notes = sorted(folder.rglob("*.gcno"))
for counts in folder.rglob("*.gcda"):
    if counts.stat().st_size == 0:
        counts.unlink()  # laid there for whoever would count, and nobody did
for at in range(0, len(notes), 20):
    text = subprocess.run(["gcov", "--json-format", "--stdout", *map(str, notes[at:at + 20])], cwd=folder, check=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    for unit in map(json.loads, filter(None, text.splitlines())):
        for source in unit["files"]:
            path = pathlib.Path(unit["current_working_directory"], source["file"]).resolve()
            if folder / "src" not in path.parents:
                continue
            lines = counted[path.relative_to(folder)]
            names = {function["name"]: function["demangled_name"] for function in source["functions"]}
            for line in source["lines"]:
                lines[line["line_number"]] += line["count"]
                owner[path.relative_to(folder), line["line_number"]] = names.get(line.get("function_name"), "")
            for function in source["functions"]:
                if function["start_line"] in lines:  # where a lambda begins gcov counts nothing
                    lines[function["start_line"]] += function["execution_count"]

report.mkdir(exist_ok=True)
total = covered = 0
with open(report / "files", "w") as files, open(report / "uncovered", "w") as uncovered:
    for path in sorted(filter(counted.get, counted)):
        lines = counted[path]
        ran = sum(times > 0 for times in lines.values())
        total, covered = total + len(lines), covered + ran
        print(f"{100 * ran / len(lines):6.1f} %  {ran:5} of {len(lines):5}  {path}", file=files)
        source = (folder / path).read_text().splitlines()
        missed = (number for number in sorted(lines) if not lines[number])
        for function, numbers in itertools.groupby(missed, lambda number: owner[path, number]):
            print(f"{path}: {function}", file=uncovered)
            for number in numbers:
                print(f"{number:6}: {source[number - 1].strip()}", file=uncovered)
print(*open(report / "files"), sep="", end="")
print(f"{100 * covered / total:.1f} % of {total} lines ran; {total - covered} did not, see {report / 'uncovered'}")
