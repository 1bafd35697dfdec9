"""Landing files to the lake: each row compared with a plain-Python reading of the same files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
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
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.ingest import load
from headrace.manifest import Manifest
from headrace.workspace import Workspace
from tests.ingest_support import (
    COLUMNS,
    D1,
    D2,
    D3,
    D4,
    NAMES,
    POSITION,
    event,
    ids,
    jsonl,
    make_spec,
    put,
    run,
    table,
    version,
)

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
    kept: list[Any] = []
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
                    kept.append({**row, "_source_file": name, "_source_line": number, "ds": ds})
    return kept, bad, counts


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
    again = [event(n, D2, ts=f"{D1}T23:00:00Z") for n in (0, 1, 23)]
    put(ws, f"in/{D2}/part-0.json.gz", jsonl([*again, event(40, D2), event(40, D2), event(41, D2)]))
    spec = make_spec()
    return ws, spec, run(spec, ws, D2).manifest


def test_rows_and_quarantine_equal_a_plain_reading(
    spark: SparkSession, loaded: tuple[Workspace, Spec, Manifest]
) -> None:
    ws, _, manifest = loaded
    kept, bad, counts = plain_ingest(ws, [D1, D2])
    assert counts["duplicates"] == 8
    assert counts["quarantined"] > len(WRONG)
    found = table(spark, ws, "events")
    assert [{k: r[k] for k in (*NAMES, *POSITION, "ds")} for r in found] == kept
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
    (found,) = (r for r in _quarantine_once(spark, loaded[0]) if f'"{row}"' in r["_raw"])
    assert found["_reason"] == reason


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
    again = run(spec, ws, D2).manifest
    assert (again.rows, again.facts, again.outputs) == (manifest.rows, manifest.facts, manifest.outputs)
    # A data file that goes missing is loaded again, that day alone.
    before = table(spark, ws, "events")
    log = DeltaLog(ws.table("shop", "events"))
    files = log.files(int(manifest.output("delta").version))
    assert files is not None
    lost = next(f for f in files if f.partition["ds"] == D2)
    lost.path.remove()
    outcome = run(spec, ws, D2)
    assert "rows of version" in outcome.reason
    assert log.version == int(manifest.output("delta").version) + 1
    assert table(spark, ws, "events") == before


# --- what stops a day ------------------------------------------------------------------------------------------------


def test_expectations_stop_the_day_before_anything_of_it_is_committed(spark: SparkSession, ws: Workspace) -> None:
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(n, D1) for n in range(14, 24)]))
    late = [event(n, D1, note=None) for n in range(100, 106)]
    put(ws, f"in/{D2}/a.json.gz", jsonl([*late, event(106, D1), "bad", "bad", "bad"]))
    strict = {"min_rows": 8, "max_bad_rate": 0.2, "null_rate": {"note": 0.5}, "freshness_hours": 12}
    spec = make_spec(expectations=strict)
    with pytest.raises(UserError) as e:
        run(spec, ws, D2)
    told = str(e.value).splitlines()
    assert told[0] == f"{D2} breaks 4 of its expectations; nothing of the day was loaded:"
    assert told[1:5] == [
        "  min_rows: 7 rows, at least 8 wanted",
        "  max_bad_rate: 0.3, at most 0.2 wanted",
        "  null_rate.note: 0.857143, at most 0.5 wanted",
        "  freshness_hours: the newest event is 37.5 hours before the end of the day, at most 12 wanted",
    ]
    assert told[5] == "  bad rows: not a JSON object (3)"
    # The day before it was fine, and is loaded.
    assert list(ids(spark, ws)) == [D1]
    assert table(spark, ws, "quarantine") == []
    assert Manifest.load(ws.manifest("shop", D2, "ingest")) is None
    # Looser limits are another run; stricter ones are asked of a day that is loaded already, too.
    loose = make_spec(expectations={"max_bad_rate": 0.3, "null_rate": {"note": 0.9}})
    facts = run(loose, ws, D2).manifest.facts
    assert [(c["name"], c["value"], c["limit"], c["ok"]) for c in facts["expectations"] if c["ds"] == D2] == [
        ("min_rows", 7, 1, True),
        ("max_bad_rate", 0.3, 0.3, True),
        ("null_rate.note", 0.857143, 0.9, True),
    ]
    assert len(ids(spark, ws)[D2]) == 7
    with pytest.raises(UserError, match="max_rows: 7 rows, at most 6 wanted"):
        run(make_spec(expectations={"max_bad_rate": 1, "max_rows": 6}), ws, D2)
    assert len(ids(spark, ws)[D2]) == 7


@pytest.mark.parametrize("policy", ["report", "accept", "refuse"])
def test_drift_by_name_under_each_policy(spark: SparkSession, ws: Workspace, policy: str) -> None:
    spec = make_spec(new_columns=policy, columns=COLUMNS[:5], event_time=None, keys=[])
    put(ws, f"in/{D1}/a.json.gz", jsonl([{k: event(n, D1)[k] for k in NAMES[:5]} for n in range(3)]))
    rows = [{"id": f"e{n}", "ts": f"{D2} 00:00:00", "user": n, "hour": f"{n}h", "color": "red"} for n in range(4)]
    rows[0] |= {"hour": 1, "color": {"rgb": [255, 0, 0]}}
    put(ws, f"in/{D2}/a.json.gz", jsonl(rows))
    put(ws, f"in/{D2}/b.csv", b"id,ts,user,price,hour,size\nc1,2026-03-02,1,2.5,3,XL\nc2,2026-03-02,1,2.5,3,\n")
    if policy == "refuse":
        with pytest.raises(UserError) as e:
            run(spec, ws, D2)
        assert "new columns on 2026-03-02" in str(e.value)
        assert f"'color' in in/{D2}/a.json.gz; 'size' in in/{D2}/b.csv" in str(e.value)
        assert list(ids(spark, ws)) == [D1]
        return
    manifest = run(spec, ws, D2).manifest
    drift = [(d["ds"], d["column"], d["change"]) for d in manifest.facts["drift"]]
    assert drift == [(D2, "color", "new"), (D2, "size", "new"), (D2, "price", "missing"), (D2, "hour", "retyped")]
    details = [d["detail"] for d in manifest.facts["drift"]]
    assert details[2] == f"in no row of in/{D2}/a.json.gz"
    expected = f"declared int, but 3 of 4 values are not (string such as '1h') in in/{D2}/a.json.gz"
    assert details[3] == expected
    events = {(r["ds"], r["id"]): r for r in table(spark, ws, "events")}
    assert [(r["_source_line"], r["_reason"]) for r in table(spark, ws, "quarantine")] == [
        (n + 1, f"hour: '{n}h' is not an int") for n in (1, 2, 3)
    ]
    if policy == "report":
        assert "color" not in events[D2, "e0"]
        return
    assert events[D1, "e1"]["color"] is None
    assert events[D2, "e0"]["color"] == '{"rgb":[255,0,0]}'
    assert [events[D2, c]["size"] for c in ("e0", "c1", "c2")] == [None, "XL", None]
    # The table has them now: the next day they are no news, and a day without them is fine.
    put(ws, f"in/{D3}/a.csv", b"id,ts,user,price,hour,color\nd1,2026-03-03,1,2.5,3,blue\n")
    assert run(spec, ws, D3).manifest.facts["drift"] == []
    (row,) = (r for r in table(spark, ws, "events") if r["ds"] == D3)
    assert (row["color"], row["size"]) == ("blue", None)
    # A name that the table cannot take.
    put(ws, f"in/{D4}/a.csv", b"id,ts,user,price,hour,Color\nd1,2026-03-04,1,2.5,3,blue\n")
    with pytest.raises(UserError, match="new column 'Color' cannot be added to the table"):
        run(spec, ws, D4)


def test_required_column_missing_from_a_file(spark: SparkSession, ws: Workspace) -> None:
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1)]))
    put(ws, f"in/{D1}/b.json.gz", jsonl([{k: v for k, v in event(2, D1).items() if k != "user"}, "broken"]))
    with pytest.raises(
        UserError, match=rf"required column 'user' is missing from all of landing file in/{D1}/b.json.gz"
    ):
        run(make_spec(), ws, D1)
    assert ids(spark, ws) == {}


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        ("truncated", r"it ends in the middle \(truncated\)"),
        ("flipped", "its gzip data are damaged"),
        ("not gzip", "it ends in the middle|its gzip data are damaged"),
    ],
)
def test_damaged_gzip_is_named_and_days_before_are_loaded(
    spark: SparkSession, ws: Workspace, capfd: pytest.CaptureFixture[str], damage: str, cause: str
) -> None:
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1)]))
    put(ws, f"in/{D2}/a.json.gz", jsonl([event(2, D2)]))
    path = put(ws, f"in/{D2}/b c%20.json.gz", jsonl([event(n, D2) for n in range(10, 3000)]))
    body = bytearray(path.read_bytes())
    if damage == "flipped":
        body[len(body) // 2] ^= 0xFF
    path.write_bytes({"truncated": bytes(body[: len(body) // 2]), "flipped": bytes(body), "not gzip": b"{}\n"}[damage])
    capfd.readouterr()
    with pytest.raises(UserError, match=rf"landing file in/{D2}/b c%20\.json\.gz cannot be read: ({cause})"):
        run(make_spec(), ws, D2)
    assert "Exception" not in capfd.readouterr().err
    assert ids(spark, ws) == {D1: ["e1"]}


@pytest.mark.parametrize("body", [b"", b"\n\n", b"id,ts,user\n"], ids=["empty", "blank lines", "header alone"])
def test_empty_day_names_the_glob(spark: SparkSession, ws: Workspace, body: bytes) -> None:
    put(ws, f"in/{D1}/a.csv", body)
    with pytest.raises(UserError, match=rf"the 1 landing files of {D1} hold no rows \({ws.home}/in/{D1}/\*"):
        run(make_spec(), ws, D1)


def test_empty_day_may_be_allowed(spark: SparkSession, ws: Workspace) -> None:
    put(ws, f"in/{D1}/a.json.gz", b"")
    spec = make_spec(expectations={"min_rows": 0})
    assert run(spec, ws, D1).manifest.rows == {"read": 0, "kept": 0, "quarantined": 0, "duplicates": 0}
    assert run(spec, ws, D1).skipped


def test_unknown_ending_and_bad_headers(spark: SparkSession, ws: Workspace) -> None:
    path = put(ws, f"in/{D1}/a.xml", b"<a/>")
    with pytest.raises(UserError, match=rf"landing file in/{D1}/a\.xml: its name ends in neither \.json nor \.csv"):
        run(make_spec(), ws, D1)
    path.unlink()
    put(ws, f"in/{D1}/a.csv", b"id,id\n1,2\n")
    with pytest.raises(UserError, match=rf"landing file in/{D1}/a\.csv: its header names column 'id' twice"):
        run(make_spec(), ws, D1)


def test_blanks_around_fields_and_a_column_without_a_name(spark: SparkSession, ws: Workspace) -> None:
    """Text as people write it by hand, or pandas with its index."""
    body = ', id , hour, note\n0, a 1, 7, ?\n1,b , 8 ,"  x, ""y"" "\n2, c, ?, ? \n3,"d",9, z z \n'
    put(ws, f"in/{D1}/a.txt", body.encode())
    columns = [{"name": n, "type": t} for n, t in (("column0", "int"), ("id", "string"), ("hour", "bigint"))]
    columns.append({"name": "note", "type": "string"})
    spec = make_spec(
        {"format": "csv", "trim": True, "null_value": "?"}, columns=columns, event_time=None, expectations={}
    )
    assert run(spec, ws, D1).manifest.rows["quarantined"] == 0
    wanted = [(0, "a 1", 7, None), (1, "b", 8, '  x, "y" '), (2, "c", None, None), (3, "d", 9, "z z")]
    assert [(r["column0"], r["id"], r["hour"], r["note"]) for r in table(spark, ws, "events")] == wanted


def test_file_that_changes_while_it_is_read(
    spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1)]))
    assess = load.assess_day

    def meanwhile(*args: Any) -> Any:
        os.utime(path, ns=(0, 0))
        return assess(*args)

    monkeypatch.setattr(load, "assess_day", meanwhile)
    with pytest.raises(UserError, match=rf"landing file in/{D1}/a\.json\.gz changed while it was read"):
        run(make_spec(), ws, D1)
    assert ids(spark, ws) == {}
    assert table(spark, ws, "quarantine") == []


def test_declared_type_that_the_table_does_not_have(spark: SparkSession, ws: Workspace) -> None:
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1)]))
    run(make_spec(), ws, D1)
    columns = [c | {"type": "string"} if c["name"] == "user" else c for c in COLUMNS]
    with pytest.raises(UserError, match=r"declares 'user' as string, but .* has 'user' as long"):
        run(make_spec(columns=columns), ws, D1)
    # A column that is declared later is added, and the day that the run is for gets its values.
    more = [*COLUMNS, {"name": "color", "type": "array<bigint>"}]
    put(ws, f"in/{D1}/a.json.gz", jsonl([event(1, D1, color=[1, 2])]))
    run(make_spec(columns=more), ws, D1)
    assert [r["color"] for r in table(spark, ws, "events")] == [[1, 2]]
    assert run(make_spec(columns=more), ws, D1).skipped
