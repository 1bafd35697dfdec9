"""Ids that are trained as out of vocabulary now and then (`train.unknown_rate`).

Where the vocabulary is made of the training rows themselves, the vector of what is out of vocabulary is hardly ever
looked up in training, and the other features are hardly ever asked about a row whose id says nothing. Taking the id
from some rows teaches both (Volkovs, Yu and Poutanen, "DropoutNet: Addressing Cold Start in Recommender Systems",
2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.dataset.native import OutputColumns
from headrace.errors import UserError, nearest
from headrace.schema import OOV_CODE, DatasetSchema, Kind


@dataclass(frozen=True)
class UnknownIds:
    """Of a column of a batch's `codes` the share `rate` of the known ids, codes from `first` on, becomes unknown."""

    column: int
    rate: float
    first: int

    @staticmethod
    def of(schema: DatasetSchema, rates: Mapping[str, float]) -> tuple[UnknownIds, ...]:
        """The plan for a dataset, in the schema's order.

        Args:
            schema: the dataset's.
            rates: `train.unknown_rate`.

        Raises:
            UserError: a name is not that of a categorical feature of codes with one value a row.
        """
        scalars = [f for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
        names = [f.name for f in scalars if not f.dynamic]
        for name in rates:
            if name not in names:
                raise UserError(
                    f"train.unknown_rate: '{name}' is no categorical feature of codes with one value a row"
                    f"{nearest(name, names)}; there are: {', '.join(names) or 'none'}"
                )
        return tuple(UnknownIds(i, rates[f.name], f.first_code) for i, f in enumerate(scalars) if f.name in rates)

    def write(self, generator: np.random.Generator, rows: int, skip: int, codes: OutputColumns) -> None:
        """Give the codes of out-of-vocabulary buckets, any as likely as the others, to the rows that are drawn.

        Args:
            generator: of the row group in the epoch.
            rows: of the row group, those passed over included: a run that goes on draws the same.
            skip: rows that are passed over.
            codes: what is written to, int64 [S, n] a part, in all `rows` - `skip` rows.
        """
        is_drawn = generator.random(rows, np.float32) < self.rate
        buckets = generator.integers(OOV_CODE, self.first, rows)
        at = skip
        for part in codes.views:
            column = part[self.column]
            place = slice(at, at + len(column))
            mine = is_drawn[place] & (column >= self.first)
            column[mine] = buckets[place][mine]
            at = place.stop
