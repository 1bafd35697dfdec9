"""The fitted workflow as a model of Triton's Python back end, by headrace's own Arrow kernels.

It is for workflows with operators that ONNX lacks. The back end's Python needs headrace with pyarrow, NumPy, pandas,
pydantic and PyYAML, but neither Spark nor torch. The folder `workflow/` is beside this file.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from headrace.errors import UserError
from headrace.export.features.columns import FeaturesStep
from headrace.storage import local


class TritonPythonModel:
    """Entry point that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the workflow. `args` has the configuration as JSON, the repository's path and the version."""
        config = json.loads(args["model_config"])
        self.outputs = [output["name"] for output in config["output"]]
        folder = Path(args["model_repository"]) / args["model_version"] / "workflow"
        self.step = FeaturesStep.load(local(folder), self.outputs)
        self.inputs = [tensor.name for column in self.step.columns for tensor in column.tensors]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request; a malformed one gets an error of its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            tensors = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            features = self.step(tensors)
        except UserError as e:
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(e)))
        outputs = [pb_utils.Tensor(name, _outer(features[name])) for name in self.outputs]
        return pb_utils.InferenceResponse(output_tensors=outputs)


def _outer(x: Any) -> Any:
    """Return [rows] as [rows, 1]: Triton's tensors have a dimension besides the rows."""
    return np.ascontiguousarray(x if x.ndim > 1 else x[:, None])
