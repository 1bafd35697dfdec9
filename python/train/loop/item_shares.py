"""How likely an item is among the rows, or drawn: counted in the split train when it is first asked for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace import config
from headrace.dataset.loader.candidates import CandidateSampler
from headrace.dataset.loader.negatives import drawn_column
from headrace.dataset.parquet.layout import SplitLayout
from headrace.errors import UserError
from headrace.models.inputs import ShareOf
from headrace.schema import DatasetSchema
from headrace.train.evaluation.catalogue import Occurrences, count_occurrences
from headrace.train.evaluation.ranks import Ranks
from headrace.train.evaluation.request import coded_feature


class ItemShares:
    """The shares of codes in the split train. Its methods are collective where a feature is asked for the first time.

    Args:
        ranks: each counts its part of the row groups.
        layout: the split train.
        schema: the dataset's.
        train: its `negatives` and `seed`.
    """

    def __init__(self, ranks: Ranks, layout: SplitLayout, schema: DatasetSchema, train: config.Train) -> None:
        self._ranks, self._layout, self._schema, self._train = ranks, layout, schema, train
        self._counts: dict[str, Occurrences] = {}
        self._logs: dict[tuple[str, ShareOf], Tensor] = {}

    def sampler(self) -> CandidateSampler | None:
        """What draws the candidates of `train.negatives`; None: it asks for none.

        Raises:
            UserError: see CandidateSampler.of.
        """
        asked = self._train.negatives
        if asked is None or asked.form != "candidates":
            return None
        counts = self._occurrences(asked.column).positives if asked.method == "popularity" else None
        return CandidateSampler.of(self._schema, asked, self._train.seed, counts)

    def log_share(self, feature: str, of: ShareOf) -> Tensor:
        """See `Inputs.log_q`; of all codes: float32 [cardinality].

        Raises:
            UserError: the feature has no codes, one a row; or no candidates are drawn of it.
        """
        if (feature, of) not in self._logs:
            counts = self._occurrences(feature)
            if of == "negatives":
                weights = self._weights_of_draws(feature, counts)
            else:
                weights = (counts.rows if of == "rows" else counts.positives).astype(np.float64)
            # What is never there is as likely as what is there once: it has a place in the loss all the same.
            shares = np.maximum(weights, 1.0) / max(weights.sum(), 1.0)
            self._logs[feature, of] = torch.from_numpy(np.log(shares).astype(np.float32))
        return self._logs[feature, of]

    def _weights_of_draws(self, feature: str, counts: Occurrences) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        asked = self._train.negatives
        if asked is None or asked.form != "candidates" or asked.column != feature:
            raise UserError(
                f"the model asks how likely a draw of '{feature}' is: set train.negatives to candidates of it"
            )
        known, _ = drawn_column(self._schema, asked)
        weights = counts.positives.astype(np.float64)
        if asked.method == "uniform":
            weights[:] = 1.0
        elif asked.method == "popularity":
            weights **= asked.exponent
        weights[: known.first_code] = 0.0
        return weights

    def _occurrences(self, feature: str) -> Occurrences:
        if feature not in self._counts:
            name = coded_feature(self._schema, feature, "the share of an item").name
            self._counts |= count_occurrences(self._ranks, self._layout, self._schema, [name])
        return self._counts[feature]
