"""TorchCollective on two and three real processes over gloo, against ranks that are threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from headrace.comm.base import Collective, LocalCollective, PeerLost, run_ranks
from headrace.comm.shared_memory import SharedCollective, shared
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for
from tests.collective_support import many_abandoned, most_in_flight

KINDS = ["table_wise", "row_wise", "column_wise", "data_parallel"]


def messages(c: Collective) -> dict[str, Any]:
    """Each kind of message: ragged, of nothing, not contiguous, of half-width types."""
    me, size = c.world.rank, c.world.size
    out: dict[str, Any] = {}
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16):
        rows = [[me, to, n] for to in range(size) for n in range((me + 2 * to) % 3)]
        send = [(me + 2 * to) % 3 for to in range(size)]
        received, counts = c.all_to_all(torch.tensor(rows, dtype=dtype).reshape(-1, 3), send)
        out[f"all_to_all {dtype}"] = (received.tolist(), counts, str(received.dtype))
    wide = torch.arange(4.0 * size).view(size, 4).t() + 100 * me
    out["transposed"] = c.all_to_all(wide, [4] + [0] * (size - 1))[0].tolist()
    out["nothing"] = c.all_to_all(torch.zeros(0, 2), [0] * size)[0].tolist()
    if size > 1:
        out["most in flight"] = most_in_flight(c)
        many_abandoned(c)
    first = c.start_all_to_all(torch.full((size, 2), me), [1] * size)
    second = c.start_all_to_all(torch.full((size, 2), 10 + me), [1] * size)
    out["two in flight"] = (second()[0].tolist(), first()[0].tolist())
    tensors = [torch.full((2, 3), me + 1.0), torch.tensor([me]), torch.tensor(0.5 * me)]
    c.all_reduce_sum(tensors)
    out["sum"] = [t.tolist() for t in tensors]
    out["gather"] = c.all_gather(torch.full((me, 2), me)).tolist()
    payload = [torch.full((2,), float(me)), torch.tensor(me)]
    c.broadcast(payload, root=size - 1)
    out["broadcast"] = [t.tolist() for t in payload]
    c.barrier()
    return out


def steps(c: Collective) -> list[list[float]]:
    """Ten steps of a plan of all kinds and two storages; the last rows of this rank."""
    tables = tuple(Table(f"t{i}", 5 + 7 * i, 4 + 2 * (i % 2), "bf16" if i == 1 else "fp32") for i in range(4))
    blocks = tuple(b for t, kind in zip(tables, KINDS, strict=True) for b in blocks_for(t, kind, c.world.size))
    lookups = tuple(Lookup(f"f{i}", t.name, 2, True, ("sum", "mean", "max", "none")[i]) for i, t in enumerate(tables))
    embeddings = ShardedEmbeddings(Plan(tables, lookups, blocks, c.world.size), c, seed=1)
    embeddings.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1))
    for step in range(10):
        generator = torch.Generator().manual_seed(10 * step + c.world.rank)
        rows = (step + c.world.rank) % 3
        codes = torch.stack(
            [torch.randint(0, t.rows, (rows,), generator=generator) for t in tables for _ in range(2)], dim=1
        )
        sum((out - 1).square().sum() for out in embeddings.features(codes)).backward()
        embeddings.step()
    return [w.float().flatten().tolist() for w in embeddings.weights]


def report(c: Collective) -> tuple[dict[str, Any], list[list[float]]]:
    return messages(c), steps(c)


def rank_main(rank: int, size: int, meeting: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        from headrace.comm.torch_dist import TorchCollective

        answers.put((rank, report(TorchCollective())))
    finally:
        dist.destroy_process_group()


def shared_rank_main(rank: int, size: int, meeting: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        from headrace.comm.torch_dist import TorchCollective

        collective = shared(TorchCollective())
        assert isinstance(collective, SharedCollective)
        result = report(collective)
        # Longer messages than slots had room for, and more of them than there are slots.
        for n in [3, 70_000, 5, 90_000] * 10:
            sent = torch.arange(n * size).view(-1, 1) * 10 + rank
            received, counts = collective.all_to_all(sent, [n] * size)
            each = torch.arange(rank * n, (rank + 1) * n).view(-1, 1)
            assert torch.equal(received, torch.cat([each * 10 + r for r in range(size)]))
            assert counts == [n] * size
        answers.put((rank, result))
        collective.close()
    finally:
        dist.destroy_process_group()


def lonely_rank_main(rank: int, size: int, meeting: Path, answers: Any) -> None:
    """Rank 1 is killed; the others wait for it."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    from headrace.comm.torch_dist import TorchCollective

    collective = shared(TorchCollective())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match="rank 1 is gone") as first:
        collective.all_reduce_sum([torch.zeros(3)])
    answers.put((rank, str(first.value)))
    answers.close()
    answers.join_thread()
    os._exit(0)  # gloo has lost a rank, too


def failing_rank_main(rank: int, folder: Path, answers: Any) -> None:
    """Rank 1 raises while rank 0 waits for it, and says why a while later, as a task of Spark does."""
    from headrace.comm.torch_dist import gloo_ranks

    def tell(text: str) -> list[str]:
        (folder / f"{rank}.part").write_text(text)
        (folder / f"{rank}.part").rename(folder / str(rank))
        while not all((folder / name).exists() for name in "01"):
            time.sleep(0.01)
        return [(folder / name).read_text() for name in "01"]

    try:
        with gloo_ranks(rank, 2, "127.0.0.1", tell) as collective:
            if rank == 1:
                raise ValueError
            collective.all_reduce_sum([torch.zeros(3)])
    except ValueError:
        time.sleep(0.5)
        (folder / "reason").touch()
    except RuntimeError:
        answers.put((folder / "reason").exists())
        answers.close()
        answers.join_thread()
    os._exit(1)


def launch(size: int, meeting: Path, main: Callable[..., None]) -> list[Any]:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=main, args=(rank, size, meeting, answers)) for rank in range(size)]
    for r in ranks:
        r.start()
    results = dict(answers.get(timeout=120) for _ in ranks)
    for r in ranks:
        r.join(60)
        assert r.exitcode == 0
    return [results[rank] for rank in range(size)]


def test_host_tensors_go_by_way_of_the_gpu_where_nccl_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's part is played by gloo, which here refuses tensors of the host as NCCL does."""
    from headrace.comm import torch_dist
    from tests.gpu.pretended import ELSEWHERE, Elsewhere, pretend, unwrap

    def as_nccl(work: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*args: Any, **more: Any) -> Any:
            tensors = [x for x in tree_leaves((args, more)) if isinstance(x, torch.Tensor)]
            assert tensors
            assert all(isinstance(x, Elsewhere) for x in tensors), "No backend type associated with device type cpu"
            return work(*tree_map(unwrap, args), **more)

        return refusing

    for name in ("all_to_all_single", "all_reduce", "all_gather", "broadcast"):
        monkeypatch.setattr(dist, name, as_nccl(getattr(dist, name)))
    monkeypatch.setattr(torch_dist, "_staging_device", lambda group: ELSEWHERE, raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with pretend():
            assert messages(torch_dist.TorchCollective()) == messages(LocalCollective())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "expected"),
    [("cuda:nccl", torch.device("cuda", 3)), ("cpu:gloo,cuda:nccl", None), ("cpu:gloo,cuda:gloo", None)],
)
def test_which_groups_take_host_tensors(
    config: str, expected: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.comm.torch_dist import _staging_device

    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert _staging_device(None) == expected


@pytest.mark.parametrize(
    ("size", "main"), [(2, rank_main), (3, rank_main), (2, shared_rank_main), (3, shared_rank_main)]
)
def test_processes_say_and_learn_what_threads_do(size: int, main: Callable[..., None], tmp_path: Path) -> None:
    actual = launch(size, tmp_path / "meeting", main)
    for (answers, weights), (expected, expected_weights) in zip(actual, run_ranks(size, report), strict=True):
        assert answers == expected
        for a, b in zip(weights, expected_weights, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-6)


def test_who_waits_for_a_rank_that_raises_fails_after_it_has_told_why(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=failing_rank_main, args=(rank, tmp_path, answers)) for rank in range(2)]
    for r in ranks:
        r.start()
    assert answers.get(timeout=60) is True
    for r in ranks:
        r.join(60)
    assert [r.exitcode for r in ranks] == [1, 1]


def test_who_waits_for_a_rank_that_is_killed_hears_of_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=lonely_rank_main, args=(r, 3, tmp_path / "meeting", answers)) for r in range(3)]
    for r in ranks:
        r.start()
    assert dict(answers.get(timeout=60) for _ in range(2)) == {0: "rank 1 is gone", 2: "rank 1 is gone"}
    for r in ranks:
        r.join(60)
    assert [r.exitcode for r in ranks] == [0, -signal.SIGKILL, 0]
