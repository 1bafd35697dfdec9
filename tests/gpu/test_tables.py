"""ShardedEmbeddings with the kernels at work: the equality tests of CPU tables, once more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.checkpoint.changes import apply_changes, save_changes
from headrace.embeddings.checkpoint.files import write_index
from headrace.embeddings.checkpoint.shards import load_shards, save_shards
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Lookup, Table, blocks_for, row_wise
from headrace.embeddings.storage import decode
from headrace.errors import UserError
from headrace.storage import local
from tests import plans_support as plans
from tests.gpu.conftest import DEVICE, HAS_GPU
from tests.gpu.pretended import ELSEWHERE, Elsewhere, pretend

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class OnDevice(ShardedEmbeddings):
    """Tables on the device of the test; vectors come to the host, where the tests compare them."""

    target_device: Any = DEVICE

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, device=self.target_device, **more)

    def step(self, *args: Any) -> None:
        super().step(*args)
        self.flush()  # the tests look at all rows

    def features(self, *args: Any, **more: Any) -> list[Tensor]:
        return [x.cpu() for x in super().features(*args, **more)]


@pytest.mark.parametrize(
    ("kinds", "world", "storage"),
    [(["row_wise"] * 4, 1, "fp32"), (plans.KINDS, 2, "fp32"), (["row_wise"] * 4, 1, "bf16")],
)
def test_steps_equal_a_dense_model(
    kinds: list[str], world: int, storage: Any, kernels_everywhere: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All poolings, weights and tables of two widths; row-wise Adagrad by the kernel. By two ranks some are cached."""
    monkeypatch.setattr(plans, "ShardedEmbeddings", OnDevice)
    tables = tuple(
        Table(t.name, t.rows, t.dim, storage, 0.5 if world == 2 and t.name in "ab" else 1.0) for t in plans.TABLES
    )
    plan = plans.planned(kinds, world, tables)
    optimizer = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1, weight_decay=0.01)
    case = plans.Case(plan, ((4,) * world,) * 3, 8, optimizer, ragged=world == 2)
    plans.check_any(case)
    assert kernels_everywhere["pool_sum"] > 10
    # By two ranks some tables are replicated or cut by columns: those step by torch.
    assert kernels_everywhere["rowwise_adagrad"] >= 3


def test_bags_that_owners_sum(kernels_everywhere: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "ShardedEmbeddings", OnDevice)
    lookups = (
        Lookup("mean", "b", 4, True, "mean"),
        Lookup("weighted", "a", 5, True, "sum", True),
        Lookup("flag", "tiny"),
        Lookup("wide", "wide", 2, True),
    )
    blocks = [b for t in plans.TABLES for b in blocks_for(t, "row_wise", 2, pooled=t.name in ("a", "b"))]
    plan = plans.Plan(plans.TABLES, lookups, tuple(blocks), 2)
    optimizer = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1)
    plans.check_any(plans.Case(plan, ((3, 2),) * 2, 9, optimizer))
    assert kernels_everywhere["rowwise_adagrad"] >= 4


TABLES = (Table("a", 30, 4), Table("b", 9, 4))
LOOKUPS = (Lookup("x", "a"), Lookup("y", "b", 3, True))


def trained(make: Any, steps: int = 2, tables: Any = TABLES, kind: Any = "rowwise_adagrad") -> ShardedEmbeddings:
    embeddings: ShardedEmbeddings = make(row_wise(tables, LOOKUPS, 1), LocalCollective(), 3)
    embeddings.configure_optimizer(EmbeddingOptimizer(kind=kind, learning_rate=0.1))
    for step in range(steps):
        one_step(embeddings, step)
    return embeddings


def one_step(embeddings: ShardedEmbeddings, step: int) -> None:
    codes = torch.randint(0, 9, (6, 4), generator=torch.Generator().manual_seed(step))
    embeddings(codes).square().sum().backward()
    embeddings.step()


def test_a_save_of_a_gpu_opens_on_a_cpu_and_back(tmp_path: Path, kernels_everywhere: dict[str, int]) -> None:
    device_tables = trained(OnDevice)
    save_shards(device_tables, local(tmp_path), with_optimizer=True)
    write_index(local(tmp_path))
    twins = [trained(make, 0) for make in (OnDevice, ShardedEmbeddings)]
    for twin in twins:
        load_shards(twin, local(tmp_path), with_optimizer=True)
        assert torch.equal(twin.weight.cpu(), device_tables.weight.cpu())
        assert torch.equal(twin.state["sum"].cpu(), device_tables.state["sum"].cpu())
        assert twin.steps == 2
    one_step(device_tables, 7)
    one_step(twins[0], 7)
    assert torch.equal(twins[0].weight, device_tables.weight)


def test_what_a_device_cannot_hold_is_explained() -> None:
    plan = row_wise(TABLES, LOOKUPS, 1)
    if not HAS_GPU:
        with pytest.raises(UserError, match="sees no GPU here"):
            ShardedEmbeddings(plan, LocalCollective(), 1, device="cuda")
    with pytest.raises(UserError, match="on 'cpu' or 'cuda'"):
        ShardedEmbeddings(plan, LocalCollective(), 1, device="xpu")


# --- a device that is pretended: no tensor may be on the wrong one ---------------------------------------------------


def test_the_pretended_device_refuses_tensors_of_the_host() -> None:
    with pretend():
        x = torch.zeros(3, device=ELSEWHERE)
        assert x.device == ELSEWHERE
        with pytest.raises(RuntimeError, match="tensors on two devices"):
            x + torch.ones(3)
        assert torch.equal((x + torch.ones(3, device=ELSEWHERE)).cpu(), torch.ones(3))
        assert (x + 1).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.skipif(HAS_GPU, reason="there is a real one")
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_no_tensor_is_on_the_wrong_device(
    optimizer: Any, elsewhere: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plans, "ShardedEmbeddings", type("PretendedTables", (OnDevice,), {"target_device": ELSEWHERE}))
    settings = EmbeddingOptimizer(kind=optimizer, learning_rate=0.1)
    plans.check_any(plans.Case(plans.planned(["row_wise"] * 4, 1), ((3,),) * 2, 8, settings))
    some_cached = tuple(replace(t, cached=0.5 if t.name in "ab" else 1.0) for t in plans.TABLES)
    plans.check_any(plans.Case(plans.planned(plans.KINDS, 2, some_cached), ((3, 2),) * 2, 8, settings, ragged=True))
    cached = optimizer == "adam"
    tables = [replace(t, storage="int8", cached=0.5) for t in TABLES] if cached else TABLES
    with pretend():
        device_tables = trained(
            type("PretendedTables", (OnDevice,), {"target_device": ELSEWHERE}), 2, tables, optimizer
        )
        device_tables.track_changes()
        save_shards(device_tables, local(tmp_path), with_optimizer=True)
        write_index(local(tmp_path))
        load_shards(device_tables, local(tmp_path), with_optimizer=True)
        one_step(device_tables, 3)
        assert save_changes(device_tables, local(tmp_path / "changes"))
        apply_changes(device_tables, local(tmp_path / "changes"))
        assert all(isinstance(w, Elsewhere) != cached for w in device_tables.weights)
        assert all(isinstance(x, Elsewhere) for c in device_tables.caches if c is not None for x in c.on_device)
        if cached:  # int8 by the draws of CPUs
            host_tables = trained(ShardedEmbeddings, 2, [replace(t, storage="int8") for t in TABLES], optimizer)
            retrained = trained(
                type("PretendedTables", (OnDevice,), {"target_device": ELSEWHERE}), 2, tables, optimizer
            )
            torch.testing.assert_close(decode(retrained.weight), decode(host_tables.weight), rtol=0, atol=2e-3)
