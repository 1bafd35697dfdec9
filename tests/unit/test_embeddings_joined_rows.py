"""Rows that are brought to a lookup, against the whole tables: from saves of any world, plan and chain of changes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm import World
from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.checkpoint import saved_rows
from headrace.embeddings.checkpoint.changes import changes_base, save_changed_rows
from headrace.embeddings.checkpoint.dynamic import save_rows
from headrace.embeddings.checkpoint.files import write_index
from headrace.embeddings.checkpoint.saved_rows import assemble, files_of
from headrace.embeddings.checkpoint.shards import load_shards, save_shards
from headrace.embeddings.dynamic.rows_cpu import HostRows
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.layout import TableRows
from headrace.embeddings.sharding_plan import Table
from headrace.errors import UserError
from headrace.storage import local
from tests.plans_support import KINDS, TABLES, Case, planned

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
OPTIMIZER = EmbeddingOptimizer(kind="sgd", learning_rate=0.3)


def write_days(home: Path, kinds: list[str], worlds: list[int], tables: list[Table]) -> list[Path]:
    """Save all rows, and after it those that each step has changed."""
    folders = [home / str(day) / "embeddings" for day in range(len(worlds))]
    for day, world in enumerate(worlds):
        case = Case(planned(kinds, world, tables), ((3,) * world,) * len(worlds), 8, OPTIMIZER)

        def a_day(c: Collective, day: int = day, case: Case = case) -> None:
            embeddings = ShardedEmbeddings(case.plan, c, seed=5)
            embeddings.configure_optimizer(OPTIMIZER)
            folder = local(folders[day])
            if not day:
                save_shards(embeddings, folder, with_optimizer=False)
            else:
                previous = local(folders[day - 1])
                load_shards(embeddings, previous, with_optimizer=False)
                codes, weights = case.padded(day, c.world.rank)
                out = embeddings.features(codes, weights if any(x.weighted for x in case.plan.lookups) else None)
                sum(o.sin().sum() for o in out).backward()
                embeddings.step()
                base = changes_base(previous, folder, 1.0)
                save_changed_rows(embeddings, folder, previous, base, with_optimizer=False)
            c.barrier()
            if c.world.is_chief:
                write_index(folder)

        run_ranks(world, a_day)
    return folders


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4),
    worlds=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    storages=st.lists(st.sampled_from(["fp32", "fp16", "bf16", "int8"]), min_size=4, max_size=4),
    joined=st.lists(st.booleans(), min_size=4, max_size=4),
    ragged=st.booleans(),
    file_bytes=st.sampled_from([40, 128 << 20]),
)
def test_lookups_have_the_bits_of_the_whole_tables(
    kinds: list[str], worlds: list[int], storages: list[Any], joined: list[bool], ragged: bool, file_bytes: int
) -> None:
    storages = ["fp32" if k == "column_wise" and s == "int8" else s for k, s in zip(kinds, storages, strict=True)]
    tables = [replace(t, storage=s) for t, s in zip(TABLES, storages, strict=True)]
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.embeddings.checkpoint.shards.FILE_BYTES", file_bytes)  # a row a file, or all in one
        *_, folder = write_days(Path(home), kinds, worlds, tables)
        case = Case(planned(["table_wise"] * 4, 1, tables), ((6,),), 21, OPTIMIZER, ragged)
        complete = ShardedEmbeddings(case.plan, LocalCollective(), seed=77)
        load_shards(complete, local(folder), with_optimizer=False)
        some = tuple(replace(t, joined=j) for t, j in zip(tables, joined, strict=True))
        joined_embeddings = ShardedEmbeddings(planned(["table_wise"] * 4, 1, some), LocalCollective(), seed=78)
        load_shards(joined_embeddings, local(folder), with_optimizer=False)
        assert sum(w.shape[0] for w in joined_embeddings.weights) == sum(t.rows for t in some if not t.joined)

        names = {t.name for t in some if t.joined}
        files = files_of(local(folder), local(folder), names, [])
        codes, _ = case.padded(0, 0)
        codes_by_table: dict[str, list[Any]] = {name: [np.zeros(1, np.int64)] for name in names}
        slot = 0
        for x in case.plan.lookups:
            if x.table in names:
                codes_by_table[x.table].append(codes[:, slot : slot + x.length].numpy().reshape(-1))
            slot += x.length
        needed = {name: np.unique(np.concatenate(chunks)) for name, chunks in codes_by_table.items()}
        rows = {
            t.name: assemble(
                t, [r for f in files for r in f.read(t.name, needed[t.name][f.may_have(t.name, needed[t.name])])]
            )
            for t in some
            if t.joined
        }
        for name, table_rows in rows.items():
            np.testing.assert_array_equal(table_rows.codes, needed[name])
        joined_embeddings.set_joined(rows)
        held = sum(w.shape[0] for w in joined_embeddings.weights) - sum(t.rows for t in some if not t.joined)
        assert held == sum(map(len, needed.values()))
        batch, weights = case.batch(0, 0)
        with torch.no_grad():
            for a, b in zip(joined_embeddings.features(batch, weights), complete.features(batch, weights), strict=True):
                assert torch.equal(a, b)
                assert a.dtype is b.dtype


def test_files_of_raw_ids_give_the_rows_of_those_they_have(tmp_path: Path) -> None:
    spec, ids = DynamicSpec("t", 3), np.arange(-40, 40, dtype=np.int64) * 7919
    by_id: dict[int, torch.Tensor] = {}
    for rank in range(2):
        rows = HostRows(spec, World(rank, 2), 1)
        rows.configure_optimizer(EmbeddingOptimizer())
        local_ids = ids[saved_rows.owners(ids, 2) == rank]
        rows.look_up(local_ids, np.ones_like(local_ids), True)
        save_rows(rows, local(tmp_path))
        vectors = rows.rows_at(rows.look_up(local_ids, np.ones_like(local_ids), False))
        by_id |= dict(zip(local_ids.tolist(), vectors, strict=True))
    write_days(tmp_path / "planned", ["table_wise"] * 4, [1], list(TABLES))
    embeddings = local(tmp_path / "planned" / "0" / "embeddings")
    files = files_of(embeddings, local(tmp_path), [], [spec])
    assert len(files) == 2
    ids_to_read = np.array([5, 0, 7919, -7919 * 40, 2**62], np.int64)
    parts = [list(f.read("t", ids_to_read[f.may_have("t", ids_to_read)])) for f in files]
    assert all(len(x.codes) < 3 for part in parts for x in part), "each file is asked for its own ids"
    rows_read = assemble(spec, [x for part in parts for x in part])
    assert rows_read.codes.tolist() == [-7919 * 40, 0, 7919]
    assert torch.equal(rows_read.rows, torch.stack([by_id[i] for i in rows_read.codes.tolist()]))
    assert assemble(spec, []).rows.shape == (0, 3)


def test_a_row_that_was_not_brought_is_an_error_and_damage_is_named(tmp_path: Path) -> None:
    tables = [replace(t, joined=True) for t in TABLES]
    (folder,) = write_days(tmp_path, ["table_wise"] * 4, [1], list(TABLES))
    case = Case(planned(["table_wise"] * 4, 1, tables), ((6,),), 21, OPTIMIZER)
    embeddings = ShardedEmbeddings(case.plan, LocalCollective(), seed=1)
    codes, weights = case.padded(0, 0)
    weights = weights if any(x.weighted for x in case.plan.lookups) else None
    with pytest.raises(RuntimeError, match="were not brought"):
        embeddings.features(codes, weights)
    t = tables[0]
    with pytest.raises(ValueError, match="do not ascend, or are outside"):
        embeddings.set_joined({t.name: TableRows(torch.tensor([t.rows]), torch.zeros(1, t.dim))})
    with pytest.raises(ValueError, match=f"rows of table '{t.name}' are"):
        embeddings.set_joined({t.name: TableRows(torch.tensor([0]), torch.zeros(1, t.dim + 1))})
    with pytest.raises(ValueError, match="not in a world of several"):
        planned(["table_wise"] * 4, 2, tables)
    (file,) = files_of(local(folder), local(folder), [t.name], [])
    file.check()
    path = folder / file.record.name
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=f"{path.name} is damaged"):
        file.check()
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match="no file of tables"):
        list(file.read(t.name, np.zeros(1, np.int64)))
