"""Scoring from candidates to lists: make bench-score. Each figure beside its floor, in the same run.

    python -m bench.bench_score                              # all cases
    python -m bench.bench_score ranking retrieval            # some of them
    python -m bench.bench_score million --resume             # with the parts that other commits have left
    python -m bench.bench_score million --users 20000        # a slice, whose parts count for the whole

CASES names the functions of the cases. `million` is 1 million users x 1 million items, whole: the best 500 of 64
columns by vectors, ranked by a DLRM, the best 10 kept. It takes some 25 minutes of two cores; one that is stopped goes
on where it was.

Two processes, a thread each, do what Spark's tasks do, with their functions: `best_items` over mapped vectors, which
compares all items, then `score_batches`. Each 10,000 users leave their rows (Parquet) and their figures below
build/bench/million, so that what is stopped goes on there; the minutes are those during which users were worked on.
What another commit has left is removed, or with `--resume` kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from bench import score_ranking, score_retrieval
from bench.report import Figure, checkout_version, publish
from bench.score_ranking import ITEM, USER, in_a_process, items_of, task_of, users_of, write_model
from bench.score_retrieval import COLUMNS, drawn, write_items
from bench.score_retrieval import items_of as vectors_of
from bench.usage import peak_of_tree
from headrace.config.installation import checkout
from headrace.score.loaded_model import loaded_model
from headrace.score.ranking import ITEMS, TaskInputs, score_batches
from headrace.score.top_k import best_items, top_k
from headrace.storage import local

USERS, N_ITEMS, CANDIDATES, RANKED_ITEMS = 1_000_000, 1_000_000, 500, 10
#: Users of a part, of a search, and of a batch that is ranked.
PART, SEARCHED, RANKED = 10_000, 2_048, 500
PROCESSES = 2
#: Which code has made the model and the vectors, and what that took; written when they are there.
PREPARED = "prepared.json"


def million_figures(resume: bool = False, users: int = USERS) -> list[Figure]:
    """Work off what is left, then the figures of all parts.

    Args:
        resume: keep what another commit has left, the model and the vectors too.
        users: a multiple of PART, at most USERS.
    """
    folder = checkout() / "build" / "bench" / "million"
    prepare(folder, resume)
    parts = range(users // PART)
    left = [n for n in parts if not _figures_of(folder, n).is_file()]
    task = in_a_process(task_of, folder, folder / "scratch", N_ITEMS) if left else None
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), initializer=begin) as pool:
        waiting = [pool.submit(work, folder, task, number) for number in left]
        for i, done in enumerate(as_completed(waiting), len(parts) - len(left) + 1):
            part = done.result()
            print(
                f"{i} of {len(parts)} parts: found in {part['search_seconds']:.1f} s, ranked in "
                f"{part['rank_seconds']:.1f} s",
                flush=True,
            )
    return of_parts(folder, parts)


def of_parts(folder: Path, numbers: range) -> list[Figure]:
    parts = [json.loads(_figures_of(folder, n).read_text()) for n in numbers]
    for code, count in sorted(Counter(p["code"] for p in parts).items()):
        print(f"million: {count} parts by the code {code}")
    users, rows = len(parts) * PART, sum(p["rows"] for p in parts)
    seconds = worked([(p["began"], p["ended"]) for p in parts])
    searching, ranking = (sum(p[f"{name}_cpu_seconds"] for p in parts) for name in ("search", "rank"))
    ranked_rows = sum(pq.read_metadata(_rows_of(folder, n)).num_rows for n in numbers)
    assert (rows, ranked_rows) == (users * CANDIDATES, users * RANKED_ITEMS)
    mapped = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and "parts" not in f.parts)
    preparation = json.loads((folder / PREPARED).read_text())
    label = f"million: {users:,} users x {N_ITEMS:,} items x {COLUMNS}, best {CANDIDATES}, ranked, best {RANKED_ITEMS}"
    return [
        Figure(f"{label}, two processes", seconds / 60, "min"),
        Figure(f"{label}, two processes", rows / seconds, "rows/s"),
        Figure(f"{label}, two processes", users * N_ITEMS / seconds / 1e6, "M pairs/s"),
        Figure("million: search, processor time of both", searching / 60, "min"),
        Figure("million: search, a core", users * N_ITEMS / searching / 1e6, "M pairs/s"),
        Figure("million: ranking, processor time of both", ranking / 60, "min"),
        Figure("million: ranking, a core", rows / ranking, "rows/s"),
        Figure("million: a process's own memory, at most", max(p["mib"] for p in parts), "MiB"),
        Figure("million: files that both map or read", mapped / 2**20, "MiB"),
        Figure("million: before, model and vectors made and laid out for mapping", preparation["seconds"] / 60, "min"),
        Figure("million: before, memory of that process, at most", preparation["mib"], "MiB"),
    ]


def worked(spans: list[tuple[float, float]]) -> float:
    """Return the seconds that some of the spans cover."""
    total, until = 0.0, -np.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def prepare(folder: Path, resume: bool) -> None:
    """Write the model and the vectors of this very code; what another version has left is removed, unless it is
    resumed.
    """
    version = checkout_version()
    if (folder / PREPARED).is_file():
        left = json.loads((folder / PREPARED).read_text())["code"]
        if resume or (left == version and not version.endswith("-dirty")):
            return
        print(f"million: what the code {left} has left is removed (--resume keeps it)", flush=True)
    local(folder).remove_quietly()
    local(folder / "parts").make_dir()
    tick = time.perf_counter()
    mib = in_a_process(_prepare, folder)
    record = {"code": version, "seconds": time.perf_counter() - tick, "mib": mib}
    local(folder / PREPARED).put_text(json.dumps(record) + "\n")


def _prepare(folder: Path) -> float:
    """Write model and vectors; return MiB of this process's own pages at the peak."""
    with peak_of_tree() as peak:
        columns = [*users_of(USERS).columns, *items_of(N_ITEMS).columns]
        write_model(folder, dict(zip((*USER, *ITEM), columns, strict=True)))
        write_items(folder / "vectors")
        # The tables are laid out for mapping once, by this process: the others have none in their memory.
        loaded_model(local(folder / "model"), 1, None, local(folder / "maps"))
    return peak.mib


def begin() -> None:
    """Set one thread, once in each process."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)


@lru_cache(maxsize=1)
def everybody() -> pa.RecordBatch:
    return users_of(USERS)


def work(folder: Path, task: TaskInputs, number: int) -> dict[str, Any]:
    """Find, rank and keep the items of some users; leave rows and figures."""
    with peak_of_tree() as peak:
        figures = _work(folder, task, number)
    record = {"code": checkout_version(), **figures, "mib": peak.mib}
    local(_figures_of(folder, number)).put_text(json.dumps(record) + "\n")
    return record


def _work(folder: Path, task: TaskInputs, number: int) -> dict[str, float]:
    blocks = vectors_of(folder / "vectors").blocks()
    queries, people = drawn(PART, 1_000 + number, 3), everybody().slice(number * PART, PART)
    start, cpu = time.time(), time.process_time()
    items = np.concatenate(
        [best_items(queries[first : first + SEARCHED], blocks, CANDIDATES).items for first in range(0, PART, SEARCHED)]
    )
    middle, middle_cpu = time.time(), time.process_time()
    rows = [0]
    scored = list(score_batches(task, _batches(people, items), lambda n: rows.__setitem__(0, rows[0] + n)))
    pq.write_table(pa.Table.from_batches(scored), _rows_of(folder, number))
    end, end_cpu = time.time(), time.process_time()
    _check(queries[:1], blocks, items[:1])
    return {
        "began": start,
        "ended": end,
        "rows": rows[0],
        "search_seconds": middle - start,
        "rank_seconds": end - middle,
        "search_cpu_seconds": middle_cpu - cpu,
        "rank_cpu_seconds": end_cpu - middle_cpu,
    }


def _figures_of(folder: Path, number: int) -> Path:
    """Return the file of a part's figures, which is written last."""
    return folder / "parts" / f"{number:03d}.json"


def _rows_of(folder: Path, number: int) -> Path:
    return folder / "parts" / f"{number:03d}.parquet"


def _batches(people: pa.RecordBatch, items: NDArray[np.int32]) -> Iterator[pa.RecordBatch]:
    for first in range(0, PART, RANKED):
        some = items[first : first + RANKED]
        lists = pa.FixedSizeListArray.from_arrays(pa.array(some.reshape(-1)), CANDIDATES).cast(pa.list_(pa.int32()))
        yield pa.RecordBatch.from_arrays([*people.slice(first, RANKED).columns, lists], [*USER, ITEMS])


def _check(queries: NDArray[np.float32], blocks: Any, items: NDArray[np.int32]) -> None:
    """Check a user's items against a product of NumPy; it may round otherwise, so that neighbours may change places."""
    scores = np.concatenate([queries @ vectors.T for _, vectors in blocks], axis=1)
    best = np.take_along_axis(scores, top_k(scores, CANDIDATES), 1)
    assert np.allclose(np.take_along_axis(scores, items, 1), best, rtol=1e-5)


CASES: Mapping[str, Callable[..., list[Figure]]] = {
    "ranking": score_ranking.figures,
    "retrieval": score_retrieval.figures,
    "million": million_figures,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_score")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--resume", action="store_true", help="million: keep the parts that another commit has left")
    parser.add_argument("--users", type=int, default=USERS, help=f"million: so many users, a multiple of {PART:,}")
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case '{unknown[0]}'; cases: {', '.join(CASES)}")
    if args.users % PART or not 0 < args.users <= USERS:
        parser.error(f"--users is a multiple of {PART:,}, {USERS:,} at most")
    figures: list[Figure] = []
    for name in args.cases:
        options = {"resume": args.resume, "users": args.users} if name == "million" else {}
        figures += CASES[name](**options)
    publish("score" if args.cases == list(CASES) else f"score-{'-'.join(args.cases)}", figures)


if __name__ == "__main__":
    main()
