"""The parity table: model x format x precision, each the largest difference of exports and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.export_parity.ask import GraphAnswers, by_model, by_onnxruntime, by_torch_program, difference, rounded
from bench.export_parity.cases import CASES, Batch, ExportCase, batch, make_model
from headrace.export.files import Precision
from headrace.export.onnx_model import write_onnx
from headrace.export.torch_model import write_torch
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location, local

PRECISIONS: Sequence[Precision] = ("fp32", "fp16", "int8")
WRITE: Mapping[str, Callable[[ShardedModel, ModelCard, Location, Precision], int]] = {
    "onnx": write_onnx,
    "torch": write_torch,
}
ASK: Mapping[str, Callable[[Location, Batch], GraphAnswers]] = {"onnx": by_onnxruntime, "torch": by_torch_program}


@dataclass(frozen=True)
class ParityRow:
    """Differences of a model's exports from torch with tables of rounded numbers, by format and precision."""

    name: str
    differences: Mapping[tuple[str, str], float]
    #: By precision: how far the rounding of the tables moves the model's own predictions.
    rounding: Mapping[str, float]


def card_of(model: ShardedModel) -> ModelCard:
    """Return a record of a model that was not trained."""
    fields = {"pipeline": "p", "ds": "2026-01-01", "key": "k", "metrics": {}, "seed": 3, "files": ()}
    return ModelCard(kind=model.config.kind, model=model.config, schema=model.schema, tasks=model.tasks.specs, **fields)


def batches(case: ExportCase) -> list[Batch]:
    """Return the batches to compare: many rows with a very long list, one row, lists that are all empty."""
    return [batch(case), batch(case, 1, seed=2, longest=5), batch(case, 3, seed=3, longest=0)]


def measure(name: str, formats: Sequence[str], scratch: Path) -> ParityRow:
    """Export a model in all ways, and ask it."""
    case = CASES[name]
    model, inputs = make_model(case), batches(case)
    scratch.mkdir(parents=True)
    differences, moved = {}, {}
    unrounded = [by_model(model, case, x) for x in inputs]
    for precision in PRECISIONS:
        with rounded(model, precision):
            expected = [by_model(model, case, x) for x in inputs]
        moved[precision] = max(difference(a, b) for a, b in zip(expected, unrounded, strict=True))
        for form in formats:
            folder = scratch / f"{form}-{precision}"
            folder.mkdir()
            WRITE[form](model, card_of(model), local(folder), precision)
            answers = [ASK[form](local(folder), x) for x in inputs]
            differences[form, precision] = max(difference(a, b) for a, b in zip(answers, expected, strict=True))
    return ParityRow(name, differences, moved)


def markdown(rows: Sequence[ParityRow], formats: Sequence[str], precisions: Sequence[str]) -> str:
    """Return the table, for a document."""
    columns = [(form, precision) for form in formats for precision in precisions]
    head = [
        "model",
        *(f"{form} {precision}" for form, precision in columns),
        *(f"rounding {p}" for p in precisions[1:]),
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [f"{row.differences[c]:.1e}" for c in columns] + [f"{row.rounding[p]:.1e}" for p in precisions[1:]]
        lines.append([f"`{row.name}`", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
