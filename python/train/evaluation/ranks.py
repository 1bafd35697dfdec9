"""Communication of an evaluation's ranks: small tables, sums, and the exchange of rows.

Rows are sent to ranks by range of their scores, or by user, so that each rank can compute its part of a metric alone.
Scores are mapped to integers of the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.comm import World
from headrace.embeddings.kernels.id_map import mix
from headrace.errors import UserError

if TYPE_CHECKING:  # imports torch, which a single process does not need
    from headrace.comm.base import Collective

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


class Ranks:
    """The ranks of an evaluation. Every method is collective.

    Args:
        collective: carrier of the messages; None: this process is the only rank.
    """

    def __init__(self, collective: Collective | None = None) -> None:
        self._collective = collective
        self.world = World() if collective is None else collective.world

    def gather(self, x: I64) -> I64:
        """Return the ranks' tables of one shape: int64 [...] -> int64 [ranks, ...]."""
        return self.gather_rows(np.ascontiguousarray(x, np.int64)[None])

    def add_up(self, x: I64) -> I64:
        """Return the sum over the ranks of tables of one shape, without floats: int64 [...] -> int64 [...]."""
        total = np.array(x, np.int64)
        if self._collective is not None and total.size:
            import torch

            self._collective.all_reduce_sum([torch.from_numpy(total)])
        return total

    def gather_json(self, value: Any) -> list[Any]:
        """Return the value of each rank, in rank order: small JSON values."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = self.gather(np.array([len(text)]))[:, 0]
        joined = self.gather_rows(text).tobytes()
        ends = np.cumsum(lengths).tolist()
        return [json.loads(joined[end - n : end]) for n, end in zip(lengths.tolist(), ends, strict=True)]

    def send_rows(self, columns: Sequence[Array], rows: Sequence[int]) -> list[Array]:
        """Send the first `rows[0]` rows of columns to rank 0, and so on; return the received columns, read-only."""
        if self._collective is None:
            return list(columns)
        import torch

        return [self._collective.all_to_all(torch.from_numpy(c), rows)[0].numpy() for c in columns]

    def gather_rows(self, x: Array) -> Array:
        """Return the ranks' rows in rank order: [N_r, ...] of any type -> [sum of N_r, ...]."""
        if self._collective is None:
            return x
        import torch

        return self._collective.all_gather(torch.from_numpy(x.copy())).numpy()


F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Dimension:
    """A dimension of slices: a name and its values. A row has the position of its value, or -1 without a value."""

    name: str
    values: tuple[str, ...]


#: All rows as one slice.
OVERALL = Dimension("", ("",))


@dataclass(frozen=True)
class ScoredRows:
    """This rank's rows.

    Attributes:
        scores: logits or probabilities, float32 [n].
        labels: bool [n].
        users: ids or hashes, int64 [n], or None.
        slices: for each dimension, the position of the row's value, int64 [n].
    """

    scores: F32
    labels: Bools
    users: I64 | None = None
    slices: tuple[I64, ...] = ()

    @staticmethod
    def from_scores(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> ScoredRows:
        """Create rows from scores and labels, positive above 0. Raises ValueError unless the scores are float32."""
        if scores.dtype != np.float32:
            raise ValueError(
                f"scores are float32, not {scores.dtype}: others would be rounded, and rounding makes ties"
            )
        return ScoredRows(scores, np.asarray(labels) > 0)


def check_scores(ranks: Ranks, scores: F32 | F64, *, finite: bool = False) -> int:
    """Check scores, and return the number of rows over all ranks. Collective.

    Raises:
        UserError: a score is NaN, or with `finite` infinite, on some rank; all ranks raise it.
    """
    faults = ~np.isfinite(scores) if finite else np.isnan(scores)
    bad, rows = ranks.add_up(np.array([faults.sum(), len(scores)])).tolist()
    if bad:
        fault = "not finite, so there is nothing to measure" if finite else "NaN, so there is nothing to order them by"
        raise UserError(
            f"{bad:,} of {rows:,} predictions are {fault}: a weight or a feature is not finite; lower "
            f"train.dense.learning_rate or train.embeddings.learning_rate, or look at the features"
        )
    return int(rows)


def sigmoid(logits: npt.NDArray[Any]) -> F64:
    """Return the probabilities of logits [n], computed in float64 without overflow."""
    x = np.asarray(logits, np.float64)
    e = np.exp(-np.abs(x))
    probabilities: F64 = np.where(x >= 0, 1.0, e) / (1.0 + e)
    return probabilities


def as_they_are(scores: npt.NDArray[Any]) -> F64:
    """Return scores [n] that are probabilities already."""
    return np.asarray(scores, np.float64)


def sort_keys(rows: ScoredRows) -> I64:
    """Return integers in the order of the scores, equal for equal scores but for the label: int64 [n]."""
    # -0.0 becomes 0.0. Bits of negative floats ascend away from 0.
    bits = (rows.scores + np.float32(0)).view(np.int32)
    order = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    return (order << 1) | rows.labels


def unpacked(keys: I64) -> tuple[I64, Bools]:
    """Return the order of the scores, int64 [n], and the labels of sort keys."""
    return keys >> 1, (keys & 1).astype(bool)


def scores_of(order: I64) -> F32:
    """Return the scores of their order: float32 [n]."""
    bits = order.astype(np.int32)
    return (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)


#: Number of keys that each rank samples for each rank.
_SAMPLES = 64


def by_range(ranks: Ranks, keys: I64, columns: Sequence[Array] = ()) -> tuple[I64, list[Array]]:
    """Sort rows over all ranks: each rank gets a range of the keys, sorted. Collective.

    Splitters are sampled at equal distances in each rank's sorted keys (Shi and Schaeffer, 1992). Equal keys are
    distinguished by their position, so no rank gets more than twice its share, however many there are. They may then be
    on several ranks.

    Args:
        keys: int64 [n].
        columns: further columns of the rows, [n] each.

    Returns:
        keys of this rank, ascending, with keys of rank r + 1 not below those of rank r; and their columns.
    """
    keys, columns = _sorted(keys, columns)
    size, rank, n = ranks.world.size, ranks.world.rank, len(keys)
    if size == 1:
        return keys, list(columns)
    samples = min(n, _SAMPLES * size)
    places = np.arange(samples) * n // max(samples, 1)
    # A table of one shape, in which a rank with few rows leaves entries without weight.
    table = np.zeros((_SAMPLES * size, 3), np.int64)
    table[:samples] = np.stack([keys[places], places, np.diff(np.append(places, n))], axis=1)
    gathered = ranks.gather(table)
    key, place, weight = gathered.reshape(-1, 3).T
    of_rank = np.repeat(np.arange(size), _SAMPLES * size)
    order = np.lexsort((place, of_rank, key))
    order = order[weight[order] > 0]
    weight_before = np.cumsum(weight[order]) - weight[order]
    total = int(weight.sum())
    cuts = [0]
    for i in range(1, size):
        position = int(np.searchsorted(weight_before, total * i // size))
        if position == len(order):
            cuts.append(n)
            continue
        chosen = order[position]
        if of_rank[chosen] == rank:
            cuts.append(int(place[chosen]))
        else:
            # Equal keys of ranks before the splitter's rank are below the splitter, those of later ranks are not.
            cuts.append(int(np.searchsorted(keys, key[chosen], "right" if rank < of_rank[chosen] else "left")))
    cuts.append(n)
    received = ranks.send_rows([keys, *columns], np.diff(cuts).tolist())
    return _sorted(received[0], received[1:])


def by_id(ranks: Ranks, ids: I64, columns: Sequence[Array] = ()) -> tuple[I64, list[Array]]:
    """Send all rows of an id to one rank, that of its hash. Collective.

    Args:
        ids: int64 [n].
        columns: further columns of the rows, [n] each.
    """
    size = ranks.world.size
    if size == 1:
        return ids, list(columns)
    to = (mix(np.ascontiguousarray(ids)) >> np.uint64(32)).astype(np.int64) % size
    order = np.argsort(to, kind="stable")
    counts = np.bincount(to, minlength=size).tolist()
    received = ranks.send_rows([c[order] for c in (ids, *columns)], counts)
    return received[0], received[1:]


def _sorted(keys: I64, columns: Sequence[Array]) -> tuple[I64, list[Array]]:
    if not columns:
        return np.sort(keys), []
    order = np.argsort(keys)
    return keys[order], [c[order] for c in columns]


@contextmanager
def ranks_of_tasks() -> Iterator[Ranks]:
    """Connect the tasks of a barrier stage as ranks."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    addresses = [info.address for info in context.getTaskInfos()]
    if len(addresses) == 1:
        yield Ranks()
        return
    # torch takes seconds to import.
    from headrace.comm.torch_dist import gloo_ranks

    host = addresses[0].rsplit(":", 1)[0]
    with gloo_ranks(context.partitionId(), len(addresses), host, context.allGather) as collective:
        yield Ranks(collective)
