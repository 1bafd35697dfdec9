"""drop_low_cardinality: features that say next to nothing are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from pydantic import Field

from headrace.features.ops.base import ArrowOpContext, Op, SparkOpContext
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class DropLowCardinality(Op):
    """Codes of `categorify` as they are; those whose vocabulary is small are left out of the dataset after the fit.

    A feature stays when its vocabulary has at least `min_cardinality` values (null and out-of-vocabulary are none).
    Since vocabularies only grow, what was kept stays; what was left out comes on the day that its vocabulary is large
    enough. Columns that share a vocabulary stay or go together. NVTabular's DropLowCardinality.
    """

    name: ClassVar[str] = "drop_low_cardinality"
    by_value: ClassVar[bool] = True

    min_cardinality: int = Field(default=2, ge=1)

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        from dataclasses import replace

        out = {}
        for name, value in inputs.items():
            if value.element != "code" or value.vocabulary is None:
                raise OpError(f"column '{name}': takes codes of a vocabulary, not {value}; put categorify before it")
            out[name] = replace(value, min_cardinality=max(self.min_cardinality, value.min_cardinality))
        return out

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        return dict(columns)

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        return dict(columns)
