"""Search of the items nearest to a vector, as a model of Triton's Python back end. Needs NumPy, and perhaps Faiss.

Files beside this one: `vectors.npy` float32 [items, D], `keys.npy`, texts [items], and `index.faiss` if Faiss searches.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

#: Scores in memory at once.
_SCORES = 1 << 22


class TritonPythonModel:
    """Entry point that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the vectors. `args` has the configuration as JSON, the repository's path and the version."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        self.keys = np.char.encode(np.load(folder / "keys.npy"), "utf-8").astype(object)
        self.vectors = np.load(folder / "vectors.npy", mmap_mode="r")
        self.k = int(parameters["found"])
        self.searcher: Any = None
        if parameters["index"] == "faiss":
            import faiss

            self.searcher = faiss.read_index(str(folder / "index.faiss"))
            self.searcher.nprobe = int(parameters["probes"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Search the vectors of all requests at once."""
        queries = [pb_utils.get_input_tensor_by_name(r, "query_vector").as_numpy() for r in requests]
        rows, scores = self._search(np.ascontiguousarray(np.concatenate(queries), np.float32))
        keys = np.append(self.keys, b"")[rows]
        starts = np.cumsum([len(q) for q in queries])[:-1]
        parts = zip(*(np.split(x, starts) for x in (keys, rows, scores)), strict=True)
        return [
            pb_utils.InferenceResponse(
                output_tensors=[
                    pb_utils.Tensor("item", key),
                    pb_utils.Tensor("item_row", row),
                    pb_utils.Tensor("item_score", score),
                ]
            )
            for key, row, score in parts
        ]

    def _search(self, queries: Any) -> tuple[Any, Any]:
        """Return rows int64 and dot products float32 [queries, k], best first, then -1 and minus infinity."""
        rows = np.full((len(queries), self.k), -1, np.int64)
        scores = np.full(rows.shape, -np.inf, np.float32)
        if self.searcher is not None:
            _, near = self.searcher.search(queries, self.k)
            for i, row_numbers in enumerate(near):
                hits = row_numbers[row_numbers >= 0]
                products = self.vectors[hits] @ queries[i]
                order = np.lexsort((hits, -products))
                rows[i, : len(hits)], scores[i, : len(hits)] = hits[order], products[order]
            return rows, scores
        step = max(1, _SCORES // max(1, len(self.vectors)))
        k = min(self.k, len(self.vectors))
        for first in range(0, len(queries), step):
            products = queries[first : first + step] @ self.vectors.T
            # Among equal scores the lower row wins, also at the k-th place.
            order = np.argsort(-products, axis=1, kind="stable")[:, :k]
            rows[first : first + step, :k] = order
            scores[first : first + step, :k] = np.take_along_axis(products, order, 1)
        return rows, scores
