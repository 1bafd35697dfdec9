"""What a ranking task calls: the rules of `score.rerank` over the ranked items of its users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.config.score import Rerank
from headrace.features.functions.timestamps import DAY_MICROS
from headrace.features.table_ops.preparation import midnight
from headrace.score.items import ItemTable
from headrace.score.rank.ranked import Listed, Ranked
from headrace.score.rerank.lists import RankedLists
from headrace.score.rerank.reasons import reasons
from headrace.score.rerank.rerank import rerank
from headrace.udfs.xxhash64 import xxhash64_integers, xxhash64_strings

#: Columns of items: how many events they have in the training rows (none: null), and when the first was.
EVENTS, FIRST_EVENT = "events", "first_event"
#: Vectors of items, by their rows: float32 [n, D].
ItemVectors = Callable[[NDArray[np.int32]], NDArray[np.float32]]


@dataclass(frozen=True)
class RuleReranker:
    """A `Reranker`: picklable, and a function of what it is given alone."""

    rules: Rerank
    #: Of each user.
    top_k: int
    ds: str
    #: Of the candidates' sources, by their bits.
    sources: tuple[str, ...] = ()
    #: For `diversity.by: vectors`.
    vectors: ItemVectors | None = None

    def __call__(self, ranked: Ranked, items: ItemTable) -> Listed:
        """See `Reranker`."""
        found = rerank(self._lists(ranked, items), self.rules, self.top_k, self.ds)
        masks = None if ranked.sources is None else ranked.sources[found.rows].astype(np.int64)
        return Listed(
            found.offsets, found.rows, found.propensity, reasons(found.rule, masks, self.sources), found.unmet
        )

    def _lists(self, ranked: Ranked, items: ItemTable) -> RankedLists:
        rules, rows = self.rules, ranked.item_rows
        by = () if rules.diversity is None or rules.diversity.by == "vectors" else rules.diversity.by
        fresh = new = None
        if (freshness := rules.freshness) is not None:
            since = items.take(freshness.column or FIRST_EVENT, rows)
            fresh = is_fresh(since, midnight(self.ds, 1), freshness.days)
        if rules.new_items is not None:
            events = pc.fill_null(items.take(EVENTS, rows), 0).to_numpy(zero_copy_only=False)
            new = events < rules.new_items.below_events
        return RankedLists(
            users=hashes(ranked.users),
            offsets=ranked.offsets,
            scores=ranked.scores,
            fresh=fresh,
            new=new,
            values={c: codes(items.take(c, rows)) for c in dict.fromkeys((*by, *rules.caps))},
            vectors=self._unit_vectors(rows) if rules.diversity is not None and not by else None,
        )

    def _unit_vectors(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        assert self.vectors is not None
        distinct, place = np.unique(rows, return_inverse=True)
        vectors = self.vectors(distinct)
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: NDArray[np.float32] = (vectors / np.where(length > 0, length, 1)).astype(np.float32)
        return unit[place]


def is_fresh(since: pa.Array, now: int, days: float) -> NDArray[np.bool_]:
    """Whether items are younger than some days: bool [n]; an item without a time is not.

    Args:
        since: dates or timestamps, [n].
        now: microseconds since 1970.
        days: may have a fraction.
    """
    micros = since.cast(pa.timestamp("us", since.type.tz if pa.types.is_timestamp(since.type) else None))
    known = micros.is_valid().to_numpy(zero_copy_only=False)
    at = pc.fill_null(micros.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    young: NDArray[np.bool_] = known & (now - at < days * DAY_MICROS)
    return young


def codes(values: pa.Array) -> NDArray[np.int64]:
    """Numbers that are equal where values are: int64 [n], -1 of a null."""
    found: NDArray[np.int64] = (
        pc.fill_null(values.dictionary_encode().indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return found


def hashes(keys: pa.Array) -> NDArray[np.uint64]:
    """Of users' keys: uint64 [n], the same in every run; of numbers and texts what Spark's xxhash64 gives."""
    if pa.types.is_integer(keys.type):
        return xxhash64_integers(keys.to_numpy(zero_copy_only=False).astype(np.int64)).view(np.uint64)
    return xxhash64_strings(keys.cast(pa.string())).view(np.uint64)
