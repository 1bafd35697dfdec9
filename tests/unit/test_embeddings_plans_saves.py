"""Saves and dumps of changes, made by one plan on one world and opened by others on others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.checkpoint.changes import apply_changes, save_changes
from headrace.embeddings.checkpoint.files import shared_directory, write_index
from headrace.embeddings.checkpoint.shards import load_shards, save_shards
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Table
from headrace.errors import UserError
from headrace.storage import local
from tests.plans_support import KINDS, OPTIMIZERS, TABLES, Case, full_tables, planned, train

# Said once by torch, of its own optimizers.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_save_opens_by_any_plan_on_any_world(kind: str, tmp_path: Path) -> None:
    # 2 -> 3 -> 1 ranks, each by other kinds; half storage by rows of its own, states of a row and of a weight.
    tables = (*TABLES[:2], Table("b", 11, 6, "bf16"), TABLES[3])
    optimizer = EmbeddingOptimizer(kind=kind, learning_rate=0.1)

    def case_of(kinds: Sequence[str], world: int) -> Case:
        return Case(planned(kinds, world, tables), ((4,) * world,) * 3, 8, optimizer)

    batch = case_of(KINDS, 1).padded(0, 0)

    def save(embeddings: ShardedEmbeddings, folder: Path) -> list[Tensor]:
        with shared_directory(local(folder), embeddings.collective) as partial:
            save_shards(embeddings, local(partial), with_optimizer=True)
            embeddings.collective.barrier()
            if embeddings.collective.world.is_chief:
                write_index(local(partial))
        with torch.no_grad():
            return embeddings.features(*batch)

    def load(case: Case, collective: Collective, folder: Path) -> ShardedEmbeddings:
        embeddings = ShardedEmbeddings(case.plan, collective, seed=99)
        embeddings.configure_optimizer(optimizer)
        load_shards(embeddings, local(folder), with_optimizer=True)
        return embeddings

    two, three, on_one = case_of(KINDS, 2), case_of([*KINDS[2:], *KINDS[:2]], 3), case_of(["column_wise"] * 4, 1)
    expected = run_ranks(2, lambda c: save(train(two, c).embeddings, tmp_path / "two"))[0]
    for got in run_ranks(3, lambda c: save(load(three, c, tmp_path / "two"), tmp_path / "three")):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    alone = load(on_one, LocalCollective(), tmp_path / "three")
    assert all(torch.equal(a, b) for a, b in zip(alone.features(*batch), expected, strict=True))
    # The states came along: one rank by the first plan and this one take the same next step.
    direct = load(case_of(KINDS, 1), LocalCollective(), tmp_path / "two")
    for embeddings in (alone, direct):
        sum(out.square().sum() for out in embeddings.features(*batch)).backward()
        embeddings.step()
    assert alone.steps == direct.steps == 4
    for a, b in zip(alone.features(*batch), direct.features(*batch), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # Tables that have grown since: old rows as they were, new ones at their own start, on any world.
    saved = load(on_one, LocalCollective(), tmp_path / "three")
    initial_tables = full_tables(on_one.plan, [saved], [saved.weights])
    grown = tuple(Table(t.name, t.rows + 5, t.dim, t.storage) for t in tables)
    for world in (1, 2, 3, 4):
        case = Case(planned(KINDS[::-1] if world > 1 else KINDS, world, grown), ((4,) * world,) * 3, 8, optimizer)
        ranks = run_ranks(world, lambda c, case=case: load(case, c, tmp_path / "two"))
        fresh = run_ranks(world, lambda c, case=case: ShardedEmbeddings(case.plan, c, seed=99))
        now, start = (full_tables(case.plan, r, [e.weights for e in r]) for r in (ranks, fresh))
        for name, initial in initial_tables.items():
            assert torch.equal(now[name][: len(initial)], initial)
            assert torch.equal(now[name][len(initial) :], start[name][len(initial) :])


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad"])
def test_dumps_of_changes_bring_another_world_up_to_date(kind: str, tmp_path: Path) -> None:
    optimizer = EmbeddingOptimizer(kind=kind, learning_rate=0.1)
    case = Case(planned(KINDS, 2), ((2, 2),) * 6, 8, optimizer)
    batch = Case(planned(KINDS, 1), ((30,),), 5, optimizer).padded(0, 0)

    def leader(c: Collective) -> tuple[list[int], list[Tensor]]:
        embeddings = ShardedEmbeddings(case.plan, c, seed=8)
        embeddings.configure_optimizer(optimizer)
        with pytest.raises(RuntimeError, match="track_changes comes before"):
            save_changes(embeddings, local(tmp_path / "early"))
        embeddings.track_changes()
        counts = []
        for step in range(6):
            case.loss(embeddings.features(*case.batch(step, c.world.rank)), step, c.world.rank).backward()
            embeddings.step()
            if step % 2:
                counts.append(save_changes(embeddings, local(tmp_path / f"{step}")))
        counts.append(save_changes(embeddings, local(tmp_path / "none")))
        with torch.no_grad():
            return counts, embeddings.features(*batch)

    (counts, expected), (other_counts, _) = run_ranks(2, leader)
    assert counts[-1] == other_counts[-1] == 0
    rows = sum(t.rows for t in case.plan.tables)
    assert 0 < counts[0] + other_counts[0] < rows + 9 * 2  # the wide table's columns are counted by block

    def follower(c: Collective) -> list[Tensor]:
        embeddings = ShardedEmbeddings(planned(KINDS[::-1], 3), c, seed=8)  # the same start: no base is needed
        initial = embeddings.features(*batch)
        for name in ("1", "3", "5", "none"):
            apply_changes(embeddings, local(tmp_path / name))
        after = embeddings.features(*batch)
        assert not torch.equal(initial[0], after[0])
        return after

    for got in run_ranks(3, follower):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    path = tmp_path / "3" / "changes-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    alone = ShardedEmbeddings(planned(KINDS, 1), LocalCollective(), seed=8)
    with pytest.raises(UserError, match=r"changes-00001\.safetensors is damaged"):
        apply_changes(alone, local(tmp_path / "3"))
    (tmp_path / "5" / "changes-00001.json").unlink()
    with pytest.raises(UserError, match=r"changes-00001\.json is missing"):
        apply_changes(alone, local(tmp_path / "5"))
