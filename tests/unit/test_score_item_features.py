"""Items' features where hosts share no folder: in a store by parts, and on each host whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.compute.jagged import JaggedArray
from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.spark.tasks import run_tasks
from headrace.score import item_features
from headrace.score.item_features import ItemFeatures
from headrace.score.items import ItemTable
from headrace.score.loaded_model import PairFeatures
from headrace.storage import LeaseLost, Location, local
from headrace.storage.host_scratch import HostScratch, RunFolder
from headrace.storage.objects import copies
from tests.storage_support import memory_home

COLUMNS = {"user": "string", "item": "bigint", "price": "double", "tags": "array<string>", "click": "int"}
CHAINS: list[dict[str, Any]] = [
    {"columns": ["price"], "ops": ["fill_missing", "log"]},
    {"columns": ["tags"], "ops": ["categorify", {"pad": {"length": 4}}]},
    {"columns": ["item"], "ops": [{"hash_bucket": {"buckets": 7}}]},
    {"columns": ["user"], "ops": [{"hash_bucket": {"buckets": 3}}]},
]


def made_of() -> PairFeatures:
    columns = [TableColumn(name=name, type=type_) for name, type_ in COLUMNS.items()]
    workflow = Workflow([Chain.model_validate(c) for c in CHAINS], columns, label="click")
    states = [[{c: {} for c in chain.columns} for _ in chain.steps] for chain in workflow.chains]
    tags = Lookup(pa.table({"value": ["a", "b"], "code": pa.array([2, 3], pa.int64())}))
    return PairFeatures(("user",), ("item", "price", "tags"), {}, FittedWorkflow(workflow, states, {"tags": tags}))


def things(n: int) -> pa.Table:
    rng = np.random.default_rng(n)
    tags = [None if i % 5 == 0 else list(rng.choice(["a", "b", "c"], i % 4)) for i in range(n)]
    prices = [None if i % 7 == 0 else float(p) for i, p in enumerate(rng.gamma(2, 9, n))]
    types = {"item": pa.int64(), "price": pa.float64(), "tags": pa.list_(pa.string())}
    return pa.table(
        [pa.array(v, t) for v, t in zip((range(n), prices, tags), types.values(), strict=True)], list(types)
    )


def values(columns: Mapping[str, Any], rows: int) -> dict[str, list[Any]]:
    def to_list(x: Any) -> list[Any]:
        if isinstance(x, JaggedArray):
            return [x.values[a:b].tolist() for a, b in zip(x.offsets[:rows], x.offsets[1 : rows + 1], strict=True)]
        return [float(v).hex() for v in x[:rows]]

    return {name: to_list(x) for name, x in columns.items()}


@pytest.mark.parametrize(("n", "part_rows"), [(0, 5), (4, 5), (23, 5), (23, 100)])
def test_each_host_puts_them_together(n: int, part_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features, lake = made_of(), memory_home(monkeypatch, tmp_path / "cache")
    model = local(tmp_path / "model")
    features.fitted.save(model / "workflow")
    (model / "model.json").put_text("{}")

    def written(folder: Location, hosts: RunFolder | None) -> ItemFeatures:
        table = ItemTable.of_arrow(things(n), "item", folder / "items", part_rows)
        assert table.first(8).num_rows == min(n, 8)
        assert table.first(8).equals(table.open().slice(0, 8))
        return ItemFeatures.write(table, model, features, folder / "features", None, hosts)

    expected = values(written(local(tmp_path / "shared"), None).open(), n)
    assert set(expected) == {"price", "tags", "item"}
    stored = written(lake, RunFolder(HostScratch("mapped/shop"), "run", ()))
    for host in ("one", "other"):
        monkeypatch.setenv("HEADRACE_SCRATCH", str(tmp_path / host))
        host_folder = stored.on_this_host()
        assert host_folder.is_below(local(tmp_path / host / "mapped" / "shop" / "scratch.run"))
        assert values(ItemFeatures(host_folder, stored.files, stored.ends).open(), n) == expected
    # A few of them, without a host's folder.
    monkeypatch.setenv("HEADRACE_SCRATCH", str(tmp_path / "driver"))
    count = min(n, 8)
    assert values(stored.first(count), count) == {name: column[:count] for name, column in expected.items()}
    # Their copies on a host are the first to go.
    parts = [copy for copy in copies.cached_files() if copy.name.startswith("feature-")]
    assert {copy.stat().st_mtime for copy in parts} == {0}
    assert not (tmp_path / "driver").exists()


def test_a_task_that_was_lost_and_goes_on_changes_no_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, lake, n = made_of(), memory_home(monkeypatch, tmp_path / "cache"), 23
    model = local(tmp_path / "model")
    features.fitted.save(model / "workflow")
    (model / "model.json").put_text("{}")
    table = ItemTable.of_arrow(things(n), "item", lake / "items", 5)
    lost = []

    def run_twice(spark: None, count: int, work: Callable[[int], Iterable[Any]]) -> list[Any]:
        run_tasks(spark, count, work)
        lost.append(lambda: run_tasks(spark, count, work))
        return run_tasks(spark, count, work)

    monkeypatch.setattr(item_features, "run_tasks", run_twice)
    hosts = RunFolder(HostScratch("mapped/shop"), "run", ())
    stored = ItemFeatures.write(table, model, features, lake / "features", None, hosts)
    first_values = values(stored.first(8), 8)
    for task in lost:
        with pytest.raises(LeaseLost):  # all is published since
            task()
    assert values(stored.first(8), 8) == first_values
    monkeypatch.setenv("HEADRACE_SCRATCH", str(tmp_path / "host"))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "another"))
    assert values(stored.open(), 8) == first_values
