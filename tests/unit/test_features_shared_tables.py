"""Tables by key that the driver does not hold, for the operators that learn behind them in the same chain."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.features.arrow.fit import LakeFit
from headrace.features.arrow.scan import FileScan, LakeRows, ScanTask, lake_rows
from headrace.features.learn.statistics import canonical
from headrace.features.ops.base import FittedState
from headrace.features.vocabulary.keyed_tables import KEY, FileKeyedTable, keyed_of
from headrace.features.vocabulary.table_writer import write_table
from headrace.features.workflow.workflow import Workflow
from headrace.storage import local
from headrace.storage.host_scratch import HostScratch
from tests.unit.test_features_large_text import COLUMNS, ROWS, TRAIN, WORKFLOW, chain, make, splitter, write


@pytest.mark.parametrize("shared", [False, True])
def test_a_table_that_the_driver_does_not_hold_is_mapped_by_hosts(tmp_path: Path, shared: bool) -> None:
    """The next turn learns the same as from a table in memory, and no task is sent the table.

    It may be of the dataset that another one is built upon: not where tasks hand each other files.
    """
    rows = make()
    rows["body"] = [f"{i // 2}" + "x" * 500 for i in range(ROWS)]
    file = write(rows, tmp_path / "rows.parquet", pa.string())
    estimator, name = (4, 1), "often"
    with lake_rows(WORKFLOW, [file], splitter(), local(tmp_path / "home"), {}) as lake:
        fit = LakeFit(WORKFLOW, lake)
        task = fit.next_task()
        assert task is not None
        fit.merge(fit.scan(None, task))
        expected = fit.next_task()
        assert expected is not None
        learned = fit._learned[estimator[0]][estimator[1]].tables[name]
        (partials,) = [dict(expected.partials(s.rows())) for s in scans(lake)]
    write_table(keyed_of(learned).table, tmp_path / "table.parquet", KEY)
    host_scratch = None if shared else HostScratch("encoded", local(tmp_path / "host"))
    with lake_rows(WORKFLOW, [file], splitter(), local(tmp_path / "none"), {}, host_scratch=host_scratch) as lake:
        fit = LakeFit(WORKFLOW, lake, shared_folder=local(tmp_path / "handed"))
        assert fit.next_task() is not None
        in_file = FittedState({}, {name: FileKeyedTable(tmp_path / "table.parquet")})
        fit._learn({a: in_file if a == estimator else FittedState({}) for a in fit._learning})
        task = fit.next_task()
        assert task is not None
        (tmp_path / "table.parquet").unlink()  # no task sees it
        assert list(task.shared_tables) == [(*estimator, name)]
        assert len(pickle.dumps(task)) < len(pickle.dumps(expected)) - TRAIN // 2 * 500
        (mapped_partials,) = [dict(pickle.loads(pickle.dumps(task)).partials(s.rows())) for s in scans(lake)]
    assert mapped_partials.keys() == partials.keys()
    for key, partial in mapped_partials.items():
        assert canonical(partial).equals(canonical(partials[key]))


def test_tables_of_several_turns_keep_apart(tmp_path: Path) -> None:
    """Tasks that share a folder number their files from 0 in each turn."""
    counts = ({"rename": {"to": {"k": "n"}}}, "value_count", "value_count", "normalize")
    workflow = Workflow([chain("k", ops=counts)], COLUMNS, "y", ())
    file = write(make(), tmp_path / "rows.parquet", pa.string())
    learned = []
    for in_files in (False, True):
        with lake_rows(workflow, [file], splitter(), local(tmp_path / "home"), {}) as lake:
            fit = LakeFit(workflow, lake)
            turns = 0
            while (task := fit.next_task()) is not None:
                assert len(task.shared_tables) == (turns if in_files else 0)
                fit.merge(fit.scan(None, task))
                turns += 1
                step = fit._learned[0][-1]
                if in_files and step.tables:
                    ((name, table),) = step.tables.items()
                    folder = lake.scratch / f"tables-{turns}"
                    folder.make_dir()
                    write_table(keyed_of(table).table, folder.local_path() / "0.parquet", KEY)
                    in_file = FileKeyedTable(folder.local_path() / "0.parquet")
                    fit._learned[0][-1] = FittedState(step.states, {name: in_file})
            assert turns == 3
            learned.append(fit._learned[0][-1].states)
    assert learned[0]
    assert learned[0] == learned[1]


def scans(rows: LakeRows) -> Iterator[FileScan]:
    """Return the scans of the files, in one task."""
    tasks = (tuple(enumerate(rows.files)),)
    yield from ScanTask(tasks, rows.folder, rows.layout, rows.splitter, None).files(0)
