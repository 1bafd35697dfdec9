"""Landing files to the lake: each row compared with a plain-Python reading of the same files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.stage.manifest import Manifest
from tests.ingest_support import D1, D2, NAMES, POSITION, event, jsonl, make_spec, put, run, table, version

# --- an independent reading, without Spark ---------------------------------------------------------------------------


def plain_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    body = path.read_bytes()
    text = gzip.decompress(body) if path.suffix == ".gz" else body
    lines = text.split(b"\n")
    yield from enumerate(lines[:-1] if lines[-1] == b"" else lines, 1)


def plain_rows(path: Path) -> Iterator[tuple[int, str, dict[str, Any] | str]]:
    """(line, text, fields as text or lists; or why the line is broken)."""
    header: list[str] | None = None
    for number, raw in plain_lines(path):
        try:
            line = raw.decode().rstrip("\r")
        except UnicodeDecodeError:
            yield number, raw.decode(errors="replace").rstrip("\r"), "not UTF-8 text"
            continue
        if number == 1:
            line = line.removeprefix("\ufeff")
        if ".csv" in path.name:
            if header is None:
                (header,) = csv.reader([line])
                continue
            if not line.strip():
                continue
            fields = next(csv.reader(io.StringIO(line)))
            if len(fields) != len(header):
                yield number, line, "wrong number of fields"
                continue
            named: dict[str, Any] = {k: v or None for k, v in zip(header, fields, strict=True)}
            for name in ("tags", "sizes"):
                named[name] = named[name].split("|") if named.get(name) else None
            yield number, line, named
        elif line.strip():
            try:
                parsed = json.loads(line, parse_constant=str)
                assert isinstance(parsed, dict)
            except (ValueError, AssertionError):
                yield number, line, "not a JSON object"
                continue
            yield number, line, parsed


def plain_value(name: str, value: Any) -> tuple[Any, bool]:
    """(typed value, whether it could be read)."""
    if value is None:
        return None, True
    if name in ("tags", "sizes"):
        if not isinstance(value, list):
            return None, False
        items = [plain_value("note" if name == "tags" else "hour", v) for v in value]
        return [v for v, _ in items], all(ok for _, ok in items)
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    if name in ("id", "note"):
        return text, True
    if name in ("user", "hour"):
        ok = re.fullmatch(r"[+-]?\d+", text.strip()) is not None and abs(int(text)) < 2 ** (
            63 if name == "user" else 31
        )
        return (int(text), True) if ok else (None, False)
    if name == "price":
        try:
            number = float(text)
        except ValueError:
            return None, False
        return (number, True) if math.isfinite(number) else (None, False)
    if not re.match(r"\d{4}-\d\d-\d\d", text):
        return None, False
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None, False
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment, True


def plain_ingest(ws: Workspace, days: Sequence[str], late_days: int = 1) -> tuple[list[Any], list[Any], Counter[str]]:
    """(events, quarantine without reasons' wording, rows by outcome) of days loaded in order."""
    good: list[Any] = []
    bad: list[Any] = []
    seen: dict[str, datetime] = {}
    counts: Counter[str] = Counter()
    for ds in days:
        start = datetime.fromisoformat(ds)
        for path in sorted((ws.home / "in" / ds).iterdir()):
            name = str(path.relative_to(ws.home))
            for number, text, fields in plain_rows(path):
                counts["read"] += 1
                columns: set[str] = set()
                row: dict[str, Any] = {}
                if isinstance(fields, str):
                    columns = {fields}
                else:
                    for column in NAMES:
                        row[column], ok = plain_value(column, fields.get(column))
                        if not ok or (row[column] is None and column in ("id", "ts", "user")):
                            columns.add(column)
                    if row["hour"] is not None and not 0 <= row["hour"] <= 23:
                        columns.add("hour")
                    ts = row["ts"]
                    if ts and not start - timedelta(days=late_days) <= ts < start + timedelta(days=1):
                        columns.add("ts")
                if columns:
                    counts["quarantined"] += 1
                    bad.append((ds, name, number, text, columns))
                elif row["id"] in seen and start - seen[row["id"]] <= timedelta(days=late_days):
                    counts["duplicates"] += 1
                else:
                    seen[row["id"]] = start
                    counts["kept"] += 1
                    good.append({**row, "_source_file": name, "_source_line": number, "ds": ds})
    return good, bad, counts


# --- a day and what is wrong with it ---------------------------------------------------------------------------------

WRONG: list[dict[str, Any] | str] = [
    '{"id": "cut", "ts": "2026-03-01T00:00:00Z", "us',
    '{"id": "a"}{"id": "b"}',
    '{"id": "a"} trailing',
    "[1, 2]",
    "null",
    "plain words",
    event(900, D1, price="12d"),
    event(901, D1, price="0x10"),
    event(902, D1, price="1e999"),
    event(903, D1, price=float("nan")),
    event(904, D1, hour=12.5),
    event(905, D1, hour=3_000_000_000),
    event(906, D1, user=2**63),
    event(907, D1, user="u-17"),
    event(908, D1, ts="2026"),
    event(909, D1, ts="12:30"),
    event(910, D1, ts="2026-02-30T00:00:00Z"),
    event(911, D1, ts=""),
    event(912, D1, hour=24),
    event(913, D1, hour=-1, price="free"),
    event(914, D1, tags="a|b"),
    event(915, D1, sizes=[1, "x"]),
    event(916, D1, id=None),
    {k: v for k, v in event(917, D1).items() if k != "user"},
    event(918, D1, ts="2026-02-27T23:59:59.999Z"),
    event(919, D1, ts="2026-03-02T00:00:00Z"),
    event(920, D1, ts="2026-03-02T00:30:00+00:15", hour="many"),
]
RIGHT: list[dict[str, Any] | str] = [
    *(event(n, D1) for n in range(20)),
    event(20, D1, price=None, hour=None, tags=None, sizes=None, note=None),
    {"id": "e21", "ts": "2026-03-01 05:06:07", "user": "22"},
    event(22, D1, ts="2026-03-01", price="1e3", tags=[], sizes=[], note=""),
    event(23, D1, ts="2026-02-28T00:00:00Z"),
    event(24, D1, ts="2026-03-02T00:30:00+01:00"),
    event(25, D1, note={"nested": [1]}, tags=[None, "x"], hour=" 7 "),
    "",
    "   ",
    event(3, D1, note="again"),
]
CSV = (
    "\ufeffnote,id,ts,user,price,hour,tags,sizes\r\n"
    '"a, ""b""",c1,2026-03-01T01:00:00Z,1,2.5,3,x|y,1|2\r\n'
    ",c2,2026-03-01 01:00:00,2,,,,\r\n"
    "\r\n"
    "short,c3,2026-03-01\r\n"
    "long,c4,2026-03-01,1,2,3,x,1,extra\r\n"
    "note,id,ts,user,price,hour,tags,sizes\r\n"
    "bad,c5,2026-03-01,1,2;5,3,x,1|z\r\n"
    "again,e1,2026-03-01,1,2,3,x,1\r\n"
    "again,c1,2026-03-01,1,2,3,x,1\r\n"
    'last,c6,2026-03-01,1,2,3,x|,"4"'
)


@pytest.fixture(scope="module")
def loaded(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Spec, Manifest]:
    """Two days with everything in them, loaded by one run. Tests only read it."""
    ws = Workspace(tmp_path_factory.mktemp("ingest") / "home")
    mixed = [row for pair in zip_longest(RIGHT, WRONG) for row in pair if row is not None]
    put(ws, f"in/{D1}/part-0 [é].json.gz", jsonl(mixed))
    put(ws, f"in/{D1}/part-1.csv.gz", CSV.encode())
    put(
        ws,
        f"in/{D1}/part-2.jsonl",
        jsonl([event(30, D1)]) + b'{"id": "\xff\xfe"}\n' + jsonl([event(31, D1), event(0, D1)]),
    )
    put(ws, f"in/{D1}/part-3.json.gz", b"")
    late_events = [event(n, D2, ts=f"{D1}T23:00:00Z") for n in (0, 1, 23)]
    put(ws, f"in/{D2}/part-0.json.gz", jsonl([*late_events, event(40, D2), event(40, D2), event(41, D2)]))
    spec = make_spec()
    return ws, spec, run(spec, ws, D2).manifest


def test_rows_and_quarantine_equal_a_plain_reading(
    spark: SparkSession, loaded: tuple[Workspace, Spec, Manifest]
) -> None:
    ws, _, manifest = loaded
    good, bad, counts = plain_ingest(ws, [D1, D2])
    assert counts["duplicates"] == 8
    assert counts["quarantined"] > len(WRONG)
    actual = table(spark, ws, "events")
    assert [{k: r[k] for k in (*NAMES, *POSITION, "ds")} for r in actual] == good
    quarantine = table(spark, ws, "quarantine")
    positions = [(r["ds"], r["_source_file"], r["_source_line"], r["_raw"]) for r in quarantine]
    assert positions == [b[:4] for b in bad]
    for row, (*_, columns) in zip(quarantine, bad, strict=True):
        # A reason names each column at fault, or says why the line as a whole is.
        named = {part.split(": ")[0] for part in row["_reason"].split("; ")}
        assert named == columns, row
    assert manifest.rows == {k: counts[k] for k in ("read", "kept", "quarantined", "duplicates")}
    assert sum(manifest.facts["reasons"].values()) == counts["quarantined"]
    assert manifest.facts["days"] == [D1, D2]
    assert manifest.output("delta").name == "lake/shop/events"
    assert manifest.output("delta").rows == counts["kept"]
    assert manifest.output("quarantine").rows == counts["quarantined"]
    assert manifest.output("delta").version == str(version(ws))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("e900", "price: '12d' is not a double"),
        ("e904", "hour: '12.5' is not an int"),
        ("e907", "user: 'u-17' is not a bigint"),
        ("e911", "ts: '' is not a timestamp"),
        ("e912", "hour: 24 is outside [0, 23]"),
        ("e913", "price: 'free' is not a double; hour: -1 is outside [0, 23]"),
        ("e915", "sizes: '[1,\"x\"]' is not an array<int>"),
        ("e917", "user: required, but null"),
        ("e918", "ts: '2026-02-27 23:59:59.999' is more than 1 day late"),
        ("e919", "ts: '2026-03-02 00:00:00' is after the end of the day"),
    ],
)
def test_reasons_name_column_value_and_type(
    spark: SparkSession, loaded: tuple[Workspace, Spec, Manifest], row: str, reason: str
) -> None:
    (quarantined,) = (r for r in _quarantine_once(spark, loaded[0]) if f'"{row}"' in r["_raw"])
    assert quarantined["_reason"] == reason


_QUARANTINE: dict[Path, list[dict[str, Any]]] = {}


def _quarantine_once(spark: SparkSession, ws: Workspace) -> list[dict[str, Any]]:
    if ws.home not in _QUARANTINE:
        _QUARANTINE[ws.home] = table(spark, ws, "quarantine")
    return _QUARANTINE[ws.home]


def test_reasons_are_counted_by_kind(loaded: tuple[Workspace, Spec, Manifest]) -> None:
    reasons = loaded[2].facts["reasons"]
    assert reasons["not a JSON object"] == 6
    assert reasons["wrong number of fields"] == 2
    assert reasons["not UTF-8 text"] == 1
    assert reasons["price: not a double"] == 6
    assert reasons["hour: outside [0, 23]"] == 1


def test_a_second_run_does_nothing_and_damage_is_noticed(
    spark: SparkSession, loaded: tuple[Workspace, Spec, Manifest]
) -> None:
    ws, spec, manifest = loaded
    outcome = run(spec, ws, D2)
    assert outcome.skipped
    assert outcome.manifest == manifest
    assert list((ws.spark_local / "ingest").local_path().glob("*/*")) == []
    # Without its manifest the day is still known to be loaded: nothing is read, the same is said of it.
    path = ws.manifest("shop", D2, "ingest").local_path()
    path.unlink()
    rerun = run(spec, ws, D2).manifest
    assert (rerun.rows, rerun.facts, rerun.outputs) == (manifest.rows, manifest.facts, manifest.outputs)
    # A data file that goes missing is loaded again, that day alone.
    rows_before = table(spark, ws, "events")
    log = DeltaLog(ws.table("shop", "events"))
    files = log.files(int(manifest.output("delta").version))
    assert files is not None
    lost = next(f for f in files if f.partition["ds"] == D2)
    lost.path.remove()
    outcome = run(spec, ws, D2)
    assert outcome.reason == f"{lost.path} is gone"
    assert log.version == int(manifest.output("delta").version) + 1
    assert table(spark, ws, "events") == rows_before
