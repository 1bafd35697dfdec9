"""Memory of a GPU for tables: a stand-in for the device says what is free when."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headrace.comm import World
from headrace.comm.base import LocalCollective
from headrace.config import Model, Sharding, Train
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.train.setup.state import reserved_gib, tables_gib

SCHEMA = DatasetSchema(
    features=(
        *(Feature(name=f"c{i}", kind=Kind.CONTINUOUS, dtype="float32") for i in range(13)),
        *(Feature(name=f"t{i}", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9) for i in range(26)),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)
MODEL = Model(embedding_dim=128, bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512, 256))


class Communicating(LocalCollective):
    """Takes memory of the device with the first message of each kind, as NCCL does."""

    def __init__(self) -> None:
        self.taken = 0.0

    def all_to_all(self, x: Tensor, send_rows: object) -> tuple[Tensor, list[int]]:
        self.taken += 2.0
        return x, [x.shape[0]]

    def all_reduce_sum(self, tensors: object) -> None:
        self.taken += 1.0


def free_of(monkeypatch: pytest.MonkeyPatch, gib: float) -> Communicating:
    collective = Communicating()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((gib - collective.taken) * 2**30, 80 * 2**30))
    return collective


def test_tables_leave_room_for_communication_and_the_dense_part(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tables_gib(torch.device("cpu"), free_of(monkeypatch, 43.0), 10.0)
    assert limit == pytest.approx(0.9 * (43 - 3 - 10))
    with pytest.raises(UserError, match=r"of 7\.0 GiB that are free on a GPU, 8\.0 are reserved.*reserve_gib"):
        tables_gib(torch.device("cpu"), free_of(monkeypatch, 10.0), 8.0)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_what_is_reserved_follows_from_the_layers(accumulate: int) -> None:
    """A DLRM's by its widths, written out; of a class that has no such widths by its own."""
    train = Train(batch_size=1_024, streams=4, device="cuda", accumulate=accumulate)
    bottom, top = (13, 512, 256, 128), (128 + 27 * 26 // 2, 1024, 1024, 512, 256, 1)
    weights = sum(a * b + b for w in (bottom, top) for a, b in pairwise(w))
    floats = 1_024 // accumulate * (sum(bottom) + sum(top) + 27 * 128) * 2 + 5 * weights
    assert reserved_gib(SCHEMA, MODEL, train, World()) == pytest.approx(0.5 + 4 * floats / 2**30)
    shallow, deep = (
        Model.model_validate({"class": "dcn_v2", "args": {"layers": 1, "deep_mlp": widths}}) for widths in ([8], [4096])
    )
    more = reserved_gib(SCHEMA, deep, train, World()) - reserved_gib(SCHEMA, shallow, train, World())
    flat = 13 + 26 * 16
    floats = (1_024 // accumulate * 2 * 2 + 5 * (flat + 2)) * (4096 - 8)
    assert more == pytest.approx(4 * floats / 2**30)


def test_what_is_reserved_grows_with_the_rows_of_a_micro_batch() -> None:
    train = Train(batch_size=65_536, streams=4, device="cuda")
    one_micro_batch = reserved_gib(SCHEMA, MODEL, train, World())
    # Of each row about 4 k floats of layers, and 3.5 k of vectors, and as many gradients.
    assert 3.5 < one_micro_batch < 5.5
    halves = {
        reserved_gib(SCHEMA, MODEL, train, World(size=2)),
        reserved_gib(SCHEMA, MODEL, train_of(accumulate=2), World()),
    }
    assert len(halves) == 1
    assert halves.pop() == pytest.approx(0.5 + (one_micro_batch - 0.5) / 2, rel=0.02)
    assert reserved_gib(SCHEMA, MODEL, train_of(cuda_graphs=True), World()) > 1.8 * one_micro_batch - 0.5
    settings = train_of(sharding=Sharding(reserve_gib=12))
    assert reserved_gib(SCHEMA, MODEL, settings, World()) == 12


def train_of(**more: object) -> Train:
    return Train.model_validate({"batch_size": 65_536, "streams": 4, "device": "cuda", **more})
