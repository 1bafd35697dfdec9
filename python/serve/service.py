"""What is answered, whichever way it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace import __version__
from headrace.serve.catalogue import Served
from headrace.serve.errors import RequestError
from headrace.serve.loader import Loader
from headrace.serve.metrics import Metrics
from headrace.serve.options import ServeOptions

NAME = "headrace"
EXTENSIONS = ("binary_tensor_data", "model_repository", "model_configuration")


class Service:
    """Of one server.

    Attributes:
        options: of the server.
        loader: what is served.
        metrics: what is counted.
    """

    def __init__(self, options: ServeOptions, loader: Loader, metrics: Metrics) -> None:
        self.options, self.loader, self.metrics = options, loader, metrics
        self.pending_bytes = 0

    def find(self, name: str, version: str) -> Served:
        """See `Catalogue.find`."""
        return self.loader.catalogue.find(name, version)

    def check_size(self, count: int) -> None:
        """Raise RequestError (413) where a body has too many bytes."""
        most = self.options.limits.body_bytes
        if count > most:
            raise RequestError(413, f"a body of {count:,} bytes or more; a request may have {most:,}")

    def take_bytes(self, count: int) -> None:
        """Count bytes of a body that have arrived. Raises RequestError (503): all together are too many."""
        if self.pending_bytes + count > self.options.limits.pending_bytes:
            raise RequestError(503, f"{self.pending_bytes:,} bytes of other requests are in memory", retry_after=1)
        self.pending_bytes += count

    def give_back(self, count: int) -> None:
        """They have been answered."""
        self.pending_bytes -= count

    @property
    def ready(self) -> bool:
        """Whether all that is wanted is served."""
        return self.loader.catalogue.ready

    def has(self, name: str, version: str) -> bool:
        """Whether a model answers."""
        try:
            self.find(name, version)
        except RequestError:
            return False
        return True

    @staticmethod
    def server() -> dict[str, Any]:
        """The server's metadata."""
        return {
            "name": NAME,
            "version": __version__,
            "extensions": ["binary_tensor_data", "model_repository", "model_configuration"],
        }

    def metadata(self, name: str, version: str) -> dict[str, Any]:
        """A model's. Raises RequestError."""
        model = self.find(name, version).model
        return {
            "name": model.name,
            "versions": [version] if version else self.loader.catalogue.versions(name),
            "platform": "onnxruntime_onnx",
            "inputs": [x.json() for x in model.inputs],
            "outputs": [x.json() for x in model.outputs],
        }

    def config(self, name: str, version: str) -> dict[str, Any]:
        """A model's, by Triton's fields: rows are not among dims where requests are merged. Raises RequestError."""
        model = self.find(name, version).model
        of_rows = 1 if model.by_row else 0

        def tensors(specs: Sequence[Any]) -> list[dict[str, Any]]:
            kinds = {"BYTES": "TYPE_STRING"}
            return [
                {
                    "name": x.name,
                    "data_type": kinds.get(x.datatype, f"TYPE_{x.datatype}"),
                    "dims": list(x.shape[of_rows:]),
                }
                for x in specs
            ]

        return {
            "name": model.name,
            "platform": "onnxruntime_onnx",
            "max_batch_size": self.options.limits.rows if model.by_row else 0,
            "input": tensors(model.inputs),
            "output": tensors(model.outputs),
        }
