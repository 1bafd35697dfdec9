"""Comparison of a server's answers with those of a saved model: Triton with an exported repository, or `headrace
serve`.

    python scripts/compare_server.py SAVED URL... --model NAME [--requests N] [--rows N] [--tolerance T]

SAVED is the folder of a saved model (`headrace models PIPELINE` names it), NAME the model of the server that takes raw
columns (the ensemble of Triton, the model itself of `headrace serve`). Rows are made of what the model's vocabularies
know, of values that they do not know, of nulls, and of lists from empty to long. Each request goes to each server over
HTTP by KServe's protocol, with Triton's own client; the answers are compared with what headrace computes from the saved
model in this process. Prints the largest difference of each output of each server; exits with 1 where one is above the
tolerance (absolute and relative), or a server answers with an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import tritonclient.http as http
from numpy.typing import NDArray

from headrace.export.features.columns import RawColumn, made_of, raw_columns, to_tensors
from headrace.features.ops.categories import Categorify
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.predictor import load_predictor
from headrace.storage import local, local_folder

#: Of values that are missing, and of those that no vocabulary knows.
_MISSING, _UNKNOWN = 0.1, 0.1
#: Lists are as long as this at most, but for one in each request.
_LENGTH, _LONG = 6, 300
_SECONDS_OF_A_YEAR, _FIRST_YEAR = 31_556_952, 54
_LETTERS = 6


@dataclass(frozen=True)
class RawRows:
    """Draws rows of a workflow's input columns."""

    workflow: FittedWorkflow
    columns: tuple[RawColumn, ...]

    @staticmethod
    def for_workflow(workflow: FittedWorkflow) -> RawRows:
        """Return rows of the columns that the features are made of."""
        return RawRows(workflow, raw_columns(workflow.workflow, made_of(workflow.features)))

    def draw(self, rows: int, rng: np.random.Generator) -> pa.RecordBatch:
        """Draw rows, each time others; columns of which no feature is made are null."""
        drawn = {c.name: self._column(c, rows, rng) for c in self.columns}
        types = {name: self.workflow.workflow.input_type(name).arrow for name in self.workflow.input_columns}
        return pa.RecordBatch.from_pydict({n: drawn[n] if n in drawn else pa.nulls(rows, t) for n, t in types.items()})

    def _column(self, column: RawColumn, rows: int, rng: np.random.Generator) -> pa.Array:
        known = self._known(column.name)
        if not column.type.is_list:
            return pa.array(self._values(column, known, rows, rng, column.required), column.type.arrow)
        lengths = rng.integers(0, _LENGTH, rows)
        lengths[0] = _LONG
        lists = [self._values(column, known, int(n), rng, False) for n in lengths]
        return pa.array([None if not x and rng.random() < 0.5 else x for x in lists], column.type.arrow)

    def _values(
        self, column: RawColumn, known: Sequence[str], n: int, rng: np.random.Generator, required: bool
    ) -> list[Any]:
        missing = np.zeros(n, np.bool_) if required else rng.random(n) < _MISSING
        return [None if m else self._value(column.type.element, known, rng) for m in missing]

    def _value(self, element: str, known: Sequence[str], rng: np.random.Generator) -> Any:
        if known and rng.random() > _UNKNOWN:
            value = known[int(rng.integers(len(known)))]
            return value if element == "string" else value == "true" if element == "boolean" else int(value)
        return _anything(element, rng)

    def _known(self, column: str) -> list[str]:
        """Return the values of the first vocabulary that a chain of the column has."""
        for chain in self.workflow.workflow.chains:
            for step in chain.steps:
                if column in step.inputs and isinstance(step.op, Categorify):
                    table = self.workflow.vocabularies[step.op.vocabulary_of(column)].table
                    values = [str(v) for v in table.column("value").to_pylist()]
                    is_integer = step.inputs[column].element in ("int", "bigint")
                    return [v for v in values if not is_integer or v.removeprefix("-").isdigit()]
        return []


def _anything(element: str, rng: np.random.Generator) -> Any:
    """Draw a value of a type."""
    seconds = int(rng.integers(0, _FIRST_YEAR * _SECONDS_OF_A_YEAR))
    values = {
        "string": "".join(rng.choice([*"abcdefé日"], _LETTERS)),
        "boolean": bool(rng.integers(2)),
        "float": float(np.float32(rng.normal(scale=10))),
        "double": float(rng.normal(scale=10)),
        "decimal": None,
        "timestamp": seconds * 1_000_000,
        "date": seconds // 86_400,
    }
    return values.get(element, int(rng.integers(-(2**31), 2**31)))


class ServerClient:
    """One that speaks KServe's protocol over HTTP."""

    def __init__(self, url: str, model: str) -> None:
        """Connect to a server. `url`: HOST:PORT, with or without http://."""
        self._client = http.InferenceServerClient(url.removeprefix("http://"))
        self._model = model
        metadata = self._client.get_model_metadata(model)
        self._inputs = {t["name"]: (t["datatype"], len(t["shape"])) for t in metadata["inputs"]}
        self.outputs = [t["name"] for t in metadata["outputs"]]

    def ask(self, tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return outputs [rows] of raw columns. Triton's tensors have a dimension besides the rows."""
        inputs = []
        for name, (datatype, dimensions) in self._inputs.items():
            x = tensors[name]
            shaped = x[:, None] if x.ndim < dimensions else x
            inputs.append(http.InferInput(name, list(shaped.shape), datatype))
            inputs[-1].set_data_from_numpy(np.ascontiguousarray(shaped))
        answer = self._client.infer(self._model, inputs)
        rows = len(next(iter(tensors.values())))
        return {name: np.asarray(answer.as_numpy(name)).reshape(rows, -1)[:, 0] for name in self.outputs}


def compare(saved: str, urls: Sequence[str], model: str, requests: int, rows: int, tolerance: float) -> bool:
    """Print the largest differences; whether all are within the tolerance."""
    folder = local(local_folder(saved, "SAVED"))
    workflow = FittedWorkflow.load(folder / "workflow")
    predictor = load_predictor(folder)
    servers = {url: ServerClient(url, model) for url in urls}
    drawn, rng, fine = RawRows.for_workflow(workflow), np.random.default_rng(0), True
    worst = {(url, output): 0.0 for url, server in servers.items() for output in server.outputs}
    for number in range(requests):
        batch = drawn.draw(rows if number else 1, rng)
        features = workflow.transform_batch(batch)
        expected = predictor.predict_tasks(
            {n: features.column(i).to_numpy() for i, n in enumerate(features.schema.names)}
        )
        tensors = to_tensors(drawn.columns, batch)
        for url, server in servers.items():
            for output, answered in server.ask(tensors).items():
                apart = np.abs(answered - expected[output]) / np.maximum(1, np.abs(expected[output]))
                # NaN is apart from everything.
                fine &= bool((apart <= tolerance).all())
                worst[url, output] = max(worst[url, output], float(np.nan_to_num(apart, nan=np.inf).max(initial=0)))
    for (url, output), apart in worst.items():
        print(f"{url} {model} {output}: {requests} requests of {rows} rows, largest difference {apart:.2g}")
    return fine


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("saved", metavar="SAVED")
    parser.add_argument("urls", metavar="URL", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    args = parser.parse_args()
    try:
        fine = compare(args.saved, args.urls, args.model, args.requests, args.rows, args.tolerance)
    except http.InferenceServerException as e:
        sys.exit(f"the server answers: {e}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
