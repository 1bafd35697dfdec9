"""The tensors of graphs and of features as a configuration says them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.export.features.columns import FEATURE, RawColumn
from headrace.export.record import Tensor as GraphTensor
from headrace.export.triton.config import ANY, Tensor
from headrace.schema import Feature, Kind


def of_graph(tensor: GraphTensor) -> Tensor:
    """Return a graph's tensor, whose first dimension is the rows."""
    return _tensor(tensor.name, tensor.dtype, tuple(ANY if isinstance(n, str) else n for n in tensor.shape[1:]))


def of_columns(columns: Sequence[RawColumn]) -> tuple[Tensor, ...]:
    """Return the tensors of a request that holds columns of the lake's table."""
    return tuple(_tensor(t.name, t.dtype, (ANY,) * (len(t.shape) - 1)) for column in columns for t in column.tensors)


def of_feature(feature: Feature) -> Tensor:
    """Return a feature's tensor; see headrace.export.features.graph_file."""
    codes = feature.kind is Kind.CATEGORICAL
    dims = () if codes and not feature.is_list else (feature.length,)
    return _tensor(f"{feature.name}{FEATURE}", "int64" if codes else "float32", dims)


def plain(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors as an ensemble or a Python model has them: as the request does."""
    return tuple(Tensor(t.name, t.dtype, t.dims) for t in tensors)


def with_rows(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors for a model without batches, whose shapes begin with the rows."""
    return tuple(Tensor(t.name, t.dtype, (ANY, *t.dims)) for t in tensors)


def _tensor(name: str, dtype: str, dims: tuple[int, ...]) -> Tensor:
    return Tensor(name, dtype, dims) if dims else Tensor(name, dtype, (1,), ())
