"""Models of every class, of numbers large enough for rounding to be seen, and rows to ask them for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace import config
from headrace.comm.base import Collective, LocalCollective
from headrace.embeddings.jagged import JaggedTensor
from headrace.models.categorical import CategoricalBatch
from headrace.models.sharded_model import ShardedModel
from headrace.schema import DatasetSchema, Feature, Kind

Batch = Mapping[str, NDArray[Any]]

USERS, ITEMS, TAGS, DEVICES, TIMES = 1000, 60, 50, 40, 24
#: Raw ids that have a row.
KNOWN_IDS = np.concatenate([np.arange(1, DEVICES) * 1_000_003, [-(2**63), 2**63 - 1, -7]]).astype(np.int64)


def _of_codes(name: str, cardinality: int, **more: Any) -> Feature:
    return Feature(name=name, kind=Kind.CATEGORICAL, dtype="int32", cardinality=cardinality, **more)


_USER = _of_codes("user", USERS, tags=("user",))
_AGE = Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32", tags=("user",))
_TAGS = _of_codes("tags", TAGS, length=5, is_list=True, tags=("item",))
_PRICES = Feature(name="prices", kind=Kind.CONTINUOUS, dtype="float32", length=3, is_list=True, tags=("user",))
_ITEM = _of_codes("item", ITEMS, tags=("item",))
_SEEN = _of_codes("seen", ITEMS, vocabulary="item")
_HISTORY = _of_codes("history", ITEMS, length=5, is_list=True, vocabulary="item")
_TIMES = Feature(name="times", kind=Kind.CONTINUOUS, dtype="float32", length=TIMES, is_list=True)
_DEVICE = Feature(name="device", kind=Kind.CATEGORICAL, dtype="int64", cardinality=None, dynamic=True)
_DEVICES = _DEVICE.model_copy(update={"name": "devices", "is_list": True, "length": 5})
_LABEL = Feature(name="click", kind=Kind.LABEL, dtype="float32")

TASKS = {"click": config.Task(), "buy": config.Task(label="buy"), "both": config.Task(product=("click", "buy"))}


def _schema(*features: Feature) -> DatasetSchema:
    return DatasetSchema(features=(*features, _LABEL))


PLAIN = _schema(_USER, _AGE, _TAGS, _PRICES, _ITEM)
HISTORIES = _schema(_USER, _AGE, _TAGS, _ITEM, _HISTORY)
CODES_ALONE = _schema(_USER, _ITEM, _HISTORY)


@dataclass(frozen=True)
class ExportCase:
    """A model to be exported.

    Attributes:
        kind: its class.
        schema: of its dataset.
        settings: of `model`, beside the class.
        tasks: of `train.tasks`.
        longest: values of the longest list of a batch.
    """

    kind: str
    schema: DatasetSchema = PLAIN
    settings: Mapping[str, Any] = field(default_factory=dict)
    tasks: bool = False
    longest: int = 3000


def _args(**settings: Any) -> dict[str, Any]:
    return {"args": settings}


_PAIR = {"user": "user", "item": "item"}
CASES: Mapping[str, ExportCase] = {
    "dlrm": ExportCase("dlrm", settings={"bottom_mlp": (8,), "top_mlp": (16,), "pooling": "mean"}),
    "wide_deep": ExportCase("wide_deep", settings={**_args(deep_mlp=[8]), "pooling": "max"}),
    "deepfm": ExportCase("deepfm", settings=_args(deep_mlp=[8], dropout=0.2)),
    "dcn_v2": ExportCase("dcn_v2", settings=_args(low_rank=2, experts=2, deep_mlp=[8])),
    "final_mlp": ExportCase("final_mlp", settings=_args(first_mlp=[8, 4], second_mlp=[6], first_gate=["user"])),
    "masknet": ExportCase("masknet", settings=_args(blocks=[8, 8])),
    "shared_bottom": ExportCase("shared_bottom", tasks=True),
    "mmoe": ExportCase("mmoe", tasks=True),
    # A sum of 3,000 vectors is another one in another order, which four experts and two levels make visible.
    "ple": ExportCase("ple", settings={"pooling": "mean"}, tasks=True),
    "esmm": ExportCase("esmm", settings={"pooling": "mean"}, tasks=True),
    "matrix_factorization": ExportCase("matrix_factorization", CODES_ALONE, _args(**_PAIR)),
    "matrix_factorization, cosine": ExportCase(
        "matrix_factorization", CODES_ALONE, _args(**_PAIR, similarity="cosine", temperature=0.5)
    ),
    "neumf": ExportCase("neumf", CODES_ALONE, _args(**_PAIR, mlp=[8], mlp_dim=6)),
    "mult_vae": ExportCase("mult_vae", CODES_ALONE, _args(history="history", item="item", hidden=[12])),
    "lightgcn": ExportCase("lightgcn", CODES_ALONE, _args(**_PAIR, temperature=0.5)),
    "simplex": ExportCase("simplex", CODES_ALONE, _args(**_PAIR, history="history")),
    "two_tower": ExportCase("two_tower", PLAIN, _args(item="item", user_mlp=[8], item_mlp=[8], temperature=0.5)),
    "two_tower, items by code": ExportCase(
        "two_tower", PLAIN, _args(item="item", item_features=["item"], user_mlp=[8], item_mlp=[8])
    ),
    "sasrec": ExportCase("sasrec", HISTORIES, _args(item="item", history="history", length=10, heads=2)),
    "sasrec, newest first": ExportCase(
        "sasrec", HISTORIES, _args(item="item", history="history", length=10, newest="first", temperature=0.2)
    ),
    "hstu": ExportCase("hstu", HISTORIES, _args(item="item", history="history", length=10, heads=2)),
    "hstu, times": ExportCase(
        "hstu",
        _schema(_USER, _ITEM, _HISTORY, _TIMES),
        _args(item="item", history="history", length=10, times="times"),
        longest=TIMES,
    ),
    "din": ExportCase("din", HISTORIES, _args(histories={"item": "history"}, attention_mlp=[8], mlp=[8])),
    "din, softmax": ExportCase(
        "din", HISTORIES, _args(histories={"item": "history"}, softmax=True, activation="prelu", mlp=[8])
    ),
    "dlrm, raw ids": ExportCase(
        "dlrm", _schema(_USER, _AGE, _DEVICE, _DEVICES), {"bottom_mlp": (8,), "top_mlp": (16,), "pooling": "mean"}
    ),
    "din, raw ids": ExportCase(
        "din",
        _schema(_USER, _AGE, _ITEM, _DEVICES, _DEVICE, _HISTORY),
        _args(histories={"item": "history", "device": "devices"}, mlp=[8]),
    ),
}


def make_model(case: ExportCase, collective: Collective | None = None) -> ShardedModel:
    """Return the model of a case, in evaluation mode, the same on any number of ranks.

    Its tables' numbers are multiplied by 20; raw ids `KNOWN_IDS` have rows; LightGCN has a graph.
    """
    spec = config.Model.model_validate({"class": case.kind, "embedding_dim": 8, **case.settings})
    model = ShardedModel(case.schema, spec, collective or LocalCollective(), 3, tasks=TASKS if case.tasks else {})
    with torch.no_grad():
        for rows in model.embeddings.weights:
            rows.mul_(20)
        if hasattr(model.network, "observe"):
            model.observe(_edges())
        if model.dynamic is not None and model.absent is not None:
            _admit(model, case.schema)
            for absent in model.absent:
                absent.copy_(torch.linspace(-0.5, 0.5, absent.shape[-1]).expand_as(absent))
        _mend_statistics(model)
    return model.eval()


def _edges() -> list[Any]:
    rng = np.random.default_rng(5)
    codes = torch.from_numpy(np.stack([rng.integers(0, USERS, 400), rng.integers(0, ITEMS, 400)], 1))
    lists = [JaggedTensor.of_lengths(torch.zeros(0, dtype=torch.int64), torch.zeros(400, dtype=torch.int64))]
    return [(torch.zeros(400, 0), CategoricalBatch(codes, lists), torch.ones(400))]


def _mend_statistics(model: ShardedModel) -> None:
    """Set moving averages (Dice) that training would have moved."""
    generator = torch.Generator().manual_seed(7)
    for name, buffer in model.network.named_buffers():
        if name.endswith((".mean", ".variance")):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.1)


def _admit(model: ShardedModel, schema: DatasetSchema) -> None:
    """Give the known ids rows, as a step of training does."""
    inputs = dict(batch(ExportCase("", schema), len(KNOWN_IDS), longest=3))
    for f in schema.of(Kind.CATEGORICAL):
        if f.dynamic:
            inputs[f.name] = KNOWN_IDS[:, None] if f.is_list else KNOWN_IDS
    with torch.enable_grad():
        model.train()(*tensors(schema, inputs))
    assert model.dynamic is not None
    for table in model.dynamic.tables:
        table.weight.mul_(20)


def batch(case: ExportCase, rows: int = 64, seed: int = 1, longest: int | None = None) -> Batch:
    """Draw nulls and unknown values among codes and ids, empty lists, one list of thousands of values with nulls
    between.
    """
    rng = np.random.default_rng(seed)
    longest = case.longest if longest is None else longest
    columns: dict[str, NDArray[Any]] = {}
    for f in (*case.schema.of(Kind.CONTINUOUS), *case.schema.of(Kind.CATEGORICAL)):
        if f.kind is Kind.CONTINUOUS:
            columns[f.name] = rng.normal(size=(rows, f.length)).astype(np.float32)
            if f.name == "times":
                columns[f.name] = np.sort(np.abs(columns[f.name]) * 1e4, axis=1)
        elif f.is_list:
            columns[f.name] = _lists(f, rng, rows, longest)
        else:
            columns[f.name] = _draw(f, rng, rows)
            columns[f.name][:3] = [0, 1, (f.cardinality or 8) - 1][:rows]
    return columns


def _draw(f: Feature, rng: np.random.Generator, size: Any) -> NDArray[np.int64]:
    if f.dynamic:
        return np.where(rng.random(size) < 0.2, rng.integers(-(2**62), 2**62, size), rng.choice(KNOWN_IDS, size))
    return rng.integers(0, f.cardinality or 0, size)


def _lists(f: Feature, rng: np.random.Generator, rows: int, longest: int) -> NDArray[np.int64]:
    lists = np.zeros((rows, max(1, longest)), np.int64)
    if longest:
        for row, length in enumerate(rng.integers(0, min(13, longest + 1), rows)):
            lists[row, :length] = _draw(f, rng, length)
        lists[0] = 0
        if rows > 1:
            lists[1] = _draw(f, rng, longest)
            lists[1, ::7] = 0
    return lists


def tensors(schema: DatasetSchema, inputs: Batch) -> tuple[torch.Tensor, CategoricalBatch]:
    """Return a batch as a model takes it."""
    rows = len(next(iter(inputs.values())))
    continuous = [torch.from_numpy(inputs[f.name]) for f in schema.of(Kind.CONTINUOUS)]
    scalars = [torch.from_numpy(inputs[f.name]) for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
    lists = [
        JaggedTensor.of_padded(torch.from_numpy(inputs[f.name]), 0) for f in schema.of(Kind.CATEGORICAL) if f.is_list
    ]
    codes = torch.stack(scalars, 1) if scalars else torch.zeros(rows, 0, dtype=torch.int64)
    return torch.cat(continuous, 1) if continuous else torch.zeros(rows, 0), CategoricalBatch(codes, lists)
