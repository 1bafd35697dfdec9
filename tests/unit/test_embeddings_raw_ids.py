"""Tables of raw ids, of ranks and as mapped files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.comm import World
from headrace.comm.base import Collective, LocalCollective, ThreadCollective, run_ranks
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.addressing import UniqueRawIds, owners, pack, unpack
from headrace.embeddings.checkpoint.dynamic import load_rows, save_rows
from headrace.embeddings.checkpoint.mapped import open_mapped, write_mapped
from headrace.embeddings.dynamic.rows import DynamicReport
from headrace.embeddings.dynamic.rows_cpu import HostRows
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for
from headrace.errors import UserError
from headrace.storage import local
from tests.unit.test_embeddings_dynamic import ANY_ID, alone, look_up


def test_tables_travel_together_and_stay_apart() -> None:
    """Two tables of two widths, on three ranks, against each alone on one."""
    specs = [DynamicSpec("a", 2), DynamicSpec("b", 5, admit_after=2)]
    generator = np.random.default_rng(3)
    batches = [[generator.integers(0, 9, 30), generator.integers(0, 9, 12)] for _ in range(4)]

    def run(c: Collective, chosen: Sequence[int]) -> list[list[Tensor]]:
        tables = DynamicEmbeddings([specs[i] for i in chosen], c, seed=7)
        tables.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.5))
        embeddings = alone(tables)
        outs = []
        for batch in batches:
            local_ids = [np.array_split(batch[i], c.world.size)[c.world.rank] for i in chosen]
            vectors = [v for v, _ in look_up(embeddings, [torch.from_numpy(m) for m in local_ids])]
            sum(((v - 1) ** 2).sum() for v in vectors).backward()  # type: ignore[union-attr]
            tables.step()
            outs.append([v.detach() for v in vectors])
        return outs

    together = run_ranks(3, lambda c: run(c, [0, 1]))
    for table in (0, 1):
        by_itself = run(LocalCollective(), [table])
        for step in range(4):
            got = torch.cat([rank[step][table] for rank in together])
            torch.testing.assert_close(got, by_itself[step][0], rtol=1e-4, atol=1e-5)


class Counting(ThreadCollective):
    """Counts messages."""

    def __init__(self, inner: ThreadCollective) -> None:
        super().__init__(inner._rendezvous, inner.world.rank)
        self.messages = 0

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        self.messages += 1
        return super().all_to_all(x, send_rows)


def plan_beside(world: int, kind: str, ranks_per_node: int = 1) -> Plan:
    """Plan tables of two widths and storages that share a step with raw ids."""
    tables = (Table("p", 9, 4), Table("q", 30, 3, "bf16"))
    lookups = (Lookup("p", "p"), Lookup("q", "q", 2, True))
    pooled = kind == "pooled"
    blocks = [
        b for t in tables for b in blocks_for(t, "row_wise" if pooled else kind, world, pooled=pooled and t.name == "q")
    ]  # type: ignore[arg-type]
    return Plan(tables, lookups, tuple(blocks), world, "fp32", ranks_per_node)


def step_beside(
    c: Collective, plan: Plan, specs: Sequence[DynamicSpec], together: bool
) -> tuple[list[Tensor], list[DynamicReport]]:
    """Take six steps of planned tables and raw ids, ids prepared ahead; in one lookup, or each kind in its own.

    Gradients are small integers times powers of two: no sum of them is rounded, in whatever order.
    """
    tables = DynamicEmbeddings(specs, c, seed=7)
    planned = ShardedEmbeddings(plan, c, 7, dynamic=tables if together else None)
    lone = planned if together else alone(tables)
    for x in (planned, tables):
        x.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.25))
    outs: list[Tensor] = []

    def prepare(step: int) -> tuple[LookupHandle, LookupHandle]:
        rng = np.random.default_rng([step, c.world.rank])
        rows = (3 * step + c.world.rank) % 4  # none, on some ranks
        codes = torch.from_numpy((rng.random((rows, 3)) * np.array([9, 30, 30])).astype(np.int64))
        raw = [torch.from_numpy(rng.integers(-6, 6, n) * 2**60) for n in (4 * rows, (step * 2) % 5)]
        if together:
            return (both := planned.prepare(codes, raw=raw)), both
        return planned.prepare(codes), lone.prepare(codes[:, :0], raw=raw)

    following = prepare(0)
    for step in range(6):
        (codes, raw), following = following, prepare(step + 1)
        vectors = planned.features(codes)
        if not together:
            lone(raw)
        vectors += [v for v, _ in raw.found]
        outs += [f.detach().clone() for f in vectors]
        following[0].prefetch()
        rng = np.random.default_rng([step, c.world.rank, 1])
        sum((f * torch.from_numpy(rng.integers(-3, 4, f.shape))).sum() for f in vectors).backward()
        planned.step()
        tables.step()
    for p in dict.fromkeys(following):
        p.drop()
    return outs, list(tables.report().values())


SPECS = (DynamicSpec("a", 2, admit_after=2, max_rows=3), DynamicSpec("b", 5))


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "data_parallel", "pooled"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_raw_ids_travel_with_planned_tables_to_the_same_bits(world: int, kind: str) -> None:
    plan = plan_beside(world, kind)
    apart, joined = (run_ranks(world, lambda c, t=t: step_beside(c, plan, SPECS, t)) for t in (False, True))
    for (outs, reports), (got, got_reports) in zip(apart, joined, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, outs, strict=True))
        assert got_reports == reports
        assert reports[0].evicted
        assert any(o.any() for o in outs)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_raw_ids_go_by_machines_to_the_same_rows(kind: str) -> None:
    direct, by_node = (
        run_ranks(
            4,
            lambda c, ranks_per_node=ranks_per_node: step_beside(c, plan_beside(4, kind, ranks_per_node), SPECS, True),
        )
        for ranks_per_node in (1, 2)
    )
    for (outs, reports), (got, got_reports) in zip(direct, by_node, strict=True):
        assert got_reports == reports
        assert reports[0].evicted
        for a, b in zip(got, outs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks_per_node", "messages"), [(1, 3), (2, 6)])
def test_all_tables_of_a_step_share_one_exchange_each_way(ranks_per_node: int, messages: int) -> None:
    def rank_main(c: ThreadCollective) -> int:
        counting = Counting(c)
        tables = DynamicEmbeddings(SPECS, counting, seed=7)
        embeddings = ShardedEmbeddings(plan_beside(4, "row_wise", ranks_per_node), counting, 7, dynamic=tables)
        for x in (embeddings, tables):
            x.configure_optimizer(EmbeddingOptimizer())
        prepared = embeddings.prepare(torch.ones(2, 3, dtype=torch.int64), raw=[torch.arange(5), torch.arange(3)])
        out = embeddings.features(prepared)
        sum(x.sum() for x in (*out, *(v for v, _ in prepared.found))).backward()
        embeddings.step()
        tables.step()
        return counting.messages

    assert run_ranks(4, rank_main) == [messages] * 4


def test_bfloat16_on_the_wire_rounds_raw_ids_too() -> None:
    """A message of half the bytes; whether there is a row is exact."""

    def rank_main(c: Collective, comm_dtype: str) -> list[tuple[Tensor, Tensor]]:
        tables = DynamicEmbeddings([DynamicSpec("t", 8, admit_after=2)], c, seed=7)
        plan = Plan((), (), (), 2, comm_dtype)  # type: ignore[arg-type]
        embeddings = ShardedEmbeddings(plan, c, 7, dynamic=tables)
        return look_up(embeddings, [torch.tensor([1, 1, 2, 3, 3])])

    for exact, rounded in zip(*(run_ranks(2, lambda c, w=w: rank_main(c, w)) for w in ("fp32", "bf16")), strict=True):
        assert torch.equal(rounded[0][0], exact[0][0].bfloat16().float())
        assert rounded[0][1].tolist() == exact[0][1].tolist() == [True] * 5


@settings(max_examples=150, deadline=None)
@given(
    ranks=st.integers(1, 5),
    long=st.booleans(),
    tables=st.lists(st.lists(st.one_of(ANY_ID, st.integers(-(2**63), 2**63 - 1)), max_size=12), min_size=1, max_size=3),
)
def test_what_is_asked_arrives(ranks: int, long: bool, tables: list[list[int]]) -> None:
    """Each id at its owner, with its count; what follows in a message stays as it is."""
    requests = [UniqueRawIds.from_ids(torch.tensor(ids, dtype=torch.int64), ranks) for ids in tables]
    for ids, w in zip(tables, requests, strict=True):
        assert dict(zip(w.ids.tolist(), w.counts.tolist(), strict=True)) == Counter(ids)
        assert w.ids[w.duplicates.inverse()].tolist() == ids
        assert owners(w.ids.numpy(), ranks).tolist() == [r for r, n in enumerate(w.ids_per_rank) for _ in range(n)]
    dtype = torch.int64 if long else torch.int32
    message, lengths = pack(requests, dtype)
    trailing = [torch.arange(r, dtype=dtype) for r in range(ranks)]
    parts = [torch.cat(pair) for pair in zip(torch.split(message, lengths), trailing, strict=True)]
    received, rest, sizes = unpack(torch.cat(parts), [p.numel() for p in parts], len(tables))
    assert (rest.tolist(), sizes) == (torch.cat(trailing).tolist(), list(range(ranks)))
    for w, a in zip(requests, received, strict=True):
        assert (a.ids.tolist(), a.counts.tolist(), a.ids_per_rank) == (
            w.ids.tolist(),
            w.counts.tolist(),
            w.ids_per_rank,
        )
        # Asked by two, an id is wanted once, as often as both together.
        again = UniqueRawIds.from_ids(torch.cat([a.ids, a.ids]), ranks, torch.cat([a.counts, a.counts + 1]))
        assert (again.ids.tolist(), again.counts.tolist()) == (w.ids.tolist(), (2 * w.counts + 1).tolist())


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60, unique=True), st.integers(1, 3), st.booleans(), st.data()
)
def test_mapped_rows_are_those_that_were_saved(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], ranks: int, ordered: bool, data: st.DataObject
) -> None:
    """Saved by several ranks, whatever the order of the ids in their files; `IdMap` finds what a binary search does."""
    folder, spec = tmp_path_factory.mktemp("mapped"), DynamicSpec("t", 3)
    values = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(1))
    row_of = {id_: i for i, id_ in enumerate(ids)}
    owner = owners(np.array(ids, np.int64), ranks)
    for rank in range(ranks):
        local_ids = np.array(ids, np.int64)[owner == rank]
        local_ids = np.sort(local_ids) if ordered else local_ids
        rows = HostRows(spec, World(rank, ranks), 1)
        weight = values[torch.tensor([row_of[i] for i in local_ids.tolist()], dtype=torch.int64)]
        held = {"ids": torch.from_numpy(local_ids), "weight": weight}
        with patch.object(rows, "dump", lambda held=held: (held, {"waiting": torch.zeros(0, 3)})):
            save_rows(rows, local(folder))
    with patch("headrace.embeddings.checkpoint.mapped.PIECE_BYTES", 64):  # several pieces
        write_mapped(spec, 0, local(folder), local(folder))
    mapped = open_mapped(spec, 0, local(folder))
    loaded = HostRows(spec, World(0, 1), 1)
    load_rows(loaded, local(folder), False)
    lookup_ids = np.array(data.draw(st.lists(st.sampled_from([*ids, 5, -(2**63), 2**63 - 1]), max_size=30)), np.int64)
    once = np.ones(len(lookup_ids), np.int64)
    positions = mapped.look_up(lookup_ids, once, False)
    np.testing.assert_array_equal(positions >= 0, np.isin(lookup_ids, ids))
    expected = torch.stack(
        [values[row_of[i]] if i in row_of else torch.zeros(3) for i in lookup_ids.tolist()] or [values[:0]]
    )
    assert torch.equal(mapped.rows_at(positions), expected.view(-1, 3))
    assert torch.equal(mapped.rows_at(positions), loaded.rows_at(loaded.look_up(lookup_ids, once, False)))
    assert (len(mapped), mapped.report.rows, mapped.nbytes) == (len(ids), len(ids), 0)
    np.testing.assert_array_equal(np.sort(mapped.ids), np.sort(np.array(ids, np.int64)))


def test_mapped_rows_stay_in_the_page_cache_and_learn_nothing(tmp_path: Path) -> None:
    spec, folder = DynamicSpec("t", 16), local(tmp_path)
    rows = HostRows(spec, World(0, 1), 1)
    rows.configure_optimizer(EmbeddingOptimizer())
    ids = np.arange(20_000, dtype=np.int64) * 7919
    rows.look_up(ids, np.ones_like(ids), True)
    save_rows(rows, folder)
    write_mapped(spec, 0, folder, folder)
    mapped = open_mapped(spec, 0, folder)
    assert torch.equal(mapped.rows_at(mapped.look_up(ids, np.ones_like(ids), False)), rows.rows_at(rows._map.find(ids)))
    smaps = Path("/proc/self/smaps").read_text().split("VmFlags")
    held = [x for x in smaps if str(tmp_path) in x]
    assert len(held) == 2, "the ids and the rows are mapped"
    for mapping in held:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in mapping.splitlines() if line.endswith(" kB")}
        assert kib["Rss"] > 0
        assert kib["Anonymous"] == 0, "pages of this process alone"
    with pytest.raises(RuntimeError, match="read alone"):
        mapped.look_up(ids, np.ones_like(ids), True)
    with pytest.raises(RuntimeError, match="read alone"):
        mapped.configure_optimizer(EmbeddingOptimizer())
    file = next(tmp_path.glob("t-00000.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"t-00000\.safetensors is damaged"):
        write_mapped(spec, 0, folder, folder)
    file.unlink()
    with pytest.raises(UserError, match=r"t-00000\.safetensors is missing"):
        write_mapped(spec, 0, folder, folder)
