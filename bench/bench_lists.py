"""Multi-hot features as one Parquet list column, read into batches, beside the same values as padded scalar columns.

make bench-lists: 26 codes, 13 numbers and a history of codes a row: of up to 20 (a mean of 4, or all full; 0.5 M rows),
and of up to 1,000 (a mean of 10; 0.13 M rows). Rows a second, bytes, and how much memory reading takes at its peak.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.report import Figure, publish
from headrace.config import Train
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.dataset import lists
from headrace.dataset.layout import open_split
from headrace.dataset.loaders import TrainLoader
from headrace.storage import local

ROUNDS = 3
KINDS = ("lists", "columns")
TRAIN = Train(batch_size=8192, streams=4)


@dataclass(frozen=True)
class ListCase:
    """A dataset: lists of `mean` codes in the mean and at most `length`."""

    name: str
    rows: int
    group: int
    length: int
    mean: float


CASES = (
    ListCase("of 4 codes in the mean", 524_288, 65_536, 20, 4.0),
    ListCase("all full", 524_288, 65_536, 20, float("inf")),
    ListCase("of 10 codes in the mean, up to 1,000", 131_072, 32_768, 1_000, 10.0),
)


def main() -> None:
    figures = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            schemas = {kind: write(Path(folder) / kind, case, kind == "lists") for kind in KINDS}
            measured: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for _ in range(ROUNDS):  # taking turns, so that both meet the same machine
                for kind, schema in schemas.items():
                    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                        measured[kind].append(alone.submit(measure, Path(folder) / kind, schema).result())
            size = {k: sum(f.stat().st_size for f in (Path(folder) / k).rglob("*.parquet")) / 2**20 for k in KINDS}
        rate, peak = ({k: best(pair[i] for pair in measured[k]) for k in KINDS} for i, best in ((0, max), (1, min)))
        for label, unit, by in (
            ("batches from", "rows/s", rate),
            ("size,", "MiB", size),
            ("peak memory,", "MiB", peak),
        ):
            name = f"{label} lists {case.name}; peer: padded columns"
            figures.append(Figure(name, by["lists"], unit, peer=by["columns"]))
    publish("lists", figures)


def write(folder: Path, case: ListCase, as_lists: bool) -> DatasetSchema:
    """Write one split; return its schema."""
    (folder / "train").mkdir(parents=True)
    rng = np.random.default_rng(0)
    drawn = rng.geometric(1 / (case.mean + 1), case.rows) - 1 if np.isfinite(case.mean) else np.full(case.rows, 10**6)
    length = np.minimum(drawn, case.length)
    length[:: case.group] = case.length  # one at least in each row group
    offsets = np.append(0, length.cumsum())
    history = lists.from_arrays(offsets, rng.integers(1, 1000, offsets[-1]).astype(np.int32))
    scalars = {f"n{i}": rng.random(case.rows, np.float32) for i in range(13)}
    scalars |= {f"c{i}": rng.integers(0, 1000, case.rows).astype(np.int32) for i in range(26)}
    table = pa.table({**scalars, "y": np.zeros(case.rows, np.float32), "h": history})
    for g in range(case.rows // case.group):
        part = table.slice(g * case.group, case.group)
        if not as_lists:
            padded = np.empty((case.group, case.length), np.int32, order="F")
            lists.pad(part.column("h"), padded, "h")
            columns = {f"h{i}": padded[:, i] for i in range(case.length)}
            part = pa.table({**{n: part.column(n) for n in (*scalars, "y")}, **columns})
        path = folder / "train" / f"part-{g:03d}.parquet"
        pq.write_table(part, path, compression="none", use_dictionary=False)
    code = {"kind": Kind.CATEGORICAL, "dtype": "int32", "cardinality": 1000}
    codes = [Feature(name=n, **code) for n in scalars if n[0] == "c"]
    if as_lists:
        codes.append(Feature(name="h", is_list=True, length=case.length, **code))
    else:
        codes += [Feature(name=f"h{i}", **code) for i in range(case.length)]
    numbers = [Feature(name=n, kind=Kind.CONTINUOUS, dtype="float32") for n in scalars if n[0] == "n"]
    return DatasetSchema(features=(*numbers, *codes, Feature(name="y", kind=Kind.LABEL, dtype="float32")))


def measure(folder: Path, schema: DatasetSchema) -> tuple[float, float]:
    """Measure two epochs of a rank alone, after a first one: rows a second, MiB at the peak above those before."""
    start_mib = _peak_mib()
    with TrainLoader(open_split(local(folder), "train", schema), schema, TRAIN) as source:
        for _ in range(source.steps_per_epoch):
            next(source)
        tick = time.perf_counter()
        for _ in range(2 * source.steps_per_epoch):
            next(source)
        rate = 2 * source.steps_per_epoch * TRAIN.batch_size / (time.perf_counter() - tick)
    return rate, _peak_mib() - start_mib


def _peak_mib() -> float:
    """Return this process's largest resident set since it was started. (getrusage's is at least the parent's.)"""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
