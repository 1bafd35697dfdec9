"""The fitted workflow by its Arrow kernels, from the tensors of a request to those that a model asks for.

Imports neither Spark, torch nor ONNX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.export.features.columns import FEATURE, RawColumn, Tensors, made_of, raw_columns, to_batch
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.schema import Feature, Kind
from headrace.storage import Location


@dataclass(frozen=True)
class FeaturesStep:
    """The features by Arrow kernels, with the tensors of the graph (headrace.export.features.graph_file)."""

    workflow: FittedWorkflow
    columns: tuple[RawColumn, ...]
    features: tuple[Feature, ...]

    @staticmethod
    def from_workflow(workflow: FittedWorkflow, names: Sequence[str] | None = None) -> FeaturesStep:
        """`names`: of the features that are made; None: all."""
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
        # Columns that stand in a chain with others, and of which none of these features is made.
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
