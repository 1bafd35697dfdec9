"""A model's network without its tables: a torch module of plain tensors, and its graphs by torch's exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from headrace.config.schema import Feature, Kind
from headrace.embeddings.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.export.record import ITEM, MODEL, QUERY
from headrace.models.inputs import Inputs
from headrace.models.lookups import EmbeddingLookup, lookups_of, table_name
from headrace.models.predictor import ONLY_TASK
from headrace.models.sharded_model import ShardedModel

#: Prefix of the names that a graph reserves.
RESERVED = "lookup."
CONTINUOUS = f"{RESERVED}continuous"
#: Names of the outputs of the query and item graphs.
QUERY_VECTOR, ITEM_VECTOR = "query_vector", "item_vector"
#: Name of the batch dimension.
ROWS = "rows"
#: Rows of the example batch. The exporter would treat 0 or 1 as a constant.
_TRACED_ROWS = 3


@dataclass(frozen=True)
class Argument:
    """An input tensor of the network.

    Attributes:
        name: name in the graph.
        shape: dimensions; a name stands for one that differs between batches.
        dtype: float32 or int64.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype


def vectors_name(lookup: str) -> str:
    """Return the name of a lookup's result, float32: [rows, D], a sequence [values, D], a table [cardinality, D]."""
    return f"{RESERVED}vectors.{lookup}"


def ids_name(feature: str) -> str:
    """Return the name of a feature's ids: int64 [rows], or for a list [values], without nulls."""
    return f"{RESERVED}ids.{feature}"


def lengths_name(feature: str) -> str:
    """Return the name of the number of values in each row of a list: int64 [rows]."""
    return f"{RESERVED}lengths.{feature}"


class ExportedNetwork:
    """Exported part of a model: a network, its lookups, and tables that replace the model's own.

    A network with a method `frozen` is replaced by its result (LightGCN computes its vectors from complete tables and a
    graph).
    """

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self.network: nn.Module = model.network
        self.features: Mapping[str, Feature] = {f.name: f for f in model.schema.of(Kind.CATEGORICAL)}
        frozen = getattr(model.network, "frozen", None)
        rows: Mapping[str, Tensor] = {}
        if frozen is not None:
            self.network, rows = frozen(_empty_inputs(model))
        declared_lookups = lookups_of(self.network)
        #: True if the network reads `Inputs.vectors`, one vector for each categorical feature.
        self.has_vectors = declared_lookups is None
        pooling, dim = model.config.pooling, model.config.embedding_dim
        self.lookups: Sequence[EmbeddingLookup] = (
            [EmbeddingLookup(name, name, dim, pooling) for name in self.features]
            if declared_lookups is None
            else declared_lookups
        )
        #: Tables that replace the model's, by name: float32 [rows, D].
        self.tables: Mapping[str, Tensor] = {self.table_of(w): rows[w.name] for w in self.lookups if w.name in rows}

    def table_of(self, w: EmbeddingLookup) -> str:
        """Return the name of a lookup's table."""
        return table_name(w, self.features[w.feature])

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of the network's graphs: see `headrace.export.record`."""
        is_retrieval = all(hasattr(self.network, name) for name in ("item", "queries", "items"))
        return (MODEL, QUERY, ITEM) if is_retrieval else (MODEL,)

    def outputs(self, graph: str) -> tuple[str, ...]:
        """Return the names of a graph's outputs."""
        if graph != MODEL:
            return (QUERY_VECTOR if graph == QUERY else ITEM_VECTOR,)
        return tuple(self.model.tasks.specs) or (ONLY_TASK,)

    @property
    def arguments(self) -> list[Argument]:
        """Return the arguments of `NetworkGraphs`, in order."""
        columns = self.model.inputs.continuous_columns
        arguments = [Argument(CONTINUOUS, (ROWS, columns), torch.float32)] if columns else []
        for f in self.features.values():
            arguments.append(Argument(ids_name(f.name), (_values(f) if f.is_list else ROWS,), torch.int64))
            if f.is_list:
                arguments.append(Argument(lengths_name(f.name), (ROWS,), torch.int64))
        for w in self.lookups:
            f = self.features[w.feature]
            if w.ids == "negatives":
                continue
            rows: int | str = (f.cardinality or 0) if w.ids == "all" else _values(f) if is_sequence(w) else ROWS
            arguments.append(Argument(vectors_name(w.name), (rows, w.dim), torch.float32))
        return arguments


class NetworkGraphs(nn.Module):
    """Some graphs of a network as one module of `ExportedNetwork.arguments`; their outputs follow each other."""

    def __init__(self, exported: ExportedNetwork, graphs: Sequence[str]) -> None:
        super().__init__()
        self.network = exported.network
        # Plain Python values, not submodules: the tables do not belong to the program.
        self._exported, self._graphs = (exported,), tuple(graphs)
        self._arguments = exported.arguments

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return float32 [rows] for each task, as `Predictor.predict_tasks`, or vectors float32 [rows, D]."""
        (exported,) = self._exported
        model, network = exported.model, exported.network
        inputs = self._inputs({a.name: x for a, x in zip(self._arguments, tensors, strict=True)})
        results: list[Tensor] = []
        for graph in self._graphs:
            if graph != MODEL:
                encoder = network.queries if graph == QUERY else network.items
                results.append(encoder(inputs).float())  # type: ignore[operator]
                continue
            outputs = model.tasks.complete({name: value.float() for name, value in network(inputs).items()})
            tasks = model.tasks
            results += [tasks.value(name, outputs[name]) for name in tasks.specs] or [model.value(outputs["logits"])]
        return tuple(results)

    def _inputs(self, tensors: Mapping[str, Tensor]) -> Inputs:
        (exported,) = self._exported
        rows = next(tensors[a.name].shape[0] for a in self._arguments if a.shape[0] == ROWS)
        ids: dict[str, Tensor | JaggedTensor] = {}
        for name, f in exported.features.items():
            x = tensors[ids_name(name)]
            ids[name] = JaggedTensor(x, pad(tensors[lengths_name(name)].cumsum(0), (1, 0))) if f.is_list else x
        embeddings: dict[str, Tensor | JaggedTensor] = {}
        for w in exported.lookups:
            lookup_ids = ids[w.feature]
            if w.ids == "negatives":
                embeddings[w.name] = torch.zeros(rows, 0, w.dim)
            elif is_sequence(w) and isinstance(lookup_ids, JaggedTensor):
                embeddings[w.name] = JaggedTensor(tensors[vectors_name(w.name)], lookup_ids.offsets)
            else:
                embeddings[w.name] = tensors[vectors_name(w.name)]
        vectors = torch.zeros(rows, 0, exported.model.config.embedding_dim)
        if exported.has_vectors and embeddings:
            vectors = torch.stack([x for x in embeddings.values() if isinstance(x, Tensor)], 1)
        continuous = tensors[CONTINUOUS] if CONTINUOUS in tensors else torch.zeros(rows, 0)
        no_negatives = torch.zeros(rows, 0, dtype=torch.int64)
        return Inputs(
            exported.model.inputs, continuous, vectors, embeddings=embeddings, ids=ids, negatives=no_negatives
        )


def is_sequence(w: EmbeddingLookup) -> bool:
    """Return whether a lookup gives a vector for each value of a list."""
    return w.ids == "batch" and w.pooling == "none"


def _values(f: Feature) -> str:
    return f"{f.name}.values"


def _empty_inputs(model: ShardedModel) -> Inputs:
    """Return the inputs of a batch without rows; they include tables that are looked up completely."""
    codes = sum(f.length for f in model.schema.of(Kind.CATEGORICAL))
    with torch.no_grad():
        return model.inputs_of(
            torch.zeros(0, model.inputs.continuous_columns), torch.zeros(0, codes, dtype=torch.int64)
        )


def traced(module: nn.Module, arguments: Sequence[Argument], kind: str) -> torch.export.ExportedProgram:
    """Trace a module of tensors as a program of torch.

    Args:
        module: a module in evaluation mode.
        arguments: arguments of its `forward`, in order.
        kind: the model's class, for the message.

    Raises:
        UserError: torch's exporter cannot trace it; the message names the line.
    """
    sizes: dict[str, Any] = {}
    examples, shapes = [], []
    for a in arguments:
        examples.append(_example(a, sizes))
        shapes.append({i: sizes[n][1] for i, n in enumerate(a.shape) if isinstance(n, str)})
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(module, tuple(examples), dynamic_shapes=(tuple(shapes),), strict=False)
    except Exception as e:  # torch raises many types, and a user's class may raise its own
        raise _refused(kind, e) from e


def traced_onnx(exported: ExportedNetwork) -> Any:
    """Return all graphs of a network as one ONNX model (`onnx.ModelProto`) with named inputs and outputs.

    Raises:
        UserError: torch's exporter cannot trace it, or ONNX lacks an operator; the message names the line.
    """
    kind = exported.model.config.kind
    program = traced(NetworkGraphs(exported, exported.graphs).eval(), exported.arguments, kind)
    outputs = [name for graph in exported.graphs for name in exported.outputs(graph)]
    try:
        with _quiet():
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[a.name for a in exported.arguments],
                output_names=outputs,
                verbose=False,
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as e:
        raise _refused(kind, e) from e
    assert onnx_program is not None
    return onnx_program.model_proto


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's messages about missing libraries and untraceable code, which the error reports."""
    with warnings.catch_warnings(), torch.inference_mode(False), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirect(io.StringIO()))
        previous_level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, previous_level)
        yield


def _example(a: Argument, sizes: dict[str, Any]) -> Tensor:
    """Return an example tensor of an argument; add torch's sizes and names of varying dimensions to `sizes`."""
    shape = []
    for n in a.shape:
        if isinstance(n, str):
            if n not in sizes:  # a new size, since torch would treat equal sizes as one dimension
                sizes[n] = _TRACED_ROWS + 2 * len(sizes), torch.export.Dim(f"size_{len(sizes)}")
            n = sizes[n][0]
        shape.append(n)
    return torch.zeros(*shape, dtype=a.dtype)


def _refused(kind: str, e: Exception) -> UserError:
    first = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
    return UserError(f"the model's class '{kind}' cannot be exported: {first}")
