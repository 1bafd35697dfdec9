"""Data files whose commit fails: they stay where it may have been made, and go where it was refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from headrace.errors import BusyError, UserError
from headrace.lake.delta.data_files import DataFileWriter, WrittenFile, remove_files
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.lake.landing.commit import forgotten_unless_refused
from headrace.storage import LeaseLost, Location, StoreRefused, local
from headrace.storage.objects.calls import StoreAway

DAY = "2026-03-01"


@pytest.fixture
def table(tmp_path: Path) -> Location:
    folder = local(tmp_path / "table")
    types = {"id": "long", "ds": "string"}
    create_table(folder, [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in types.items()], ["ds"])
    return folder


def _written(table: Location, first: int) -> WrittenFile:
    schema = pa.schema([("id", pa.int64())])
    writer = DataFileWriter(table, DAY, schema, "snappy")
    writer.add(pa.table({"id": [first, first + 1]}, schema=schema))
    data_file = writer.close()
    assert data_file is not None
    return data_file


@pytest.mark.parametrize(
    "error",
    [StoreAway("no answer"), StoreRefused("the token has expired"), OSError(5, "fsync"), KeyboardInterrupt()],
    ids=lambda e: type(e).__name__,
)
def test_files_of_a_commit_whose_answer_is_lost_stay(error: BaseException, table: Location) -> None:
    committed_file, extra_file = _written(table, 0), _written(table, 10)
    written = [committed_file, extra_file]

    def commit() -> None:
        with forgotten_unless_refused(written, [committed_file]):
            Transaction(table).replace("ds", [DAY], [committed_file.add_action()], "{}")
            raise error

    with pytest.raises(type(error)):
        commit()
    remove_files(table, written)
    assert (table / committed_file.path).exists()
    assert not (table / extra_file.path).exists()


@pytest.mark.parametrize("error", [UserError("a constraint is broken"), BusyError("another writer"), LeaseLost("lost")])
def test_files_of_a_refused_commit_go(error: UserError, table: Location) -> None:
    refused_file = _written(table, 0)
    written = [refused_file]

    def commit() -> None:
        with forgotten_unless_refused(written, [refused_file]):
            raise error

    with pytest.raises(type(error)):
        commit()
    remove_files(table, written)
    assert not (table / refused_file.path).exists()
