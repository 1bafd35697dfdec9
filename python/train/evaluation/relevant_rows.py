"""What a full ranking needs of a split: its positive rows, and a vector of each user."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.comm.base import Collective
from headrace.config import FullRanking
from headrace.dataset.loader.loaders import EvalLoader, streams_of
from headrace.dataset.parquet import lists
from headrace.dataset.parquet.layout import SplitLayout
from headrace.jagged import JaggedArray, concatenated
from headrace.models.retrieval import query_vectors
from headrace.models.sharded_model import ShardedModel
from headrace.schema import NULL_CODE, DatasetSchema, Kind
from headrace.train.evaluation.bootstrap import F64
from headrace.train.evaluation.predictions import Predictions
from headrace.train.evaluation.ranks import I64, Array, Ranks
from headrace.train.evaluation.rows import F32
from headrace.train.evaluation.slices import check_no_nulls, ids_here
from headrace.train.micro_batch import MicroBatch
from headrace.world import World

#: Rows that wait at least before those are dropped that do not stand for their user.
_WAITING = 65_536


class RowsOfUsers:
    """Rows as they come, of which for each user the one of the least (order, position) stays.

    The columns of a row: user int64, order float64, position int64, number int64, query float32 [D].
    """

    def __init__(self) -> None:
        self._parts: list[tuple[list[Array], JaggedArray]] = []
        self._waiting, self._standing = 0, 0

    def add(self, columns: Sequence[Array], excluded: JaggedArray | None) -> None:
        """More rows: see above, [n, ...] each; and codes, a list a row."""
        none = JaggedArray(np.zeros(len(columns[0]) + 1, np.int64), np.zeros(0, np.int64))
        self._parts.append(([np.array(c) for c in columns], concatenated([excluded or none], np.int64)))
        self._waiting += len(columns[0])
        if self._waiting > max(_WAITING, self._standing):
            self.take()

    def take(self) -> tuple[list[Array], JaggedArray]:
        """The rows that stand for their users, users ascending. There was a call of `add`."""
        columns = [np.concatenate(parts) for parts in zip(*(c for c, _ in self._parts), strict=True)]
        codes = concatenated([x for _, x in self._parts], np.int64)
        user, order, position = columns[:3]
        chosen = np.lexsort((position, order, user))
        chosen = chosen[np.flatnonzero(np.diff(user[chosen], prepend=user[chosen][:1] - 1))]
        taken = JaggedArray(*lists.take(codes.offsets, codes.values, chosen))
        self._parts = [([c[chosen] for c in columns], taken)]
        self._waiting, self._standing = 0, len(chosen)
        return self._parts[0]


@dataclass(frozen=True)
class RelevantRows:
    """This rank's positive rows of a split whose item is not null, and the vectors of their users.

    users, items: of each row, ids of any kind and codes; int64 [n]. found: what else was asked for of each row. The
    other columns are of the rows that stand for their users, one for each user that this rank has rows of: user int64
    [m], ascending; order float64 [m] and position int64 [m], of which the least decides over the ranks; row int64 [m],
    in [0, n); queries float32 [m, D]; excluded: codes, a list a row.
    """

    users: I64
    items: I64
    found: Predictions
    user: I64
    order: F64
    position: I64
    row: I64
    queries: F32
    excluded: JaggedArray


def relevant_rows(
    model: ShardedModel,
    layout: SplitLayout,
    schema: DatasetSchema,
    collective: Collective,
    settings: FullRanking,
    item: str,
    *,
    batch_size: int,
    streams: int,
    carried: Sequence[str] = (),
    codes: Sequence[str] = (),
) -> RelevantRows:
    """Read a split, each rank its streams. Collective.

    Args:
        settings: whose rows are one list.
        item: the feature that is ranked.
        carried: carried columns to bring along.
        codes: categorical features of one code a row, to bring along.

    Raises:
        UserError: rows without a user.
    """
    user, order_by = (None if c is None else schema.carried_name(c) for c in (settings.user, settings.order_by))
    read = list(dict.fromkeys([*carried, *(c for c in (user, order_by) if c is not None)]))
    scalars = [f.name for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
    places = {name: scalars.index(name) for name in dict.fromkeys([item, *codes])}
    standing, nulls = RowsOfUsers(), 0
    columns: dict[str, list[Array]] = {name: [] for name in (*carried, *places)}
    users: list[I64] = []
    rows = 0
    with EvalLoader(layout, schema, collective.world, batch_size=batch_size, streams=streams, carried=read) as source:
        for batch, position in zip(source, _positions(layout, collective.world, batch_size, streams), strict=False):
            given = MicroBatch.of(batch)
            queries = query_vectors(model, given.continuous, given.categorical).cpu().numpy()
            chosen = np.flatnonzero((batch.labels > 0) & (batch.codes[:, places[item]] != NULL_CODE))
            excluded = None if settings.exclude is None else batch.lists[settings.exclude]
            if excluded is not None:
                excluded = JaggedArray(*lists.take(excluded.offsets, excluded.values, chosen))
            if user is None or not batch.rows:  # carried columns of no rows have no type
                ids = position[chosen]
            else:
                ids, missing = ids_here(batch.carried[user][chosen], user, schema)
                nulls += missing
            order = np.zeros(len(chosen))
            if order_by is not None and batch.rows:
                order = np.nan_to_num(batch.carried[order_by][chosen].astype(np.float64), nan=np.inf)
            standing.add([ids, order, position[chosen], rows + np.arange(len(chosen)), queries[chosen]], excluded)
            rows += len(chosen)
            users.append(ids)
            for name, place in places.items():
                columns[name].append(batch.codes[chosen, place])
            for name in carried if batch.rows else ():
                columns[name].append(batch.carried[name][chosen])
    if user is not None:
        check_no_nulls(Ranks(collective), nulls, user)
    joined = {name: np.concatenate(parts) if parts else np.empty(0, object) for name, parts in columns.items()}
    found = Predictions(
        np.empty(0, np.float32),
        np.empty(0, np.float32),
        {name: joined[name] for name in carried},
        {name: joined[name] for name in codes},
    )
    (of_user, order, position, row, vectors), left_out = standing.take()
    return RelevantRows(np.concatenate(users), joined[item], found, of_user, order, position, row, vectors, left_out)


def _positions(layout: SplitLayout, world: World, batch_size: int, streams: int) -> Iterator[I64]:
    """Of each batch of an EvalLoader, where its rows are in the split: their stream and their place in it."""
    mine = streams_of(world, streams)
    sizes = np.array([sum(g.rows for g in layout.stream(i, streams)) for i in mine])
    each = batch_size // streams
    for step in itertools.count():
        counts = np.clip(sizes - step * each, 0, each)
        within = np.concatenate([np.arange(n) for n in counts])
        yield (np.repeat(np.array(mine), counts) << 40) + step * each + within
