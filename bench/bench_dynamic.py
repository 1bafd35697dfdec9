"""Tables of raw ids beside memory and beside a planned table: one rank, in one run, the best of several turns.

    make bench-dynamic

- find: the id map's lookups of distinct ids (all known), beside gathering as many rows of 64.
- step: ids to vectors, gradient, row-wise Adagrad, of a table whose rows are all there, beside the planned table's step
  on the same ids as codes, uniform and Zipf(1.05). Both sort out duplicates, and touch the same rows.
- churn: the same step where ids never seen before come all the time, under a limit of rows: admissions and evictions.

- days: raw ids through tables with room for a part of them, new ids each day, beside TorchRec's managed collisions
  (bench.peers.torchrec_collisions), where `make bench-peers` has installed it.

Times: less is better. `floor` is the gather's time, `peer` the planned table's. Of days, `peer` is TorchRec's, and the
floor of a share what a table without a limit would keep.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bench.peers.torchrec_collisions import IdStream, run
from bench.peers.torchrec_step import is_installed
from bench.report import Figure, publish
from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.kernels.id_map import IdMap, mix
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, row_wise

ROWS, DIM, IDS, TURNS = 1_000_000, 64, 32_768, 8
OPTIMIZER = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.01)


def draw(kind: str, seed: int) -> np.ndarray:
    """Draw codes int64 [IDS] in [1, ROWS)."""
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return rng.integers(1, ROWS, IDS)
    edges = np.cumsum(np.arange(1, ROWS + 1) ** -1.05)
    return np.searchsorted(edges / edges[-1], rng.random(IDS)).clip(1, ROWS - 1)


def best(*works: Callable[[int], object]) -> list[float]:
    """Measure seconds of each call, the best of several repeats, one after the other; each gets the repeat's number."""
    fastest = [float("inf")] * len(works)
    for repeat in range(TURNS):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work(repeat)
            fastest[i] = min(fastest[i], time.perf_counter() - start)
    return fastest


def planned() -> Callable[[Tensor, Tensor], None]:
    """Return a step of a planned table; no code is 0."""
    plan = row_wise([Table("t", ROWS, DIM)], [Lookup("t", "t", 1, False)], 1)
    embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
    embeddings.configure_optimizer(OPTIMIZER)

    def step(codes: Tensor, gradient: Tensor) -> None:
        embeddings(codes.unsqueeze(1)).backward(gradient.unsqueeze(1))
        embeddings.step()

    return step


def dynamic(ids: np.ndarray, max_rows: int | None = None) -> tuple[DynamicEmbeddings, Callable[[Tensor, Tensor], None]]:
    """Return a step of a table of raw ids that knows `ids`."""
    tables = DynamicEmbeddings([DynamicSpec("t", DIM, max_rows=max_rows)], LocalCollective(), seed=1)
    tables.configure_optimizer(OPTIMIZER)
    embeddings = ShardedEmbeddings(Plan((), (), (), 1), LocalCollective(), seed=1, dynamic=tables)
    no_codes = torch.zeros(0, 0, dtype=torch.int64)
    with torch.no_grad():
        embeddings(embeddings.prepare(no_codes, raw=[torch.from_numpy(ids)]))

    def step(raw_ids: Tensor, gradient: Tensor) -> None:
        prepared = embeddings.prepare(no_codes, raw=[raw_ids])
        embeddings(prepared)
        prepared.found[0][0].backward(gradient)
        tables.step()

    return tables, step


def day_figures(stream: IdStream) -> list[Figure]:
    """Measure our tables beside TorchRec's."""
    measured, seen = run(stream)
    figures = []
    for table, peer in zip(measured[::2], measured[1::2], strict=True):
        label = f"{stream.days} days, {stream.rows:,} rows, {table.name} (peer: TorchRec, {peer.name})"
        figures += [
            Figure(f"lookup and admission, {label}", table.nanoseconds, "ns an id", peer=peer.nanoseconds),
            Figure(f"lookups of ids with a row of their own, {label}", table.own_row, "share", peer=peer.own_row),
            Figure(
                f"lookups of rows held since an earlier batch, {label}", table.held_row, "share", seen, peer.held_row
            ),
            Figure(f"memory, {label}", table.bytes_a_row, "bytes a row", 4.0 * stream.dim + 4, peer.bytes_a_row),
        ]
    return figures


def main() -> None:
    torch.set_num_threads(1)
    known = mix(np.arange(ROWS)).view(np.int64)
    gradient = torch.ones(IDS, DIM)
    figures = []

    table, target = torch.zeros(ROWS, DIM), torch.empty(IDS, DIM)
    codes = [np.unique(draw("uniform", repeat))[: IDS // 2] for repeat in range(TURNS)]
    requested = [known[c] for c in codes]
    rows = [torch.from_numpy(c) for c in codes]
    held = IdMap(known)
    find, gather = best(
        lambda repeat: held.find(requested[repeat]),
        lambda repeat: torch.index_select(table, 0, rows[repeat], out=target[: len(rows[repeat])]),
    )
    each = 1e9 / (IDS // 2)
    figures.append(Figure("find, of 1 M ids", find * each, "ns an id", floor=gather * each))

    by_plan = planned()
    tables, by_id = dynamic(known)
    for kind in ("uniform", "Zipf(1.05)"):
        drawn = [torch.from_numpy(draw(kind, 100 + repeat)) for repeat in range(TURNS)]
        raw = [torch.from_numpy(known[d.numpy()]) for d in drawn]
        floor, peer, own_seconds = best(
            lambda repeat, d=drawn: torch.index_select(table, 0, d[repeat], out=target),  # type: ignore[misc]
            lambda repeat, d=drawn: by_plan(d[repeat], gradient),  # type: ignore[misc]
            lambda repeat, r=raw: by_id(r[repeat], gradient),  # type: ignore[misc]
        )
        figures.append(Figure(f"step, {kind}", own_seconds * 1e3, "ms", floor=floor * 1e3, peer=peer * 1e3))

    # A tenth of each batch was never seen; the table is full.
    limited, churning = dynamic(known[: ROWS // 4], max_rows=ROWS // 4)
    base = [draw("uniform", 200 + repeat) % (ROWS // 4) for repeat in range(TURNS)]
    raw = []
    for repeat, b in enumerate(base):
        ids = known[b].copy()
        ids[::10] = mix(np.arange(len(ids[::10])) + 2**40 * (repeat + 1)).view(np.int64)
        raw.append(torch.from_numpy(ids))
    start = time.perf_counter()
    for r in raw:
        churning(r, gradient)
    mean = (time.perf_counter() - start) / TURNS * 1e3
    plain = next(f.value for f in figures if f.name == "step, uniform")
    figures.append(Figure("step, a tenth new, 250 k rows at most (mean)", mean, "ms", peer=plain))
    report = limited.report()["t"]
    assert report.evicted
    print(f"churn: {report.admitted:,} admitted, {report.evicted:,} evicted, {report.rows:,} rows", file=sys.stderr)
    print(
        f"memory of 1 M rows: {tables.report()['t'].nbytes / ROWS:.0f} bytes a row, of which "
        f"{4 * DIM + 4} are weights and states",
        file=sys.stderr,
    )
    publish("dynamic", figures + (day_figures(IdStream()) if is_installed() else []))


if __name__ == "__main__":
    main()
