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
  "Rows read and written once" is the floor with the least that the tables' memory must do (bench.train_bound).
- loader: one rank's loader (shuffled, checked batches of 8,192, of four streams) beside pyarrow's decoding of the same
  row groups, both on one core and both on two: the process is pinned, and Arrow has as many threads. The loader does
  more than the floor: it shuffles, checks codes, widens them and puts batches together. `in stored order` is a pass of
  an evaluation, without the shuffle but with the opening of files. Rows come from the page cache.
- from Parquet: the loop fed by the loader beside the same loop fed from memory, two ranks.
- a step's parts: milliseconds, mean over ranks, which add up to the step (floor: the step). The trace is
  build/bench/train_trace.json; `python -m bench.draw_trace` draws a step of it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.peers.torchrec_step import TrainingStep, is_installed, run_torchrec
from bench.report import Figure, publish
from bench.train_loader import loader_figures, write_dataset
from bench.train_ranks import MALLOC, LoopResult, run_loop

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
    main()
