"""The training step, the loader, and both together, each beside its floor and its peers in the same run.

    make bench-peers      # once: TorchRec and FBGEMM's CPU operators
    make bench-train

- step: two gloo ranks of one thread each, 26 tables x 100k rows x 64, 13 continuous features, 4,096 samples a rank.
  DLRM with MLPs 512-256-64 and 512-256-1 and one id a table, ids uniform and Zipf(1.05); and an embedding-heavy one
  with MLPs 64-64 and 64-1 and ten ids a table. Ours is the loop as training runs it, fed from memory; tables are dealt
  by rows, those of lists as `kind: auto` plans them. Floor: the same loop and MLPs with the embeddings replaced by a
  constant, in the same processes, in turns; "in plain torch": without our C++ for the interaction. Peers: TorchRec's
  DLRM with the tables whole on ranks (table-wise) and by rows (row-wise), the same ids, optimizers, threads and
  allocator settings. Medians of the slowest rank's steps.
  "Rows read and written once" is the floor with the least that the tables' memory must do (bench.train_ranks).
- loader: one rank's loader (shuffled, checked batches of 8,192, of four streams) beside pyarrow's decoding of the same
  row groups, both on one core and both on two: the process is pinned, and Arrow has as many threads. The loader does
  more than the floor: it shuffles, checks codes, widens them and puts batches together. `in stored order` is a pass of
  an evaluation, without the shuffle but with the opening of files. Rows come from the page cache.
- from Parquet: the loop fed by the loader beside the same loop fed from memory, two ranks.
- a step's parts: milliseconds, mean over ranks, which add up to the step (floor: the step). The trace is
  build/bench/train_trace.json; `python -m bench.bench_train --draw [TRACE [PICTURE]]` draws a step of it:
  what each rank did, and what its loader did meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.peers.torchrec_step import TrainingStep, is_installed, run_torchrec
from bench.report import Figure, publish
from bench.train_ranks import MALLOC, LoopResult, run_loop, schema_of, step_of, train_of
from headrace.config.installation import checkout
from headrace.dataset.layout import SplitLayout, open_split, stored_columns
from headrace.dataset.loaders import EvalLoader, TrainLoader
from headrace.storage import local
from headrace.train.callbacks.tracing import PARTS

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
    words = ["bench.bench_train", "--loader", str(folder), json.dumps(asdict(step)), str(cores)]
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


def draw_trace(trace: Path, picture: Path, step: int | None = None) -> None:
    """Draw the step (default: the one of median length) with a margin of a tenth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(PARTS, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    steps = sorted((e for e in spans if e["name"] == "step" and e["pid"] == 0), key=lambda e: e["dur"])
    chosen = steps[len(steps) // 2]["args"]["step"] if step is None else step
    step_spans = [e for e in spans if e["name"] == "step" and e["args"]["step"] == chosen]
    first = min(e["ts"] for e in step_spans)
    last = max(e["ts"] + e["dur"] for e in step_spans)
    rows = sorted({(e["pid"], e["tid"]) for e in spans})
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    figure, axes = plt.subplots(figsize=(10, 0.6 + 0.65 * len(rows)))
    seen: set[str] = set()
    # Inner spans are shorter, and drawn over those that they are in.
    for e in sorted(spans, key=lambda e: -e["dur"]):
        if e["name"] not in (*colours, "decode") or e["ts"] > last or e["ts"] + e["dur"] < first:
            continue
        label = None if e["name"] in seen else e["name"]
        seen.add(e["name"])
        axes.barh(
            rows.index((e["pid"], e["tid"])),
            e["dur"] / 1e3,
            left=(e["ts"] - first) / 1e3,
            height=0.7,
            label=label,
            color=colours.get(e["name"], "lightgrey"),
            linewidth=0,
        )
    axes.set_yticks(range(len(rows)), [f"rank {pid}: {names[pid, tid]}" for pid, tid in rows])
    axes.invert_yaxis()
    axes.set_xlim(-0.02 * (last - first) / 1e3, 1.02 * (last - first) / 1e3)
    axes.set_xlabel("ms")
    axes.legend(ncols=len(seen), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    figure.savefig(picture, dpi=80, bbox_inches="tight")


DLRM = TrainingStep(
    rows=(100_000,) * 26, ids=1, dim=64, batch=4_096, steps=10, dense=13, bottom=(512, 256), top=(512, 256), batches=4
)
HEAVY = replace(DLRM, ids=10, bottom=(64,), top=(64,))
CASES = {
    "DLRM, Zipf(1.05)": replace(DLRM, zipf=1.05),
    "DLRM, uniform ids": replace(DLRM, zipf=0.0),
    "embedding-heavy, Zipf(1.05)": replace(HEAVY, zipf=1.05),
}
ROW_GROUPS = 8


def samples(step: TrainingStep, seconds: Sequence[float]) -> float:
    """Return the samples a second of all ranks, by the median step."""
    return step.batch * step.world / statistics.median(seconds)


def step_figures(name: str, step: TrainingStep) -> tuple[list[Figure], LoopResult]:
    """Measure our loop beside the floor and the peers."""
    peers: dict[str, list[float]] = {}

    def run_peers(steps: int) -> None:
        for sharding in ("table_wise", "row_wise") if is_installed() else ():
            peer_run = run_torchrec(replace(step, sharding=sharding, steps=steps), MALLOC)
            peers.setdefault(sharding, []).extend(peer_run.seconds)

    run_peers(16)
    result = run_loop(step)
    floor = samples(step, result.floor)
    value = samples(step, result.loop)
    figures = [
        Figure(
            f"{name} (floor: dense only; peer: TorchRec {sharding.replace('_', '-')})",
            value,
            "samples/s",
            floor,
            samples(step, seconds),
        )
        for sharding, seconds in peers.items()
    ]
    figures = figures or [Figure(f"{name} (floor: dense only)", value, "samples/s", floor)]
    plain = samples(step, result.torch)
    figures.append(Figure(f"{name} (floor: dense only in plain torch)", value, "samples/s", plain))
    if result.bound:
        named = f"{name}: rows read and written once, no more (floor: dense only)"
        figures.append(Figure(named, samples(step, result.bound), "samples/s", floor))
    return figures, result


def main() -> None:
    figures: list[Figure] = []
    for name, step in CASES.items():
        figures += step_figures(name, step)[0]
    profiled = run_loop(CASES["DLRM, Zipf(1.05)"], turns=2, profile=True).profile
    step_ms = profiled["step"]
    figures += [Figure(f"part of a step: {part}", ms, "ms", step_ms) for part, ms in profiled.items() if part != "step"]
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder), DLRM, ROW_GROUPS)
        figures += loader_figures(Path(folder), DLRM)
        step = CASES["DLRM, uniform ids"]
        fed = run_loop(step, dataset=Path(folder))
        figures.append(
            Figure(
                "Parquet to updated weights (floor: fed from memory)",
                samples(step, fed.loop),
                "samples/s",
                samples(step, fed.floor),
            )
        )
    publish("train", figures)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--loader", dataset, shape, core_count]:
            print(json.dumps(loader_rates(Path(dataset), step_of(shape), int(core_count))))
        case ["--draw", *words]:
            paths = [Path(word) for word in words]
            draw_trace(*(paths + [Path("build/bench/train_trace.json"), Path("docs/trace.png")][len(paths) :]))
        case _:
            main()
