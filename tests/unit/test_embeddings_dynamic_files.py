"""Saves and dumps of tables of raw ids, for other worlds; damage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.comm.base import Collective, LocalCollective, ThreadCollective, run_ranks
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.checkpoint.changes import apply_changes, save_changes
from headrace.embeddings.checkpoint.dynamic import load_dynamic, save_dynamic
from headrace.embeddings.dynamic.rows import DynamicReport
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.errors import UserError
from headrace.storage import local
from tests.unit.test_embeddings_dynamic import DIM, SingleTable, alone, look_up, train
from tests.unit.test_embeddings_raw_ids import plan_beside


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam"])
def test_saved_on_two_loaded_on_three_and_on_one(kind: str, tmp_path: Path) -> None:
    spec = DynamicSpec("t", DIM, admit_after=2)
    ids = torch.arange(-20, 60)

    def new(c: Collective) -> SingleTable:
        return SingleTable(spec, c, kind=kind, learning_rate=0.1)

    def step(table: SingleTable, number: int) -> None:
        ids = np.random.default_rng(number).integers(-20, 60, 48)
        local_ids = np.array_split(ids, table.collective.world.size)[table.collective.world.rank]
        (table(torch.from_numpy(local_ids)) - 1).square().sum().backward()
        table.step()

    def look(table: SingleTable) -> Tensor:
        table.eval()
        with torch.no_grad():
            out = table(ids)
        table.train()
        return out

    def first(c: ThreadCollective) -> Tensor:
        table = new(c)
        for n in range(4):
            step(table, n)
        save_dynamic(table, local(tmp_path / "two"))
        return look(table)

    def second(c: ThreadCollective) -> Tensor:
        table = new(c)
        load_dynamic(table, local(tmp_path / "two"), True)
        save_dynamic(table, local(tmp_path / "three"))
        return look(table)

    expected = run_ranks(2, first)[0]
    assert 20 < int(expected.any(dim=1).sum()) < 80
    for got in run_ranks(3, second):
        assert torch.equal(got, expected)
    single = new(LocalCollective())
    load_dynamic(single, local(tmp_path / "three"), True)
    assert torch.equal(look(single), expected)
    # Counts, states and those who wait came along.
    undisturbed = new(LocalCollective())
    for n in range(4):
        step(undisturbed, n)
    for n in range(4, 7):
        step(undisturbed, n)
        step(single, n)
    torch.testing.assert_close(look(single), look(undisturbed), rtol=1e-4, atol=1e-6)
    assert replace(single.dynamic_report, asked=0, absent=0, load=0, nbytes=0) == replace(
        undisturbed.dynamic_report, asked=0, absent=0, load=0, nbytes=0
    )
    # Scoring reads ids and vectors alone.
    scoring = DynamicEmbeddings([spec], LocalCollective(), seed=7).eval()
    for path in (tmp_path / "three").glob("*-training.safetensors"):
        path.unlink()
    load_dynamic(scoring, local(tmp_path / "three"), False)
    ((vectors, is_present),) = look_up(alone(scoring), [ids])
    assert torch.equal(vectors, expected)
    assert torch.equal(is_present, expected.any(dim=1))


def test_dumps_of_changes_bring_another_world_up_to_date(tmp_path: Path) -> None:
    """Rows that changed, came, went, and came again; on two ranks, followed on three and on one."""
    specs = (DynamicSpec("a", 2, admit_after=2, max_rows=16), DynamicSpec("b", 5))
    ids = [torch.arange(-20, 20) * 2**50] * 2

    def leader(c: Collective) -> tuple[list[int], list[tuple[Tensor, Tensor]], list[DynamicReport]]:
        tables = DynamicEmbeddings(specs, c, seed=7)
        embeddings = ShardedEmbeddings(plan_beside(2, "row_wise"), c, 7, dynamic=tables)
        for x in (embeddings, tables):
            x.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.5))
        embeddings.track_changes()
        counts = []
        for step in range(9):
            rng = np.random.default_rng([step, c.world.rank])
            raw = [torch.from_numpy(rng.integers(-20, 20, n) * 2**50) for n in (12, 2)]
            prepared = embeddings.prepare(torch.from_numpy(rng.integers(0, 9, (2, 3))), raw=raw)
            outs = [*embeddings.features(prepared), *(v for v, _ in prepared.found)]
            sum((out - 1).square().sum() for out in outs).backward()
            with pytest.raises(RuntimeError, match="gradients wait"):
                save_changes(embeddings, local(tmp_path / "early"))
            embeddings.step()
            tables.step()
            if step % 3 == 2:
                counts.append(save_changes(embeddings, local(tmp_path / f"{step}")))
        counts.append(save_changes(embeddings, local(tmp_path / "none")))
        tables.eval()
        with torch.no_grad():
            return counts, look_up(embeddings_of(tables, 2), ids), list(tables.report().values())

    def embeddings_of(tables: DynamicEmbeddings, world: int) -> ShardedEmbeddings:
        return ShardedEmbeddings(plan_beside(world, "row_wise"), tables.collective, 7, dynamic=tables)

    (counts, expected, reports), _ = run_ranks(2, leader)
    assert counts[-1] == 0 < min(counts[:-1])
    assert reports[0].evicted > 16
    assert counts[1] < reports[0].rows + reports[1].rows + 39  # not all there is

    def follower(c: Collective) -> list[tuple[Tensor, Tensor]]:
        tables = DynamicEmbeddings([replace(s, max_rows=None) for s in specs], c, seed=8).eval()
        embeddings = embeddings_of(tables, c.world.size)
        for name in ("2", "5", "8", "none"):
            apply_changes(embeddings, local(tmp_path / name))
        return look_up(embeddings, ids)

    for got in [*run_ranks(3, follower), follower(LocalCollective())]:
        for (vectors, is_present), (same, expected_present) in zip(got, expected, strict=True):
            assert torch.equal(vectors, same)
            assert torch.equal(is_present, expected_present)
            assert expected_present.any()
    assert not expected[0][1].all()
    fewer_tables = embeddings_of(DynamicEmbeddings(specs[:1], LocalCollective(), seed=8), 1)
    with pytest.raises(UserError, match=r"were dumped with dims \{'a': 2, 'b': 5\}"):
        apply_changes(fewer_tables, local(tmp_path / "2"))


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    table, *_ = train(DynamicSpec("t", DIM), LocalCollective(), [[[1, 2, 3]]])
    save_dynamic(table, local(tmp_path))
    path = tmp_path / "t-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"t-00000\.safetensors is damaged"):
        load_dynamic(table, local(tmp_path), True)
    meta = tmp_path / "t-00000.json"
    meta.write_text(meta.read_text().replace('"steps":1', '"steps":2'))
    with pytest.raises(UserError, match=r"t-00000\.json is damaged"):
        load_dynamic(table, local(tmp_path), True)
    another_table = SingleTable(DynamicSpec("u", DIM), LocalCollective())
    with pytest.raises(UserError, match=r"the save of .* did not finish"):
        load_dynamic(another_table, local(tmp_path), True)
