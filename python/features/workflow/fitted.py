"""A fitted workflow: all that it learned, and the transform of Arrow batches.

    fitted.transform_batch(batch)     # in a process without Spark: what the dataset's writer wrote, bit for bit
    fitted.save(folder); FittedWorkflow.load(folder)

With Spark: headrace.features.spark, which fits and transforms frames.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace import __version__
from headrace.dataset import lists
from headrace.errors import UserError
from headrace.features.functions.arrays import doubles, input_values, is_missing, to_numpy, with_elements
from headrace.features.learn.statistics import IDENTITY
from headrace.features.ops.base import State
from headrace.features.types import ValueType
from headrace.features.vocabulary.keyed_tables import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow import saved
from headrace.features.workflow.workflow import Workflow
from headrace.schema import Feature, Kind
from headrace.storage import Location


class FittedWorkflow:
    """A workflow and all that it learned: the same transform in the dataset's writer, in scoring, in serving."""

    def __init__(
        self,
        workflow: Workflow,
        states: Sequence[Sequence[Mapping[str, State]]],
        vocabularies: Mapping[str, Lookup],
        tables: Mapping[str, KeyedTable] | None = None,
        folder: Location | None = None,
    ) -> None:
        """Put together what was learned.

        Args:
            states: by chain, step and column.
            tables: keyed tables as `CHAIN.STEP.NAME`.
            folder: where it was loaded from.

        Raises:
            UserError: drop_low_cardinality leaves no feature.
        """
        self.workflow, self.states, self.vocabularies = workflow, tuple(tuple(s) for s in states), dict(vocabularies)
        self.tables = dict(tables or {})
        #: Where it was loaded from.
        self.folder = folder
        first = {name: rule.first_code for name, rule in workflow.rules.items()}
        self.schema = workflow.schema_of(
            {name: max(v.cardinality, first[name]) for name, v in self.vocabularies.items()},
            {name: len(v) for name, v in self.vocabularies.items()},
        )
        if not self.features:
            raise UserError(
                "drop_low_cardinality leaves no feature at all: every vocabulary has fewer values than its "
                "min_cardinality"
            )

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of the lake's table that the features are made of; the label is not among them."""
        return self.workflow.input_columns

    @property
    def features(self) -> tuple[Feature, ...]:
        """Features that the transforms make: the schema without label and carried columns."""
        return tuple(f for f in self.schema.features if f.kind in (Kind.CONTINUOUS, Kind.CATEGORICAL))

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """Arrow schema of `transform_batch`: numbers float32, codes int32, raw ids int64, no nulls.

        In the schema's order.
        """
        return physical_schema(self.features)

    def transform_batch(
        self, batch: pa.RecordBatch, keep: Sequence[str] = (), only: Collection[str] | None = None
    ) -> pa.RecordBatch:
        """Transform rows of the lake's table to physical columns, by the Arrow kernels. Needs no Spark.

        Args:
            batch: has the input columns, in the declared types or ones that cast to them without loss, and IDENTITY
                where some rows are of the training range.
            keep: further columns of the batch, taken along unchanged at the end.
            only: names of features; the others are left out, and chains that make none of them are not computed, so
                the batch need not have their columns.

        Raises:
            UserError: an input column is missing or has another type.
        """
        features = self.features if only is None else tuple(f for f in self.features if f.name in only)
        arrays = self._finished(batch, {f.name for f in features})
        out: list[pa.Array] = []
        for feature in features:
            array = arrays[feature.name]
            if feature.is_list:
                matrix = np.empty((feature.length, len(array)), array.type.value_type.to_pandas_dtype())
                lists.pad(array, matrix.T, f"feature '{feature.name}'")
                out += [pa.array(column) for column in matrix]
            else:
                out.append(array)
        schema = self.arrow_schema if only is None else physical_schema(features)
        for name in keep:
            schema = schema.append(batch.schema.field(name))
            out.append(batch.column(name))
        return pa.RecordBatch.from_arrays(out, schema=schema)

    def transform_lists(self, batch: pa.RecordBatch, only: Collection[str] | None = None) -> list[pa.Array]:
        """Transform as `transform_batch` does into the form of the dataset's files: an array a feature, lists not
        padded.

        A list feature is an array of lists without the zeros at their ends (headrace.dataset.lists).

        Args:
            batch: see `transform_batch`.
            only: names of features; see `transform_batch`.
        """
        features = [f for f in self.features if only is None or f.name in only]
        arrays = self._finished(batch, {f.name for f in features})
        return [lists.trim_zeros(arrays[f.name]) if f.is_list else arrays[f.name] for f in features]

    def _finished(self, batch: pa.RecordBatch, names: Collection[str]) -> dict[str, pa.Array]:
        """Return numbers, codes or raw ids of the rows of a raw batch, or lists of them, by name of the feature."""
        arrays: dict[str, pa.Array] = {}
        index = batch.schema.get_field_index(IDENTITY)
        identity = batch.column(index) if index >= 0 else None
        for i, (chain, states) in enumerate(zip(self.workflow.chains, self.states, strict=True)):
            if not any(name in names for name in chain.outputs):
                continue
            columns = {name: self._column(batch, name) for name in chain.columns}
            for j, (step, state) in enumerate(zip(chain.steps, states, strict=True)):
                columns = step.arrow(
                    columns, state, self.vocabularies.__getitem__, partial(self._table, f"{i}.{j}"), identity
                )
            for name, end in chain.outputs.items():
                if name in names:
                    arrays[name] = finished(columns[name], end)
        return arrays

    def _table(self, scope: str, name: str) -> KeyedTable:
        return self.tables[f"{scope}.{name}"]

    def missing(self, batch: pa.RecordBatch, column: str) -> NDArray[np.bool_]:
        """Return which rows of a raw batch lack a value of a column: null, NaN, or an empty list. bool [rows]."""
        return is_missing(self._column(batch, column))

    def save(self, folder: Location) -> None:
        """Write it into `folder` (headrace.features.workflow.saved).

        The folder is not remembered: callers fill one and rename it.
        """
        w = self.workflow
        written = saved.SavedWorkflow(
            headrace=__version__,
            columns=w.declared,
            label=w.label_column,
            carried=w.carried_columns,
            chains=w.spec_chains,
            states=self.states,
            vocabularies={name: len(v) for name, v in self.vocabularies.items()},
            tables={name: len(t) for name, t in self.tables.items()},
            dataset_schema=self.schema,
        )
        saved.write(folder, written, self.vocabularies, self.tables)

    @staticmethod
    def load(folder: Location, most_values: int | None = None, maps: Location | None = None) -> FittedWorkflow:
        """Load what `save` wrote.

        Args:
            most_values: a vocabulary or keyed table with more values stays in its file; None: none does.
            maps: a folder of this workflow's alone, where large ones are mapped; None: they are in memory.

        Raises:
            UserError: a file is missing or damaged.
        """
        saved_workflow, vocabularies, tables = saved.read(folder, most_values, maps)
        section = str(saved.file_of(folder))
        workflow = Workflow(
            saved_workflow.chains, saved_workflow.columns, saved_workflow.label, saved_workflow.carried, section=section
        )
        return FittedWorkflow(workflow, saved_workflow.states, vocabularies, tables, folder)

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """Return an input column in its declared type; NaN is null, a null list is empty."""
        type_ = self.workflow.input_type(name)
        index = batch.schema.get_field_index(name)
        if index < 0:
            raise UserError(f"column '{name}' ({type_}) is missing (there are: {', '.join(batch.schema.names)})")
        array = batch.column(index)
        if array.type != type_.arrow:
            try:
                array = array.cast(type_.arrow)
            except pa.ArrowException as e:
                raise UserError(f"column '{name}' is {array.type} and cannot be read as {type_}: {e}") from None
        return input_values(array)


def finished(x: pa.Array, end: ValueType) -> pa.Array:
    """Return codes and raw ids as they are, numbers as float32. What is missing or not finite as float32 is 0.

    Lists have at most `end.length` elements.
    """
    if end.is_categorical:
        return with_elements(x, x.flatten()) if pa.types.is_fixed_size_list(x.type) else x
    flat = x.flatten() if end.is_list else x
    with np.errstate(over="ignore"):
        single = to_numpy(doubles(flat)).astype(np.float32)
    out = pa.array(np.where(np.isfinite(single), single, np.float32(0)))
    return with_elements(x, out) if end.is_list else out


_PHYSICAL = {
    "float32": pa.float32(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}


def stored_schema(features: Sequence[Feature]) -> pa.Schema:
    """Return Arrow fields of the Parquet columns, a list one of them; only carried columns may have nulls."""

    def type_of(f: Feature) -> pa.DataType:
        plain = _PHYSICAL[f.dtype]
        return pa.list_(pa.field("element", plain, nullable=False)) if f.is_list else plain

    return pa.schema([pa.field(f.name, type_of(f), nullable=f.kind is Kind.CARRIED) for f in features])


def physical_schema(features: Sequence[Feature]) -> pa.Schema:
    """Return Arrow fields of the columns that features have in a batch, a list padded.

    Only carried columns may have nulls.
    """
    return pa.schema(
        [
            pa.field(column, _PHYSICAL[f.dtype], nullable=f.kind is Kind.CARRIED)
            for f in features
            for column in f.physical
        ]
    )
