"""Days of raw ids through tables of ours and TorchRec's managed collisions: the same ids, one process, in turns.

    make bench-peers                                       # TorchRec and FBGEMM, below build/peers
    for found in run(Stream()): ...

Each table has room for so many rows; each day a share of the ids gives way to ids that were never seen. A table looks
up a batch and gives rows to new ids, which may take them from others; nothing is learned, so gradients cost nothing on
either side. TorchRec's is `MCHManagedCollisionModule` with its remapped ids looked up in a table of torch; rows that
change hands start anew, as its sharded modules see to (torchrec/distributed/mc_embedding_modules.py). Its last row is
that of all ids without one.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.peers.torchrec_step import FOLDERS
from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer
from headrace.config.installation import checkout
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Plan

_MODULE = "bench.peers.torchrec_collisions"
_NO_OWNER = -1
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class IdStream:
    """Ids, and the tables' sizes."""

    #: Room of each table.
    rows: int = 131_072
    #: Ids that can come on a day, and the share of them that is new each day (as popular as those they replace).
    population: int = 1_000_000
    new: float = 0.1
    zipf: float = 1.05
    days: int = 5
    #: Batches of a day.
    steps: int = 30
    batch: int = 16_384
    dim: int = 64
    #: Batches between TorchRec's evictions.
    interval: int = 10

    def batches(self) -> Iterator[tuple[int, Ids, Mask]]:
        """Yield day, ids int64 [batch] in [0, 2^63 - 1), and which of them came in an earlier batch."""
        rng = np.random.default_rng(1)
        edges = np.cumsum(np.arange(1, self.population + 1) ** -self.zipf)
        edges /= edges[-1]
        ids = rng.integers(0, 2**63 - 1, self.population)
        was_seen = np.zeros(self.population, dtype=bool)
        for day in range(self.days):
            if day:
                replaced = np.flatnonzero(rng.random(self.population) < self.new)
                ids[replaced], was_seen[replaced] = rng.integers(0, 2**63 - 1, len(replaced)), False
            for _ in range(self.steps):
                drawn = np.searchsorted(edges, rng.random(self.batch)).clip(0, self.population - 1)
                yield day, ids[drawn], was_seen[drawn]
                was_seen[drawn] = True


@dataclass(frozen=True)
class TableFigures:
    """Figures of one table. Shares are of the lookups after the first day."""

    name: str
    #: Of an id, lookup and admission: the median of the days' means.
    nanoseconds: float
    #: Lookups whose id had a row of its own, and had it since an earlier batch.
    own_row: float
    held_row: float
    #: Of weights, the state of row-wise Adagrad, and all that says which id has which row.
    bytes_a_row: float


class HeadraceTable:
    """A table of raw ids, one rank."""

    def __init__(self, name: str, stream: IdStream, **settings: Any) -> None:
        self.name, self._rows = name, stream.rows
        spec = DynamicSpec("t", stream.dim, max_rows=stream.rows, **settings)
        self._tables = DynamicEmbeddings([spec], LocalCollective(), seed=1)
        self._tables.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad"))
        self._lookups = ShardedEmbeddings(Plan((), (), (), 1), LocalCollective(), seed=1, dynamic=self._tables)
        self._no_codes = torch.zeros(0, 0, dtype=torch.int64)
        self._has_row = torch.zeros(0, dtype=torch.bool)

    def look_up(self, ids: Tensor) -> Tensor:
        prepared = self._lookups.prepare(self._no_codes, raw=[ids])
        self._lookups.features(prepared)
        ((vectors, self._has_row),) = prepared.found
        return vectors

    def with_row(self, ids: Ids) -> Mask:
        """Return which ids have a row already."""
        return np.isin(ids, self._tables.tables[0].ids)

    def has_own(self, ids: Ids, held: Mask) -> tuple[Mask, Mask]:
        """Return which ids of the last lookup had a row of their own, and which of these had it before."""
        is_own = self._has_row.numpy()
        return is_own, is_own & held

    @property
    def nbytes(self) -> int:
        table = self._tables.tables[0]
        return int(table.nbytes + table._waiting.nbytes)


class TorchRec:
    """Managed collisions and a table of torch."""

    def __init__(self, name: str, stream: IdStream, policy: Any) -> None:
        from torchrec.modules.mc_modules import MCHManagedCollisionModule  # type: ignore[import-not-found]

        self.name, self._common = name, stream.rows - 1
        self._module = MCHManagedCollisionModule(
            zch_size=stream.rows, device=torch.device("cpu"), eviction_policy=policy, eviction_interval=stream.interval
        )
        self._weight = torch.zeros(stream.rows, stream.dim).uniform_(-0.05, 0.05)
        self._state = torch.zeros(stream.rows, 1)
        #: Who had a row last.
        self._owner = np.full(stream.rows, _NO_OWNER)
        self._last_rows: Ids = np.zeros(0, dtype=np.int64)

    def look_up(self, ids: Tensor) -> Tensor:
        from torchrec.sparse.jagged_tensor import JaggedTensor  # type: ignore[import-not-found]

        features = JaggedTensor(values=ids, lengths=torch.ones_like(ids, dtype=torch.int32))
        rows = self._module({"t": features})["t"].values()
        changed = self._module.evict()
        if changed is not None:
            self._weight[changed] = torch.empty(len(changed), self._weight.shape[1]).uniform_(-0.05, 0.05)
            self._state[changed] = 0.0
        self._last_rows = rows.numpy()
        return self._weight.index_select(0, rows)

    def with_row(self, ids: Ids) -> Mask:
        return np.zeros(len(ids), dtype=bool)

    def has_own(self, ids: Ids, held: Mask) -> tuple[Mask, Mask]:
        is_own = self._last_rows != self._common
        is_held = is_own & (self._owner[self._last_rows] == ids)
        self._owner[self._last_rows[is_own]] = ids[is_own]
        return is_own, is_held

    @property
    def nbytes(self) -> int:
        """The history of `interval` batches included, which is no buffer of the module by name."""
        module = self._module
        held = [*module.buffers(), *module._history_metadata.values(), module._history_accumulator]
        different = {x.data_ptr(): x.numel() * x.element_size() for x in (*held, self._weight, self._state)}
        return sum(different.values())


def tables_of(stream: IdStream) -> list[HeadraceTable | TorchRec]:
    """Return our tables beside TorchRec's of the same rule, in pairs."""
    from torchrec.modules import mc_modules as theirs

    return [
        HeadraceTable("lfu", stream),
        TorchRec("LFU", stream, theirs.LFU_EvictionPolicy()),
        HeadraceTable("lru", stream, evict="lru"),
        TorchRec("LRU", stream, theirs.LRU_EvictionPolicy()),
        HeadraceTable("lfu, admit_after 2", stream, admit_after=2),
        TorchRec("distance-LFU", stream, theirs.DistanceLFU_EvictionPolicy()),
    ]


def measure(stream: IdStream, tables: Sequence[HeadraceTable | TorchRec]) -> tuple[list[TableFigures], float]:
    """Measure each table, and the share of lookups whose id had come before: what a table without a limit keeps."""
    seconds = np.zeros((len(tables), stream.days))
    shares = np.zeros((len(tables), 2))
    seen = 0.0
    later = (stream.days - 1) * stream.steps * stream.batch
    for number, (day, ids, was_seen) in enumerate(stream.batches()):
        id_tensor = torch.from_numpy(ids)
        seen += float(was_seen.sum()) * (day > 0)
        for offset in range(len(tables)):
            i = (offset + number) % len(tables)
            held = tables[i].with_row(ids)
            start = time.perf_counter()
            tables[i].look_up(id_tensor)
            seconds[i, day] += time.perf_counter() - start
            masks = tables[i].has_own(ids, held)
            if day:
                shares[i] += [mask.sum() for mask in masks]
    each = 1e9 / (stream.steps * stream.batch)
    return [
        TableFigures(
            t.name, median(seconds[i, 1:].tolist()) * each, *(shares[i] / later).tolist(), t.nbytes / stream.rows
        )
        for i, t in enumerate(tables)
    ], seen / later


def run(stream: IdStream) -> tuple[list[TableFigures], float]:
    """`measure` in a process that has TorchRec.

    Raises:
        subprocess.CalledProcessError: it failed; its messages are on stderr.
    """
    root = checkout()
    path = os.pathsep.join([str(root), *(str(root / "build" / "peers" / name) for name in FOLDERS)])
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", _MODULE, json.dumps(asdict(stream))],
        check=True,
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ).stdout
    answer = json.loads(output.splitlines()[-1])
    return [TableFigures(**f) for f in answer["tables"]], answer["seen"]


def _main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import fbgemm_gpu  # type: ignore[import-not-found]  # noqa: F401  (registers the operators)

    stream = IdStream(**json.loads(sys.argv[1]))
    measured, seen = measure(stream, tables_of(stream))
    print(json.dumps({"tables": [asdict(f) for f in measured], "seen": seen}))


if __name__ == "__main__":
    with torch.no_grad():
        _main()
