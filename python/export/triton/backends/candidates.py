"""Pairs of users and the items that an index has found, as input rows of a ranking model.

A model of Triton's Python back end that needs only NumPy. Files beside it describe a catalogue of items: `keys.npy`,
texts [items], and `column-N.npy` for each tensor of their columns, which `columns.json` names.

Each user is a row of `item_row`, int64 [users, n] (rows of the catalogue, -1 for none), and of `exclude`, texts [users,
m]: keys of items that the user must not get, "" for none. The other inputs are the users' columns. The outputs have a
row for each remaining pair: the user's columns, the item's columns from the catalogue, and `pair_user`, `pair_item`
int64 [pairs, 1], the rows of both. If no pair remains there is one row, with the user -1.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Entry point that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the catalogue. `args` has the configuration as JSON, the repository's path and the version."""
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        keys = np.char.encode(np.load(folder / "keys.npy"), "utf-8")
        self.row_of_key = {key: i for i, key in enumerate(keys.tolist())}
        names = json.loads((folder / "columns.json").read_text())
        self.catalogue = {name: _texts(np.load(folder / file)) for name, file in names.items()}
        other_inputs = {"item_row", "exclude"}
        self.users = [tensor["name"] for tensor in config["input"] if tensor["name"] not in other_inputs]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        def input_array(name: str) -> Any:
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        item_rows, excluded = input_array("item_row"), input_array("exclude")
        columns = {name: input_array(name) for name in self.users}
        rows = {name: len(x) for name, x in {"item_row": item_rows, "exclude": excluded, **columns}.items()}
        if len(set(rows.values())) > 1:
            message = f"tensors of different numbers of users: {rows}"
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message))
        is_allowed = item_rows >= 0
        for user, keys in enumerate(excluded.tolist()):
            is_allowed[user] &= ~np.isin(
                item_rows[user], [self.row_of_key[key] for key in keys if key in self.row_of_key]
            )
        users, positions = np.nonzero(is_allowed)
        items = item_rows[users, positions]
        if not len(users):
            users, items = np.array([-1]), np.array([0])
        tensors = {name: x[users] for name, x in columns.items()}
        tensors |= {name: x[items] for name, x in self.catalogue.items()}
        tensors |= {"pair_user": users[:, None], "pair_item": items[:, None]}
        outputs = [pb_utils.Tensor(name, np.ascontiguousarray(x)) for name, x in tensors.items()]
        return pb_utils.InferenceResponse(output_tensors=outputs)


def _texts(x: Any) -> Any:
    return np.char.encode(x, "utf-8").astype(object) if x.dtype.kind == "U" else x
