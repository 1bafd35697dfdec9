"""Events made for tests of table operators, and what the operators must make of them: loops over all pairs of rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from headrace.config import OpSpec
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.features.table_ops.preparation import ExternalReader, Preparation
from headrace.features.types import declared
from headrace.lake.delta.log import DeltaLog
from headrace.storage import local

TYPES = {
    "user": "bigint",
    "item": "string",
    "ts": "timestamp",
    "price": "double",
    "n": "int",
    "big": "bigint",
    "flag": "boolean",
    "day": "date",
    "tags": "array<string>",
    "odd.na`me": "float",
    "click": "int",
}
COLUMNS = [TableColumn(name=n, type=t) for n, t in TYPES.items()]  # type: ignore[arg-type]
META = {"_source_file": pa.string(), "_source_line": pa.int64()}
START = datetime(2026, 1, 1, tzinfo=UTC)
#: Without external tables.
NOWHERE = ExternalReader(Workspace(Path("/nonexistent")))
#: Whether rows only ask (a value of `__query`).
PROBES = st.lists(st.sampled_from([None, None, None, "asks"]), min_size=40, max_size=40)
#: Steps that join the prices of `external`.
JOINS_ASOF: list[dict[str, Any]] = [
    {
        "join_asof": {
            "path": "tables/prices",
            "format": "parquet",
            "keys": ["item"],
            "valid_from": "since",
            "add": {"list_price": "double", "tier": "string"},
            "tolerance_days": 4,
        }
    },
    {
        "join_asof": {
            "path": "tables/prices",
            "format": "parquet",
            "keys": ["item"],
            "valid_from": "since",
            "add": {"list_price": "double"},
            "at": "before",
            "prefix": "earlier_",
        }
    },
]
HOUR, DAY = timedelta(hours=1), timedelta(days=1)

Row = dict[str, Any]

REALS = (
    st.none() | st.sampled_from([0.5, -0.0, 1.0, math.nan, math.inf, -math.inf, 1e300, 0.1, 3e-7]) | st.floats(-9, 9)
)
#: Quarters of days, so that events share instants and windows end exactly at events; some a microsecond aside.
TIMES = st.builds(
    lambda quarters, micros: START + quarters * DAY / 4 + timedelta(microseconds=micros),
    st.integers(0, 14),
    st.sampled_from([0, 0, 0, 0, 1, -1]),
)
CELLS = {
    "user": st.sampled_from([None, 1, 1, 1, 2, 2**53 + 1, 2**53]),
    "item": st.sampled_from([None, "a", "a", "é", "日本", ""]),
    "ts": st.one_of(TIMES, TIMES, TIMES, TIMES, TIMES, TIMES, st.none()),
    "price": REALS,
    "n": st.none() | st.integers(-3, 3),
    "big": st.none() | st.sampled_from([2**62, -(2**62), 7, 2**53 + 1]),
    "flag": st.none() | st.booleans(),
    "day": st.none() | st.sampled_from([(START + i * DAY).date() for i in range(4)]),
    "tags": st.none() | st.lists(st.sampled_from(["x", "y"]), max_size=2),
    "odd.na`me": st.none() | st.sampled_from([0.25, math.nan, -2.0]),
    "click": st.sampled_from([None, 0, 0, 1, 1]),
}
#: Few rows or, mostly, enough that keys and instants meet.
ROWS = st.lists(st.fixed_dictionaries(CELLS), max_size=3) | st.lists(
    st.fixed_dictionaries(CELLS), min_size=14, max_size=40
)
#: Rows that negatives can be drawn for.
ROW_OF_CLICKS = st.fixed_dictionaries(
    {
        **CELLS,
        "user": st.sampled_from([None, 1, 2, 3, 4]),
        "ts": TIMES,
        "item": st.sampled_from(["a", "é", "日本", "", "b", "c", None]),
    }
)


def number(rows: list[Row]) -> list[Row]:
    """With an identity each, in no order of time."""
    return [{**r, "_source_file": f"f{i % 3}ü", "_source_line": i // 3} for i, r in enumerate(rows)]


def as_table(rows: list[Row], query: bool = False) -> pa.Table:
    types = {n: declared(TableColumn(name=n, type=t)).arrow for n, t in TYPES.items()} | META  # type: ignore[arg-type]
    if query:
        types["__query"] = pa.string()
    return pa.table({n: pa.array([r.get(n) for r in rows], t) for n, t in types.items()})


def prepare(*ops: dict[str, Any], label: str = "click", knows_train: bool = True) -> Preparation:
    specs = [OpSpec(op=name, params=params) for op in ops for name, params in op.items()]
    return Preparation(specs, COLUMNS, label, "ts", knows_train)


def by_identity(table: pa.Table) -> dict[tuple[str, int], Row]:
    rows = {(r["_source_file"], r["_source_line"]): r for r in table.to_pylist()}
    assert len(rows) == table.num_rows, "two rows have one identity"
    return rows


def same(a: Any, b: Any) -> bool:
    """Equal, NaN being NaN, and -0.0 not 0.0."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b) and type(a) is type(b)


def assert_rows(actual: pa.Table, expected: pa.Table) -> None:
    """The same columns and the same rows by identity, to the bit."""
    assert actual.schema.names == expected.schema.names
    a, b = by_identity(actual), by_identity(expected)
    assert a.keys() == b.keys()
    for key, row in b.items():
        for name, value in row.items():
            assert same(a[key][name], value), (key, name, a[key][name], value)


def commit_delta(folder: Path, table: pa.Table) -> None:
    """One commit that makes the table's rows those of a Delta table, by hand; the first one makes the table."""
    log = DeltaLog(local(folder))
    version = -1 if log.version is None else log.version
    files_before = log.files(version) if version >= 0 else []
    assert files_before is not None
    (folder / "_delta_log").mkdir(parents=True, exist_ok=True)
    name = f"{version + 1}.parquet"
    pq.write_table(table, folder / name)
    types = {pa.string(): "string", pa.int64(): "long", pa.float64(): "double"}
    fields = [{"name": f.name, "type": types[f.type], "nullable": True, "metadata": {}} for f in table.schema]
    metadata = {
        "id": "0",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {},
    }
    add = {"path": name, "partitionValues": {}, "size": (folder / name).stat().st_size, "modificationTime": 0}
    actions: list[dict[str, Any]] = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": metadata},
        *({"remove": {"path": f.path.name, "deletionTimestamp": 0, "dataChange": True}} for f in files_before),
        {"add": {**add, "dataChange": True}},
    ]
    path = folder / "_delta_log" / f"{version + 1:020d}.json"
    path.write_text("".join(json.dumps(a) + "\n" for a in actions), encoding="utf-8")


def external(home: Path) -> ExternalReader:
    """Two tables for joins, with awkward keys."""
    items = pa.table(
        {
            "id": pa.array(["a", "é", "nobody", None, "日本"]),
            "brand": pa.array(["x", None, "z", "w", "y"]),
            "stock": pa.array([1, 2, 3, 4, None], pa.int64()),
            "rank": pa.array([1, 2, 3, 4, 5], pa.int32()),
        }
    )
    times = [START + i * DAY / 4 for i in (0, 3, 8, 8, 13, 5)]
    prices = pa.table(
        {
            "item": pa.array(["a", "a", "a", "é", "é", None]),
            "since": pa.array(times, pa.timestamp("us", tz="UTC")),
            "list_price": pa.array([1.0, None, 3.0, 4.0, 5.0, 9.0]),
            "tier": pa.array(["p", "q", None, "s", "t", "u"]),
        }
    )
    (home / "tables").mkdir(parents=True, exist_ok=True)
    for name, table in (("items", items), ("prices", prices)):
        (home / "tables" / name).mkdir(exist_ok=True)
        pq.write_table(table, home / "tables" / name / "part.parquet")
    return ExternalReader(Workspace(home))


def finite(x: Any) -> float | None:
    return None if x is None or not math.isfinite(x) else float(x)


def rows_before(
    rows: list[Row],
    row: Row,
    keys: Iterable[str],
    delay: timedelta = timedelta(),
    window: timedelta | None = None,
    keep: Callable[[Row], bool] = lambda r: True,
) -> list[Row]:
    """The events of the row's key before it, in order: the definition, by looking at every row."""
    if row["ts"] is None or any(row[k] is None for k in keys):
        return []
    matching = [
        r
        for r in rows
        if r["ts"] is not None
        and r.get("__query") is None
        and all(r[k] == row[k] for k in keys)
        and keep(r)
        and r["ts"] + delay < row["ts"]
        and (window is None or r["ts"] + delay + window >= row["ts"])
    ]
    return sorted(matching, key=lambda r: (r["ts"], r["_source_file"].encode(), r["_source_line"]))


#: Every operator that looks at the past, with most of its parameters.
PAST: list[dict[str, Any]] = [
    {
        "trailing": {
            "keys": ["user"],
            "windows": [1, 2.5, "all"],
            "values": ["price", "big", "click"],
            "stats": ["count", "sum", "mean", "rate"],
        }
    },
    {"trailing": {"keys": ["item", "user"], "windows": [3], "where": "click = 1 or price > 0.4", "delay_hours": 6}},
    {"lag": {"keys": ["user"], "values": ["price", "n", "flag", "odd.na`me"], "since": "hours"}},
    {"lag": {"keys": ["user"], "values": ["price", "flag"], "since": "days", "shift": 3}},
    {"history": {"keys": ["user"], "values": ["item", "big"], "length": 3}},
    {
        "history": {
            "keys": ["day"],
            "values": ["price"],
            "length": 2,
            "newest": "first",
            "suffix": "recent",
            "where": "flag is not null",
            "delay_hours": 6,
        }
    },
    {"sessions": {"keys": ["user"], "gap_minutes": 360}},
    {"history": {"keys": ["session_id"], "values": ["n"], "length": 5, "suffix": "in_session"}},
    {"target_encoding_past": {"keys": ["item"], "delay_hours": 12, "smoothing": 2, "prior": 0.25}},
    {"target_encoding_past": {"keys": ["flag", "n"], "delay_hours": 0, "smoothing": 1.5}},
]


def _sums(rows: list[Row], column: str) -> tuple[int, int, float]:
    """(values, ones, sum) as the operators define them: reals on a grid."""
    values = [v for r in rows if (v := r[column]) is not None and math.isfinite(v)]
    if column == "price":
        grid = [round(max(min(v, 2.0**42), -(2.0**42)) * 2**20) for v in values]
        return len(values), sum(q == 2**20 for q in grid), float(sum(grid)) / 2**20
    return len(values), sum(v == 1 for v in values), float(sum(values))


def expected_past(rows: list[Row]) -> dict[tuple[str, int], Row]:
    """Return what PAST adds to each row."""
    out = {}
    starts: dict[int, datetime] = {}
    for i, r in enumerate(rows):
        e: Row = {}
        for name, window in (("1d", DAY), ("2.5d", 2.5 * DAY), ("all", None)):
            earlier = rows_before(rows, r, ["user"], window=window)
            e[f"user_count_{name}"] = len(earlier)
            for c in ("price", "big", "click"):
                n, ones, total = _sums(earlier, c)
                e[f"user_{c}_sum_{name}"] = total
                e[f"user_{c}_mean_{name}"] = total / n if n else None
                e[f"user_{c}_rate_{name}"] = ones / n if n else None

        def is_kept(x: Row) -> bool:
            price = x["price"]
            return x["click"] == 1 or (price is not None and not math.isnan(price) and price > 0.4)

        e["item_user_count_3d"] = len(rows_before(rows, r, ["item", "user"], 6 * HOUR, 3 * DAY, is_kept))

        earlier = rows_before(rows, r, ["user"])
        for c in ("price", "n", "flag", "odd.na`me"):
            current, last = r[c], earlier[-1][c] if earlier else None
            is_missing = any(v is None or (isinstance(v, float) and math.isnan(v)) for v in (current, last))
            e[f"user_{c}_difference"] = None if is_missing else float(current) - float(last)
        e["user_since"] = (r["ts"] - earlier[-1]["ts"]) / timedelta(microseconds=1) / 3.6e9 if earlier else None
        for c in ("price", "flag"):
            current, third = r[c], earlier[-3][c] if len(earlier) >= 3 else None
            is_missing = any(v is None or (isinstance(v, float) and math.isnan(v)) for v in (current, third))
            e[f"user_{c}_difference_3"] = None if is_missing else float(current) - float(third)
        e["user_since_3"] = (
            (r["ts"] - earlier[-3]["ts"]) / timedelta(microseconds=1) / 8.64e10 if len(earlier) >= 3 else None
        )
        for c in ("item", "big"):
            e[f"{c}_history"] = [x[c] for x in earlier if x[c] is not None][-3:]
        recent = rows_before(rows, r, ["day"], 6 * HOUR, keep=lambda x: x["flag"] is not None)
        values = [x["price"] for x in recent if x["price"] is not None and not math.isnan(x["price"])]
        e["price_recent"] = values[-2:][::-1]

        # A session's start: walk back over the key's instants until a gap.
        if r["user"] is not None and r["ts"] is not None:
            start = r["ts"]
            for x in reversed(earlier):
                if start - x["ts"] > 6 * HOUR:
                    break
                start = x["ts"]
            starts[i] = start
        e["session_position"] = len([x for x in earlier if x["ts"] >= starts[i]]) if i in starts else 0
        e["session_age"] = (r["ts"] - starts[i]) / timedelta(seconds=1) if i in starts else None
        e["n_in_session"] = (
            [x["n"] for x in earlier if x["ts"] >= starts[i] and x["n"] is not None][-5:] if i in starts else []
        )

        n, _, y = _sums(rows_before(rows, r, ["item"], 12 * HOUR), "click")
        e["item_target"] = (y + 2 * 0.25) / (n + 2)
        n, _, y = _sums(rows_before(rows, r, ["flag", "n"]), "click")
        prior = None
        if r["ts"] is not None:
            midnight = r["ts"].replace(hour=0, minute=0, second=0, microsecond=0)
            known = [x for x in rows if x["ts"] is not None and x["ts"] < midnight and x.get("__query") is None]
            m, _, total = _sums(known, "click")
            prior = total / m if m else None
        e["flag_n_target"] = (y + 1.5 * prior) / (n + 1.5) if prior is not None else y / n if n else None
        out[(r["_source_file"], r["_source_line"])] = e
    # Ids say nothing but which rows are of one session.
    return out


def perturbed(rows: list[Row], other_rows: list[Row], instant: datetime) -> tuple[list[Row], list[Row]]:
    """The rows, and the same ones before `instant` with all that follows changed: rows deleted, altered and added."""
    original = number(rows)
    future = [r for r in original if r["ts"] is not None and r["ts"] >= instant]
    remaining = [r for r in original if r not in future]
    altered = [
        {**o, "ts": r["ts"], "_source_file": r["_source_file"], "_source_line": r["_source_line"]}
        for r, o in zip(future[::2], other_rows, strict=False)
    ]
    added = [
        {**o, "ts": max(o["ts"] or instant, instant), "_source_file": "new", "_source_line": i}
        for i, o in enumerate(other_rows)
    ]
    return original, [*altered, *added, *remaining]


def past_of(table: pa.Table, instant: datetime) -> dict[tuple[str, int], Row]:
    """The rows before `instant`, by identity."""
    return {k: r for k, r in by_identity(table).items() if r["ts"] is not None and r["ts"] < instant}


def assert_same_rows(a: dict[tuple[str, int], Row], b: dict[tuple[str, int], Row]) -> None:
    assert a.keys() == b.keys()
    for key, row in a.items():
        for name, value in row.items():
            assert same(value, b[key][name]), (key, name, value, b[key][name])


def micros(instant: datetime) -> int:
    return (instant - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def check_negatives(
    negatives: pa.Table, rows: list[Row], params: dict[str, Any], train: tuple[datetime, datetime]
) -> int:
    """Everything that is promised of negatives, by looking at every row; how many there are."""
    item, user = params["item"], params.get("user")
    events = [r for r in rows if r["ts"] is not None and r[item] is not None]
    inside = [r for r in events if train[0] <= r["ts"] < train[1]]
    clicked = {(r.get(user), r[item]) for r in inside if r["click"] == 1 and params.get("exclude_seen")}
    by_place = {(r["_source_file"], r["_source_line"]): r for r in rows}
    drawn: dict[tuple[str, int], int] = {}
    for (file, line), row in by_identity(negatives).items():
        if row["__query"] is None:
            assert "#negative" not in file
            positive_row = by_place[(file, line)]
        else:
            file, number_ = file.split("#negative-")
            positive = by_place[(file, line)]
            drawn[(file, line)] = drawn.get((file, line), 0) + 1
            assert 1 <= int(number_) <= params["per_positive"]
            assert positive["click"] == 1
            assert row["click"] == 0
            assert row[item] != positive[item]
            assert any(r[item] == row[item] and r["ts"] < positive["ts"] for r in inside)
            # Nobody in particular has seen nothing.
            assert user is None or positive[user] is None or (positive[user], row[item]) not in clicked
            positive_row = {**positive, item: row[item]}
            newest = rows_before(rows, positive_row, [item])[-1]
            positive_row |= {c: newest[c] for c in params.get("item_columns", ())}
        for name in TYPES:
            assert same(row[name], positive_row[name]) or (name == "click" and row["__query"]), (
                name,
                row[name],
                positive_row[name],
            )
        if "item_count_2d" in row:
            assert row["item_count_2d"] == len(rows_before(rows, positive_row, [item], window=2 * DAY))
    assert negatives.num_rows == len(rows) + sum(drawn.values())
    assert all(n <= params["per_positive"] for n in drawn.values())
    return sum(drawn.values())
