"""Source tables: columns by path, and days in names of folders."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import TableSource
from headrace.lake.tables.declared import holds_only
from headrace.lake.tables.delta import DeltaSnapshot
from headrace.lake.tables.folder import FolderSnapshot
from headrace.lake.tables.snapshot import FIRST, LAST, FileSnapshot
from headrace.storage import local

START = datetime(2026, 1, 1, tzinfo=UTC)
UTC_MICROS = pa.timestamp("us", "UTC")
NAMES = st.sampled_from(["ts", "TS", "Ts", "t"])
#: Columns beside the one that says the day: kind, name, and the name of the leaf within.
TWINS = st.lists(
    st.tuples(st.sampled_from(["struct", "deep", "list", "structs", "map", "dotted", "fixed"]), NAMES, NAMES),
    max_size=4,
)
#: Hours after START of the rows of each file; and where the column of times stands among the others.
FILES = st.lists(st.lists(st.integers(0, 95), min_size=1, max_size=4), min_size=1, max_size=3)


def twin(kind: str, leaf: str, times: list[datetime]) -> pa.Array:
    """A column with a leaf of that name whose times are others."""
    later_times = [t + timedelta(days=40 + i) for i, t in enumerate(times)]
    struct = pa.struct([(leaf, UTC_MICROS)])
    twins: dict[str, tuple[list[Any], pa.DataType]] = {
        "struct": ([{leaf: t} for t in later_times], struct),
        "deep": ([{"a": {leaf: t}} for t in later_times], pa.struct([("a", struct)])),
        "list": ([[t, t] for t in later_times], pa.list_(UTC_MICROS)),
        "structs": ([[{leaf: t}] for t in later_times], pa.list_(struct)),
        "map": ([[(leaf, t)] for t in later_times], pa.map_(pa.string(), UTC_MICROS)),
        "fixed": ([[t, t] for t in later_times], pa.list_(UTC_MICROS, 2)),
        "dotted": (later_times, UTC_MICROS),
    }
    values, type_ = twins[kind]
    return pa.array(values, type_)


@settings(max_examples=60)
@given(twins=TWINS, files=FILES, place=st.integers(0, 4), unit=st.sampled_from(["ms", "us", "ns"]), zone=st.booleans())
def test_files_have_the_days_of_their_rows(
    twins: list[tuple[str, str, str]], files: list[list[int]], place: int, unit: str, zone: bool, tmp_path_factory: Any
) -> None:
    folder: Path = tmp_path_factory.mktemp("folder")
    for number, hours in enumerate(files):
        times = [START + timedelta(hours=h) for h in hours]
        # Names of the top level differ by more than their case.
        columns = [
            (f"{leaf}.ts" if kind == "dotted" else f"{name}{i}", twin(kind, leaf, times))
            for i, (kind, name, leaf) in enumerate(twins)
        ]
        columns = list(dict(columns).items())
        local_times = pa.array(times, UTC_MICROS).cast(pa.timestamp("us", "UTC" if zone else None))
        columns.insert(place, ("ts", local_times.cast(pa.timestamp(unit, local_times.type.tz))))
        names = [name for name, _ in columns]
        pq.write_table(pa.table([array for _, array in columns], names=names), folder / f"{number}.parquet")
    source = TableSource.model_validate({"format": "parquet", "path": str(folder), "day": {"time": "TS"}})
    snapshot = FolderSnapshot(source, local(folder), "parquet")
    days = [(START + timedelta(days=k)).date().isoformat() for k in range(-1, 60)]
    for file in snapshot.files:
        rows = pq.read_table(file.path.local_path())["ts"]
        seen = pc.strftime(rows.cast(pa.timestamp("us")), "%Y-%m-%d")
        expected = [day for day in days if pc.any(pc.equal(seen, day)).as_py()]
        assert (file.first, file.last) == (expected[0], expected[-1])
        assert not file.may_lack_days
        assert {day for day in days if file.may_hold(day)} >= set(expected)


@settings(max_examples=40)
@given(micros=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3), unit=st.sampled_from(["ms", "us"]))
def test_times_of_any_year(micros: list[int], unit: str, tmp_path_factory: Any) -> None:
    """Sides beyond the years 1 to 9999 are open; the others are NumPy's days, without a word of an error."""
    folder: Path = tmp_path_factory.mktemp("folder")
    values = pa.array(micros, pa.int64()).cast(pa.timestamp(unit))
    pq.write_table(pa.table({"ts": values}), folder / "a.parquet", version="2.6")
    source = TableSource.model_validate({"format": "parquet", "path": str(folder), "day": {"time": "ts"}})
    (file,) = FolderSnapshot(source, local(folder), "parquet").files
    in_a_day = 86_400 * (10**3 if unit == "ms" else 10**6)
    first, last = min(micros) // in_a_day, max(micros) // in_a_day
    # The days from 0001-01-01 to the one before 9999-12-31, since 1970; a bound may be a millisecond late.
    known = range(-719_162, 2_932_896)
    epoch = datetime(1970, 1, 1)
    if first in known:
        assert file.first == (epoch + timedelta(days=first)).date().isoformat()
    elif first < -719_162:
        assert file.first == FIRST
    if last in known:
        exact = (epoch + timedelta(days=last)).date().isoformat()
        assert exact <= file.last <= (epoch + timedelta(days=last + 1)).date().isoformat()
    elif last > 2_932_896:
        assert file.last == LAST


#: Of each file: hours after START of its rows; None: a row without a time.
HOURS = st.lists(st.lists(st.none() | st.integers(0, 71), min_size=1, max_size=5), min_size=1, max_size=4)


def written(folder: Path, form: str, files: list[list[int | None]]) -> FileSnapshot:
    source = TableSource.model_validate({"format": form, "path": str(folder), "day": {"time": "ts"}})
    folder.mkdir()
    for number, hours in enumerate(files):
        times = [None if h is None else START + timedelta(hours=h) for h in hours]
        rows = pa.table({"id": pa.array([number] * len(hours)), "ts": pa.array(times, pa.timestamp("us", "UTC"))})
        if form == "delta":
            deltalake.write_deltalake(str(folder), rows, mode="append")
        else:
            pq.write_table(rows, folder / f"{number}.parquet")
    if form == "delta":
        return DeltaSnapshot(source, local(folder), len(files) - 1)
    return FolderSnapshot(source, local(folder), form)


@pytest.mark.parametrize("form", ["delta", "parquet"])
@given(files=HOURS)
def test_a_file_is_taken_as_it_is_where_all_its_rows_are_of_the_days(
    form: str, files: list[list[int | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    snapshot = written(tmp_path_factory.mktemp("days") / "table", form, files)
    by_id = {int(pq.read_table(f.path.local_path())["id"][0].as_py()): f for f in snapshot.files}
    assert len(by_id) == len(files)
    for number, hours in enumerate(files):
        days = sorted({(START + timedelta(hours=h)).date().isoformat() for h in hours if h is not None})
        file = by_id[number]
        if days:
            assert (file.first, file.last) == (days[0], days[-1])
            assert file.may_lack_days == (None in hours)
            assert holds_only(file, days) == (None not in hours and len(days) == 1 + _apart(days[0], days[-1]))
        else:
            assert (file.first, file.last) == (FIRST, LAST)
            assert not holds_only(file, ["2026-01-01"])


def _apart(first: str, last: str) -> int:
    return (datetime.fromisoformat(last) - datetime.fromisoformat(first)).days
