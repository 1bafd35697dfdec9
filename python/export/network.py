"""A model's network by itself: a torch module of plain tensors, for torch's exporter to trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from headrace.embeddings.jagged import JaggedTensor
from headrace.export.record import ITEM, MODEL, QUERY
from headrace.models.inputs import Inputs
from headrace.models.lookups import EmbeddingLookup, lookups_of, table_name
from headrace.models.predictor import ONLY_TASK
from headrace.models.sharded_model import ShardedModel
from headrace.schema import Feature, Kind

#: How names begin that a graph has for itself.
RESERVED = "lookup."
CONTINUOUS = f"{RESERVED}continuous"
#: What the graphs of vectors give.
QUERY_VECTOR, ITEM_VECTOR = "query_vector", "item_vector"
#: The dimension of a batch's rows.
ROWS = "rows"


@dataclass(frozen=True)
class Argument:
    """A tensor that the network is given.

    Attributes:
        name: in the graph.
        shape: a name stands for what differs from batch to batch.
        dtype: float32 or int64.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype


def vectors_name(lookup: str) -> str:
    """Return the name of a lookup's result: float32 [rows, D], [values, D] of a sequence, [cardinality, D] of a whole
    table.
    """
    return f"{RESERVED}vectors.{lookup}"


def ids_name(feature: str) -> str:
    """Ids of a feature, int64 [rows], or of a list [values], without nulls."""
    return f"{RESERVED}ids.{feature}"


def lengths_name(feature: str) -> str:
    """Return the name of the number of values in each row of a list: int64 [rows]."""
    return f"{RESERVED}lengths.{feature}"


class ExportedNetwork:
    """Exported part of a model: a network and its lookups, and the tables that are not the model's own.

    A network that says how it is `frozen` (LightGCN, whose vectors follow from whole tables and a graph) is replaced.
    """

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self.network: nn.Module = model.network
        self.features: Mapping[str, Feature] = {f.name: f for f in model.schema.of(Kind.CATEGORICAL)}
        frozen = getattr(model.network, "frozen", None)
        rows: Mapping[str, Tensor] = {}
        if frozen is not None:
            self.network, rows = frozen(_empty_inputs(model))
        own = lookups_of(self.network)
        #: Whether the network sees `Inputs.vectors`, one of each categorical feature.
        self.has_vectors = own is None
        pooling, dim = model.config.pooling, model.config.embedding_dim
        self.lookups: Sequence[EmbeddingLookup] = (
            [EmbeddingLookup(name, name, dim, pooling) for name in self.features] if own is None else own
        )
        #: By name, tables that are in place of the model's: float32 [rows, D].
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
        """Names of what a graph gives."""
        if graph != MODEL:
            return (QUERY_VECTOR if graph == QUERY else ITEM_VECTOR,)
        return tuple(self.model.tasks.specs) or (ONLY_TASK,)

    @property
    def arguments(self) -> list[Argument]:
        """Return the arguments of `NetworkGraphs`, in order."""
        columns = self.model.inputs.continuous_columns
        found = [Argument(CONTINUOUS, (ROWS, columns), torch.float32)] if columns else []
        for f in self.features.values():
            found.append(Argument(ids_name(f.name), (_values(f) if f.is_list else ROWS,), torch.int64))
            if f.is_list:
                found.append(Argument(lengths_name(f.name), (ROWS,), torch.int64))
        for w in self.lookups:
            f = self.features[w.feature]
            if w.ids == "negatives":
                continue
            rows: int | str = (f.cardinality or 0) if w.ids == "all" else _values(f) if is_sequence(w) else ROWS
            found.append(Argument(vectors_name(w.name), (rows, w.dim), torch.float32))
        return found


class NetworkGraphs(nn.Module):
    """Some of a network's graphs, of the tensors of `ExportedNetwork.arguments`; their outputs follow each other."""

    def __init__(self, exported: ExportedNetwork, graphs: Sequence[str]) -> None:
        super().__init__()
        self.network = exported.network
        self._exported, self._graphs = (exported,), tuple(graphs)  # not submodules: tables have no place here
        self._arguments = exported.arguments

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """float32 [rows] of each task, as `Predictor.predict_tasks`; or vectors float32 [rows, D]."""
        (exported,) = self._exported
        model, network = exported.model, exported.network
        inputs = self._inputs({a.name: x for a, x in zip(self._arguments, tensors, strict=True)})
        found: list[Tensor] = []
        for graph in self._graphs:
            if graph != MODEL:
                of = network.queries if graph == QUERY else network.items
                found.append(of(inputs).float())  # type: ignore[operator]
                continue
            outputs = model.tasks.complete({name: value.float() for name, value in network(inputs).items()})
            tasks = model.tasks
            found += [tasks.value(name, outputs[name]) for name in tasks.specs] or [model.value(outputs["logits"])]
        return tuple(found)

    def _inputs(self, given: Mapping[str, Tensor]) -> Inputs:
        (exported,) = self._exported
        rows = next(given[a.name].shape[0] for a in self._arguments if a.shape[0] == ROWS)
        ids: dict[str, Tensor | JaggedTensor] = {}
        for name, f in exported.features.items():
            x = given[ids_name(name)]
            ids[name] = JaggedTensor(x, pad(given[lengths_name(name)].cumsum(0), (1, 0))) if f.is_list else x
        found: dict[str, Tensor | JaggedTensor] = {}
        for w in exported.lookups:
            of = ids[w.feature]
            if w.ids == "negatives":
                found[w.name] = torch.zeros(rows, 0, w.dim)
            elif is_sequence(w) and isinstance(of, JaggedTensor):
                found[w.name] = JaggedTensor(given[vectors_name(w.name)], of.offsets)
            else:
                found[w.name] = given[vectors_name(w.name)]
        vectors = torch.zeros(rows, 0, exported.model.config.embedding_dim)
        if exported.has_vectors and found:
            vectors = torch.stack([x for x in found.values() if isinstance(x, Tensor)], 1)
        continuous = given[CONTINUOUS] if CONTINUOUS in given else torch.zeros(rows, 0)
        nothing = torch.zeros(rows, 0, dtype=torch.int64)
        return Inputs(exported.model.inputs, continuous, vectors, embeddings=found, ids=ids, negatives=nothing)


def is_sequence(w: EmbeddingLookup) -> bool:
    """Return whether a lookup gives a vector for each value of a list."""
    return w.ids == "batch" and w.pooling == "none"


def _values(f: Feature) -> str:
    return f"{f.name}.values"


def _empty_inputs(model: ShardedModel) -> Inputs:
    """Return the inputs of a batch without rows; tables that are looked up whole are part of it all the same."""
    codes = sum(f.length for f in model.schema.of(Kind.CATEGORICAL))
    with torch.no_grad():
        return model.inputs_of(
            torch.zeros(0, model.inputs.continuous_columns), torch.zeros(0, codes, dtype=torch.int64)
        )
