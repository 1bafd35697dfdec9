"""The rules of `score.rerank` over ranked items, as a ranking task applies them: lists, reasons and unmet rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark import Accumulator, SparkContext

from headrace.compute.jagged import JaggedArray
from headrace.config.score import Rerank
from headrace.errors import UserError
from headrace.features.functions.timestamps import DAY_MICROS
from headrace.features.table_ops.preparation import midnight
from headrace.lake.spark.tasks import ByPartition, this_partition
from headrace.models.predictor import Predictor
from headrace.score.item_features import ItemFeatures
from headrace.score.items import ItemTable
from headrace.score.loaded_model import Columns, gather, loaded_model
from headrace.score.ranking import OutputRows, Ranked
from headrace.score.rerank.explore import Softmax, explore, pool_of, protected
from headrace.score.rerank.select import (
    I64,
    Bools,
    Caps,
    RankedItems,
    Rectangle,
    Reranked,
    Rule,
    Share,
    select,
    shares_of,
)
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace
from headrace.udfs.arrow import xxhash64_integers, xxhash64_strings

#: Counts of a rule: lists that do not meet it, and those of them that provably could not.
LISTS, IMPOSSIBLE = "lists", "impossible"

_NAMES = {Rule.FRESH: "freshness", Rule.NEW_ITEM: "new_items"}


def unmet_rules(placed: I64, grid: Rectangle, caps: Caps, shares: list[Share], k: int) -> Counter[tuple[str, str]]:
    """Count, by (rule, LISTS or IMPOSSIBLE), some users' lists.

    A share is not met where a beginning of the list has fewer such items than it asks for. It is impossible where, of
    the ranked items, the caps let fewer into any list, each cap by itself. Caps are met always; what they cost is
    counted: lists that are shorter than k although more items were ranked.

    Args:
        placed: what stands at each position: int64 [n, positions], columns of the rectangle, -1 beyond a list's end.
        grid: the ranked items.
        caps: of the same.
        shares: that the rules ask for.
        k: `score.top_k`.
    """
    is_item = placed >= 0
    length, columns = is_item.sum(1), np.maximum(placed, 0)
    counts: Counter[tuple[str, str]] = Counter()

    def note(rule: str, unmet: Bools, impossible: Bools) -> None:
        counts[rule, LISTS] += int(unmet.sum())
        counts[rule, IMPOSSIBLE] += int((unmet & impossible).sum())

    for share in shares:
        share_counts = (is_item & np.take_along_axis(share.members, columns, 1)).cumsum(1)
        short = (is_item & (share_counts < share.least[1 : placed.shape[1] + 1])).any(1)
        note(_NAMES[share.rule], short, caps.at_most(share.members) < share.least[length])
    if caps.limits:
        possible = np.minimum(k, grid.is_item.sum(1))
        note("caps", length < possible, caps.at_most(grid.is_item) < possible)
    return counts


Counts = dict[int, dict[tuple[str, str], int]]


@dataclass(frozen=True)
class UnmetByTask:
    """Picklable, for tasks of one job."""

    counts: Accumulator[Counts]

    @staticmethod
    def empty(context: SparkContext) -> UnmetByTask:
        """Return counts of zero lists."""
        empty: Counts = {}
        return UnmetByTask(context.accumulator(empty, ByPartition()))

    def add(self, unmet: Mapping[tuple[str, str], int]) -> None:
        """Call at the end of a task, with all of its lists."""
        self.counts.add({this_partition(): dict(unmet)})

    def by_rule(self) -> dict[str, dict[str, int]]:
        """Return by rule, for the manifest, how many lists did not meet it, and how many provably could not."""
        total: Counter[tuple[str, str]] = Counter()
        for counts in self.counts.value.values():
            total.update(counts)
        return {
            rule: {outcome: total[rule, outcome] for outcome in (LISTS, IMPOSSIBLE)}
            for rule in sorted({r for r, _ in total})
        }


_WORDS = {Rule.SCORE: "", Rule.FRESH: "fresh", Rule.NEW_ITEM: "new_item", Rule.EXPLORE: "explore"}
#: Reason of an item that no rule and no source brought: it was ranked among all items.
_RANKED = "score"


def reasons(rule: NDArray[np.uint8], sources: NDArray[np.int64] | None, names: Sequence[str]) -> pa.StringArray:
    """Return each row's reason: the rule that put it there, if one did, then its sources, with commas between.

    Args:
        rule: a `Rule` each, uint8 [M].
        sources: bit masks by position in `names`, int64 [M]; None: there were no sources, all items were ranked.
        names: of the sources, 48 at most.
    """
    masks = np.zeros(len(rule), np.int64) if sources is None else sources.astype(np.int64)
    distinct, place = np.unique(masks << 8 | rule, return_inverse=True)
    words = [_words(int(key), names) for key in distinct]
    return pa.array(words, pa.string()).take(pa.array(place))


def _words(key: int, names: Sequence[str]) -> str:
    mask, rule = key >> 8, Rule(key & 0xFF)
    words = [_WORDS[rule], *(name for i, name in enumerate(names) if mask >> i & 1)]
    return ",".join(word for word in words if word) or _RANKED


def rerank(lists: RankedItems, rules: Rerank, k: int, ds: str) -> Reranked:
    """Return at most k items for each user: a function of the user's own items, its key, the day and the rules.

    Args:
        lists: the ranked items. What the rules look at must be there.
        rules: the section `score.rerank`.
        k: `score.top_k`.
        ds: the day, YYYY-MM-DD: others are drawn on another.
    """
    grid = Rectangle.from_offsets(lists.offsets)
    exploration = rules.explore
    draw = (
        None
        if exploration is None or exploration.temperature is None
        else Softmax.for_day(exploration, ds, lists.users, grid, k)
    )
    selected, caps = select(lists, grid, rules, k, draw)
    placed, rule, propensity = selected.chosen, selected.rule, selected.propensity
    if rules.explore is not None and rules.explore.epsilon is not None:
        pool = pool_of(selected, grid, caps, rules.explore.pool)
        fixed = protected(selected, shares_of(lists, grid, rules, k))
        placed, propensity, rule = explore(selected, pool, fixed, rules.explore, ds, lists.users)
    unmet = unmet_rules(placed, grid, caps, shares_of(lists, grid, rules, k), k)
    is_item = placed >= 0
    offsets = np.zeros(len(lists.offsets), np.int64)
    np.cumsum(is_item.sum(1), out=offsets[1:])
    rows = np.take_along_axis(grid.rows, np.maximum(placed, 0), 1)[is_item]
    return Reranked(offsets, rows, propensity[is_item], rule[is_item], unmet)


@dataclass(frozen=True)
class ModelItemVectors:
    """Picklable; the model is the one that the worker has loaded to rank, and items' features are mapped."""

    model: Location
    threads: int
    output: str | None
    maps: HostPlace | None
    item_features: ItemFeatures
    #: See TaskInputs.
    gpu: bool = False
    joined: frozenset[str] = frozenset()

    def __call__(self, item_rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the vectors of item rows [n]: float32 [n, D].

        Raises:
            UserError: the model is in no retrieval form.
        """
        predictor, _ = loaded_model(self.model, self.threads, self.output, self.maps, self.gpu, self.joined)
        columns = gather({}, self.item_features.open(), item_rows, item_rows)
        return _vectors(predictor, columns, len(item_rows))


def _vectors(predictor: Predictor, columns: Columns, n: int) -> NDArray[np.float32]:
    vectors_of = getattr(predictor, "vectors", None)
    if vectors_of is None:
        raise UserError(
            f"score.rerank.diversity.by is 'vectors', and a model of kind '{predictor.kind}' has none: name columns of "
            f"score.item"
        )
    for f in predictor.schema.features:
        if f.name not in columns:  # features of users, which an item's vector does not read
            zeros = np.zeros(n, f.dtype)
            columns[f.name] = JaggedArray(np.zeros(n + 1, np.int64), zeros[:0]) if f.is_list else zeros
    vectors: NDArray[np.float32] = vectors_of(columns, "item")
    return vectors


#: Columns of items: number of events in the training rows (null if none), and time of the first.
EVENTS, FIRST_EVENT = "events", "first_event"
#: Vectors of items, by their rows: float32 [n, D].
ItemVectors = Callable[[NDArray[np.int32]], NDArray[np.float32]]


@dataclass(frozen=True)
class RuleReranker:
    """A `Reranker`: picklable, and a function of what it is given alone."""

    rules: Rerank
    #: Length of each user's list.
    top_k: int
    ds: str
    #: Names of the candidates' sources, by bit.
    sources: tuple[str, ...] = ()
    #: For `diversity.by: vectors`.
    vectors: ItemVectors | None = None

    def __call__(self, ranked: Ranked, items: ItemTable) -> OutputRows:
        """See `Reranker`."""
        reranked = rerank(self._lists(ranked, items), self.rules, self.top_k, self.ds)
        masks = None if ranked.sources is None else ranked.sources[reranked.rows].astype(np.int64)
        return OutputRows(
            reranked.offsets,
            reranked.rows,
            reranked.propensity,
            reasons(reranked.rule, masks, self.sources),
            reranked.unmet,
        )

    def _lists(self, ranked: Ranked, items: ItemTable) -> RankedItems:
        rules, rows = self.rules, ranked.item_rows
        by = () if rules.diversity is None or rules.diversity.by == "vectors" else rules.diversity.by
        fresh = new = None
        if (freshness := rules.freshness) is not None:
            since = items.take(freshness.column or FIRST_EVENT, rows)
            fresh = is_fresh(since, midnight(self.ds, 1), freshness.days)
        if rules.new_items is not None:
            events = pc.fill_null(items.take(EVENTS, rows), 0).to_numpy(zero_copy_only=False)
            new = events < rules.new_items.below_events
        return RankedItems(
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
    """Return whether items are younger than some days: bool [n]; an item without a time is not.

    Args:
        since: dates or timestamps, [n].
        now: microseconds since 1970.
        days: may have a fraction.
    """
    micros = since.cast(pa.timestamp("us", since.type.tz if pa.types.is_timestamp(since.type) else None))
    known = micros.is_valid().to_numpy(zero_copy_only=False)
    times = pc.fill_null(micros.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    is_young: NDArray[np.bool_] = known & (now - times < days * DAY_MICROS)
    return is_young


def codes(values: pa.Array) -> NDArray[np.int64]:
    """Return numbers that are equal where values are: int64 [n], -1 for null."""
    numbers: NDArray[np.int64] = (
        pc.fill_null(values.dictionary_encode().indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return numbers


def hashes(keys: pa.Array) -> NDArray[np.uint64]:
    """Return hashes of users' keys: uint64 [n], equal in every run; for numbers and texts those of Spark's xxhash64."""
    if pa.types.is_integer(keys.type):
        return xxhash64_integers(keys.to_numpy(zero_copy_only=False).astype(np.int64)).view(np.uint64)
    return xxhash64_strings(keys.cast(pa.string())).view(np.uint64)
