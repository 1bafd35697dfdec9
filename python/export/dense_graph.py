"""The network between embeddings and predictions, by torch's exporter."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.models.inputs import Inputs
from headrace.models.predictor import ONLY_TASK
from headrace.models.sharded_model import ShardedModel

CONTINUOUS, VECTORS = "continuous", "vectors"
#: The dimension of a batch's rows.
ROWS = "rows"
#: Of the batch by which the network is traced: not 0 and not 1, which torch takes for constants.
_TRACED_ROWS = 3


class Dense(nn.Module):
    """Predictions float32 [B] of each task from continuous float32 [B, C] and vectors float32 [B, F, D]."""

    def __init__(self, model: ShardedModel) -> None:
        super().__init__()
        self.network = model.network
        self._model = (model,)  # not a submodule: its tables have no place here

    @property
    def outputs(self) -> tuple[str, ...]:
        """The tasks' names, in the order of what `forward` gives."""
        return tuple(self._model[0].tasks.specs) or (ONLY_TASK,)

    def forward(self, continuous: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        """As `Predictor.predict_tasks`."""
        (model,) = self._model
        outputs = model.outputs(Inputs(model.inputs, continuous, vectors))
        if not model.tasks.specs:
            return (model.value(outputs["logits"]),)
        return tuple(model.tasks.value(name, outputs[name]) for name in model.tasks.specs)


def export_dense(model: ShardedModel) -> Any:
    """The network as an ONNX model (`onnx.ModelProto`) with inputs `continuous` and `vectors`, outputs by task.

    Raises:
        UserError: torch's exporter cannot trace it; says where.
    """
    dense = Dense(model).eval()
    features = model.inputs
    arguments = (
        torch.zeros(_TRACED_ROWS, features.continuous_columns),
        torch.zeros(_TRACED_ROWS, len(features.categorical), features.embedding_dim),
    )
    rows = torch.export.Dim(ROWS, min=1)
    quiet = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), torch.inference_mode(False):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                dense,
                arguments,
                dynamo=True,
                input_names=[CONTINUOUS, VECTORS],
                output_names=list(dense.outputs),
                dynamic_shapes=({0: rows}, {0: rows}),
                verbose=False,
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as e:
        first = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise UserError(f"the model's class '{model.config.kind}' cannot be exported: {first}") from e
    assert program is not None
    return program.model_proto
