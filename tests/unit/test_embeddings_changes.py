"""Saves of changed rows: with what they lie upon, the same bits as a whole save, on any world and by any plan."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.checkpoint.changes import changes_base, save_changed_rows
from headrace.embeddings.checkpoint.files import read_chain, shared_directory, verify_shards, write_index
from headrace.embeddings.checkpoint.shards import load_shards, save_shards
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Table
from headrace.errors import UserError
from headrace.storage import local
from tests.plans_support import KINDS, OPTIMIZERS, TABLES, Case, planned

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def write(embeddings: ShardedEmbeddings, folder: Path, previous: Path | None = None, aged: float = 1.0) -> None:
    """Save all rows, or with `previous` those that changed since. Collective."""
    with shared_directory(local(folder), embeddings.collective) as partial:
        if previous is None:
            save_shards(embeddings, partial, with_optimizer=True)
        else:
            base = changes_base(local(previous), local(folder), aged)
            save_changed_rows(embeddings, partial, local(previous), base, with_optimizer=True)
        embeddings.collective.barrier()
        if embeddings.collective.world.is_chief:
            write_index(partial)


def step(embeddings: ShardedEmbeddings, case: Case, number: int) -> None:
    codes, weights = case.padded(number, embeddings.collective.world.rank)
    out = embeddings.features(codes, weights if any(x.weighted for x in case.plan.lookups) else None)
    sum(o.sin().sum() for o in out).backward()
    embeddings.step()


def read(folder: Path, case: Case, optimizer: EmbeddingOptimizer) -> list[Tensor]:
    """Return all that one rank reads: weights, states, steps."""
    embeddings = ShardedEmbeddings(case.plan, LocalCollective(), seed=77)
    embeddings.configure_optimizer(optimizer)
    loaded = load_shards(embeddings, local(folder), with_optimizer=True)
    assert not loaded.new_rows
    states = [s for states_of_table in embeddings.states for _, s in sorted(states_of_table.items())]
    return [*embeddings.weights, *states, torch.tensor(embeddings.steps)]


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(OPTIMIZERS),
    kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4),
    worlds=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    storage=st.sampled_from(["fp32", "bf16"]),
    grows=st.integers(0, 4),
    aged=st.sampled_from([1.0, 0.5, 0.3]),
)
def test_a_chain_of_changes_is_a_whole_save(
    kind: str, kinds: list[str], worlds: list[int], storage: Any, grows: int, aged: float
) -> None:
    optimizer = EmbeddingOptimizer(kind=kind, learning_rate=0.1)
    with tempfile.TemporaryDirectory() as home:
        folders = [Path(home) / "days" / str(day) / "model" / "embeddings" for day in range(3)]
        for day, world in enumerate(worlds):
            tables = tuple(Table(t.name, t.rows + grows * day, t.dim, storage) for t in TABLES)
            case = Case(planned(kinds, world, tables), ((3,) * world,) * 3, 8, optimizer)

            def train_a_day(c: Collective, day: int = day, case: Case = case) -> None:
                embeddings = ShardedEmbeddings(case.plan, c, seed=5)
                embeddings.configure_optimizer(optimizer)
                if day:
                    load_shards(embeddings, local(folders[day - 1]), with_optimizer=True)
                    embeddings.age_state(aged)
                step(embeddings, case, day)
                write(embeddings, folders[day], folders[day - 1] if day else None, aged)
                write(embeddings, Path(home) / "whole" / str(day))

            run_ranks(world, train_a_day)
            alone = Case(planned(["table_wise"] * 4, 1, tables), ((3,),), 8, optimizer)
            loaded, expected = (read(f, alone, optimizer) for f in (folders[day], Path(home) / "whole" / str(day)))
            for a, b in zip(loaded, expected, strict=True):
                assert torch.equal(a, b)
        assert [index.base.depth if index.base else 0 for _, index in read_chain(local(folders[2]))] == [0, 1, 2]


def test_few_rows_changed_are_few_bytes_and_a_base_that_is_gone_is_named(tmp_path: Path) -> None:
    optimizer = EmbeddingOptimizer(kind="adagrad", learning_rate=0.1)
    tables = tuple(Table(t.name, 4_000, t.dim) for t in TABLES)
    case = Case(planned(["row_wise"] * 4, 1, tables), ((2,),) * 2, 8, optimizer)
    embeddings = ShardedEmbeddings(case.plan, LocalCollective(), seed=5)
    embeddings.configure_optimizer(optimizer)
    base, changes = tmp_path / "a" / "embeddings", tmp_path / "b" / "embeddings"
    write(embeddings, base)
    step(embeddings, case, 0)
    write(embeddings, changes, base)
    sizes = [sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in (base, changes)]
    assert sizes[1] < sizes[0] / 50
    verify_shards(local(changes))
    shutil.move(tmp_path, moved := tmp_path.with_name("moved"))  # together they may move
    verify_shards(local(moved / "b" / "embeddings"))

    torn = next((moved / "a" / "embeddings").glob("weight*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"a/embeddings/weight.* is damaged"):
        load_shards(embeddings, local(moved / "b" / "embeddings"), with_optimizer=True)
    shutil.rmtree(moved / "a")
    with pytest.raises(UserError, match=r"b/embeddings holds the rows that changed since .*a/embeddings.*is missing"):
        load_shards(embeddings, local(moved / "b" / "embeddings"), with_optimizer=True)
    write(embeddings, moved / "a" / "embeddings")
    with pytest.raises(UserError, match="that is another save by now"):
        load_shards(embeddings, local(moved / "b" / "embeddings"), with_optimizer=True)
