"""Tensors of a request, and the features that the fitted workflow computes from them by its Arrow kernels.

It imports neither Spark, torch nor ONNX. The tensors are a workflow's input columns; tensors have no nulls.

Tensors of a column `c`, by its declared type:

    string                  object [rows] of str (KServe: BYTES)       `c.missing` bool [rows]
    integers                int64 [rows]                               `c.missing` bool [rows]
    boolean                 bool [rows]                                `c.missing` bool [rows]
    timestamp, date         int64 [rows]: microseconds, or days, since 1970 (UTC)      `c.missing`
    decimal                 object [rows]: plain notation              `c.missing`
    float, double           float32 or float64 [rows], NaN where it is missing
    lists of these          [rows, length], `c.length` int64 [rows]; `c.missing` bool [rows, length] (floats: NaN)

`length` is the same for all rows of a batch, at least 1; elements beyond a list's own length are ignored. A null list
is an empty one. A column that is declared `required` has no null and no `c.missing`; elements of a list may be null.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.config.schema import Feature, Kind
from headrace.errors import UserError
from headrace.features.types import ValueType
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.storage import Location

ROWS = "rows"
MISSING, LENGTH = ".missing", ".length"
#: Suffix of a feature's tensor: an input and an output of a graph cannot share a name.
FEATURE = ".feature"
_DTYPES = {"float": "float32", "double": "float64", "boolean": "bool", "string": "object", "decimal": "object"}

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RawTensor:
    """A tensor of a request. `shape`: [rows], or [rows, length] with the name of its length."""

    name: str
    #: NumPy's name of the type; `object` for texts.
    dtype: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class RawColumn:
    """An input column of a workflow."""

    name: str
    type: ValueType
    required: bool

    @property
    def dtype(self) -> str:
        """NumPy's name of the tensor's type."""
        return _DTYPES.get(self.type.element, "int64")

    @property
    def has_nan(self) -> bool:
        """True if NaN marks missing values."""
        return self.type.element in ("float", "double")

    @property
    def has_missing(self) -> bool:
        """True if a separate tensor marks missing values."""
        return not self.has_nan and (self.type.is_list or not self.required)

    @property
    def tensors(self) -> tuple[RawTensor, ...]:
        """Its tensors, the values first."""
        shape = (ROWS, f"{self.name}{LENGTH}") if self.type.is_list else (ROWS,)
        tensors_ = [RawTensor(self.name, self.dtype, shape)]
        if self.type.is_list:
            tensors_.append(RawTensor(f"{self.name}{LENGTH}", "int64", (ROWS,)))
        if self.has_missing:
            tensors_.append(RawTensor(f"{self.name}{MISSING}", "bool", shape))
        return tuple(tensors_)


def raw_columns(workflow: Workflow, names: Collection[str]) -> tuple[RawColumn, ...]:
    """Return some input columns of a workflow, in its order.

    Raises:
        UserError: two of their tensors have one name.
    """
    required = {c.name for c in workflow.declared if c.required}
    chosen = [name for name in workflow.input_columns if name in names]
    columns = tuple(RawColumn(name, workflow.input_type(name), name in required) for name in chosen)
    seen: set[str] = set()
    for tensor in (t for column in columns for t in column.tensors):
        if tensor.name in seen:
            raise UserError(f"two tensors of the columns would be named '{tensor.name}': rename a column")
        seen.add(tensor.name)
    return columns


def made_of(features: Iterable[Feature]) -> set[str]:
    """Return the columns from which features are computed; other columns of their chains are not needed."""
    return {column for f in features for column in f.sources}


def to_batch(columns: Sequence[RawColumn], tensors: Tensors) -> pa.RecordBatch:
    """Convert tensors to the rows that `FittedWorkflow.transform_batch` takes; scalars may be [rows, 1], texts bytes.

    Raises:
        UserError: a tensor is missing, or has another type or shape.
    """
    arrays = {column.name: _array(column, tensors) for column in columns}
    rows = {len(a) for a in arrays.values()}
    if len(rows) > 1:
        raise UserError(f"tensors of {', '.join(map(str, sorted(rows)))} rows in one request")
    return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))


def to_tensors(columns: Sequence[RawColumn], batch: pa.RecordBatch) -> dict[str, NDArray[Any]]:
    """Return rows with nulls as tensors, the reverse of `to_batch`. Columns have their declared types."""
    out: dict[str, NDArray[Any]] = {}
    for column in columns:
        x = batch.column(batch.schema.get_field_index(column.name)).cast(column.type.arrow)
        if not column.type.is_list:
            out |= _named(column, _values(column, x), x.is_null().to_numpy(zero_copy_only=False))
            continue
        x = pc.if_else(x.is_valid(), x, pa.scalar([], x.type)) if x.null_count else x
        lengths = pc.list_value_length(x).to_numpy(zero_copy_only=False).astype(np.int64)
        flat, width = x.flatten(), max(int(lengths.max(initial=1)), 1)
        is_element = np.arange(width) < lengths[:, None]
        values = np.full(is_element.shape, "" if column.dtype == "object" else 0, column.dtype)
        missing = np.zeros(is_element.shape, np.bool_)
        values[is_element], missing[is_element] = _values(column, flat), flat.is_null().to_numpy(zero_copy_only=False)
        out |= _named(column, values, missing) | {f"{column.name}{LENGTH}": lengths}
    return out


def _named(column: RawColumn, values: NDArray[Any], missing: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    return {column.name: values} | ({f"{column.name}{MISSING}": missing} if column.has_missing else {})


def _values(column: RawColumn, x: pa.Array) -> NDArray[Any]:
    """Return flat values with any number (NaN for reals, the empty text for texts) in place of nulls."""
    if column.has_nan:
        return np.asarray(x.to_numpy(zero_copy_only=False), column.dtype)
    if column.type.element == "decimal":
        return np.array(["" if v is None else f"{v:f}" for v in x.to_pylist()], object)
    if column.dtype == "object":
        return np.asarray(pc.fill_null(x, "").to_numpy(zero_copy_only=False), object)
    if column.type.element == "date":
        x = x.cast(pa.int32())
    return np.asarray(_as_int64(x, column).to_numpy(zero_copy_only=False), column.dtype)


def _as_int64(x: pa.Array, column: RawColumn) -> pa.Array:
    return pc.fill_null(x, False) if column.dtype == "bool" else pc.fill_null(x.cast(pa.int64()), 0)


def _array(column: RawColumn, tensors: Tensors) -> pa.Array:
    values = _tensor(column.name, tensors)
    if not column.type.is_list:
        values = values.reshape(len(values)) if values.shape[1:] == (1,) else values
        return _typed(column, values, _missing(column, tensors, values), values.shape == values.shape[:1])
    lengths = _tensor(f"{column.name}{LENGTH}", tensors)
    lengths = lengths.reshape(len(lengths)) if lengths.ndim else lengths
    if values.ndim != 2 or lengths.shape != values.shape[:1]:
        raise UserError(f"column '{column.name}': values {list(values.shape)}, lengths {list(lengths.shape)}")
    if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= values.shape[1]:
        raise UserError(f"column '{column.name}': lengths must be 0 to {values.shape[1]}, that of its values")
    is_element = np.arange(values.shape[1]) < lengths[:, None]
    missing = _missing(column, tensors, values)
    flat = _typed(column, values[is_element], None if missing is None else missing[is_element], True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def _tensor(name: str, tensors: Tensors) -> NDArray[Any]:
    if name not in tensors:
        raise UserError(f"tensor '{name}' is missing (there are: {', '.join(sorted(tensors))})")
    return np.asarray(tensors[name])


def _missing(column: RawColumn, tensors: Tensors, values: NDArray[Any]) -> NDArray[np.bool_] | None:
    if not column.has_missing:
        return None
    missing = _tensor(f"{column.name}{MISSING}", tensors)
    if missing.size != values.size:
        raise UserError(f"tensor '{column.name}{MISSING}' is {list(missing.shape)}, its values {list(values.shape)}")
    return missing.reshape(values.shape).astype(np.bool_)


def _typed(column: RawColumn, values: NDArray[Any], missing: NDArray[np.bool_] | None, flat: bool) -> pa.Array:
    type_ = column.type.arrow.value_type if column.type.is_list else column.type.arrow
    try:
        if not flat:
            raise ValueError(f"its shape is {list(values.shape)}")
        if column.dtype == "object":
            texts: list[str | None] = [v.decode() if isinstance(v, bytes) else str(v) for v in values.tolist()]
            if missing is not None:
                texts = [None if m else t for t, m in zip(texts, missing.tolist(), strict=True)]
            return pa.array(texts, pa.string()).cast(type_)
        # The stored number of a missing value has no meaning.
        numbers = values.astype(column.dtype, casting="same_kind")
        if missing is not None:
            numbers = np.where(missing, numbers.dtype.type(0), numbers)
        if column.type.element == "date":
            numbers = numbers.astype(np.int32)
        array = pa.array(numbers, mask=missing)
        return array if array.type == type_ else array.cast(type_)
    except (ValueError, TypeError, pa.ArrowException) as e:
        raise UserError(f"column '{column.name}' cannot be read as {column.type}: {e}") from None


@dataclass(frozen=True)
class FeaturesStep:
    """The features by Arrow kernels, with the tensors of the graph (headrace.export.features.graph_file)."""

    workflow: FittedWorkflow
    columns: tuple[RawColumn, ...]
    features: tuple[Feature, ...]

    @staticmethod
    def from_workflow(workflow: FittedWorkflow, names: Sequence[str] | None = None) -> FeaturesStep:
        """Return the step for the features `names`, or for all of them if None."""
        features = tuple(f for f in workflow.features if names is None or f.name in names)
        return FeaturesStep(workflow, raw_columns(workflow.workflow, made_of(features)), features)

    @staticmethod
    def load(folder: Location, outputs: Sequence[str] | None = None) -> FeaturesStep:
        """Load a saved workflow. `outputs`: names of the tensors; None: all."""
        names = None if outputs is None else [o.removesuffix(FEATURE) for o in outputs]
        return FeaturesStep.from_workflow(FittedWorkflow.load(folder), names)

    def __call__(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """`<feature>.feature` of the rows: codes int64 [rows], lists of codes int64 [rows, length], numbers float32
        [rows, columns].

        Raises:
            UserError: a tensor is missing, or has another type or shape.
        """
        batch = to_batch(self.columns, tensors)
        # A chain may read further columns from which none of these features is made.
        rest = [name for name in self.workflow.input_columns if name not in batch.schema.names]
        nulls = [pa.nulls(batch.num_rows, self.workflow.workflow.input_type(name).arrow) for name in rest]
        batch = pa.RecordBatch.from_arrays([*batch.columns, *nulls], [*batch.schema.names, *rest])
        features_batch = self.workflow.transform_batch(batch, only=[f.name for f in self.features])
        out: dict[str, NDArray[Any]] = {}
        for f in self.features:
            parts = [
                features_batch.column(features_batch.schema.get_field_index(name)).to_numpy() for name in f.physical
            ]
            codes = f.kind is Kind.CATEGORICAL
            x = parts[0] if codes and not f.is_list else np.stack(parts, axis=1)
            out[f"{f.name}{FEATURE}"] = x.astype(np.int64) if codes else x
        return out
