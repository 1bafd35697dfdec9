"""Multi-hot features as one Parquet list column, read into batches, beside the same values as padded scalar columns.

make bench-lists: 26 codes, 13 numbers and a history of up to 20 codes a row (a mean of 4, or all full), 0.5 M rows.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.report import Figure, publish
from headrace.config import Train
from headrace.dataset.loader.loaders import TrainLoader
from headrace.dataset.parquet import lists
from headrace.dataset.parquet.layout import open_split
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.storage import local

ROWS, GROUP, LENGTH, ROUNDS = 524_288, 65_536, 20, 3
TRAIN = Train(batch_size=8192, streams=4)


def main() -> None:
    figures = []
    for name, mean in (("of 4 codes in the mean", 4.0), ("all full", float("inf"))):
        with tempfile.TemporaryDirectory() as folder:
            schemas = {kind: write(Path(folder) / kind, mean, kind == "lists") for kind in ("lists", "columns")}
            rates: dict[str, list[float]] = {kind: [] for kind in schemas}
            for _ in range(ROUNDS):  # taking turns, so that both meet the same machine
                for kind, schema in schemas.items():
                    rates[kind].append(rate(Path(folder) / kind, schema))
            sizes = {k: sum(f.stat().st_size for f in (Path(folder) / k).rglob("*.parquet")) / 2**20 for k in schemas}
        best = {kind: max(found) for kind, found in rates.items()}
        figures.append(
            Figure(f"batches from lists {name}; peer: padded columns", best["lists"], "rows/s", peer=best["columns"])
        )
        figures.append(
            Figure(f"size, lists {name}; peer: padded columns", sizes["lists"], "MiB", peer=sizes["columns"])
        )
    publish("lists", figures)


def write(folder: Path, mean: float, as_lists: bool) -> DatasetSchema:
    """One split; returns its schema."""
    (folder / "train").mkdir(parents=True)
    rng = np.random.default_rng(0)
    length = np.full(ROWS, LENGTH) if np.isinf(mean) else np.minimum(rng.geometric(1 / (mean + 1), ROWS) - 1, LENGTH)
    history = np.where(np.arange(LENGTH) < length[:, None], rng.integers(1, 1000, (ROWS, LENGTH)), 0).astype(np.int32)
    table = {f"n{i}": rng.random(ROWS, np.float32) for i in range(13)}
    table |= {f"c{i}": rng.integers(0, 1000, ROWS).astype(np.int32) for i in range(26)}
    table |= (
        {"h": lists.trim_zeros(lists.from_arrays(np.arange(ROWS + 1) * LENGTH, history.ravel()))}
        if as_lists
        else {f"h{i}": history[:, i].copy() for i in range(LENGTH)}
    )
    table["y"] = np.zeros(ROWS, np.float32)
    whole = pa.table(table)
    for g in range(ROWS // GROUP):
        path = folder / "train" / f"part-{g:03d}.parquet"
        pq.write_table(whole.slice(g * GROUP, GROUP), path, compression="none", use_dictionary=False)
    codes = [Feature(name=n, kind=Kind.CATEGORICAL, dtype="int32", cardinality=1000) for n in table if n[0] == "c"]
    if as_lists:
        codes.append(
            Feature(name="h", kind=Kind.CATEGORICAL, dtype="int32", cardinality=1000, is_list=True, length=LENGTH)
        )
    else:
        codes += [Feature(name=f"h{i}", kind=Kind.CATEGORICAL, dtype="int32", cardinality=1000) for i in range(LENGTH)]
    numbers = [Feature(name=n, kind=Kind.CONTINUOUS, dtype="float32") for n in table if n[0] == "n"]
    return DatasetSchema(features=(*numbers, *codes, Feature(name="y", kind=Kind.LABEL, dtype="float32")))


def rate(folder: Path, schema: DatasetSchema) -> float:
    """Rows a second over one epoch of a rank alone."""
    with TrainLoader(open_split(local(folder), "train", schema), schema, TRAIN) as source:
        next(source)
        tick = time.perf_counter()
        for _ in range(source.steps_per_epoch - 1):
            next(source)
        return (source.steps_per_epoch - 1) * TRAIN.batch_size / (time.perf_counter() - tick)


if __name__ == "__main__":
    main()
