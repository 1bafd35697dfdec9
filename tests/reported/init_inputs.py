"""Generated click logs in the shapes that people have: dialects, types, names, nulls and layouts drawn by a seed."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Form = Literal["csv", "jsonl", "parquet", "delta"]
#: Number of the day of each row, from 0.
Days = NDArray[np.int64]
FORMS: tuple[Form, ...] = ("csv", "jsonl", "parquet", "delta")
FIRST_DAY = date(2026, 3, 1)

#: Names of feature columns that tools trip over.
_NAMES = (
    "price [EUR] <net>",
    "service.name",
    "größe;cm",
    'the "best"',
    "select",
    "Order",
    "100%",
    "it's",
    "a-b",
    "käufer status",
    "x" * 81,
    "plain",
    "device",
    "Preis in €",
    "a.b.c",
    "back`tick",
    "tab\tname",
    "rank",
)
_TEXTS = ("a", "b,c", 'say "hi"', "ümlaut", "x;y", " blank ", "tab\there", "100%", "\\", "NA-like", "😀")


@dataclass(frozen=True)
class GeneratedInput:
    """A click log on disk."""

    form: Form
    #: What `headrace init` is given.
    path: Path
    #: Rows by day of the files' or partitions' names; one day "" where the layout has no days.
    rows: dict[str, int]
    #: What was drawn, for the message of a failure.
    drawn: str


def generate(seed: int, form: Form, folder: Path) -> GeneratedInput:
    """Write the click log of a seed below `folder`, and count its rows by reading it back without headrace."""
    rng = np.random.default_rng([seed, FORMS.index(form)])
    table, day, drawn = _table(rng, form)
    writers: dict[Form, Callable[[np.random.Generator, pa.Table, Days, Path], tuple[Path, dict[str, int], str]]] = {
        "csv": _write_csv,
        "jsonl": _write_jsonl,
        "parquet": _write_parquet,
        "delta": _write_delta,
    }
    path, rows, layout = writers[form](rng, table, day, folder / f"log_{form}_{seed}")
    return GeneratedInput(form, path, rows, f"seed {seed}, {form}: {layout}; {drawn}")


def _table(rng: np.random.Generator, form: Form) -> tuple[pa.Table, Days, str]:
    """(rows in order of time; the day of each, from 0; what was drawn).

    Users, items, a label, a time, and some odd columns.
    """
    rows, days = int(rng.integers(80, 240)), int(rng.integers(1, 4))
    seconds = np.sort(rng.integers(0, days * 86_400, rows))
    times = [datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=int(s)) for s in seconds]
    user, item = rng.integers(0, 25, rows), rng.integers(0, 12, rows)
    columns: dict[str, pa.Array] = {}
    time_name = rng.choice(["ts", "event_time", "timestamp", "created_at"])
    columns[time_name] = _times(rng, times, form)
    columns[rng.choice(["user_id", "userId", "Kunden-Nr.", "customer"])] = _ids(rng, user, form)
    columns[rng.choice(["item_id", "product_id", "sku", "Artikel Nr"])] = _ids(rng, item, form)
    names = list(rng.choice(_NAMES, size=int(rng.integers(1, 5)), replace=False))
    if rng.random() < 0.15:
        names += ["Twin", "twin"]
    for name in names:
        columns[str(name)] = _feature(rng, rows, form)
    label_name, label = _label(rng, rows)
    columns[label_name] = label
    drawn = ", ".join(f"{n[:12]}: {c.type}" for n, c in columns.items())
    return pa.table(columns), seconds // 86_400, f"{rows} rows, {days} days, {drawn}"


def _times(rng: np.random.Generator, times: Sequence[datetime], form: Form) -> pa.Array:
    if form in ("csv", "jsonl"):
        spelled: Sequence[Any] = (
            [t.strftime("%Y-%m-%dT%H:%M:%SZ") for t in times],
            [t.strftime("%Y-%m-%d %H:%M:%S") for t in times],
            [t.isoformat() for t in times],
            [int(t.timestamp()) for t in times],
            [int(t.timestamp() * 1_000) for t in times],
            [f"{t.timestamp() * 1_000:.12e}" if form == "csv" else t.timestamp() * 1_000 for t in times],
            [t.date().isoformat() for t in times],
        )
        return pa.array(spelled[int(rng.integers(len(spelled)))])
    values = [None if rng.random() < 0.004 else t for t in times]
    unit = str(rng.choice(["us", "ms", "ns"] if form == "parquet" else ["us"]))
    array = pa.array(values, pa.timestamp(unit, tz="UTC"))
    if form == "parquet" and unit == "us" and rng.random() < 0.3:  # a time of the year 57,988
        far = array.cast(pa.int64()).to_pylist()
        far[int(rng.integers(len(far)))] = 1_767_000_000_000_000_000
        return pa.array(far, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    return array


def _ids(rng: np.random.Generator, codes: NDArray[np.int64], form: Form) -> pa.Array:
    kind = str(rng.choice(["int", "text", "unsigned", "hash"]))
    if kind == "text":
        return pa.array([f"u{c}" for c in codes])
    if kind == "hash":
        return pa.array([f"{(int(c) * 2_654_435_761) % 2**64:016x}" for c in codes])
    if kind == "unsigned" and form == "parquet":
        return pa.array(codes.astype(np.uint64) + 10, pa.uint64())
    return pa.array(codes.astype(np.int64) + 1_000)


def _feature(rng: np.random.Generator, rows: int, form: Form) -> pa.Array:
    kinds = ["double", "int", "text", "null", "constant", "bool", "mostly null"]
    kinds += ["list", "unsigned", "small", "decimal", "date", "struct"] if form == "parquet" else []
    kinds += ["list", "struct", "mixed"] if form == "jsonl" else []
    kinds += ["euros", "percent"] if form in ("csv", "jsonl") else []
    kind = str(rng.choice(kinds))
    numbers = rng.normal(10, 3, rows).round(2)
    if kind == "int":
        return pa.array(rng.integers(-5, 1_000, rows))
    if kind == "text":
        return pa.array([str(t) for t in rng.choice(_TEXTS, rows)])
    if kind == "null":
        return pa.nulls(rows, pa.string())
    if kind == "constant":
        return pa.array(["same"] * rows)
    if kind == "bool":
        return pa.array(rng.random(rows) < 0.5)
    if kind == "mostly null":
        return pa.array([float(n) if rng.random() < 0.1 else None for n in numbers])
    if kind == "list":
        return pa.array([[f"t{k}" for k in range(int(n))] for n in rng.integers(0, 4, rows)], pa.list_(pa.string()))
    if kind == "unsigned":
        return pa.array(rng.integers(0, 200, rows).astype(np.uint8), pa.uint8())
    if kind == "small":
        return pa.array(rng.integers(-100, 100, rows).astype(np.int16), pa.int16())
    if kind == "decimal":
        return pa.array([f"{n:.2f}" for n in numbers]).cast(pa.decimal128(9, 2))
    if kind == "date":
        return pa.array([FIRST_DAY + timedelta(days=int(d)) for d in rng.integers(0, 300, rows)])
    if kind == "struct":
        return pa.array([{"os": "ios" if n > 10 else "web", "score": float(n)} for n in numbers])
    if kind in ("euros", "percent"):
        return pa.array([f"{n:.2f}{' €' if kind == 'euros' else '%'}" for n in numbers])
    if kind == "mixed":
        return pa.array([json.dumps(n) if k % 2 else str(n) for k, n in enumerate(numbers)])
    return pa.array([None if rng.random() < 0.05 else float(n) for n in numbers])


def _label(rng: np.random.Generator, rows: int) -> tuple[str, pa.Array]:
    positive = rng.random(rows) < 0.3
    positive[:2] = (True, False)
    kind = str(rng.choice(["0/1", "bool", "yes/no", "rating"]))
    if kind == "bool":
        return "is_click", pa.array(positive)
    if kind == "yes/no":
        return "purchased", pa.array(np.where(positive, "yes", "no"))
    if kind == "rating":
        return "rating", pa.array(rng.integers(1, 6, rows))
    return "clicked", pa.array(positive.astype(np.int64))


# --- writers: (what init is given, rows by day, what was drawn) -------------------------------------------------------


def _parts(rng: np.random.Generator, table: pa.Table, day: Days) -> tuple[str, dict[str, pa.Table]]:
    """(layout, rows by name of a file without its ending)."""
    layout, days = str(rng.choice(["one", "flat", "days"])), int(day.max()) + 1
    if layout == "one":
        return layout, {"log": table}
    if layout == "flat":
        third = np.arange(len(day)) * 3 // len(day)
        return layout, {f"part {k}": table.filter(pa.array(third == k)) for k in range(3)}
    names = [f"{FIRST_DAY + timedelta(days=k)}/log" for k in range(days)]
    pieces = [table.filter(pa.array(day == k)) for k in range(days)]
    return layout, {n: p for n, p in zip(names, pieces, strict=True) if p.num_rows}


def _day_of(name: str) -> str:
    return name.split("/")[0] if "/" in name else ""


def _write_csv(rng: np.random.Generator, table: pa.Table, day: Days, folder: Path) -> tuple[Path, dict[str, int], str]:
    layout, parts = _parts(rng, table, day)
    separator = str(rng.choice([",", ";", "\t", "|"]))
    end = str(rng.choice(["\n", "\r\n"]))
    packed, bom = bool(rng.random() < 0.3), bool(rng.random() < 0.3)
    null = str(rng.choice(["", "", "NULL"]))
    # Some have their header again, as files have that were joined.
    again = bool(rng.random() < 0.2)
    suffix = str(rng.choice([".csv", ".csv", ".tsv", ".dat", ".txt", *([""] if layout == "one" else [])]))
    packed &= suffix != ""
    rows: dict[str, int] = {}
    path = folder
    for name, part in parts.items():
        out = io.StringIO(newline="")
        writer = csv.writer(out, delimiter=separator, lineterminator=end)
        writer.writerow(part.column_names)
        for k, row in enumerate(zip(*(c.to_pylist() for c in part.columns), strict=True)):
            if again and k == 5:
                writer.writerow(part.column_names)
            writer.writerow([null if v is None else str(v).lower() if isinstance(v, bool) else v for v in row])
        body = (b"\xef\xbb\xbf" if bom else b"") + out.getvalue().encode()
        path = folder / (name + suffix + (".gz" if packed else ""))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(body) if packed else body)
        read = list(csv.reader(io.StringIO(body.decode("utf-8-sig"), newline=""), delimiter=separator))
        rows[_day_of(name)] = rows.get(_day_of(name), 0) + sum(1 for r in read[1:] if r)
    input_path = path if layout == "one" else folder
    file = f"{suffix!r}, gzip {packed}, BOM {bom}"
    return input_path, rows, f"{layout}, {separator!r}, {end!r}, {file}, null {null!r}, header again {again}"


def _write_jsonl(
    rng: np.random.Generator, table: pa.Table, day: Days, folder: Path
) -> tuple[Path, dict[str, int], str]:
    layout, parts = _parts(rng, table, day)
    surrogates, leave_out = bool(rng.random() < 0.3), bool(rng.random() < 0.4)
    suffix = str(rng.choice([".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", *([""] if layout == "one" else [])]))
    rows: dict[str, int] = {}
    path = folder
    for name, part in parts.items():
        lines = []
        for k, row in enumerate(part.to_pylist()):
            if leave_out:
                row = {key: value for key, value in row.items() if value is not None}
            if surrogates and k % 7 == 3:
                row["note"] = "half \ud83d"
            lines.append(json.dumps(row))
        path = folder / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(lines) + "\n"
        compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
        path.write_bytes(pa.compress(text.encode(), compression, asbytes=True) if compression else text.encode())
        read = [json.loads(line) for line in text.split("\n") if line.strip()]
        rows[_day_of(name)] = rows.get(_day_of(name), 0) + len(read)
    drawn = f"{layout}, {suffix!r}, half surrogates {surrogates}, no nulls {leave_out}"
    return (path if layout == "one" else folder), rows, drawn


def _write_parquet(
    rng: np.random.Generator, table: pa.Table, day: Days, folder: Path
) -> tuple[Path, dict[str, int], str]:
    layout, parts = _parts(rng, table, day)
    rows: dict[str, int] = {}
    for name, part in parts.items():
        ds = _day_of(name)
        path = folder / (f"dt={ds}/log.parquet" if ds else f"{name}.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(part, path, row_group_size=int(rng.integers(20, 200)))
        rows[ds] = rows.get(ds, 0) + pq.read_metadata(path).num_rows
    return folder, rows, layout


def _write_delta(
    rng: np.random.Generator, table: pa.Table, day: Days, folder: Path
) -> tuple[Path, dict[str, int], str]:
    layout = str(rng.choice(["plain", "by day", "by country", "appended"]))
    # Delta takes neither such names without column mapping, nor columns without a type.
    names = [n.translate({ord(c): "_" for c in " ,;{}()\n\t="}) for n in table.column_names]
    table = table.rename_columns([n if names.count(n) == 1 else f"{n}{k}" for k, n in enumerate(names)])
    lower = [n.lower() for n in table.column_names]
    table = table.select([n for k, n in enumerate(table.column_names) if lower.index(n.lower()) == k])
    if layout == "by country":
        country = [None if rng.random() < 0.2 else str(rng.choice(["DE", "AT"])) for _ in range(table.num_rows)]
        table = table.append_column("country", pa.array(country, pa.string()))
        deltalake.write_deltalake(str(folder), table, partition_by=["country"])
    elif layout == "by day":
        table = table.append_column("dt", pa.array([FIRST_DAY + timedelta(days=int(k)) for k in day], pa.date32()))
        deltalake.write_deltalake(str(folder), table, partition_by=["dt"])
    else:
        half = table.num_rows // 2
        deltalake.write_deltalake(str(folder), table.slice(0, half) if layout == "appended" else table)
        if layout == "appended":
            deltalake.write_deltalake(str(folder), table.slice(half), mode="append")
    counts: dict[str, int] = {}
    actions = pa.table(deltalake.DeltaTable(str(folder)).get_add_actions(flatten=True))
    by_day = "partition.dt" in actions.column_names
    for k, count in enumerate(actions["num_records"].to_pylist()):
        key = str(actions["partition.dt"][k].as_py()) if by_day else ""
        counts[key] = counts.get(key, 0) + count
    return folder, counts, layout
