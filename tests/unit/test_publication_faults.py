"""Whole publications (a model, a dataset, a day of a Delta table) while the n-th call of the store fails, for all n.

Whatever the call was, a reader opens the old one or the new one, every file of which is there as it was written, and a
rerun makes the new one, once, and leaves nothing beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace import config
from headrace.comm.base import LocalCollective
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.dataset.layout import LISTING
from headrace.errors import UserError
from headrace.features.arrow.write_lake import write_lake_rows
from headrace.features.build.run import complete
from headrace.features.layout.files import plan_files
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.delta.data_files import DataFileWriter, remove_files
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.lake.landing.load import commit_files, forgotten_unless_refused
from headrace.library.staging import staged_rows
from headrace.models.saved import load_model, save_model
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location, local
from headrace.storage.objects import calls
from tests.storage_support import Killed, faulty, left_over, memory_home

SCHEMA = DatasetSchema(
    features=(
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9),
        Feature(name="price", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)
DAY, OTHER_DAY = "2026-03-01", "2026-03-02"


def save(home: Location, scratch: Path, state: str) -> None:
    """A model."""
    model = ShardedModel(SCHEMA, config.Model(embedding_dim=4), LocalCollective(), {"old": 1, "new": 2}[state])
    workflow = local(scratch / "workflow")
    (workflow / "workflow.json").put_text("{}")
    saved = home / "thing"
    save_model(saved, model, workflow=workflow, pipeline="p", ds=DAY, key=state, metrics={"auc": 0.5})


def opened_model(thing: Location) -> Any:
    """Return the answer of a model, or None where there is no model."""
    if not thing.exists():
        return None
    weights = [w.tolist() for w in load_model(thing).embeddings.weights]
    return json.loads((thing / "model.json").read_text())["key"], weights


@cache
def fitted(state: str) -> tuple[Any, pa.Table]:
    """A workflow, and the rows that it learned from."""
    rng = np.random.default_rng({"old": 1, "new": 2}[state])
    n = {"old": 60, "new": 90}[state]
    rows = pa.table({"user": rng.integers(0, 30, n), "price": rng.random(n), "click": rng.integers(0, 2, n)})
    chains = (["user"] >> hr.Categorify()) + (["price"] >> hr.Normalize())
    return hr.Workflow(chains, label="click").fit(rows).fitted, rows


def write_dataset(home: Location, scratch: Path, state: str) -> None:
    """A dataset, as the stage features publishes one."""
    workflow, rows = fitted(state)
    with staged_rows(workflow.workflow, {"train": rows[:40], "valid": rows[40:]}) as (staged, spark):
        staged.scan(spark)
        counts = staged.counts.rows
        with (home / "thing").new_folder() as folder:
            workflow.save(folder / "workflow")
            written = write_lake_rows(workflow, staged, plan_files(counts, 20, 1), folder, folder / "workflow", spark)
            complete(folder, written.files, counts)


def opened_dataset(thing: Location) -> Any:
    """All rows of a dataset, and its vocabulary; None where there is none."""
    if not thing.exists():
        return None
    listed = json.loads((thing / LISTING).read_text())
    assert {f["name"]: f["size"] for f in listed} == {
        f.below(thing): f.size() for f in thing.files() if f.name != LISTING
    }
    tables = {f["name"]: pq.read_table((thing / f["name"]).open()).to_pydict() for f in listed if "rows" in f}
    return tables, FittedWorkflow.load(thing / "workflow").vocabularies["user"].table.to_pydict()


def load_day(home: Location, scratch: Path, state: str) -> None:
    """A day of a Delta table, beside another day that stays, as the stage ingest commits one."""
    table, schema = home / "thing", pa.schema([("id", pa.int64())])
    fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in (("id", "long"), ("ds", "string"))]
    create_table(table, fields, ["ds"])
    for day, ids in {OTHER_DAY: range(3), DAY: {"old": range(10, 14), "new": range(20, 27)}[state]}.items():
        written = []
        try:
            writer = DataFileWriter(table, day, schema, "snappy")
            writer.add(pa.table({"id": list(ids)}, schema=schema))
            file = writer.close()
            assert file is not None
            written.append(file)
            no_session: Any = None  # Spark is asked for checkpoints and constraints alone
            with forgotten_unless_refused(written, [file]):
                commit_files(no_session, table, [day], [file], json.dumps({"which": state}))
        finally:
            remove_files(table, written)


def opened_days(thing: Location) -> Any:
    """The ids of the day; None where there is none of it."""
    if DeltaLog(thing).version is None:
        return None
    days: dict[str, list[int]] = {}
    for add in Transaction(thing).adds:
        rows = pq.read_table((thing / add["path"]).open()).column("id").to_pylist()
        days.setdefault(dict(add["partitionValues"])["ds"], []).extend(rows)
    assert days.get(OTHER_DAY, [0, 1, 2]) == [0, 1, 2]
    return sorted(days[DAY]) if DAY in days else None


@pytest.mark.parametrize("how", ["fails", "is not answered", "killed"])
@pytest.mark.parametrize(
    ("act", "opened"),
    [(save, opened_model), (write_dataset, opened_dataset), (load_day, opened_days)],
    ids=["model", "dataset", "day"],
)
def test_the_nth_call(
    act: Callable[[Location, Path, str], None],
    opened: Callable[[Location], Any],
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completed, seen = 0, {"old": 0, "new": 0}
    for n in range(1, 400):
        home = memory_home(monkeypatch, tmp_path / "cache", readers=("reader",))
        reader = Location(home.path, "reader") / "thing"
        act(home, tmp_path, "old")
        old = opened(reader)
        with faulty(n, how == "killed", calls, done=how == "is not answered") as fault:
            try:
                act(home, tmp_path, "new")
                is_readable = True
            except (OSError, UserError, Killed):  # a file that cannot be read is told as such
                is_readable = False
        result = opened(reader)
        act(home, tmp_path, "new")
        new = opened(reader)
        assert None is not old != new is not None
        assert result in (old, new), n
        assert opened(home / "thing") == new
        if is_readable:
            assert result == new
        seen["new" if result == new else "old"] += 1
        if act is not load_day:  # its files that no commit names are VACUUM's to remove
            home.discard_unfinished()
            assert left_over(home) == [], n
        completed += 1
        if fault.calls_made < n:
            break
    else:
        raise AssertionError("no end")
    assert completed > 10
    assert min(seen.values()) > 0
