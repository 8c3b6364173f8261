"""The odd payloads and event keys of case 22: each is refused, or arrives bit for bit at every kind of destination."""
import json
from dataclasses import dataclass, field

TYPE = "odd %_*?\\ \"type\" é 😀"
HEADERS = {"h-1": "é 😀 %41 \"'\\", "empty": ""}


@dataclass
class Value:
    """An event to emit. `stored` is the payload's text once it is jsonb, where it differs from what is written here;
    `error` the SQLSTATE with which the emit is refused."""
    about: str
    key: str = None
    payload: str = "{}"
    stored: str = None
    error: str = None
    type: str = TYPE
    headers: dict = field(default_factory=lambda: HEADERS)

    def __post_init__(self):
        # One that must not be delivered would show up under its key.
        self.key = self.about if self.key is None else self.key
        self.stored = self.payload if self.stored is None else self.stored

    def extensions(self):
        """The headers under the names that CloudEvents allows."""
        return {name.replace("-", ""): text for name, text in self.headers.items()}


VALUES = [
    # -- payloads --
    Value("empty object", payload="{}"),
    Value("SQL null", payload=None),
    Value("JSON null", payload="null"),
    Value("null in an object", payload='{"payload": null}'),
    Value("four-byte emoji", payload='{"😀": "😀 👩\u200d👩"}'),
    Value("escaped emoji", payload='"\\ud83d\\ude00"', stored='"😀"'),
    Value("first and last of four bytes", payload='"\U00010000\U0010ffff"'),
    Value("controls", payload='"\\u0001\\b\\t\\n\\f\\r\\u001b[31m\\u001f\x7f\x85"'),
    Value("text that looks like an escape", payload='"\\\\u0000 \\\\ud83d"'),
    Value("line separators, a byte order mark and no characters", payload='"\u2028\u2029\ufeff\ufffe\uffff"'),
    Value("composed and decomposed", payload='["\u00e9", "e\u0301"]'),
    Value("numbers", payload='[1.50, 9007199254740993, -0.0, 1e3, 0.1e-5]',
          stored='[1.50, 9007199254740993, 0.0, 1000, 0.000001]'),
    Value("small ones", payload='[0, false, "", [], {}]'),
    Value("zero", payload="0"), Value("false", payload="false"), Value("empty text", payload='""'),
    Value("keys of an object", payload='{"": 1, "\\"": 2, "\\\\": 3, "\\r\\n": 4}'),
    Value("quotes, markup and a statement", payload='"\'\\"</script>\'; DROP TABLE x; --"'),
    Value("an envelope", payload='{"id": "1", "data": {"data": null}, "payload": {}, "specversion": "0"}'),
    Value("more than one read", payload=json.dumps(["é😀" * 50_000], ensure_ascii=False)),
    Value("as deep as may be", payload="[" * 500 + "]" * 500),
    Value("objects as deep as may be", payload='{"a": ' * 499 + "{}" + "}" * 499),
    Value("one deeper", payload="[" * 501 + "]" * 501, error="RS110"),
    Value("an object in the deepest place but one", payload="[" * 499 + '{"a": {}}' + "]" * 499, error="RS110"),
    Value("escaped U+0000", payload='"\\u0000"', error="22P05"),
    Value("escaped U+0000 in a name", payload='{"a\\u0000": 1}', error="22P05"),
    Value("lone high surrogate", payload='"\\ud83d"', error="22P02"),
    Value("lone high surrogate before text", payload='"\\ud83dx"', error="22P02"),
    Value("lone low surrogate", payload='["\\ude00"]', error="22P02"),
    Value("lone low surrogate in a name", payload='{"\\ude00": 1}', error="22P02"),
    Value("surrogates in the wrong order", payload='"\\ude00\\ud83d"', error="22P02"),
    Value("two high surrogates", payload='"\\ud83d\\ud83d"', error="22P02"),
    Value("no payload at all", payload="", error="22P02"),
    # -- event keys --
    Value("no bytes", "", error="RS101"),
    Value("one byte", "k"),
    Value("what numbered events have", "k~1", error="RS101"), Value("the mark alone", "k~"), Value("digits alone", "1"),
    Value("another case", "K"),
    Value("blank behind", "k "), Value("blank before", " k"), Value("blank", " "),
    Value("255 bytes", "x" * 255),
    Value("256 bytes", "x" * 256, error="RS101"),
    Value("255 bytes in 128 characters", "é" * 127 + "x"),
    Value("256 bytes in 128 characters", "é" * 128, error="RS101"),
    Value("255 bytes that end in an emoji", "x" * 251 + "😀"),
    Value("256 bytes that end in an emoji", "x" * 252 + "😀", error="RS101"),
    Value("a second header", "a\r\nX-Evil: 1"), Value("an end of the head", "\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"),
    Value("line ends", "\n"), Value("quotes", "'\"`$$"), Value("two quotes", "''"), Value("parameter", "$1 %s :x"),
    Value("per cent", "%"), Value("underscore", "_"), Value("asterisk", "*"), Value("backslash", "\\"),
    Value("all of them", "%_*?\\[a-z]"), Value("encoded", "%0d%0a%00%25"), Value("statement", "'; DROP TABLE x; --"),
    Value("emoji", "😀"), Value("composed", "\u00e9"), Value("decomposed", "e\u0301"),
    Value("right to left", "\u202eabc"),
    Value("control characters", "\x01\x1b[31m\x7f\x85"), Value("another script", "ключ"), Value("null", "null"),
]
ACCEPTED = {value.key: value for value in VALUES if value.error is None}
assert len({value.key for value in VALUES}) == len(VALUES)


def emit(db, value):
    """The key of an accepted value is also the ordering key and the scope."""
    same = value.key if value.error is None else None
    return db.value("SELECT outbox_emit(NULL, %s, %s, %s, %s, %s, scope => %s)", value.key, value.type, value.payload, same,
                    json.dumps(value.headers, ensure_ascii=False), same or "")
