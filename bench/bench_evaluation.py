"""AUC and the other basic metrics of many predictions, beside NumPy's sort.

    make bench-evaluation                     # 10 million predictions
    python -m bench.bench_evaluation 1 10     # millions of predictions

One rank, then two as threads of this process, each with half of the rows. Floor: `np.argsort` of the scores (float32,
stable) alone, with which an AUC by mean ranks begins; peer: that AUC. Figures are millions of rows a second, of the
best of three turns.

Then a full ranking: 40,000 users with 5 relevant and 20 seen items each, 54,000 items, 64 columns, the first 20, one
thread. Floor: the products of the vectors alone, in blocks of 310 users; peer: these and `torch.topk`, nothing left
out. Figures are thousands of users a second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bench.report import Figure, publish
from headrace.comm.base import run_ranks
from headrace.compute.jagged import JaggedArray
from headrace.train.evaluation.auc import SortedRows, curve_areas
from headrace.train.evaluation.bootstrap import NO_REPLICATES, Bootstrap
from headrace.train.evaluation.click import click_metrics
from headrace.train.evaluation.evaluate import Predictions
from headrace.train.evaluation.full_ranking import RelevantRows, rank_all_items
from headrace.train.evaluation.ranks import Ranks, ScoredRows, by_range, sigmoid, sort_keys, unpacked

_TURNS = 3
_REPLICATES = 10


def auc(ranks: Ranks, rows: ScoredRows) -> float:
    """Return the AUC alone."""
    order, labels = unpacked(by_range(ranks, sort_keys(rows))[0])
    sorted_rows = SortedRows(1, np.zeros(len(order), np.int64), order, labels)
    return float(curve_areas(ranks, sorted_rows, NO_REPLICATES)["auc"][0, 0])


def rank_sum(rows: ScoredRows) -> float:
    """Return the AUC by a stable argsort and mean ranks of ties."""
    order = np.argsort(rows.scores, kind="stable")
    ordered = rows.scores[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    counts = np.diff(np.r_[starts, len(ordered)])
    ranks = np.repeat(starts + (counts + 1) / 2, counts)
    n1 = int(rows.labels.sum())
    n0 = len(rows.labels) - n1
    return float((ranks[rows.labels[order]].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


def best(work: Callable[[], object]) -> float:
    """Measure seconds of the fastest turn."""
    seconds = []
    for _ in range(_TURNS):
        tick = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - tick)
    return min(seconds)


def measure(millions: float) -> list[Figure]:
    """Measure all figures of one size."""
    n = int(millions * 1e6)
    rng = np.random.default_rng(0)
    logits = rng.normal(-1.5, 1.0, n).astype(np.float32)
    rows = ScoredRows(logits, rng.random(n) < sigmoid(logits), rng.integers(0, max(n // 20, 1), n))
    halves = [ScoredRows(logits[i::2], rows.labels[i::2]) for i in range(2)]
    assert auc(Ranks(), rows) == rank_sum(rows)
    draws = Bootstrap(_REPLICATES, seed=1)
    floor, peer = (n / best(w) / 1e6 for w in (lambda: np.argsort(logits, kind="stable"), lambda: rank_sum(rows)))
    measured = {
        "AUC": lambda: auc(Ranks(), rows),
        "AUC, 2 ranks": lambda: run_ranks(2, lambda c: auc(Ranks(c), halves[c.world.rank])),
        "basic metrics": lambda: click_metrics(Ranks(), rows),
        f"basic metrics, {_REPLICATES} replicates": lambda: click_metrics(Ranks(), rows, bootstrap=draws),
    }
    return [
        Figure(f"{name}, {millions:g} M", n / best(work) / 1e6, "M rows/s", floor, peer)
        for name, work in measured.items()
    ]


def measure_full_ranking(users: int = 40_000, items: int = 54_000, width: int = 64, k: int = 20) -> Figure:
    """Measure how many users are ranked in a second."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(users, width)).astype(np.float32)
    vectors = torch.from_numpy(rng.normal(size=(items, width)).astype(np.float32))
    relevant, seen = ((np.repeat(np.arange(users), n), rng.integers(2, items, users * n)) for n in (5, 20))
    empty = np.empty(0, np.float32)
    each = np.arange(users)
    excluded = JaggedArray(np.zeros(users + 1, np.int64), np.zeros(0, np.int64))
    rows = RelevantRows(*relevant, Predictions(empty, empty), each, np.zeros(users), each, each, queries, excluded)
    blocks, transposed = torch.from_numpy(queries).split(310), vectors.T.contiguous()
    out = torch.empty(310, items)

    def products(then: Callable[[Tensor], object] = lambda scores: None) -> None:
        for block in blocks:
            then(torch.mm(block, transposed, out=out[: len(block)]))

    floor, peer, rate = (
        users / best(work) / 1e3
        for work in (
            products,
            lambda: products(lambda scores: torch.topk(scores, k)),
            lambda: rank_all_items(Ranks(), rows, [], vectors, 2, k, [seen]),
        )
    )
    return Figure(f"full ranking, {items:,} items", rate, "k users/s", floor, peer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("millions", nargs="*", type=float, default=[10.0])
    figures = [f for m in parser.parse_args().millions for f in measure(m)]
    publish("evaluation", [*figures, measure_full_ranking()])
