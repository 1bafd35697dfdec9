"""Ordering of scored pairs to a list for each user, best first, as a model of Triton's Python back end.

It needs only NumPy, and `keys.npy`, texts [items], beside this file. From `pair_user`, `pair_item` int64 [pairs, 1] and
`score` float32 [pairs, 1] it makes `item`, texts, and `item_score` [users, k]; `item_row` [users, n] gives the number
of users. The list of a user with fewer items ends with "" and minus infinity. Of equal scores the lower row is first.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Entry point that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the items' keys. `args` has the configuration as JSON, the repository's path and the version."""
        config = json.loads(args["model_config"])
        self.k = int(config["parameters"]["k"]["string_value"])
        folder = Path(args["model_repository"]) / args["model_version"]
        keys = np.char.encode(np.load(folder / "keys.npy"), "utf-8").astype(object)
        self.keys = np.append(keys, b"")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        names = ("pair_user", "pair_item", "score", "item_row")
        user, item, score, item_rows = (pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in names)
        user, item, score = user.ravel(), item.ravel(), score.ravel()
        items = np.full((len(item_rows), self.k), -1, np.int64)
        scores = np.full(items.shape, -np.inf, np.float32)
        for row in range(len(item_rows)):
            pairs = np.flatnonzero(user == row)
            best = pairs[np.lexsort((item[pairs], -score[pairs]))][: self.k]
            items[row, : len(best)], scores[row, : len(best)] = item[best], score[best]
        tensors = [pb_utils.Tensor("item", self.keys[items]), pb_utils.Tensor("item_score", scores)]
        return pb_utils.InferenceResponse(output_tensors=tensors)
