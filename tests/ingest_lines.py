"""Lines of landing files as people and programs write them, most of them in order, some of them odd: strategies."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from headrace.config import LandingSource

COLUMNS = [
    {"name": "id", "type": "string", "required": True},
    {"name": "ts", "type": "timestamp"},
    {"name": "at", "type": "timestamp"},
    {"name": "i", "type": "int"},
    {"name": "b", "type": "bigint"},
    {"name": "f", "type": "float"},
    {"name": "d", "type": "double"},
    {"name": "ok", "type": "boolean"},
    {"name": "day", "type": "date"},
    {"name": "tags", "type": "array<string>"},
    {"name": "sizes", "type": "array<int>"},
    {"name": "weights", "type": "array<float>"},
]
NAMES = [str(c["name"]) for c in COLUMNS]
TABLE = {
    "columns": COLUMNS,
    "keys": ["id"],
    "event_time": "ts",
    "late_days": 2,
    "expectations": {"ranges": {"i": [-1000, 2000], "d": [None, 1e300]}, "null_rate": {"f": 1, "tags": 1}},
}

# --- values as people write them -------------------------------------------------------------------------------------

INTEGERS = st.one_of(
    st.integers(-50, 50).map(str),
    st.integers(-(2**64), 2**64).map(str),
    st.sampled_from(
        [
            "+5",
            "007",
            "-0",
            "0x10",
            "1.0",
            "1e3",
            "2147483648",
            "-2147483648",
            "9223372036854775807",
            "١٢",
            "1_000",
            "5L",
        ]
    ),
    st.sampled_from([" 7", "7 ", "\t7", "--1", "-"]),
)
NUMBERS = st.one_of(
    st.integers(-50, 50).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(-1000, 1000, places=20, allow_nan=False).map(str),
    st.sampled_from(
        [
            "1e999",
            "-1e999",
            "1e-400",
            "NaN",
            "nan",
            "inf",
            "-Infinity",
            "12d",
            "1f",
            "0x1p3",
            "1.",
            ".5",
            "+.5",
            "1e5",
            "1E+5",
            "1e",
            "-0",
            "-0.0",
            "1,5",
        ]
    ),
    # Halfway between two floats, which a double is exactly.
    st.integers(2**24, 2**25).map(lambda n: repr((n + 0.5) / 2**30)),
    st.integers(2**53, 2**62).map(str),
)
TIMES = st.one_of(
    st.datetimes().map(lambda t: t.isoformat()),
    st.builds(
        "2026-0{}-{:02d}{}{:02d}:{:02d}{}{}".format,
        st.integers(2, 3),
        st.integers(0, 32),
        st.sampled_from("T T T t_"),
        st.integers(0, 25),
        st.integers(0, 61),
        st.sampled_from(["", ":07", ":07.5", ":59.123456", ":60", ":07.1234567", ":7"]),
        st.sampled_from(["", "Z", "+05:30", "-0330", "+01", " Z", "+19:00", "z", " UTC"]),
    ),
    st.sampled_from(
        ["2026-03-01", "2026-02-29", "2026", "12:30", "0000-01-01", "2026-03-01 05", "2026-03-29T02:30:00"]
    ),
)
EPOCHS = st.one_of(
    st.integers(1_772_300_000_000, 1_772_400_000_000).map(str),
    st.floats(1e12, 2e12).map(repr),
    st.decimals(10**12, 2 * 10**12, places=3).map(str),
    st.sampled_from(["1.7723e12", "-62135596800001", "253402300800000", "1e30", "12:30", "+5"]),
)
WORDS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=8),
    st.sampled_from(["", " ", "NA", "null", 'say "hi"', "a,b", "é", "\ufeffx", "a|b", "\\", "{}", "'", "😀", "a\tb"]),
)
BOOLEANS = st.sampled_from(["true", "false", "T", "f", "YES", "no", "y", "N", "1", "0", "2", "tru", "on"])
DATES = st.one_of(st.dates().map(str), st.sampled_from(["2026-02-30", "2026-3-1", "0001-01-01", "20260301"]))
SCALARS = {"id": WORDS, "ts": TIMES, "at": EPOCHS, "i": INTEGERS, "b": INTEGERS, "f": NUMBERS, "d": NUMBERS}
SCALARS |= {"ok": BOOLEANS, "day": DATES}


def source(**changes: Any) -> LandingSource:
    fields = {"path": "in/{ds}/*", "timestamps": {"at": "epoch_milliseconds"}, **changes}
    return LandingSource.model_validate(fields)


@st.composite
def csv_lines(draw: Any, quote: bool = True) -> str:
    """A line of NAMES by commas: most are in order, some are not."""
    fields = []
    for name in NAMES:
        if name in SCALARS:
            text = draw(st.one_of(st.just(""), SCALARS[name]))
        else:
            elements = {"tags": WORDS, "sizes": INTEGERS, "weights": NUMBERS}[name]
            text = "|".join(draw(st.lists(elements, max_size=3)))
        if any(c in text for c in ',"') or draw(st.integers(0, 9)) == 0:
            text = text if draw(st.integers(0, 9)) == 0 else '"' + text.replace('"', '""') + '"'
        fields.append(text)
    line = ",".join(fields)
    odd = draw(st.integers(0, 29))
    return {0: line + ",", 1: line[:-3], 2: "", 3: "  ", 4: line + "\r", 5: '"' + line, 6: line + "\x00"}.get(odd, line)


def raw(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text)


@st.composite
def json_values(draw: Any, name: str) -> str:
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return str(
            draw(st.sampled_from(["null", "true", "{}", "[]", '{"k": [1]}', "[[1]]", '"x"', "1.50", "Inf", "-"]))
        )
    if name in ("id", "ts", "day"):
        return raw(draw(SCALARS[name]))
    if name == "ok":
        return str(draw(st.sampled_from(["true", "false", "null", '"yes"'])))
    elements = {"tags": WORDS.map(raw), "sizes": INTEGERS, "weights": NUMBERS}
    if name in elements:
        return "[" + ", ".join(draw(st.lists(st.one_of(st.just("null"), elements[name]), max_size=3))) + "]"
    return str(draw(SCALARS[name]))


@st.composite
def json_lines(draw: Any) -> str:
    """An object, most of them whole."""
    parts = [f'"{name}": {draw(json_values(name))}' for name in NAMES if draw(st.integers(0, 9))]
    if draw(st.integers(0, 9)) == 0:
        parts.append(draw(st.sampled_from(['"z": 1', '"z": "a"', '"z": null', '"i": 3', '"\\u0069": 4', '"y": [NaN]'])))
    line = "{" + ", ".join(parts) + "}"
    odd = draw(st.integers(0, 39))
    damages = {
        0: line + line,
        1: line[:-1],
        2: line + " x",
        3: " " + line,
        4: line + " ",
        5: "",
        6: "[1]",
        7: "{}",
        8: "null",
    }
    return damages.get(odd, line + "\r" if odd == 9 else line)
