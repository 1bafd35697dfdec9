"""HorovodCollective on real ranks (one launch over Gloo, no Spark), against ranks that are threads.

Four ranks on two machines, as far as Horovod knows; the first two of them are also a world of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from headrace.comm import World
from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Model, Optimizer
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for
from headrace.models.saved import load_model, save_model
from headrace.models.sharded_model import ShardedModel
from headrace.storage import local
from tests.collective_support import most_in_flight

SCHEMA = DatasetSchema(
    features=(
        Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=500),
        Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9, length=3, is_list=True),
        Feature(name="flag", kind=Kind.CATEGORICAL, dtype="int32", cardinality=1),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)
MODEL = Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,))
ROWS, STEPS = 64, 10
#: Rows of each step's global batch on rank 0: even, all, none, uneven.
SHARES = [32, ROWS, 0, 5, 60, 32, 1, 63, 32, 32]


MIXED = ["sgd", "rowwise_adagrad", "adam"]


def step_rows(step: int, world_size: int, rank: int) -> slice:
    if world_size == 1:
        return slice(0, ROWS)
    return slice(0, SHARES[step]) if rank == 0 else slice(SHARES[step], ROWS)


def train(c: Collective, kind: str) -> tuple[list[float], ShardedModel]:
    """Ten steps of a small ShardedModel on the rank's part of each global batch; the global losses."""
    model = ShardedModel(SCHEMA, MODEL, c, seed=3)
    model.embeddings.configure_optimizer(Optimizer(kind=kind, learning_rate=0.1))
    dense = torch.optim.Adam(model.dense_parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        local_rows = step_rows(step, c.world.size, c.world.rank)
        continuous = torch.from_numpy(rng.normal(size=(ROWS, 1)).astype(np.float32))[local_rows]
        codes = torch.from_numpy((rng.random((ROWS, 5)) ** 2 * np.array([500, 9, 9, 9, 1])).astype(np.int64))[
            local_rows
        ]
        labels = torch.from_numpy((rng.random(ROWS) < 0.4).astype(np.float32))[local_rows]
        loss = binary_cross_entropy_with_logits(model(continuous, codes), labels, reduction="sum") / ROWS
        dense.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        c.all_reduce_sum([total, *(p.grad for p in model.dense_parameters())])
        dense.step()
        model.embeddings.step()
        losses.append(total.item())
    return losses, model


def messages(c: Collective) -> dict[str, Any]:
    """Each kind of message with several types and ragged sizes; twice, so that the names are used again."""
    me, size = c.world.rank, c.world.size
    out: dict[str, Any] = {"world": (me, size)}
    for round_number in range(2):
        rows = [[me, to, n] for to in range(size) for n in range((me + 2 * to + round_number) % 3)]
        send = [(me + 2 * to + round_number) % 3 for to in range(size)]
        for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16):
            received, counts = c.all_to_all(torch.tensor(rows, dtype=dtype).reshape(-1, 3), send)
            out[f"all_to_all {dtype} {round_number}"] = (received.tolist(), counts, str(received.dtype))
        # Not contiguous, as gradients may be; and nothing at all.
        wide = torch.arange(12.0).view(3, 4) + 100 * me
        out[f"transposed {round_number}"] = c.all_to_all(wide.t(), [1] * (size - 1) + [5 - size])[0].tolist()
        out[f"nothing {round_number}"] = c.all_to_all(torch.zeros(0, 2), [0] * size)[0].tolist()
        # Two of one kind on their way, waited for in the other order.
        out[f"most in flight {round_number}"] = most_in_flight(c)
        first = c.start_all_to_all(torch.full((size, 2), me), [1] * size)
        second = c.start_all_to_all(torch.full((size, 2), 10 + me), [1] * size)
        out[f"in flight {round_number}"] = (second()[0].tolist(), first()[0].tolist())
        tensors = [torch.full((2, 3), me + 1.0), torch.tensor([me, round_number]), torch.tensor(0.5 * me)]
        c.all_reduce_sum(tensors)
        out[f"sum {round_number}"] = [t.tolist() for t in tensors]
        out[f"gather {round_number}"] = c.all_gather(torch.full((me + round_number, 2), me)).tolist()
        payload = [torch.full((2,), float(me)), torch.tensor(me + 10 * round_number)]
        c.broadcast(payload, root=size - 1)
        out[f"broadcast {round_number}"] = [t.tolist() for t in payload]
        c.barrier()
    return out


def mixed(c: Collective, kind: str) -> tuple[list[list[float]], list[list[float]]]:
    """Ten steps of a plan of all kinds, two widths and storages, all poolings; the last rows and answers.

    Ids and rows travel ahead, and the owner sums the first table's bags.
    """
    tables = tuple(Table(f"t{i}", 5 + 7 * i, 4 + 2 * (i % 2), "bf16" if i == 1 else "fp32") for i in range(4))
    kinds = ("table_wise", "row_wise", "column_wise", "data_parallel")
    blocks = tuple(
        b for t, how in zip(tables, kinds, strict=True) for b in blocks_for(t, how, c.world.size, pooled=t.name == "t0")
    )
    lookups = tuple(Lookup(f"f{i}", t.name, 2, True, ("sum", "mean", "max", "none")[i]) for i, t in enumerate(tables))
    embeddings = ShardedEmbeddings(Plan(tables, lookups, blocks, c.world.size), c, seed=1)
    embeddings.configure_optimizer(EmbeddingOptimizer(kind=kind, learning_rate=0.1, clip_norm=5.0))
    outs = []

    def prepare(step: int) -> LookupHandle:
        rng = np.random.default_rng([step, c.world.rank])
        sizes = np.array([t.rows for t in tables for _ in range(2)])
        codes = (rng.random(((step + c.world.rank) % 3, 8)) ** 2 * sizes).astype(np.int64)
        return embeddings.prepare(torch.from_numpy(codes))

    following = prepare(0)
    for step in range(STEPS):
        prepared, following = following, prepare(step + 1)
        outs = embeddings.features(prepared)
        following.prefetch()
        sum((out - 1).square().sum() for out in outs).backward()
        embeddings.step()
    following.start()
    following.rows()  # all ranks have heard all there is to hear
    return [w.float().flatten().tolist() for w in embeddings.weights], [o.flatten().tolist() for o in outs]


def wide(c: Collective, ranks_per_node: int) -> tuple[list[list[float]], list[dict[str, Any]], bool | None]:
    """Ten steps of four ranks: a table of several large pages on each, int8 rows, raw ids; direct or by machines.

    All answers, what the table of raw ids says, and whether the kernel was asked for large pages (None: it has none).
    """
    tables = (Table("large", 80_000, 64), Table("bytes", 50, 8, "int8"), Table("whole", 9, 8, "int8"))
    lookups = (Lookup("large", "large", 2, True), Lookup("bytes", "bytes", 3, True, "mean"), Lookup("whole", "whole"))
    blocks = [b for t in tables for b in blocks_for(t, "table_wise" if t.name == "whole" else "row_wise", c.world.size)]
    raw = DynamicEmbeddings([DynamicSpec("raw", 4, admit_after=2, max_rows=8)], c, seed=1)
    embeddings = ShardedEmbeddings(
        Plan(tables, lookups, tuple(blocks), c.world.size, "fp32", ranks_per_node), c, 1, dynamic=raw
    )
    optimizer = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1)
    for x in (embeddings, raw):
        x.configure_optimizer(optimizer)
    answers: list[list[float]] = []

    def prepare(step: int) -> LookupHandle:
        rng = np.random.default_rng([step, c.world.rank])
        rows = (step + c.world.rank) % 4
        codes = (rng.random((rows, 6)) ** 2 * np.array([80_000, 80_000, 50, 50, 50, 9])).astype(np.int64)
        ids = rng.integers(-9, 9, 3 * rows) * 2**59
        return embeddings.prepare(torch.from_numpy(codes), raw=[torch.from_numpy(ids)])

    following = prepare(0)
    for step in range(STEPS):
        prepared, following = following, prepare(step + 1)
        outs = [*embeddings.features(prepared), prepared.found[0][0]]
        following.prefetch()
        sum((out - 1).square().sum() for out in outs).backward()
        embeddings.step()
        raw.step()
        answers += [out.detach().flatten().tolist() for out in outs]
    following.drop()
    answers += [w.flatten().tolist() for w in embeddings.weights if w.dtype is torch.uint8]
    return answers, [asdict(r) for r in raw.report().values()], large_pages(embeddings.weights[0])


def large_pages(weight: torch.Tensor) -> bool | None:
    """Return whether the mapping of a matrix carries the mark of madvise(MADV_HUGEPAGE)."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        return None
    middle, inside = weight.data_ptr() + weight.numel() * 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(x, 16) for x in head.split("-"))
            inside = start <= middle < end
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    return False


def rank_report(c: Collective, folder: Path) -> dict[str, Any]:
    """All that the test looks at, of one rank."""
    report: dict[str, Any] = {"messages": messages(c)}
    report["mixed"] = {kind: mixed(c, kind) for kind in MIXED}
    for kind in ("sgd", "adagrad", "adam"):
        losses, model = train(c, kind)
        state = {name: t.numpy() for name, t in model.dense_state().items()}
        report[kind] = {"losses": losses, "rows": model.embeddings.weight.numpy(), "dense": state}
    save_model(
        local(folder / "model"),
        model,
        workflow=local(folder / "workflow"),
        pipeline="p",
        ds="2026-01-01",
        key="k",
        metrics={},
    )
    return report


def test_more_elements_than_int32_counts_are_refused() -> None:
    """Over NCCL: displacements of all that a rank receives are int32 numbers of elements."""
    from headrace.comm.horovod_collective import HorovodCollective

    collective = HorovodCollective.__new__(HorovodCollective)  # of a job of four ranks, which there is none of
    collective._world = World(rank=0, size=4)
    rows = 2**29 // 128  # 2 GiB of float32 to each rank: few rows
    with pytest.raises(ValueError, match=f"at most {2**29 - 1} elements to each of 4 ranks at once, not {2**29}"):
        collective.start_all_to_all(torch.empty(4 * rows, 128, device="meta"), [rows] * 4)
    with pytest.raises(ValueError, match=f"at most {2**31 - 1} rows to a rank"):
        collective.start_all_to_all(torch.empty(2**31, device="meta"), [2**31, 0, 0, 0])


@pytest.fixture(scope="module")
def horovod_reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[dict[str, Any]]]:
    import horovod

    folder = tmp_path_factory.mktemp("horovod")
    (folder / "workflow").mkdir()
    (folder / "workflow" / "workflow.json").write_text("{}")

    def rank_main() -> dict[str, Any]:
        import horovod.torch as hvd

        from headrace.comm.horovod_collective import HorovodCollective
        from headrace.comm.shared_memory import ByHostCollective, shared

        torch.set_num_threads(1)
        pair = hvd.ProcessSet([0, 1])
        hvd.init(process_sets=[pair])
        try:
            everybody = HorovodCollective()
            world = everybody.world
            report = {"machine": (world.rank, world.local_rank, world.local_size)}
            report["wide"] = {ranks_per_node: wide(everybody, ranks_per_node) for ranks_per_node in (1, 2)}
            by_host = shared(everybody)
            assert isinstance(by_host, ByHostCollective)
            report["by host"] = {ranks_per_node: wide(by_host, ranks_per_node) for ranks_per_node in (1, 2)}
            report["messages by host"] = messages(by_host)
            by_host.close()
            if pair.included():
                report |= rank_report(HorovodCollective(pair), folder)
            everybody.barrier()  # who leaves first takes Horovod along
            return report
        finally:
            hvd.shutdown()

    # The ranks cannot import this file by name.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    reports = horovod.run(
        rank_main, num_proc=4, hosts="localhost:2,127.0.0.1:2", use_gloo=True, executable=sys.executable
    )
    return folder, reports


def test_four_ranks_are_two_machines_of_two(horovod_reports: tuple[Path, Sequence[dict[str, Any]]]) -> None:
    assert [r["machine"] for r in horovod_reports[1]] == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_int8_raw_ids_and_large_pages_are_as_between_threads(
    horovod_reports: tuple[Path, Sequence[dict[str, Any]]], ranks_per_node: int
) -> None:
    """Bit for bit: all sums are in order of the ranks, directly and by machines."""
    _, reports = horovod_reports
    for rank, (answers, report, pages) in enumerate(run_ranks(4, lambda c: wide(c, ranks_per_node))):
        answers_here, report_here, got_pages = reports[rank]["wide"][ranks_per_node]
        assert answers_here == answers
        assert report_here == report
        assert report[0]["evicted"] > 0
        assert reports[rank]["by host"][ranks_per_node] == reports[rank]["wide"][ranks_per_node]
        assert got_pages is pages
        assert pages in (True, None)
        # By machines sums run in another order; rows of fp32 tell that they are the same sums.
        other_layout = reports[rank]["wide"][3 - ranks_per_node][0]
        for step in range(STEPS):
            for lookup in (0, 3):
                np.testing.assert_allclose(
                    answers_here[4 * step + lookup], other_layout[4 * step + lookup], rtol=1e-4, atol=1e-6
                )


def test_messages_arrive_as_between_threads(horovod_reports: tuple[Path, Sequence[dict[str, Any]]]) -> None:
    _, reports = horovod_reports
    for rank, expected in enumerate(run_ranks(2, messages)):
        assert reports[rank]["messages"] == expected
        assert expected["world"] == (rank, 2)
        assert expected["sum 0"] == [[[3.0] * 3] * 2, [1, 0], 0.5]
    for rank, expected in enumerate(run_ranks(4, messages)):
        assert reports[rank]["messages by host"] == expected


@pytest.mark.parametrize("kind", MIXED)
def test_a_mixed_plan_equals_threads(horovod_reports: tuple[Path, Sequence[dict[str, Any]]], kind: str) -> None:
    _, reports = horovod_reports
    for rank, (weights, outs) in enumerate(run_ranks(2, lambda c: mixed(c, kind))):
        got_weights, got_outs = reports[rank]["mixed"][kind]
        for actual, expected in zip([*got_weights, *got_outs], [*weights, *outs], strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_ten_steps_equal_threads_and_one_process(
    horovod_reports: tuple[Path, Sequence[dict[str, Any]]], kind: str
) -> None:
    _, reports = horovod_reports
    single_losses, whole_model = train(LocalCollective(), kind)
    assert single_losses[-1] != single_losses[0]
    threads = run_ranks(2, lambda c: train(c, kind))
    for rank, (_, model) in enumerate(threads):
        actual = reports[rank][kind]
        np.testing.assert_allclose(actual["losses"], single_losses, rtol=1e-5)
        np.testing.assert_allclose(actual["rows"], model.embeddings.weight.numpy(), rtol=1e-4, atol=1e-6)
        # Row r on rank r % 2, for each table.
        tables = [t[rank::2] for t in whole_model.embeddings.weight.split([500, 9, 1])]
        np.testing.assert_allclose(actual["rows"], torch.cat(tables).numpy(), rtol=1e-3, atol=2e-5)
        for name, value in whole_model.dense_state().items():
            np.testing.assert_allclose(actual["dense"][name], value.numpy(), rtol=1e-3, atol=2e-5, err_msg=name)
    for name, value in reports[0][kind]["dense"].items():
        np.testing.assert_array_equal(value, reports[1][kind]["dense"][name])


def test_what_two_ranks_saved_opens_in_one(horovod_reports: tuple[Path, Sequence[dict[str, Any]]]) -> None:
    folder, reports = horovod_reports
    model = load_model(local(folder / "model"))
    for rank in range(2):
        tables = [t[rank::2] for t in model.embeddings.weight.split([500, 9, 1])]
        np.testing.assert_array_equal(torch.cat(tables).numpy(), reports[rank]["adam"]["rows"])
