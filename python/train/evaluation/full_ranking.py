"""Full rankings: the places of users' relevant items among all items of a vocabulary.

Users are assigned to ranks by their hash. A rank computes the dot products of its users' vectors with those of all
items, for some users at a time, and keeps only the k greatest of each user. So no rank has all scores or all users.
Items that a user has seen are neither ranked nor relevant. Among equal scores relevant items are placed last. A
relevant item outside the vocabulary counts as not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.comm import World
from headrace.comm.base import Collective
from headrace.compute.jagged import JaggedArray, concatenated
from headrace.config import FullRanking
from headrace.config.schema import NULL_CODE, DatasetSchema, Kind
from headrace.dataset import lists
from headrace.dataset.layout import SplitLayout
from headrace.dataset.loaders import EvalLoader, streams_of
from headrace.errors import UserError
from headrace.models.retrieval import query_vectors
from headrace.models.sharded_model import ShardedModel
from headrace.train.evaluation.evaluate import Predictions
from headrace.train.evaluation.ranking import Hits, RankedLists
from headrace.train.evaluation.ranks import F32, F64, I64, Array, Ranks, by_id
from headrace.train.evaluation.request import check_no_nulls, ids_here
from headrace.train.micro_batch import MicroBatch

#: Smallest number of collected rows at which rows that do not represent their user are dropped.
_WAITING = 65_536


class RowsOfUsers:
    """Rows of a stream, reduced to the row with the smallest (order, position) of each user.

    A row has these columns: user int64, order float64, position int64, number int64, query float32 [D].
    """

    def __init__(self) -> None:
        self._parts: list[tuple[list[Array], JaggedArray]] = []
        self._waiting, self._standing = 0, 0

    def add(self, columns: Sequence[Array], excluded: JaggedArray | None) -> None:
        """Add rows: the columns, [n, ...] each, and a list of codes for each row."""
        none = JaggedArray(np.zeros(len(columns[0]) + 1, np.int64), np.zeros(0, np.int64))
        self._parts.append(([np.array(c) for c in columns], concatenated([excluded or none], np.int64)))
        self._waiting += len(columns[0])
        if self._waiting > max(_WAITING, self._standing):
            self.take()

    def take(self) -> tuple[list[Array], JaggedArray]:
        """Return the rows that represent their users, in ascending order of users. Call `add` first."""
        columns = [np.concatenate(parts) for parts in zip(*(c for c, _ in self._parts), strict=True)]
        codes = concatenated([x for _, x in self._parts], np.int64)
        user, order, position = columns[:3]
        chosen = np.lexsort((position, order, user))
        chosen = chosen[np.flatnonzero(np.diff(user[chosen], prepend=user[chosen][:1] - 1))]
        chosen_codes = JaggedArray(*lists.take(codes.offsets, codes.values, chosen))
        self._parts = [([c[chosen] for c in columns], chosen_codes)]
        self._waiting, self._standing = 0, len(chosen)
        return self._parts[0]


@dataclass(frozen=True)
class RelevantRows:
    """This rank's positive rows of a split whose item is not null, and the vectors of their users.

    Attributes:
        users: id of each row's user, int64 [n].
        items: code of each row's item, int64 [n].
        requested: other requested columns of each row.
        user: distinct users of this rank's rows, ascending, int64 [m]. The following columns are of the row that
            represents each of them.
        order: order of that row, float64 [m]; over the ranks the smallest (order, position) decides.
        position: position of that row in the split, int64 [m].
        row: position of that row among this rank's rows, int64 [m].
        queries: vector of that row, float32 [m, D].
        excluded: codes that the row excludes, as lists.
    """

    users: I64
    items: I64
    requested: Predictions
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
        settings: settings of the full ranking, with the column of users.
        item: feature of the ranked items.
        carried: carried columns to return as well.
        codes: categorical features of one code a row to return as well.

    Raises:
        UserError: a row has no user.
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
            tensors = MicroBatch.from_batch(batch)
            queries = query_vectors(model, tensors.continuous, tensors.categorical).cpu().numpy()
            chosen = np.flatnonzero((batch.labels > 0) & (batch.codes[:, places[item]] != NULL_CODE))
            excluded = None if settings.exclude is None else batch.lists[settings.exclude]
            if excluded is not None:
                excluded = JaggedArray(*lists.take(excluded.offsets, excluded.values, chosen))
            if user is None or not batch.rows:  # the carried columns of an empty batch have no type
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
    requested = Predictions(
        np.empty(0, np.float32),
        np.empty(0, np.float32),
        {name: joined[name] for name in carried},
        {name: joined[name] for name in codes},
    )
    (of_user, order, position, row, vectors), left_out = standing.take()
    return RelevantRows(
        np.concatenate(users), joined[item], requested, of_user, order, position, row, vectors, left_out
    )


def _positions(layout: SplitLayout, world: World, batch_size: int, streams: int) -> Iterator[I64]:
    """Yield, for each batch of an EvalLoader, the position of its rows in the split: their stream and their place in
    it.
    """
    local_streams = streams_of(world, streams)
    sizes = np.array([sum(g.rows for g in layout.stream(i, streams)) for i in local_streams])
    each = batch_size // streams
    for step in itertools.count():
        counts = np.clip(sizes - step * each, 0, each)
        position_in_stream = np.concatenate([np.arange(n) for n in counts])
        yield (np.repeat(np.array(local_streams), counts) << 40) + step * each + position_in_stream


#: Bytes of scores in memory at a time, and most users of a block. Blocks have one shape on all ranks, so that the same
#: vectors have the same scores.
_BLOCK_BYTES = 64 * 2**20
_BLOCK_ROWS = 1_024
#: Number of items of a group; its greatest score tells whether it can have one of the k greatest.
_GROUP = 64
#: Mask of the code in a (place, code) pair that is packed into one number.
_CODE = 0xFFFFFFFF


def rank_all_items(
    ranks: Ranks,
    rows: RelevantRows,
    slices: Sequence[I64],
    items: Tensor,
    first_code: int,
    k: int,
    met: Iterable[tuple[I64, I64]] = (),
) -> RankedLists:
    """Rank all items for each user: the first k, and the places of the relevant ones. Collective.

    Args:
        rows: rows of this rank.
        slices: for each dimension, the slice of each row, int64 [n].
        items: vectors of all codes, float32 [cardinality, D], on the device that computes.
        first_code: code of the first item that is ranked; lower codes stand for unknown items.
        k: length of the lists.
        met: pairs (user, code) of seen items, int64 [n] each, in the same number of parts on every rank.

    Returns:
        lists of this rank's users who have a relevant item. Places of hits below k are exact, others are at least k.

    Raises:
        UserError: a score is not finite; all ranks raise it.
    """
    bad = int(not np.isfinite(rows.queries).all()) + int(not bool(items.isfinite().all()))
    if faults := int(ranks.add_up(np.array(bad))):
        raise UserError(
            f"vectors of users or items are not finite ({faults} faults), so there is nothing to order items by: "
            f"lower train.dense.learning_rate or train.embeddings.learning_rate, or look at the features"
        )
    ids, (order, position, queries, *of_lists) = by_id(
        ranks, rows.user, [rows.order, rows.position, rows.queries, *(s[rows.row] for s in slices)]
    )
    first = np.lexsort((position, order, ids))
    first = first[np.flatnonzero(np.diff(ids[first], prepend=ids[first][:1] - 1))]
    users = ids[first]

    def pairs(user_ids: I64, codes: I64, positions: I64 | None = None) -> I64:
        """Return the distinct pairs of this rank's users: place of the user and code, packed into one number."""
        user_ids, (codes, *more) = by_id(ranks, user_ids, [codes] if positions is None else [codes, positions])
        if not len(users):
            return np.zeros(0, np.int64)
        place = np.minimum(np.searchsorted(users, user_ids), len(users) - 1)
        known = users[place] == user_ids
        if more:
            known &= more[0] == position[first][place]
        packed: I64 = np.unique((place[known] << 32) | codes[known])
        return packed

    by_row = np.repeat(np.arange(len(rows.user)), rows.excluded.lengths)
    left_out = [pairs(rows.user[by_row], rows.excluded.values, rows.position[by_row])]
    left_out += [pairs(*part) for part in met]
    seen_pairs = np.unique(np.concatenate(left_out))
    seen_pairs = seen_pairs[(seen_pairs & _CODE) >= first_code]  # lower codes stand for unknown items
    relevant = np.setdiff1d(pairs(rows.users, rows.items), seen_pairs, assume_unique=True)
    # Lists without a relevant item do not count.
    kept_users, user_of_pair = np.unique(relevant >> 32, return_inverse=True)
    place_of = np.full(len(users), -1)
    place_of[kept_users] = np.arange(len(kept_users))
    seen_of = place_of[seen_pairs >> 32]
    is_kept = seen_of >= 0
    best = _ranked(
        torch.from_numpy(queries[first][kept_users]),
        items[first_code:],
        k,
        (user_of_pair.astype(np.int64), (relevant & _CODE) - first_code),
        (seen_of[is_kept], (seen_pairs[is_kept] & _CODE) - first_code),
    )
    kept_slices = tuple(s[first][kept_users] for s in of_lists)
    return RankedLists(users[kept_users], best.list, best.place, best.items + first_code, best.hits, kept_slices)


@dataclass(frozen=True)
class _Best:
    """First rows of lists, as in RankedLists with items from 0, and the places of the relevant items."""

    list: I64
    place: I64
    items: I64
    hits: Hits


def _ranked(queries: Tensor, items: Tensor, k: int, relevant: tuple[I64, I64], excluded: tuple[I64, I64]) -> _Best:
    """Rank all items for this rank's lists.

    Args:
        queries: float32 [lists, D].
        items: float32 [items, D].
        relevant: (list, item) of the relevant items, int64 [n] each, sorted by list; an item below 0 is unknown.
        excluded: (list, item) of excluded items, int64 [m] each, sorted by list; none of them is relevant.
    """
    lists, count = len(queries), len(items)
    padded = -(-count // _GROUP) * _GROUP
    rows = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // (4 * max(padded, 1))))
    width = min(k, count)
    best = torch.full((lists, width), -torch.inf)
    chosen = torch.zeros((lists, width), dtype=torch.int64)
    of_relevant = torch.full((len(relevant[0]),), -torch.inf)
    transposed = items.new_zeros((items.shape[1], padded))
    transposed[:, :count] = items.T
    block = items.new_zeros((rows, items.shape[1]))
    scores = items.new_empty((rows, padded))
    for begin in range(0, lists, rows):
        end = min(begin + rows, lists)
        block.zero_()
        block[: end - begin] = queries[begin:end]
        torch.mm(block, transposed, out=scores)
        scores[:, count:] = -torch.inf
        pair, row, item = _of_lists(relevant, begin, end, items.device)
        of_relevant[pair] = scores[row, item].cpu()
        scores[row, item] = -torch.inf
        _, row, item = _of_lists(excluded, begin, end, items.device)
        scores[row, item] = -torch.inf
        best[begin:end], chosen[begin:end] = (x.cpu() for x in _greatest(scores[: end - begin], width))
    return _merged(best.numpy(), chosen.numpy(), of_relevant.numpy(), relevant, k)


def _of_lists(pairs: tuple[I64, I64], begin: int, end: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of lists [begin, end) that have an item: pair, list from `begin` on, item; int64 [n] each."""
    block = slice(*np.searchsorted(pairs[0], (begin, end)).tolist())
    pair = np.flatnonzero(pairs[1][block] >= 0) + block.start
    row, item = (torch.from_numpy(x[pair]).to(device) for x in pairs)
    return torch.from_numpy(pair), row - begin, item


def _greatest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k greatest of each row and their positions: float32 [B, N] -> [B, k] each, in descending order.

    They are in the k groups with the greatest maxima, so one pass over all scores and a search in few of them suffice.
    """
    groups = scores.shape[1] // _GROUP
    if groups <= k:
        return torch.topk(scores, k)
    grouped = scores.view(len(scores), _GROUP, groups)
    _, near = torch.topk(grouped.amax(1), k)
    near = near.unsqueeze(1).expand(-1, _GROUP, -1)
    best, position = torch.topk(grouped.gather(2, near).flatten(1), k)
    of_group = torch.arange(_GROUP, device=scores.device).view(1, -1, 1) * groups + near
    return best, of_group.flatten(1).gather(1, position)


def _merged(best: F32, chosen: I64, of_relevant: F32, relevant: tuple[I64, I64], k: int) -> _Best:
    """Merge the relevant items into the greatest other items, after other items of equal scores."""
    lists, width = best.shape
    is_item = best > -np.inf  # there may be fewer than k other items
    list_of = np.concatenate([np.repeat(np.arange(lists), width)[is_item.reshape(-1)], relevant[0]])
    score = np.concatenate([best[is_item], of_relevant])
    item = np.concatenate([chosen[is_item], relevant[1]])
    hit = np.arange(len(list_of)) >= is_item.sum()
    order = np.lexsort((item, hit, -score, list_of))
    list_of, item, hit = list_of[order], item[order], hit[order]
    place = np.arange(len(list_of)) - np.searchsorted(list_of, list_of)
    place[hit & (item < 0)] += k  # an item outside the vocabulary is never found
    counts = np.bincount(list_of[hit], minlength=lists).astype(np.int64)
    near = place < k
    return _Best(list_of[near], place[near], item[near], Hits(list_of[hit], place[hit], counts))
