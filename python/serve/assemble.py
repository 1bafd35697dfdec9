"""The models of a version: its graphs, and what they are together.

A folder without export.json is the model MODEL. An export has, with the names that it has in a repository of Triton's
(`headrace export --format triton`):

- MODEL.model: rows of codes and numbers to predictions
- MODEL.features: raw columns to such rows, where the export has that graph
- MODEL: both, one behind the other; without MODEL.features the same as MODEL.model
- MODEL.query, MODEL.item: of a model in retrieval form: vectors of what a row asks for, and of its item
- MODEL.index: a vector to the codes of the items nearest to it, by all dot products
- MODEL.retrieve: MODEL.features, MODEL.query, MODEL.index
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from headrace.serve.blocks import Blocks, blocks_of
from headrace.serve.model import Graph, LoadFailure, Model
from headrace.serve.repository import VersionFolder
from headrace.serve.tensors import Array, TensorSpec

#: Items that MODEL.index gives, best first.
FOUND = 100
#: How outputs of MODEL.features end: a graph's inputs and outputs share one space of names.
_SUFFIX = ".feature"
#: Scores that are made at once.
_SCORES = 1 << 22


def models_of(found: VersionFolder, threads: int, allow_nan: bool) -> dict[str, Model]:
    """Load a version, by the names under which it is asked. Raises LoadFailure, ValueError: what is wrong with it."""
    parts, name, version = found.parts(), found.model, found.version
    if not parts.graphs:
        return {name: Graph(name, version, parts.graph, threads, allow_nan)}
    models: dict[str, Model] = {
        f"{name}.{key}": Graph(f"{name}.{key}", version, file, threads, allow_nan) for key, file in parts.graphs.items()
    }
    features = [models[f"{name}.features"]] if "features" in parts.graphs else []
    if "model" in parts.graphs:
        models[name] = Chain(name, version, [*features, models[f"{name}.model"]])
    if parts.items is not None and "query" in parts.graphs:
        models[f"{name}.index"] = index = Index(f"{name}.index", version, *parts.items)
        models[f"{name}.retrieve"] = Chain(f"{name}.retrieve", version, [*features, models[f"{name}.query"], index])
    return models


class Chain(Model):
    """Models one behind the other: the outputs of each are, by their names, inputs of the next."""

    def __init__(self, name: str, version: int, models: Sequence[Model]) -> None:
        first, last = models[0], models[-1]
        super().__init__(name, version, first.inputs, last.outputs, all(m.by_row for m in models))
        self._first = first
        self._then: list[tuple[Model, list[int]]] = []
        for before, model in pairwise(models):
            given = {x.name.removesuffix(_SUFFIX): i for i, x in enumerate(before.outputs)}
            if missing := [x.name for x in model.inputs if x.name not in given]:
                raise LoadFailure(f"'{model.name}' asks for {', '.join(missing)}, which '{before.name}' does not give")
            self._then.append((model, [given[x.name] for x in model.inputs]))
        self.warm_up()

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        return self.run_blocks(blocks_of(feeds))

    def run_blocks(self, blocks: Blocks) -> list[Array]:
        found = self._first.run_blocks(blocks)
        for model, columns in self._then:
            found = model.run([found[i] for i in columns])
        return found


class Index(Model):
    """Codes of the items with the greatest dot products, best first; -1 and minus infinity behind the last one."""

    def __init__(self, name: str, version: int, file: Path, first_code: int) -> None:
        try:
            self._vectors = np.load(file, mmap_mode="r")[first_code:]
        except (OSError, ValueError) as e:
            raise LoadFailure(f"{file}: {e}") from None
        if self._vectors.ndim != 2 or self._vectors.dtype != np.float32:
            raise LoadFailure(f"{file} must be float32 [items, columns]")
        self._first_code = first_code
        inputs = [TensorSpec("query_vector", "FP32", (-1, self._vectors.shape[1]))]
        outputs = [TensorSpec("item_row", "INT64", (-1, FOUND)), TensorSpec("item_score", "FP32", (-1, FOUND))]
        super().__init__(name, version, inputs, outputs, True)

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        (queries,) = feeds
        codes = np.full((len(queries), FOUND), -1, np.int64)
        scores = np.full(codes.shape, -np.inf, np.float32)
        k = min(FOUND, len(self._vectors))
        step = max(1, _SCORES // max(1, len(self._vectors)))
        for at in range(0, len(queries) if k else 0, step):
            made = queries[at : at + step] @ self._vectors.T
            # Of equal scores the lower code comes first, at the border of the best k too.
            order = np.argsort(-made, axis=1, kind="stable")[:, :k]
            codes[at : at + step, :k] = order + self._first_code
            scores[at : at + step, :k] = np.take_along_axis(made, order, 1)
        return [codes, scores]
