"""The days that the data files of a source table hold, by their statistics of `day.time`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import TableSource
from headrace.lake.tables.declared import holds_only
from headrace.lake.tables.delta import DeltaSnapshot
from headrace.lake.tables.folder import FolderSnapshot
from headrace.lake.tables.snapshot import FIRST, LAST, FileSnapshot
from headrace.storage import local

START = datetime(2026, 1, 1, tzinfo=UTC)
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
