"""Workflows: chains of operators over columns, built from a spec, fitted on the training rows, the same everywhere.

    fitted = Workflow.from_spec(spec).fit(train_rows, vocabularies)
    fitted.transform(frame)             # Spark expressions
    fitted.transform_batch(batch)       # Arrow, in a process without Spark: the same values bit for bit
    fitted.save(folder); FittedWorkflow.load(folder)

This module does not import pyspark; only the Spark bodies do, when called.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace import __version__
from headrace.config import Chain, Spec
from headrace.errors import UserError, nearest
from headrace.features.functions.arrays import doubles, to_numpy, with_elements
from headrace.features.learn.statistics import IDENTITY
from headrace.features.ops.base import State, VocabularyRule
from headrace.features.ops.selection import Chains, Selection, as_chains
from headrace.features.table_ops.preparation import prepared_columns
from headrace.features.types import ValueType, declared
from headrace.features.vocabulary.keyed_table import KEY, KeyedTable
from headrace.features.vocabulary.lookup import FileLookup, Lookup
from headrace.features.workflow.binding import BoundChain, bind
from headrace.schema import Column, DatasetSchema, Feature, Kind
from headrace.storage import local

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

    from headrace.features.vocabulary.delta_table import Vocabularies

#: NumPy's names of the types that a carried column may have.
_CARRIED = {
    "string": "string",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "boolean": "bool",
}
_PHYSICAL = {
    "float32": pa.float32(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}

#: The smallest vocabularies and keyed tables are joined on broadcast copies, up to this many values together (some
#: 100 bytes each in every executor); the others as Spark chooses. See headrace.features.engines.spark.transform.Joins.
BROADCAST_ROWS = 5_000_000


class Workflow:
    """The chains of a spec, checked."""

    def __init__(
        self,
        chains: Sequence[Chain | Selection] | Selection | Chains,
        columns: Sequence[Column],
        label: str,
        carried: Sequence[str] = (),
        where: str = "features",
    ) -> None:
        """Check everything that can be known without data.

        Raises:
            UserError: an unknown operator or parameter, a column that an operator cannot take, two features of one
                name; with its place `features.workflow[i].ops[j]`.
        """
        self.spec_chains = as_chains(chains)
        self.declared, self.label_column = tuple(columns), label
        self.carried_columns, self._where = tuple(carried), where
        self._types = {c.name: declared(c) for c in columns}
        self.chains: tuple[BoundChain, ...] = tuple(
            bind(chain, self._types, label, f"{where}.workflow[{i}]") for i, chain in enumerate(self.spec_chains)
        )
        self.rules = self._rules()
        self._check_names()

    @staticmethod
    def from_spec(spec: Spec) -> Workflow:
        """The workflow of a pipeline. Raises UserError, see `Workflow`."""
        f = spec.features
        return Workflow(f.workflow, prepared_columns(spec), f.label, f.carried)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of the lake's table that the features are made of, each once; the label is not among them."""
        return tuple(dict.fromkeys(column for chain in self.chains for column in chain.columns))

    def input_type(self, column: str) -> ValueType:
        """The declared type of a column."""
        return self._types[column]

    @property
    def out_of_fold(self) -> bool:
        """Whether rows of the training range are transformed otherwise than others: they must bring IDENTITY."""
        return any(step.op.out_of_fold for chain in self.chains for step in chain.steps)

    def fit(self, train: DataFrame, vocabularies: Vocabularies, day: SparkColumn | None = None) -> FittedWorkflow:
        """Learn from the training rows.

        Args:
            train: has the input columns with their declared types, and the label where an operator learns from it;
                `_source_file` and `_source_line` (or IDENTITY, a hash of them) where one has folds.
            vocabularies: keeps codes from one fit to the next.
            day: an integer or text that orders the days on which values were first seen; None: all on one day.
        """
        from headrace.features.engines.spark.fit import fit_states

        states, values, tables = fit_states(self, train, vocabularies, day)
        return FittedWorkflow(self, states, {name: Lookup(table) for name, table in values.items()}, tables)

    def _check_names(self) -> None:
        seen: dict[str, int] = {}
        for i, chain in enumerate(self.chains):
            for name in chain.ends:
                if name in seen:
                    raise UserError(
                        f"{self._where}.workflow[{i}]: '{name}' is already a feature of "
                        f"{self._where}.workflow[{seen[name]}]; rename one of them (rename: "
                        f"{{suffix: _2}}), or name its column in one chain"
                    )
                seen[name] = i
        for name, what in ((self.label_column, "label"), *((c, "carried") for c in self.carried_columns)):
            if name not in self._types:
                raise UserError(
                    f"{self._where}.{what}: column '{name}' is not declared in table.columns"
                    f"{nearest(name, self._types)}"
                )
        label = self._types[self.label_column]
        if not label.is_number or label.is_list:
            raise UserError(f"{self._where}.label: '{self.label_column}' is {label}; a label is a number, 0 or 1")
        for name in self.carried_columns:
            type_ = self._types[name]
            if type_.is_list or type_.element not in _CARRIED:
                raise UserError(
                    f"{self._where}.carried: column '{name}' is {type_}; one of {', '.join(_CARRIED)} can be carried"
                )
        if len(set(self.carried_columns)) < len(self.carried_columns):
            raise UserError(f"{self._where}.carried: names a column twice")
        physical = [column for feature in self.schema_of({}).features for column in feature.physical]
        for column in physical:
            if physical.count(column) > 1:
                raise UserError(f"{self._where}: two columns of the dataset would be named '{column}'; rename a column")

    def _rules(self) -> dict[str, VocabularyRule]:
        """Rules of all vocabularies, by name."""
        rules: dict[str, VocabularyRule] = {}
        unnamed: set[str] = set()
        for i, chain in enumerate(self.chains):
            for j, step in enumerate(chain.steps):
                at = f"{self._where}.workflow[{i}].ops[{j}] ({step.op.name})"
                for name, rule in step.op.vocabularies(step.types).items():
                    if rules.setdefault(name, rule) != rule:
                        raise UserError(
                            f"{at}: vocabulary '{name}' is shared with a chain that has another "
                            f"min_count, max_size or oov_buckets; give both the same"
                        )
                    if getattr(step.op, "vocabulary", None) is None:
                        if name in unnamed:
                            raise UserError(
                                f"{at}: another chain makes the vocabulary '{name}' too; if they are to "
                                f"share it (its values are counted in both), say `vocabulary: {name}` in "
                                f"both; else rename the column before"
                            )
                        unnamed.add(name)
        return rules

    def schema_of(self, cardinalities: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> DatasetSchema:
        """The dataset's schema: features in the chains' order, the label, the carried columns.

        A carried column that is a feature too is stored beside it as `<column>__carried`.

        Args:
            cardinalities: by vocabulary, its highest code and one.
            sizes: by vocabulary, how many values it has: features that drop_low_cardinality drops are left out.
        """
        features = []
        for chain in self.chains:
            for column, end in chain.ends.items():
                code, raw = end.is_categorical, end.element == "id"
                if sizes is not None and end.vocabulary and sizes[end.vocabulary] < end.min_cardinality:
                    continue
                cardinality = cardinalities.get(end.vocabulary) if end.vocabulary else end.cardinality
                features.append(
                    Feature(
                        name=column,
                        kind=Kind.CATEGORICAL if code else Kind.CONTINUOUS,
                        dtype="int64" if raw else "int32" if code else "float32",
                        length=end.length or 1,
                        is_list=end.is_list,
                        cardinality=cardinality if code and not raw else None,
                        dynamic=raw,
                        vocabulary=end.vocabulary,
                        oov_buckets=self.rules[end.vocabulary].oov_buckets if end.vocabulary else 1,
                        tags=chain.tags,
                        metadata=chain.metadata,
                        sources=chain.sources[column],
                    )
                )
        features.append(Feature(name=self.label_column, kind=Kind.LABEL, dtype="float32"))
        fed = DatasetSchema(features=tuple(features))
        carried = tuple(
            Feature(name=fed.carried_name(c), kind=Kind.CARRIED, dtype=_CARRIED[self._types[c].element])
            for c in self.carried_columns
        )
        return DatasetSchema(features=(*features, *carried))


class FittedWorkflow:
    """A workflow and all that it learned: the same transform in the dataset's writer, in scoring, in serving."""

    def __init__(
        self,
        workflow: Workflow,
        states: Sequence[Sequence[Mapping[str, State]]],
        vocabularies: Mapping[str, Lookup],
        tables: Mapping[str, KeyedTable] | None = None,
        folder: Path | None = None,
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
        self._folder = folder
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
        """What the transforms make: the schema without label and carried columns."""
        return tuple(f for f in self.schema.features if f.kind in (Kind.CONTINUOUS, Kind.CATEGORICAL))

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """Of `transform_batch`: numbers float32, codes int32, raw ids int64, no nulls; in the schema's order."""
        return physical_schema(self.features)

    def transform_batch(
        self, batch: pa.RecordBatch, keep: Sequence[str] = (), only: Collection[str] | None = None
    ) -> pa.RecordBatch:
        """Rows of the lake's table to physical columns, by the Arrow bodies. Needs no Spark.

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
        wanted = {f.name for f in features}
        arrays: dict[str, pa.Array] = {}
        index = batch.schema.get_field_index(IDENTITY)
        identity = batch.column(index) if index >= 0 else None
        for i, (chain, states) in enumerate(zip(self.workflow.chains, self.states, strict=True)):
            if wanted.isdisjoint(chain.ends):
                continue
            columns = {name: self._column(batch, name) for name in chain.columns}
            for j, (step, state) in enumerate(zip(chain.steps, states, strict=True)):
                columns = step.arrow(
                    columns, state, self.vocabularies.__getitem__, partial(self._table, f"{i}.{j}"), identity
                )
            for name, end in chain.ends.items():
                if name in wanted:
                    arrays[name] = _finish_arrow(columns[name], end)
        out: list[pa.Array] = []
        for feature in features:
            array = arrays[feature.name]
            if feature.is_list:
                matrix = array.flatten().to_numpy().reshape(-1, feature.length)
                out += [pa.array(matrix[:, i].copy()) for i in range(feature.length)]
            else:
                out.append(array)
        schema = self.arrow_schema if only is None else physical_schema(features)
        for name in keep:
            schema = schema.append(batch.schema.field(name))
            out.append(batch.column(name))
        return pa.RecordBatch.from_arrays(out, schema=schema)

    def _table(self, scope: str, name: str) -> KeyedTable:
        return self.tables[f"{scope}.{name}"]

    def transform(
        self, frame: DataFrame, keep: Mapping[str, str] | Sequence[str] = (), saved: Path | None = None
    ) -> DataFrame:
        """Rows of the lake's table to physical columns, by the Spark bodies: joins with vocabularies, then one select.

        Args:
            frame: has the input columns in their declared types, and IDENTITY where some rows are of the training
                range.
            keep: further columns, taken along unchanged at the end; a mapping renames them (name of the result -> of
                the frame).
            saved: the folder that this workflow was saved in: Spark reads vocabularies and tables from its files, which
                GPUs can scan. Without, and where it was not loaded from one, they go to Spark from this process.
        """
        from headrace.features.engines.spark.transform import transform_frame

        kept = dict(keep) if isinstance(keep, Mapping) else {name: name for name in keep}
        return transform_frame(self, frame, kept, saved or self._folder, BROADCAST_ROWS)

    def missing(self, batch: pa.RecordBatch, column: str) -> NDArray[np.bool_]:
        """Which rows of a raw batch have no value of an input column: null, NaN, or an empty list. bool [rows]."""
        x = self._column(batch, column)
        none = pc.equal(pc.list_value_length(x), 0) if self.workflow.input_type(column).is_list else x.is_null()
        return np.asarray(none.to_numpy(zero_copy_only=False), np.bool_)

    def save(self, folder: Path) -> None:
        """Write `workflow.json`, `vocabulary/NAME.parquet` (value, code) and `table/NAME.parquet` into `folder`.

        The folder is not remembered: callers fill one and rename it.
        """
        (folder / "vocabulary").mkdir(parents=True, exist_ok=True)
        if self.tables:
            (folder / "table").mkdir(exist_ok=True)
        for name, keyed in self.tables.items():
            pq.write_table(keyed.table, table_file(folder, name), compression="zstd")
        for name, vocabulary in self.vocabularies.items():
            pq.write_table(vocabulary.table, vocabulary_file(folder, name), compression="zstd")
        w = self.workflow
        saved = _Saved(
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
        local(folder / "workflow.json").put_text(json.dumps(saved.model_dump(mode="json"), indent=1) + "\n")

    @staticmethod
    def load(folder: Path, most_values: int | None = None) -> FittedWorkflow:
        """What `save` wrote.

        Args:
            most_values: a vocabulary with more values stays in its file; None: none does.

        Raises:
            UserError: a file is missing or damaged.
        """
        path = folder / "workflow.json"
        try:
            saved = _Saved.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"no saved workflow in {folder} (workflow.json is not there)") from None
        except (ValidationError, UnicodeDecodeError) as e:
            raise UserError(
                f"{path} is not a workflow that headrace {__version__} reads: {' '.join(str(e).split())[:300]}"
            ) from None
        vocabularies: dict[str, Lookup] = {}
        for name, rows in saved.vocabularies.items():
            file = vocabulary_file(folder, name)
            if most_values is not None and rows > most_values:
                vocabularies[name] = FileLookup(file)
                continue
            table = _read(file)
            if table.num_rows != rows or table.schema.names != ["value", "code"]:
                raise UserError(f"{file} does not hold the {rows} values (value, code) that {path} says")
            vocabularies[name] = Lookup(table)
        tables = {}
        for name, rows in saved.tables.items():
            file = table_file(folder, name)
            table = _read(file)
            if table.num_rows != rows or KEY not in table.schema.names:
                raise UserError(f"{file} does not hold the {rows} keys that {path} says")
            tables[name] = KeyedTable(table)
        workflow = Workflow(saved.chains, saved.columns, saved.label, saved.carried, where=str(path))
        return FittedWorkflow(workflow, saved.states, vocabularies, tables, folder)

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """An input column in its declared type; NaN is null, a null list is empty."""
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
        if type_.is_list:
            if array.null_count:
                array = pc.if_else(array.is_valid(), array, pa.scalar([], array.type))
            if type_.element in ("float", "double"):
                array = with_elements(array, _nan_to_null(array.flatten()))
            return array
        return _nan_to_null(array) if type_.element in ("float", "double") else array


class _Saved(BaseModel):
    """workflow.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = Field(default=1, ge=1, le=1)
    headrace: str
    columns: tuple[Column, ...]
    label: str
    carried: tuple[str, ...]
    chains: tuple[Chain, ...]
    #: By chain, step and column.
    states: tuple[tuple[dict[str, dict[str, Any]], ...], ...]
    vocabularies: dict[str, int]
    tables: dict[str, int] = Field(default_factory=dict)
    dataset_schema: DatasetSchema


def stored_schema(features: Sequence[Feature]) -> pa.Schema:
    """Arrow fields of the Parquet columns, a list one of them; only carried columns may have nulls."""

    def type_of(f: Feature) -> pa.DataType:
        plain = _PHYSICAL[f.dtype]
        return pa.list_(pa.field("element", plain, nullable=False)) if f.is_list else plain

    return pa.schema([pa.field(f.name, type_of(f), nullable=f.kind is Kind.CARRIED) for f in features])


def physical_schema(features: Sequence[Feature]) -> pa.Schema:
    """Arrow fields of the columns that features have in a batch, a list padded; only carried columns may have nulls."""
    return pa.schema(
        [
            pa.field(column, _PHYSICAL[f.dtype], nullable=f.kind is Kind.CARRIED)
            for f in features
            for column in f.physical
        ]
    )


def _finish_arrow(x: pa.Array, end: ValueType) -> pa.Array:
    """Codes and raw ids as they are, numbers as float32. What is missing or not finite as float32 is 0."""
    if end.is_categorical:
        return x
    flat = x.flatten() if end.is_list else x
    with np.errstate(over="ignore"):
        single = to_numpy(doubles(flat)).astype(np.float32)
    out = pa.array(np.where(np.isfinite(single), single, np.float32(0)))
    return pa.FixedSizeListArray.from_arrays(out, end.length) if end.is_list else out


def _nan_to_null(x: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_nan(x), pa.scalar(None, x.type), x)


def _read(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{file} cannot be read: {' '.join(str(e).split())[:300]}") from None


def table_file(folder: Path, name: str) -> Path:
    """Where a saved workflow keeps a keyed table."""
    return folder / "table" / f"{quote(name, safe='')}.parquet"


def vocabulary_file(folder: Path, name: str) -> Path:
    """Where a saved workflow keeps a vocabulary."""
    return folder / "vocabulary" / f"{quote(name, safe='')}.parquet"
