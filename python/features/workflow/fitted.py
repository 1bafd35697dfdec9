"""A fitted workflow: all that it learned, and the transform of Arrow batches.

    fitted.transform_batch(batch)     # in a process without Spark: what the dataset's writer wrote, bit for bit
    fitted.save(folder); FittedWorkflow.load(folder)

With Spark: headrace.features.spark, which fits and transforms frames.

In its folder are `workflow.json`, `vocabulary/NAME.parquet` (value, code) and `table/NAME.parquet`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace import __version__
from headrace.config import Chain
from headrace.config.schema import DatasetSchema, Feature, Kind, TableColumn
from headrace.dataset import lists
from headrace.dataset.layout import column_bytes
from headrace.errors import UserError
from headrace.features.functions.arrays import doubles, input_values, is_missing, to_numpy, with_elements
from headrace.features.learn.statistics import IDENTITY
from headrace.features.ops.base import State
from headrace.features.types import ValueType
from headrace.features.vocabulary.keyed_tables import KEY, FileKeyedTable, KeyedTable, MappedKeyedTable, write_table
from headrace.features.vocabulary.lookup import FileLookup, Lookup, MappedLookup
from headrace.features.workflow.workflow import Workflow
from headrace.storage import Location, StoreAway, local
from headrace.storage.host_scratch import create_once

#: Bytes of values, above which neither a vocabulary nor a keyed table is taken into memory: Arrow's texts have 2 GiB.
MOST_TEXT = 3 << 29
#: Vocabularies and keyed tables with more values, or with more bytes of them, are mapped where that is asked for: a
#: smaller one costs a process a few MB.
MAPPED_VALUES, MAPPED_TEXT = 100_000, 16 << 20


class SavedWorkflow(BaseModel):
    """`workflow.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = Field(default=1, ge=1, le=1)
    headrace: str
    columns: tuple[TableColumn, ...]
    label: str
    carried: tuple[str, ...]
    chains: tuple[Chain, ...]
    #: By chain, step and column.
    states: tuple[tuple[dict[str, dict[str, Any]], ...], ...]
    #: How many values each vocabulary has, and how many keys each keyed table.
    vocabularies: dict[str, int]
    tables: dict[str, int] = Field(default_factory=dict)
    dataset_schema: DatasetSchema


def workflow_file(folder: Location) -> Location:
    """Return `workflow.json` in the folder of a saved workflow."""
    return folder / "workflow.json"


def table_file(folder: Location, name: str) -> Location:
    """Return the file of a keyed table in a saved workflow."""
    return folder / "table" / f"{quote(name, safe='')}.parquet"


def vocabulary_file(folder: Location, name: str) -> Location:
    """Return the file of a vocabulary in a saved workflow."""
    return folder / "vocabulary" / f"{quote(name, safe='')}.parquet"


def write_saved(
    folder: Location, saved: SavedWorkflow, vocabularies: Mapping[str, Lookup], tables: Mapping[str, KeyedTable]
) -> None:
    """Fill a folder; `workflow.json` comes last."""
    (folder / "vocabulary").make_dir()
    for name, keyed in tables.items():
        if isinstance(keyed, FileKeyedTable):
            table_file(folder, name).copy_from(local(keyed.path))
            continue
        with table_file(folder, name).new_file() as path:
            write_table(keyed.table, path, KEY)
    for name, vocabulary in vocabularies.items():
        if isinstance(vocabulary, FileLookup):
            vocabulary_file(folder, name).copy_from(local(vocabulary.path))
            continue
        with vocabulary_file(folder, name).new_file() as path:
            write_table(vocabulary.table, path, "value")
    workflow_file(folder).put_text(json.dumps(saved.model_dump(mode="json"), indent=1) + "\n")


def read_saved(
    folder: Location, most_values: int | None = None, maps: Location | None = None
) -> tuple[SavedWorkflow, dict[str, Lookup], dict[str, KeyedTable]]:
    """Read what `write` wrote.

    Args:
        most_values: a vocabulary or keyed table with more values stays in its file; None: none does.
        maps: where large ones are kept as files that all processes of the host map (made where they are not there
            yet); of this workflow alone. None: all of them are in this process's memory.

    Raises:
        UserError: a file is missing or damaged.
    """
    path = workflow_file(folder)
    try:
        saved = SavedWorkflow.model_validate_json(path.read_text())
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
            vocabularies[name] = FileLookup(file.local_path())
            continue
        _check(file, rows, path)
        size = _text_bytes(file, "value")
        if maps is not None and (rows > MAPPED_VALUES or size > MAPPED_TEXT):
            write = partial(_write_mapped, file)
            vocabularies[name] = MappedLookup(create_once(maps / quote(name, safe=""), write))
        else:
            vocabularies[name] = FileLookup(file.local_path()) if size > MOST_TEXT else Lookup(_read(file))
    tables: dict[str, KeyedTable] = {}
    for name, rows in saved.tables.items():
        file = table_file(folder, name)
        _check_table(file, rows, path)
        size = _text_bytes(file, KEY)
        if most_values is not None and rows > most_values:
            tables[name] = FileKeyedTable(file.local_path())
        elif maps is not None and (rows > MAPPED_VALUES or size > MAPPED_TEXT):
            # No vocabulary's quoted name has this sign.
            write = partial(_write_mapped_table, file)
            tables[name] = MappedKeyedTable(create_once(maps / f"table={quote(name, safe='')}", write))
        elif size > MOST_TEXT:
            tables[name] = FileKeyedTable(file.local_path())
        else:
            tables[name] = KeyedTable(_read(file))
    return saved, vocabularies, tables


def whole_vocabularies(folder: Location) -> Iterator[tuple[str, pa.Table]]:
    """Yield (name, its table (value, code)) of the vocabularies in a folder; what is gone or damaged is passed over."""
    try:
        saved = SavedWorkflow.model_validate_json(workflow_file(folder).read_text())
    except StoreAway:
        raise
    except (OSError, ValueError):
        return
    for name, rows in saved.vocabularies.items():
        file = vocabulary_file(folder, name)
        try:
            _check(file, rows, workflow_file(folder))
            yield name, _read(file)
        except UserError:
            continue


def _check(file: Location, rows: int, said_by: Location) -> None:
    footer = _metadata(file)
    if footer.num_rows != rows or footer.schema.names != ["value", "code"]:
        raise UserError(f"{file} does not hold the {rows} values (value, code) that {said_by} says")


def _check_table(file: Location, rows: int, said_by: Location) -> None:
    footer = _metadata(file)
    if footer.num_rows != rows or KEY not in footer.schema.names:
        raise UserError(f"{file} does not hold the {rows} keys that {said_by} says")


def _text_bytes(file: Location, column: str) -> int:
    """Return bytes of the values of a column, none of which is twice."""
    return sum(column_bytes(_metadata(file), column))


def _metadata(file: Location) -> pq.FileMetaData:
    try:
        return pq.read_metadata(file)
    except StoreAway:
        raise
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{file} cannot be read: {' '.join(str(e).split())[:300]}") from None


def _write_mapped_table(file: Location, folder: Location) -> None:
    MappedKeyedTable.write_file(file.local_path(), folder)


def _write_mapped(file: Location, folder: Location) -> None:
    MappedLookup.write_file(file.local_path(), folder)


def _read(file: Location) -> pa.Table:
    try:
        return pq.read_table(file)
    except StoreAway:
        raise
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{file} cannot be read: {' '.join(str(e).split())[:300]}") from None


def copy_table(table: FileKeyedTable, folder: Location, name: str) -> Location:
    """Put a table that the driver does not hold where a saved workflow has it (`table_file`).

    Args:
        table: its file is this host's.
        folder: which all tasks see.
        name: `CHAIN.STEP.NAME`.

    Returns:
        The file.
    """
    file = table_file(folder, name)
    file.copy_from(local(table.path))
    return file


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
        """Write it into `folder` (headrace.features.workflow.fitted).

        The folder is not remembered: callers fill one and rename it.
        """
        w = self.workflow
        written = SavedWorkflow(
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
        write_saved(folder, written, self.vocabularies, self.tables)

    @staticmethod
    def load(folder: Location, most_values: int | None = None, maps: Location | None = None) -> FittedWorkflow:
        """Load what `save` wrote.

        Args:
            most_values: a vocabulary or keyed table with more values stays in its file; None: none does.
            maps: a folder of this workflow's alone, where large ones are mapped; None: they are in memory.

        Raises:
            UserError: a file is missing or damaged.
        """
        saved_workflow, vocabularies, tables = read_saved(folder, most_values, maps)
        section = str(workflow_file(folder))
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
