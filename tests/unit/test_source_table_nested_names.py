"""Days by a column's statistics among nested leaves of its name, against PyArrow's own filter of all rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import TableSource
from headrace.lake.tables.folder import FolderSnapshot
from headrace.lake.tables.snapshot import FIRST, LAST
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
