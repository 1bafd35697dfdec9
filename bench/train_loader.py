"""The loader beside raw decoding, for bench_train: a dataset of Criteo's shape on disk, read by one rank's loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.peers.torchrec_step import TrainingStep
from bench.report import Figure
from bench.train_ranks import MALLOC, schema_of, step_of, train_of
from headrace.dataset.layout import SplitLayout, open_split, stored_columns
from headrace.dataset.loaders import EvalLoader, TrainLoader
from headrace.storage import local
from headrace.workspace import checkout

ROW_GROUP = 131_072


def write_dataset(folder: Path, step: TrainingStep, row_groups: int) -> None:
    """Write a split `train` as the features stage writes it: a file a row group, no compression, no dictionaries."""
    (folder / "train").mkdir(parents=True)
    for number in range(row_groups):
        rng = np.random.default_rng(number)
        columns: dict[str, np.ndarray] = {f"c{i}": rng.random(ROW_GROUP, np.float32) for i in range(step.dense)}
        columns |= {f"t{i}": rng.integers(1, n, ROW_GROUP, dtype=np.int32) for i, n in enumerate(step.rows)}
        columns["label"] = rng.integers(0, 2, ROW_GROUP).astype(np.float32)
        pq.write_table(
            pa.table(columns),
            folder / "train" / f"part-{number:04d}.parquet",
            row_group_size=ROW_GROUP,
            compression="none",
            use_dictionary=False,
        )


def decode_seconds(layout: SplitLayout, columns: tuple[str, ...]) -> float:
    """Measure seconds of pyarrow alone for the row groups of a split, one after the other, by Arrow's threads."""
    start = time.perf_counter()
    for group in layout.row_groups:
        with pq.ParquetFile(group.path) as file:
            file.read_row_group(group.index, columns=list(columns))
    return time.perf_counter() - start


def load_seconds(layout: SplitLayout, step: TrainingStep, batch: int, streams: int) -> float:
    """Measure seconds of the loader for the same rows: shuffled, checked, as batches of `batch` rows.

    After an epoch to begin with, the mean of three: in the middle of a run as many row groups are decoded as are used.
    """
    train = train_of(step, batch_size=batch, streams=streams, ranks=1)
    with TrainLoader(layout, schema_of(step), train) as source:
        for _ in range(source.steps_per_epoch):
            next(source)
        start = time.perf_counter()
        steps = 3 * source.steps_per_epoch
        for _ in range(steps):
            next(source)
        return (time.perf_counter() - start) * (source.rows / (steps * batch))


def pass_seconds(layout: SplitLayout, step: TrainingStep, batch: int, streams: int) -> float:
    """Measure seconds of an evaluation's pass over the same rows: checked, in stored order.

    Opening the files counts.
    """
    start = time.perf_counter()
    with EvalLoader(layout, schema_of(step), batch_size=batch, streams=streams) as source:
        for _ in source:
            pass
    return time.perf_counter() - start


def loader_rates(
    folder: Path, step: TrainingStep, cores: int, turns: int = 3, batch: int = 8_192, streams: int = 4
) -> dict[str, float]:
    """Measure rows a second, the best of several turns: `load`, `pass`, and `decode` alone, each with as many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    pa.set_cpu_count(cores)
    schema = schema_of(step)
    layout = open_split(local(folder), "train", schema)
    columns = stored_columns(schema)
    ways = {
        "decode": lambda: decode_seconds(layout, columns),
        "load": lambda: load_seconds(layout, step, batch, streams),
        "pass": lambda: pass_seconds(layout, step, batch, streams),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):  # in turns, so that all meet the same machine
        for name, seconds in ways.items():
            best[name] = min(best[name], seconds())
    return {name: layout.rows / seconds for name, seconds in best.items()}


def loader_in_a_process(folder: Path, step: TrainingStep, cores: int) -> dict[str, float]:
    """Run `loader_rates` with the allocator's settings of a rank.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    words = ["bench.train_loader", str(folder), json.dumps(asdict(step)), str(cores)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *words],
        env={**os.environ, **MALLOC},
        cwd=checkout(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def loader_figures(folder: Path, step: TrainingStep) -> list[Figure]:
    """Measure the loader beside decoding alone, on one core and on two."""
    figures = []
    for cores in (1, 2):
        rates = loader_in_a_process(folder, step, cores)
        label = f"{cores} core{'s' * (cores > 1)} (floor: raw pyarrow decode, as many threads)"
        figures += [
            Figure(f"loader alone, {label}", rates["load"], "rows/s", rates["decode"]),
            Figure(f"loader in stored order, {label}", rates["pass"], "rows/s", rates["decode"]),
        ]
    return figures


if __name__ == "__main__":
    print(json.dumps(loader_rates(Path(sys.argv[1]), step_of(sys.argv[2]), int(sys.argv[3]))))
