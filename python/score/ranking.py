"""Ranking in a Spark task: pairs of its users and their items, a block at a time, and the best items of each user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.predictor import Predictor, stages_of
from headrace.score.item_features import ItemFeatures
from headrace.score.items import ItemTable
from headrace.score.loaded_model import BLOCK_PAIRS, Columns, PairFeatures, gather, loaded_model, take_rows
from headrace.score.top_k import top_k
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace


@dataclass(frozen=True)
class Ranked:
    """The items of n users, N in all, those of a user one after the other, best first.

    users: the users' keys [n]. offsets: int64 [n + 1], where each user's items begin. item_rows: int32 [N], rows of the
    ItemTable. scores: float32 [N]. sources: int32 [N], a bit by position in `score.candidates.sources`; None: all items
    were ranked.
    """

    users: pa.Array
    offsets: NDArray[np.int64]
    item_rows: NDArray[np.int32]
    scores: NDArray[np.float32]
    sources: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class OutputRows:
    """Output rows of n users, M rows: a user's rows follow each other in the order of their ranks.

    offsets: int64 [n + 1]. rows: int64 [M], which of the N ranked items. propensity: float64 [M], the probability that
    this item stands at this rank. reason: text [M]. unmet: lists by what could not be had, (rule, what of it).
    """

    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    propensity: NDArray[np.float64]
    reason: pa.StringArray
    unmet: Mapping[tuple[str, str], int] = field(default_factory=dict)


class Reranker(Protocol):
    """Makes lists of ranked items; picklable, and a function of what it is given alone."""

    def __call__(self, ranked: Ranked, items: ItemTable) -> OutputRows:
        """Return the users' lists, none longer than `score.top_k`."""
        ...


def best_of_all(users: pa.Array, scores: NDArray[np.float32], k: int) -> Ranked:
    """Return the best k items of users for whom all items were scored; minus infinity is no item's score.

    Args:
        users: keys [n].
        scores: float32 [n, items], no NaN. Of equal scores the lower row comes first.
        k: at most so many for each.
    """
    best = top_k(scores, k)
    values = np.take_along_axis(scores, best, axis=1)
    is_scored = values > -np.inf
    return Ranked(users, _offsets(is_scored.sum(1)), best[is_scored].astype(np.int32), values[is_scored])


def best_of_lists(
    users: pa.Array,
    lengths: NDArray[np.int64],
    item_rows: NDArray[np.int32],
    scores: NDArray[np.float32],
    sources: NDArray[np.int32] | None,
    k: int,
) -> Ranked:
    """Return the best k items of each user's own, whatever the order of the lists.

    Args:
        users: keys [n].
        lengths: how many items each user has, [n], N in all.
        item_rows: int32 [N], distinct within a user.
        scores: float32 [N], no NaN. Of equal scores the lower row comes first.
        sources: int32 [N] or None.
        k: at most so many for each.
    """
    # Adding 0 makes -0 a 0, as `top_k` does.
    order = np.lexsort((item_rows, -(scores + np.float32(0)), np.repeat(np.arange(len(lengths)), lengths)))
    place = np.arange(len(order)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    top = order[place < k]
    top_sources = None if sources is None else sources[top]
    return Ranked(users, _offsets(np.minimum(lengths, k)), item_rows[top], scores[top], top_sources)


def ranks(offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the ranks from 1 of rows in lists that begin at offsets [n + 1]: int32 [offsets[-1]]."""
    total = int(offsets[-1])
    ranks: NDArray[np.int32] = (np.arange(total) - np.repeat(offsets[:-1], np.diff(offsets)) + 1).astype(np.int32)
    return ranks


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


#: Blocks are padded to a multiple of so many rows. A matrix product computes left-over rows by another kernel, which
#: rounds differently, and a pair's score must not depend on the pairs beside it.
_FULL_ROWS = 256
#: Items whose pairs are scored alone and together.
CHECKED_ITEMS = 48
#: Optional column of users: keys of items to leave out, if all items are ranked.
SEEN = "__seen"
#: Columns of users with candidates: rows of the items, array<int>, and source bits of each, array<int>.
ITEMS, SOURCES = "__items", "__sources"


@dataclass(frozen=True)
class TaskInputs:
    """Inputs of all tasks; small, since items are mapped."""

    #: The saved model's folder, visible on every executor.
    model: Location
    threads: int
    #: Items to keep of each user by score, before `rerank`.
    top_k: int
    user_key: str
    #: Items in order of the key, in which ties are broken.
    items: ItemTable
    item_features: ItemFeatures
    user_columns: tuple[str, ...]
    #: With `user_columns` and `context`, all that `PairFeatures` needs besides the workflow, which each process loads.
    item_names: tuple[str, ...]
    context: dict[str, pa.Scalar]
    block_pairs: int = BLOCK_PAIRS
    #: The task whose predictions are the scores; None: the model's first.
    output: str | None = None
    #: Where workers of a host map the model's tables; None: each has them in its memory.
    maps: HostPlace | None = None
    #: Tables that are not mapped: a task receives their rows before its users (headrace.score.joined_rows).
    joined: frozenset[str] = frozenset()
    #: True if each task has a GPU of its own for a model with embeddings.
    gpu: bool = False
    #: For a model of two stages: items per user that the first passes to the second; None: `top_k`.
    rank_depth: int | None = None
    #: Makes lists of the best items; None: the best items are the list.
    rerank: Reranker | None = None

    def load(self) -> tuple[Predictor, FittedWorkflow]:
        """Return the model, opened once in each process."""
        return loaded_model(self.model, self.threads, self.output, self.maps, self.gpu, self.joined)


def score_batches(
    task: TaskInputs,
    batches: Iterable[pa.RecordBatch],
    count: Callable[[int], None],
    unmet: Counter[tuple[str, str]] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Rank the items of users: all items, or the candidates of each.

    Args:
        task: the items and the model.
        batches: users: the key, the user's columns and perhaps `__seen`, or `__items` and perhaps `__sources`.
        count: is called with the number of pairs of each finished block.
        unmet: `OutputRows.unmet` of each block is added to it.

    Yields:
        Batches of (user key, item key, rank int32 from 1, score float32), one for each block of users; with `__sources`
        also `sources` int32; with `rerank` also `propensity` float64 and `reason` text.

    Raises:
        UserError: the model is damaged, or gives scores that are no numbers.
    """
    predictor, fitted = task.load()
    features = PairFeatures(task.user_columns, task.item_names, task.context, fitted)
    pairs, *second = (_Pairs(task, stage, features) for stage in stages_of(predictor))
    depth = (task.rank_depth or task.top_k) if second else task.top_k
    for batch in batches:
        columns = features.user_columns(batch)
        lists = CandidateLists.from_batch(batch) if ITEMS in batch.schema.names else None
        lengths = np.full(batch.num_rows, task.items.rows, np.int64) if lists is None else lists.lengths
        for users in blocks(lengths, task.block_pairs):
            part = batch.slice(users.start, len(users))
            u = np.repeat(np.arange(users.start, users.stop, dtype=np.int32), lengths[users.start : users.stop])
            if lists is None:
                i = np.tile(np.arange(task.items.rows, dtype=np.int32), len(users))
            else:
                i = lists.items[lists.offsets[users.start] : lists.offsets[users.stop]]
            scores = pairs.scores(batch, columns, u, i)
            keys = part.column(task.user_key)
            if lists is None:
                square = scores.reshape(len(users), task.items.rows)
                if SEEN in batch.schema.names:
                    _leave_out(square, part.column(SEEN), task.items)
                ranked = best_of_all(keys, square, depth)
            else:
                span = slice(int(lists.offsets[users.start]), int(lists.offsets[users.stop]))
                list_sources = None if lists.sources is None else lists.sources[span]
                ranked = best_of_lists(keys, lengths[users.start : users.stop], i, scores, list_sources, depth)
            for stage in second:
                ranked = _ranked_again(stage, batch, columns, users.start, ranked)
            yield _rows(ranked, task, unmet)
            count(len(u))


def blocks(lengths: NDArray[np.int64], block_pairs: int) -> Iterator[range]:
    """Yield ranges of consecutive users that have up to `block_pairs` pairs together; one user at least."""
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        pairs_before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, pairs_before + block_pairs, side="right")))
        yield range(start, stop)
        start = stop


@dataclass(frozen=True)
class CandidateLists:
    """Lists of a batch of users. offsets: [users + 1]; items: int32 [N]; sources: int32 [N] or None."""

    offsets: NDArray[np.int64]
    items: NDArray[np.int32]
    sources: NDArray[np.int32] | None

    @staticmethod
    def from_batch(batch: pa.RecordBatch) -> CandidateLists:
        lengths = pc.fill_null(pc.list_value_length(batch.column(ITEMS)), 0).to_numpy(zero_copy_only=False)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        columns = [
            None if name not in batch.schema.names else batch.column(name).flatten().to_numpy(zero_copy_only=False)
            for name in (ITEMS, SOURCES)
        ]
        assert columns[0] is not None
        return CandidateLists(offsets, columns[0].astype(np.int32, copy=False), columns[1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class _Pairs:
    task: TaskInputs
    predictor: Predictor
    features: PairFeatures

    def scores(
        self, batch: pa.RecordBatch, columns: Columns, u: NDArray[np.int32], i: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Return the model's scores of pairs, predicted in blocks of bounded size: float32 [n].

        Args:
            batch: users' own columns.
            columns: their features.
            u: rows of `batch`, [n].
            i: rows of items, [n].
        """
        task = self.task
        item_columns = task.item_features.open()
        scores = np.empty(len(u), dtype=np.float32)
        for start in range(0, len(u), task.block_pairs):
            users, items = u[start : start + task.block_pairs], i[start : start + task.block_pairs]
            count = len(users)
            users, items = _filled_up(users), _filled_up(items)
            pairs = gather(columns, item_columns, users, items)
            if self.features.of_pair:
                parts = [task.items.take(c, items) for c in self.features.item_parts]
                item_batch = pa.RecordBatch.from_arrays(parts, list(self.features.item_parts))
                pairs |= self.features.cross_columns(take_rows(self._user_batch(batch), users), item_batch)
            scores[start : start + count] = self.predictor.predict(pairs)[:count]
        if not np.isfinite(scores).all():
            raise UserError(
                f"the model in {task.model} gives scores that are no numbers; train it again (a lower rate?)"
            )
        return scores

    def _user_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select([c for c in self.features.user if c in batch.schema.names])


def _filled_up(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return rows [n], n above 0, padded with the last one to a multiple of `_FULL_ROWS`."""
    return np.pad(rows, (0, -len(rows) % _FULL_ROWS), mode="edge")


def scores_stand_alone(task: TaskInputs, batch: pa.RecordBatch) -> bool:
    """Return whether a pair's score is the same, to the bit, whatever pairs are scored beside it; checked on a few.

    Args:
        task: the items and the model, which has the rows of joined tables that the first CHECKED_ITEMS items look up.
        batch: a few users: the key and the user's columns.
    """
    predictor, fitted = task.load()
    features = PairFeatures(task.user_columns, task.item_names, task.context, fitted)
    columns = features.user_columns(batch)
    items = np.arange(min(task.items.rows, CHECKED_ITEMS), dtype=np.int32)
    u, i = np.repeat(np.arange(batch.num_rows, dtype=np.int32), len(items)), np.tile(items, batch.num_rows)
    if not len(u):
        return True
    for stage in stages_of(predictor):
        pairs = _Pairs(task, stage, features)
        together = pairs.scores(batch, columns, u, i)
        # Reversed, cut in two elsewhere, and each user alone.
        reversed_rows, middle = np.arange(len(u))[::-1], len(u) // 3 + 1
        cuts = [reversed_rows[:middle], reversed_rows[middle:], *np.split(np.arange(len(u)), batch.num_rows)]
        for cut in (c for c in cuts if len(c)):
            if not np.array_equal(pairs.scores(batch, columns, u[cut], i[cut]), together[cut]):
                return False
    return True


def _ranked_again(pairs: _Pairs, batch: pa.RecordBatch, columns: Columns, start: int, ranked: Ranked) -> Ranked:
    """Rank the items of a first model by the second model: the best of each user, whose first is row `start`."""
    lengths = np.diff(ranked.offsets)
    u = np.repeat(np.arange(start, start + len(lengths), dtype=np.int32), lengths)
    scores = pairs.scores(batch, columns, u, ranked.item_rows)
    return best_of_lists(ranked.users, lengths, ranked.item_rows, scores, ranked.sources, pairs.task.top_k)


def _leave_out(scores: NDArray[np.float32], seen: pa.ListArray, items: ItemTable) -> None:
    """Make the scores of items that a user has seen minus infinity, in place. scores: [users, items]."""
    rows = np.repeat(np.arange(len(seen)), pc.fill_null(pc.list_value_length(seen), 0).to_numpy(zero_copy_only=False))
    item_rows = items.rows_of(seen.flatten())
    scores[rows[item_rows >= 0], item_rows[item_rows >= 0]] = -np.inf


def _rows(ranked: Ranked, task: TaskInputs, unmet: Counter[tuple[str, str]] | None = None) -> pa.RecordBatch:
    """Return the output rows of some users."""
    offsets, chosen = ranked.offsets, np.arange(len(ranked.item_rows))
    columns: dict[str, pa.Array] = {}
    if task.rerank is not None:
        listed = task.rerank(ranked, task.items)
        offsets, chosen = listed.offsets, listed.rows
        if unmet is not None:
            unmet.update(listed.unmet)
        columns = {"propensity": pa.array(listed.propensity, pa.float64()), "reason": listed.reason}
    users = np.repeat(np.arange(len(ranked.users)), np.diff(offsets))
    first = {
        "user": ranked.users.take(pa.array(users)),
        "item": task.items.keys(ranked.item_rows[chosen]),
        "rank": pa.array(ranks(offsets)),
        "score": pa.array(ranked.scores[chosen]),
    }
    if ranked.sources is not None:
        first["sources"] = pa.array(ranked.sources[chosen], pa.int32())
    return pa.RecordBatch.from_pydict(first | columns)
