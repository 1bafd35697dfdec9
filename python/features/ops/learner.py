"""Operators that learn by statistics of parts of the training rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from headrace.features.learn.statistics import Partial, Partials, Rows, Statistic, arrow_partial
from headrace.features.ops.base import Collect, Fit, Learned, Op
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class Learner(Op):
    """An operator that learns by statistics of parts."""

    learns: ClassVar[bool] = True

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        """What to collect of the columns as they arrive at this operator."""
        raise NotImplementedError

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> Learned:
        """What the statistics of all training rows teach. Does not depend on the order of groups."""
        raise NotImplementedError

    def arrow_partial(
        self, columns: Mapping[str, pa.Array], types: Mapping[str, ValueType], rows: Rows | None = None
    ) -> dict[str, Partial]:
        """The statistics of a batch: `columns` as they arrive at this operator, NaN being null."""
        made = self.statistics(types)
        return {name: arrow_partial(s, columns, types, rows or Rows()) for name, s in made.items()}

    def fit(self, columns: Mapping[str, Column], types: Mapping[str, ValueType]) -> Fit:
        """The statistics of all training rows, by Spark, finished."""
        partials = yield Collect(self.statistics(types), columns, types)
        return self.finish(partials, types)
