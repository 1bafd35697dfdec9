"""Full rankings of splits by the trained model, from the features of all items and the items that users have seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow.parquet as pq

from headrace import config
from headrace.comm.base import Collective
from headrace.config.schema import DatasetSchema, Kind
from headrace.dataset.layout import SplitLayout, open_split
from headrace.dataset.lists import pad
from headrace.errors import UserError
from headrace.models.retrieval import ItemFeaturesByCode, further_item_features, item_feature, item_vectors
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location
from headrace.train.evaluation.evaluate import Evaluation, Evaluator
from headrace.train.evaluation.full_ranking import rank_all_items, relevant_rows
from headrace.train.evaluation.ranks import I64, Array, Ranks
from headrace.train.evaluation.request import Request, check_no_nulls, ids_here


def collect_item_features(
    ranks: Ranks, layout: SplitLayout, schema: DatasetSchema, item: str, names: Sequence[str], order_by: str | None
) -> ItemFeaturesByCode:
    """Collect the newest features of all items in a split; each rank reads its share, and all ranks get all items.

    Args:
        names: features of items.
        order_by: carried column, by its name in the dataset, in which a greater number is newer. None: the split's
            order.

    Raises:
        UserError: the dataset lacks a feature.
    """
    if not names:
        return ItemFeaturesByCode(item)
    known = {f.name: f for f in (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL))}
    for name in names:
        if name not in known:
            raise UserError(f"the model's items have the feature '{name}', which the dataset does not have")
    features = [known[name] for name in names]
    cardinality = known[item].cardinality or 0
    newest = np.full((cardinality, 2), -np.inf)  # order, position: numbers below 2^53
    columns: list[Array] = [
        np.zeros((cardinality, f.length), np.float32 if f.kind is Kind.CONTINUOUS else np.int64) for f in features
    ]

    def keep(codes: Array, age: Array, new_values: Sequence[Array]) -> None:
        """Store those rows that are newer than the stored ones."""
        order = np.lexsort((age[:, 1], age[:, 0], codes))
        last = order[np.flatnonzero(np.diff(codes[order], append=-1))]
        stored_age, new_age = newest[codes[last]], age[last]
        newer = (new_age[:, 0] > stored_age[:, 0]) | (
            (new_age[:, 0] == stored_age[:, 0]) & (new_age[:, 1] > stored_age[:, 1])
        )
        last = last[newer]
        newest[codes[last]] = age[last]
        for column, values in zip(columns, new_values, strict=True):
            column[codes[last]] = values[last]

    world, first_rows = ranks.world, np.cumsum([0, *(g.rows for g in layout.row_groups)])
    for i in range(world.rank, len(layout.row_groups), world.size):
        group = layout.row_groups[i]
        with pq.ParquetFile(group.path.local_path()) as file:
            table = file.read_row_group(group.index, columns=[item, *names, *([order_by] if order_by else [])])
        values = []
        for f in features:
            if f.is_list:
                matrix = np.zeros((table.num_rows, f.length), table[f.name].type.value_type.to_pandas_dtype())
                pad(table[f.name], matrix, f.name)
                values.append(matrix)
            else:
                values.append(table[f.name].to_numpy()[:, None])
        order = np.zeros(table.num_rows)
        if order_by is not None:
            order = np.nan_to_num(table[order_by].to_numpy().astype(np.float64), nan=-np.inf)
        position = first_rows[i] + np.arange(table.num_rows)
        keep(table[item].to_numpy(), np.stack([order, position], axis=1), values)
    # Exchange the ranks' features for a part of the items at a time.
    known_codes = np.flatnonzero(newest[:, 1] >= 0)
    for rank in range(world.size):
        codes_to_send = known_codes if rank == world.rank else known_codes[:0]
        codes, age, *values = [
            ranks.gather_rows(x) for x in (codes_to_send, newest[codes_to_send], *(c[codes_to_send] for c in columns))
        ]
        keep(codes, age, values)
    return ItemFeaturesByCode(item, dict(zip(names, columns, strict=True)))


def interactions(
    ranks: Ranks, layout: SplitLayout, schema: DatasetSchema, user: str, item: str
) -> Iterator[tuple[I64, I64]]:
    """Yield (user, code of the item) of a split's positive rows, in parts of int64 [n] each. Collective at its end.

    Every rank yields the same number of parts; some are empty.

    Args:
        user: carried column with the user, by its name in the dataset.
        item: categorical feature of one code a row.

    Raises:
        UserError: a row has no user.
    """
    rank, size, nulls = ranks.world.rank, ranks.world.size, 0
    for first in range(0, len(layout.row_groups), size):
        if first + rank >= len(layout.row_groups):
            yield np.zeros(0, np.int64), np.zeros(0, np.int64)
            continue
        group = layout.row_groups[first + rank]
        with pq.ParquetFile(group.path.local_path()) as file:
            table = file.read_row_group(group.index, columns=[user, item, schema.label.name])
        positive = table[schema.label.name].to_numpy() > 0
        ids, missing = ids_here(table[user].to_numpy()[positive], user, schema)
        nulls += missing
        yield ids, table[item].to_numpy()[positive].astype(np.int64)
    check_no_nulls(ranks, nulls, user)


_KEY = "train.evaluation.full_ranking"


class FullRanker:
    """Ranker of all items for the users of a split.

    Args:
        request: request with `full_ranking`.
        model: a model in retrieval form.
        dataset: folder of the splits.
        train: settings for reading splits.
        collective: the ranks.

    Raises:
        UserError: the network has no retrieval form, or the dataset lacks a requested column or feature.
    """

    def __init__(
        self, request: Request, model: ShardedModel, dataset: Location, train: config.Train, collective: Collective
    ) -> None:
        settings = request.settings.full_ranking
        assert settings is not None
        self._settings, self._request, self._model, self._dataset = settings, request, model, dataset
        self._train, self._collective, self._schema = train, collective, model.schema
        self._item = item_feature(model.network, model.schema, _KEY)
        self._user, self._order_by = request.ranked_by()
        self._carried = [c for c in (self._user, self._order_by, *request.sliced_by()) if c is not None]
        _check_excluded(self._schema, settings.exclude, self._item.vocabulary, self._item.name)
        if request.item is not None and request.item.name != self._item.name:
            raise UserError(
                f"train.evaluation.item is '{request.item.name}', but the model's items are '{self._item.name}': "
                f"name that one"
            )
        self._features: ItemFeaturesByCode | None = None

    def evaluate(self, evaluator: Evaluator, split: str) -> Evaluation:
        """Compute the metrics of a split. Collective.

        Raises:
            UserError: a vector is not finite, or rows have no user.
        """
        settings, schema, model = self._settings, self._schema, self._model
        ranks = Ranks(self._collective)
        user, order_by = self._user, self._order_by
        model.eval()
        if self._features is None:
            self._features = collect_item_features(
                ranks,
                open_split(self._dataset, "train", schema, [] if order_by is None else [order_by]),
                schema,
                self._item.name,
                further_item_features(model.network),
                order_by,
            )
        items = item_vectors(model, self._collective, self._features, rows=self._train.batch_size)
        rows = relevant_rows(
            model,
            open_split(self._dataset, split, schema, self._carried),
            schema,
            self._collective,
            settings,
            self._item.name,
            batch_size=self._train.batch_size,
            streams=self._train.streams,
            carried=self._request.sliced_by(),
            codes=list(self._request.seen_features.values()),
        )
        dimensions, slices = evaluator.slices(ranks, rows.requested)
        met_items = itertools.chain.from_iterable(
            interactions(ranks, open_split(self._dataset, s, schema, [user]), schema, user, self._item.name)
            for s in settings.seen
            if s != split and user is not None
        )
        lists = rank_all_items(ranks, rows, slices, items, self._item.first_code, max(settings.k), met_items)
        return evaluator.evaluate_full(ranks, lists, dimensions, slices, len(rows.users), self._item)


def _check_excluded(schema: DatasetSchema, name: str | None, vocabulary: str | None, item: str) -> None:
    lists_of_items = {f.name: f for f in schema.of(Kind.CATEGORICAL) if f.is_list and f.vocabulary == vocabulary}
    if name is not None and name not in lists_of_items:
        raise UserError(
            f"{_KEY}.exclude: '{name}' is no list of codes of '{item}'; features of its vocabulary are: "
            f"{', '.join(lists_of_items) or 'none'}"
        )
