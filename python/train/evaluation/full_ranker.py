"""Full rankings of splits by the model that is trained. Collective."""

from __future__ import annotations

import itertools

from headrace import config
from headrace.comm.base import Collective
from headrace.dataset.parquet.layout import open_split
from headrace.errors import UserError
from headrace.models.retrieval import ItemFeatures, further_item_features, item_feature, item_vectors
from headrace.models.sharded_model import ShardedModel
from headrace.schema import DatasetSchema, Kind
from headrace.storage import Location
from headrace.train.evaluation.evaluate import Evaluation, Evaluator
from headrace.train.evaluation.full_ranking import rank_all_items
from headrace.train.evaluation.interactions import interactions
from headrace.train.evaluation.item_rows import collect_item_features
from headrace.train.evaluation.ranks import Ranks
from headrace.train.evaluation.relevant_rows import relevant_rows
from headrace.train.evaluation.request import Request

_WHERE = "train.evaluation.full_ranking"


class FullRanker:
    """Ranks all items for the users of a split.

    Args:
        request: with `full_ranking`.
        model: whose network is in retrieval form.
        dataset: the folder of the splits.
        train: how splits are read.
        collective: the ranks.

    Raises:
        UserError: the network is in no retrieval form, or the dataset lacks what is asked for.
    """

    def __init__(
        self, request: Request, model: ShardedModel, dataset: Location, train: config.Train, collective: Collective
    ) -> None:
        settings = request.settings.full_ranking
        assert settings is not None
        self._settings, self._request, self._model, self._dataset = settings, request, model, dataset
        self._train, self._collective, self._schema = train, collective, model.schema
        self._item = item_feature(model.network, model.schema, _WHERE)
        self._user, self._order_by = request.ranked_by()
        self._carried = [c for c in (self._user, self._order_by, *request.sliced_by()) if c is not None]
        _check_excluded(self._schema, settings.exclude, self._item.vocabulary, self._item.name)
        if request.item is not None and request.item.name != self._item.name:
            raise UserError(
                f"train.evaluation.item is '{request.item.name}', but the model's items are '{self._item.name}': "
                f"name that one"
            )
        self._features: ItemFeatures | None = None

    def evaluate(self, evaluator: Evaluator, split: str) -> Evaluation:
        """The metrics of a split. Collective.

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
            codes=list(self._request.seen.values()),
        )
        dimensions, slices = evaluator.slices(ranks, rows.found)
        seen = itertools.chain.from_iterable(
            interactions(ranks, open_split(self._dataset, s, schema, [user]), schema, user, self._item.name)
            for s in settings.seen
            if s != split and user is not None
        )
        lists = rank_all_items(ranks, rows, slices, items, self._item.first_code, max(settings.k), seen)
        return evaluator.evaluate_full(ranks, lists, dimensions, slices, len(rows.users), self._item)


def _check_excluded(schema: DatasetSchema, name: str | None, vocabulary: str | None, item: str) -> None:
    found = {f.name: f for f in schema.of(Kind.CATEGORICAL) if f.is_list and f.vocabulary == vocabulary}
    if name is not None and name not in found:
        raise UserError(
            f"{_WHERE}.exclude: '{name}' is no list of codes of '{item}'; features of its vocabulary are: "
            f"{', '.join(found) or 'none'}"
        )
