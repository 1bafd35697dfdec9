"""Writing a frame's rows in the Arrow engine's workers: large vocabularies are mapped, on any folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.features.arrow import write
from headrace.features.layout.files import carried_columns, plan_files
from headrace.features.vocabulary.lookup import Lookup, MappedLookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.storage import Location, local
from headrace.storage.host_scratch import HostScratch, RunFolder

COLUMNS = [TableColumn(name=n, type=t) for n, t in {"user": "string", "device": "string", "click": "int"}.items()]
CHAINS: list[dict[str, Any]] = [{"columns": ["user", "device"], "ops": ["categorify"]}]
USERS, DEVICES = [f"u{i}" for i in range(9)], ["phone", "desktop"]


def lookup(values: list[str]) -> Lookup:
    return Lookup(pa.table({"value": values, "code": pa.array(range(3, 3 + len(values)), pa.int64())}))


@pytest.mark.parametrize("on_host_scratch", [False, True])
def test_workers_map_large_vocabularies(on_host_scratch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workflow = Workflow([Chain.model_validate(c) for c in CHAINS], COLUMNS, label="click")
    states = [[{c: {} for c in chain.columns} for _ in chain.steps] for chain in workflow.chains]
    fitted = FittedWorkflow(workflow, states, {"user": lookup(USERS), "device": lookup(DEVICES)})
    fitted.save(local(tmp_path / "workflow"))
    monkeypatch.setenv("HEADRACE_SCRATCH", str(tmp_path / "host"))
    monkeypatch.setattr("headrace.features.workflow.fitted.MAPPED_VALUES", len(DEVICES))
    of_run: Location | RunFolder = local(tmp_path / "run")
    if on_host_scratch:
        of_run = RunFolder(HostScratch("encoded/shop"), "one", ())
    rng = np.random.default_rng(4)
    n = 40
    columns = {
        "user": pa.array([*rng.choice([*USERS, "other"], n - 1).tolist(), None]),
        "device": pa.array(rng.choice([*DEVICES, "watch"], n).tolist()),
        "__label": pa.array(rng.integers(0, 2, n), pa.float32()),
        "__part": pa.array(np.zeros(n), pa.int32()),
    }
    plans = plan_files({"train": n}, 20, 1)
    (tmp_path / "out" / "train").mkdir(parents=True)
    out, carried = local(tmp_path / "out"), tuple(carried_columns(workflow))
    task = write._Task(tuple(plans), out, local(tmp_path / "workflow"), of_run, carried, tuple(columns))
    rows = pa.RecordBatch.from_pydict(columns)
    write.mapped.cache_clear()
    written = [b for b in task.run([rows.slice(0, 13), rows.slice(13)]) if b.num_rows]
    assert len(written) == len(plans)
    dataset = pa.concat_tables(pq.read_table(f) for f in sorted((tmp_path / "out" / "train").iterdir()))
    for name, values in (("user", USERS), ("device", DEVICES)):
        codes = {v: i + 3 for i, v in enumerate(values)} | {None: 0}
        assert dataset.column(name).to_pylist() == [codes.get(v, 1) for v in columns[name].to_pylist()]
    assert (
        dataset.column("__label" if "__label" in dataset.column_names else "click").to_pylist()
        == columns["__label"].to_pylist()
    )
    maps = (tmp_path / "host" / "encoded" / "shop" / "scratch.one" if on_host_scratch else tmp_path / "run") / "maps"
    assert [p.name for p in maps.iterdir() if p.is_dir()] == ["user"]
    kinds = {k: type(v) for k, v in write.mapped(task.workflow, local(maps)).vocabularies.items()}
    assert kinds == {"user": MappedLookup, "device": Lookup}
