"""Retrieval by vectors: exact beside a product of blocks and torch.topk, an index beside its library alone.

Of 1 million items of 64 columns, the best 500 of each user. Rates are of one core, by its processor time. Vectors are
drawn around 2,000 centres of unequal popularity, in columns of falling weight, so that their lengths differ widely.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from bench.report import Figure, publish
from bench.score_ranking import in_a_process
from headrace.score.candidates.item_vectors import (
    ItemVectors,
    VectorPart,
    build_index,
    fewest_probes,
    recall_share,
    search_index,
)
from headrace.score.top_k import best_items
from headrace.storage import local

ITEMS, COLUMNS, K = 1_000_000, 64, 500
#: Users, and times as many: memory must not grow.
USERS, TIMES = 2_048, (1, 2, 4)
#: The floor is slower: fewer users say how fast it is.
FLOOR_USERS = 512
ROUNDS = 3
RECALL = 0.95

Vectors = NDArray[np.float32]


def main() -> None:
    publish("score_retrieval", figures())


def figures() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        write_items(Path(folder))
        rates = in_a_process(exact_and_floor, Path(folder))
        results = [
            Figure(
                "exact: best 500 of 1 M items, a core; floor: blocked product, torch.topk",
                rates["exact"] * ITEMS / 1e6,
                "M pairs/s",
                floor=rates["floor"] * ITEMS / 1e6,
            ),
            Figure(
                "exact: best 500 of 1 M items, a core; floor: blocked product alone",
                rates["exact"] * ITEMS / 1e6,
                "M pairs/s",
                floor=rates["product"] * ITEMS / 1e6,
            ),
            Figure("exact: 1 M users x 1 M items x 64, best 500, of 2 cores", 1e6 / rates["exact"] / 2 / 60, "min"),
        ]
        for times in TIMES:
            rate, mib = in_a_process(exact_of_users, Path(folder), times * USERS)
            results.append(Figure(f"exact: {times * USERS:,} users x 1 M items, a core", rate, "users/s"))
            results.append(Figure(f"exact: {times * USERS:,} users x 1 M items, memory above the start", mib, "MiB"))
        index = in_a_process(index_and_library, Path(folder))
        results += [
            Figure(
                f"index: recall at {K} of 1 M items, {index['probes']} of {index['cells']} cells", index["recall"], ""
            ),
            Figure(
                "index: best 500 of 1 M items, a core; floor: Faiss alone; peer: exact",
                index["ours"],
                "users/s",
                floor=index["library"],
                peer=rates["exact"],
            ),
            *[
                Figure(
                    f"index: {point['probes']:.0f} cells, recall {point['recall']:.3f}, a core; floor: Faiss alone",
                    point["ours"],
                    "users/s",
                    floor=point["library"],
                )
                for point in index["curve"]
            ],
            Figure("index: made of 1 M items, a core", index["build_seconds"], "s"),
            Figure("index: its file; floor: the vectors", index["mib"], "MiB", floor=ITEMS * COLUMNS * 4 / 2**20),
        ]
        return results


def drawn(rows: int, seed: int, mixed: int) -> Vectors:
    """Draw float32 [rows, COLUMNS]: sums of `mixed` of the centres, and noise."""
    centres = np.random.default_rng(0)
    weights = np.arange(1, COLUMNS + 1) ** -0.5
    places = centres.standard_normal((2_000, COLUMNS)) * weights
    popularity = centres.pareto(1.5, 2_000) + 0.1
    rng = np.random.default_rng(seed)
    chosen = rng.choice(2_000, (rows, mixed), p=popularity / popularity.sum())
    noise = rng.standard_normal((rows, COLUMNS), np.float32) * weights
    vectors: Vectors = (places[chosen].sum(axis=1) / np.sqrt(mixed) + 0.6 * noise).astype(np.float32)
    return vectors


def write_items(folder: Path) -> None:
    part = ITEMS // 4
    parts = ((np.arange(i * part, (i + 1) * part, dtype=np.int32), drawn(part, 1 + i, 1)) for i in range(4))
    ItemVectors.of_arrays(parts, local(folder / "items"))


def items_of(folder: Path) -> ItemVectors:
    """Return the handle of what another process wrote, by its files."""
    rows = [(f.stat().st_size // 4, f.name) for f in sorted((folder / "items").glob("*.int32"))]
    vectors = [f.name for f in sorted((folder / "items").glob("*.float32"))]
    parts = tuple(VectorPart(v, name, n) for v, (n, name) in zip(vectors, rows, strict=True))
    return ItemVectors(local(folder / "items"), COLUMNS, parts, 100.0, 0)


def exact_and_floor(folder: Path) -> dict[str, float]:
    """Measure users a second of each way, taking turns."""
    torch.set_num_threads(1)
    # In memory, for torch takes no pages that are mapped for reading alone.
    blocks = [(first, np.array(vectors)) for first, vectors in items_of(folder).blocks()]
    queries = drawn(USERS, 9, 3)
    ways: dict[str, tuple[int, Callable[[Vectors], Any]]] = {
        "exact": (USERS, lambda q: best_items(q, blocks, K)),
        "floor": (FLOOR_USERS, lambda q: blocked_top_k(q, blocks)),
        "product": (FLOOR_USERS, lambda q: blocked_product(q, blocks)),
    }
    best = dict.fromkeys(ways, 0.0)
    for _ in range(ROUNDS):
        for name, (users, way) in ways.items():
            tick = time.process_time()
            way(queries[:users])
            best[name] = max(best[name], users / (time.process_time() - tick))
    return best


def blocked_product(queries: Vectors, blocks: Sequence[tuple[int, Vectors]], rows: int = 8_192) -> None:
    for _, vectors in blocks:
        for start in range(0, len(vectors), rows):
            torch.from_numpy(queries) @ torch.from_numpy(vectors[start : start + rows]).T


def blocked_top_k(queries: Vectors, blocks: Sequence[tuple[int, Vectors]], rows: int = 65_536) -> torch.Tensor:
    """Return the numbers of the K best items, searched as one writes it at first; of blocks of 8,192 to 131,072 items
    these were the fastest.
    """
    scores, numbers = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
    for first, vectors in blocks:
        for start in range(0, len(vectors), rows):
            part = torch.from_numpy(queries) @ torch.from_numpy(vectors[start : start + rows]).T
            values, places = part.topk(K)
            scores, numbers = torch.cat([scores, values], 1), torch.cat([numbers, places + first + start], 1)
            scores, places = scores.topk(K)
            numbers = numbers.gather(1, places)
    return numbers


def exact_of_users(folder: Path, users: int) -> tuple[float, float]:
    """Measure users a second, and MiB that this process takes at its peak above those before, pages of mapped files
    left out.
    """
    blocks, queries = items_of(folder).blocks(), drawn(users, 9, 3)
    best_items(queries[:64], blocks[:1], K)
    start_mib, tick = _anonymous_mib(), time.process_time()
    peak = start_mib
    rows = USERS  # as Spark's batches bring them
    for start in range(0, users, rows):
        best_items(queries[start : start + rows], blocks, K)
        peak = max(peak, _anonymous_mib())
    return users / (time.process_time() - tick), peak - start_mib


def index_and_library(folder: Path) -> dict[str, Any]:
    """Measure users a second of the index as tasks use it, and of Faiss alone with all in memory, taking turns.

    With so few cells that RECALL is reached, and (`curve`) with fewer and more of them.
    """
    items, queries = items_of(folder), drawn(1_024, 9, 3)
    longest = max(float(np.linalg.norm(v, axis=1).max()) for _, v in items.blocks())
    items = ItemVectors(items.folder, COLUMNS, items.parts, longest, 0)
    tick = time.process_time()
    index = build_index(items, local(folder / "index"), threads=1)
    build_seconds = time.process_time() - tick
    best = best_items(queries, items.blocks(), K).items
    tried: dict[int, float] = {}

    def recall_of(probes: int) -> float:
        tried[probes] = recall_share(search_index(index, queries, K, probes, 1).items, best)
        return tried[probes]

    probes = fewest_probes(recall_of, RECALL, index.cells)
    assert probes is not None
    recall = tried[probes]
    library: Any = faiss.read_index(str(folder / "index"))
    lengthened = np.zeros((len(queries), library.d), np.float32)
    lengthened[:, :COLUMNS] = queries / np.linalg.norm(queries, axis=1, keepdims=True)

    def rates(cells: int) -> dict[str, float]:
        library.nprobe = cells
        best = {"ours": 0.0, "library": 0.0}
        for _ in range(ROUNDS):
            for name, way in {
                "ours": lambda: search_index(index, queries, K, cells, 1),
                "library": lambda: library.search(lengthened, K),
            }.items():
                tick = time.process_time()
                way()
                best[name] = max(best[name], len(queries) / (time.process_time() - tick))
        return best

    probe_counts = sorted({max(1, probes // 4), max(1, probes // 2), 2 * probes, 4 * probes})
    curve = [{"probes": cells, "recall": recall_of(cells), **rates(cells)} for cells in probe_counts]
    size = (folder / "index").stat().st_size / 2**20
    return {
        **rates(probes),
        "curve": curve,
        "recall": recall,
        "probes": probes,
        "cells": index.cells,
        "build_seconds": build_seconds,
        "mib": size,
    }


def _anonymous_mib() -> float:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
