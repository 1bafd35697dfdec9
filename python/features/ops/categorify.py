"""categorify: values to the codes of a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from pydantic import Field

from headrace.features.columns import ValueType
from headrace.features.op import (
    ArrowPlace,
    Fit,
    Op,
    OpError,
    SparkPlace,
    ValueColumn,
    Values,
    VocabularyRule,
    with_elements,
)
from headrace.schema import NULL_CODE, OOV_CODE

if TYPE_CHECKING:
    from pyspark.sql import Column


class Categorify(Op):
    """A code for each value: 0 for null, 1 for one that the vocabulary lacks, from 2 the values, the same for ever.

    Takes text, integers and booleans (and lists of them); other numbers have no one spelling. The empty text is a
    value. Integers and texts of the same spelling are one value, so columns of both types can share a vocabulary.
    """

    name: ClassVar[str] = "categorify"
    learns: ClassVar[bool] = True
    unrolls: ClassVar[bool] = True

    #: Values seen fewer times in the training range get no code (yet).
    min_count: int = Field(default=1, ge=1)
    #: At most this many values, the most frequent first come.
    max_size: int | None = Field(default=None, ge=1)
    #: One vocabulary for all columns that name it; else each column has its own, of its name.
    vocabulary: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")

    def vocabulary_of(self, column: str) -> str:
        """The name of a column's vocabulary."""
        return self.vocabulary or column

    @property
    def rule(self) -> VocabularyRule:
        return VocabularyRule(self.min_count, self.max_size)

    def types(self, given: Mapping[str, ValueType]) -> dict[str, ValueType]:
        out = {}
        for name, value in given.items():
            if value.element not in ("string", "int", "bigint", "boolean"):
                raise OpError(f"column '{name}': takes text, integers and booleans, not {value}")
            out[name] = replace(value, element="code", vocabulary=self.vocabulary_of(name))
        return out

    def vocabularies(self, given: Mapping[str, ValueType]) -> dict[str, VocabularyRule]:
        return {self.vocabulary_of(name): self.rule for name in given}

    def fit(self, columns: Mapping[str, Column], types: Mapping[str, ValueType]) -> Fit:
        yield Values(
            tuple(ValueColumn(self.vocabulary_of(n), self.rule, column, types[n]) for n, column in columns.items())
        )
        return {}

    def spark(self, columns: Mapping[str, Column], place: SparkPlace) -> dict[str, Column]:
        from pyspark.sql import functions as F

        def code(vocabulary: str, x: Column) -> Column:
            # Casting integers and booleans to string gives the spelling that the vocabulary has.
            key = x.cast("string")
            found = F.coalesce(place.lookup(vocabulary, key), F.lit(OOV_CODE))
            return F.when(x.isNull(), F.lit(NULL_CODE)).otherwise(found).cast("int")

        out = {}
        for name, x in columns.items():
            vocabulary = self.vocabulary_of(name)
            if place.types[name].is_list:
                # A join cannot look into a list: one for each element that is used, all on one broadcast table.
                width = place.reads[name]
                assert width is not None  # Workflow has seen to it
                codes = F.array(*[code(vocabulary, F.get(x, F.lit(i))) for i in range(width)])
                out[name] = F.slice(codes, 1, F.least(F.size(x), F.lit(width)))
            else:
                out[name] = code(vocabulary, x)
        return out

    def arrow(self, columns: Mapping[str, pa.Array], place: ArrowPlace) -> dict[str, pa.Array]:
        out = {}
        for name, x in columns.items():
            lookup = place.lookup(self.vocabulary_of(name))
            if place.types[name].is_list:
                out[name] = with_elements(x, pa.array(lookup.codes(x.flatten())))
            else:
                out[name] = pa.array(lookup.codes(x))
        return out
