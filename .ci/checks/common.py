"""For the checks in Python: the files of the project, and C++ without comments and strings."""
import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
findings = []


def complain(path, line, text):
    findings.append(f"{path.relative_to(TOP)}:{line}: {text}")


def finish():
    print("\n".join(findings))
    sys.exit(1 if findings else 0)


def cpp_files():
    return sorted(p for p in (TOP / "src").rglob("*") if p.suffix in (".cpp", ".hpp", ".h"))


_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)


def without_comments(text, strings=True):
    """Blanks comments, and the insides of strings too unless told otherwise; lines and columns stay."""
    def blank(match):
        token = match.group(0)
        if token[0] != "/" and not strings:
            return token
        return re.sub(r"[^\n]", " ", token) if token[0] == "/" else token[0] + re.sub(r"[^\n]", " ", token[1:-1]) + token[-1]
    # Digit separators look like characters.
    return _TOKEN.sub(blank, re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", "_", text))


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1
