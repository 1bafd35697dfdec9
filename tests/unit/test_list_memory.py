"""Memory that lists take on their way: it follows their values, not the longest list times the rows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import Chain, Train
from headrace.config.schema import DatasetSchema, Feature, Kind, TableColumn
from headrace.dataset.layout import open_split
from headrace.dataset.loaders import EvalLoader, TrainLoader
from headrace.features.arrow.decode import LakeFile
from headrace.features.arrow.fit import LakeFit
from headrace.features.arrow.scan import Splitter, lake_rows
from headrace.features.arrow.write_lake import write_lake_rows
from headrace.features.layout.files import PositionRule, plan_files
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.storage import local
from tests.train_support import padded_codes

ROWS, MEAN, LENGTH, GROUP, BATCH = 20_000, 10, 1_000, 5_000, 100
COLUMNS = [
    TableColumn(name="items", type="array<bigint>"),
    TableColumn(name="scores", type="array<double>"),
    TableColumn(name="y", type="int"),
]


def chains(length: int) -> list[Chain]:
    pad: dict[str, Any] = {"op": "pad", "params": {"length": length}}
    return [
        Chain(columns=("items",), ops=({"op": "hash_bucket", "params": {"buckets": 1000}}, pad)),
        Chain(columns=("scores",), ops=(pad,)),
    ]


def offsets(longest: int) -> np.ndarray:
    """Return offsets of lists with MEAN values on average: some of `longest`, the others short enough for it."""
    lengths = np.random.default_rng(0).integers(0, 2 * (MEAN - 1) + 1, ROWS)
    lengths[:: 2 * longest] = longest
    surplus = int(lengths.sum()) - ROWS * MEAN
    for i in np.flatnonzero(lengths < longest)[: abs(surplus)]:
        lengths[i] = max(lengths[i] - 1, 0) if surplus > 0 else lengths[i] + 1
    return np.append(0, lengths.cumsum())


def write(folder: Path, longest: int) -> None:
    """A lake file to a dataset, by the Arrow engine."""
    rng, ends = np.random.default_rng(1), offsets(longest)
    n = int(ends[-1])
    table = {
        "items": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(rng.integers(1, 10**6, n))),
        "scores": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(rng.random(n))),
        "y": pa.array(rng.integers(0, 2, ROWS), pa.int32()),
        "_source_file": pa.array(["a"] * ROWS),
        "_source_line": pa.array(np.arange(ROWS)),
    }
    pq.write_table(pa.table(table), folder / "lake.parquet", row_group_size=GROUP)
    workflow = Workflow(chains(longest), COLUMNS, "y", ())
    file = LakeFile(local(folder / "lake.parquet"), (folder / "lake.parquet").stat().st_size)
    splitter = Splitter(PositionRule("a", ROWS - BATCH), ("train", "valid"), "y")
    with lake_rows(workflow, [file], splitter, local(folder / "home"), {}) as rows:
        rows.scan(None)
        fit = LakeFit(workflow, rows)
        assert fit.next_task() is None  # there is nothing to learn
        fitted = fit.finish(None)  # type: ignore[arg-type]  # and no vocabulary
        out = local(folder / "out")
        fitted.save(out / "workflow")
        write_lake_rows(fitted, rows, plan_files(rows.counts.rows, GROUP, 1), out, out / "workflow", None)


def schema_of(folder: Path) -> DatasetSchema:
    return FittedWorkflow.load(local(folder / "out" / "workflow")).schema


def read(folder: Path, longest: int) -> None:
    """The dataset's batches, of which one at a time is kept."""
    schema = schema_of(folder)
    layout = open_split(local(folder / "out"), "train", schema)
    with TrainLoader(layout, schema, Train(batch_size=BATCH, streams=2, ranks=1), depth=1) as source:
        for _ in range(source.steps_per_epoch):
            next(source)


def peak(work: Callable[[Path, int], None], folder: Path, longest: int) -> tuple[int, int]:
    """Bytes: the most that NumPy's and Python's objects took at a time, and Arrow's, after what was there before."""
    allocated = pa.total_allocated_bytes()
    tracemalloc.start()
    work(folder, longest)
    return tracemalloc.get_traced_memory()[1], pa.default_memory_pool().max_memory() - allocated


def peak_alone(work: Callable[[Path, int], None], folder: Path, longest: int) -> tuple[int, int]:
    """`peak` in a process of its own: pools remember the most that they ever held."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(peak, work, folder, longest).result()


def test_memory_follows_the_values(tmp_path: Path) -> None:
    """Lists of up to 20 and of up to 1,000 have as many values: padded, these would take 50 times the memory."""
    peaks: dict[tuple[str, int], tuple[int, int]] = {}
    for longest in (2 * MEAN, LENGTH):
        folder = tmp_path / str(longest)
        folder.mkdir()
        assert offsets(longest)[-1] == ROWS * MEAN
        assert np.diff(offsets(longest)).max() == longest
        for work in (write, read):
            peaks[work.__name__, longest] = peak_alone(work, folder, longest)
    matrix = BATCH * LENGTH * 4  # of the numbers: they are a dense layer's input
    for name, room in (("write", 0), ("read", 4 * matrix)):
        short, long = peaks[name, 2 * MEAN], peaks[name, LENGTH]
        assert long[0] < 1.3 * short[0] + room, (name, short, long)
        assert long[1] < 1.3 * short[1] + 2**20, (name, short, long)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_batches_hold_the_rows(tmp_path: Path, batch_size: int) -> None:
    """Lists of codes, raw ids and numbers between scalars, in many row groups, against rows padded in Python."""
    rng = np.random.default_rng(2)
    rows, length = 150, 5
    lists = [rng.integers(0, 4, int(rng.integers(0, length + 1))).tolist() for _ in range(rows)]
    columns = {
        "a": pa.array(rng.integers(0, 9, rows), pa.int32()),
        "codes": pa.array(lists, pa.list_(pa.int32())),
        "x": pa.array(rng.random(rows), pa.float32()),
        "numbers": pa.array([[v / 2 for v in r] for r in lists], pa.list_(pa.float32())),
        "ids": pa.array([[v << 40 for v in r] for r in lists], pa.list_(pa.int64())),
        "b": pa.array(rng.integers(0, 9, rows), pa.int32()),
        "y": pa.array(np.arange(rows), pa.float32()),
    }
    (tmp_path / "valid").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "valid" / "0.parquet", row_group_size=40)
    code: dict[str, Any] = {"kind": Kind.CATEGORICAL, "cardinality": 9, "dtype": "int32"}
    list_fields: dict[str, Any] = {"is_list": True, "length": length}
    schema = DatasetSchema(
        features=(
            Feature(name="numbers", kind=Kind.CONTINUOUS, dtype="float32", **list_fields),
            Feature(name="x", kind=Kind.CONTINUOUS, dtype="float32"),
            Feature(name="a", **code),
            Feature(name="codes", **code, **list_fields),
            Feature(name="ids", kind=Kind.CATEGORICAL, dtype="int64", dynamic=True, **list_fields),
            Feature(name="b", **code),
            Feature(name="y", kind=Kind.LABEL, dtype="float32"),
        )
    )
    layout = open_split(local(tmp_path), "valid", schema)
    seen = 0
    with EvalLoader(layout, schema, batch_size=batch_size, streams=1) as source:
        for batch in source:
            assert batch.codes.dtype == np.int64
            codes = padded_codes(batch, schema)
            assert batch.continuous.dtype == np.float32
            for i, row in enumerate(batch.labels.astype(int).tolist()):
                padded = lists[row] + [0] * (length - len(lists[row]))
                assert batch.continuous[i].tolist() == [*(v / 2 for v in padded), columns["x"][row].as_py()]
                assert codes[i].tolist() == [
                    columns["a"][row].as_py(),
                    *padded,
                    *(v << 40 for v in padded),
                    columns["b"][row].as_py(),
                ]
                seen += 1
    assert seen == rows
