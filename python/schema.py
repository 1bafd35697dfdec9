"""Columns: what the lake declares, and what a dataset hands to a model."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: Column types that a landing file may declare, as Spark's `simpleString` spells them.
ColumnType = Literal[
    "string",
    "int",
    "bigint",
    "float",
    "double",
    "boolean",
    "timestamp",
    "date",
    "array<string>",
    "array<int>",
    "array<bigint>",
    "array<float>",
    "array<double>",
]

#: Vocabulary codes that mean the same in every vocabulary, for ever; one with more than one out-of-vocabulary bucket
#: has its first value's code further behind (`Feature.first_code`).
NULL_CODE = 0
OOV_CODE = 1
FIRST_CODE = 2


class TableColumn(BaseModel):
    """One declared column of a landing file and of the lake's table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    type: ColumnType = "string"
    #: A row with a null here goes to quarantine.
    required: bool = False


class Kind(StrEnum):
    """What a feature is to a model."""

    CONTINUOUS = "continuous"
    CATEGORICAL = "categorical"
    LABEL = "label"
    #: Not fed to the model: carried for evaluation (the user of a ranking group, an event's id).
    CARRIED = "carried"


class Feature(BaseModel):
    """One logical column of a dataset.

    A dataset stores it as one Parquet column `name`; a multi-hot or list feature as lists without their padding. In a
    batch a list of length k is k columns `name__0 .. name__{k-1}`, padded with 0 (headrace.dataset.parquet.lists).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Kind
    #: NumPy's name: float32 for continuous features and labels, int32 for codes, int64 for raw ids.
    dtype: str
    #: Scalars a row: 1, or the padded length of a list.
    length: int = Field(default=1, ge=1)
    is_list: bool = False
    #: Categorical only: number of codes, the two special ones included; the embedding table has that many rows.
    cardinality: int | None = None
    #: Features that name the same vocabulary share codes, and may share an embedding table.
    vocabulary: str | None = None
    #: Categorical only: raw 64-bit ids in place of codes, 0 where there is none. No cardinality and no vocabulary; the
    #: table's rows come and go with the ids (headrace.embeddings.dynamic.tables).
    dynamic: bool = False
    #: Of a vocabulary: values that it lacks have codes 1..oov_buckets, those that it has begin behind.
    oov_buckets: int = Field(default=1, ge=1)
    tags: tuple[str, ...] = ()
    #: What the workflow says of it besides; JSON values.
    metadata: Mapping[str, Any] = Field(default_factory=dict)
    #: The columns of the events that it is made of; empty for label and carried columns.
    sources: tuple[str, ...] = ()

    @property
    def first_code(self) -> int:
        """The first code that stands for a value that the vocabulary has."""
        return OOV_CODE + self.oov_buckets

    @property
    def physical(self) -> tuple[str, ...]:
        """Names of the columns of a batch that hold this feature, in order. A dataset stores one column, `name`."""
        return tuple(f"{self.name}__{i}" for i in range(self.length)) if self.is_list else (self.name,)


class DatasetSchema(BaseModel):
    """The features of a dataset, in the order in which batches hold them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    features: tuple[Feature, ...]

    def of(self, kind: Kind) -> tuple[Feature, ...]:
        """The features of one kind, in order."""
        return tuple(f for f in self.features if f.kind is kind)

    @property
    def label(self) -> Feature:
        """The single label."""
        (label,) = self.of(Kind.LABEL)
        return label

    def carried_name(self, column: str) -> str:
        """The name under which a column of the lake's table is carried: `<column>__carried` beside a feature of it."""
        taken = {f.name for f in self.features if f.kind is not Kind.CARRIED}
        return f"{column}__carried" if column in taken else column
