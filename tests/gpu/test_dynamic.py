"""Tables of raw ids on a GPU: the same answers as on a CPU, and as a plain dictionary gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.checkpoint.dynamic import load_dynamic, save_dynamic
from headrace.embeddings.dynamic.rows import DynamicReport
from headrace.embeddings.dynamic.rows_gpu import DeviceRows
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.kernels import hashing
from headrace.embeddings.kernels.gpu import DeviceMap
from headrace.embeddings.kernels.id_map import IdMap, mix
from headrace.embeddings.storage import initial_values
from headrace.storage import local
from tests.gpu.conftest import DEVICE, HAS_GPU
from tests.gpu.pretended import ELSEWHERE
from tests.unit import test_embeddings_dynamic as dynamic

TARGET_DEVICE = torch.device(DEVICE)
EDGES = [0, 1, -1, -(2**63), 2**63 - 1, 2**40, 2**53 + 1]


def test_hashes_and_starts_have_the_bits_of_cpus() -> None:
    rng = np.random.default_rng(1)
    ids = np.concatenate([EDGES, rng.integers(-(2**63), 2**63 - 1, 500)]).astype(np.int64)
    on_device = torch.from_numpy(ids).to(TARGET_DEVICE)
    for salt in (0, 1, 2 + 1_000_003 * 17):
        hashed, expected = hashing.mix(on_device, salt), mix(ids, salt)
        assert np.array_equal(hashed.cpu().numpy().view(np.uint64), expected)
        assert np.array_equal(hashing.uniform(hashed).cpu().numpy(), expected.astype(np.float64) / 2.0**64)
        for ranks in (1, 3, 8):
            assert np.array_equal(hashing.remainder(hashed, ranks).cpu().numpy(), (expected % ranks).astype(np.int64))
    for dim in (1, 2, 5):
        expected = initial_values("t", ids.view(np.uint64), range(dim), 3, 0.05)
        assert np.array_equal(hashing.initial_values("t", on_device, dim, 3, 0.05).cpu().numpy(), expected)
    first, last = torch.tensor([3, 1, 3, 1, 2]), torch.tensor([0, 1, 0, 0, 1])
    assert hashing.lexsort(first, last).tolist() == np.lexsort((first.numpy(), last.numpy())).tolist()


def test_the_map_is_that_of_cpus() -> None:
    rng = np.random.default_rng(2)
    ids = np.unique(np.concatenate([EDGES, rng.integers(-(2**63), 2**63 - 1, 400), np.arange(100) << 32]))
    rng.shuffle(ids)
    cpu_map, device_map = IdMap(), DeviceMap(TARGET_DEVICE)
    for part in np.split(ids, [1, 40, 41, 300]):  # it grows in between
        assert np.array_equal(device_map.add(torch.from_numpy(part).to(TARGET_DEVICE)).cpu().numpy(), cpu_map.add(part))
    requested = np.concatenate([rng.permutation(ids), rng.integers(0, 2**31, 200)])
    assert np.array_equal(
        device_map.find(torch.from_numpy(requested).to(TARGET_DEVICE)).cpu().numpy(), cpu_map.find(requested)
    )
    assert (len(device_map), device_map.load, device_map.nbytes) == (len(cpu_map), cpu_map.load, cpu_map.nbytes)
    assert len(DeviceMap(TARGET_DEVICE).find(torch.empty(0, dtype=torch.int64, device=TARGET_DEVICE))) == 0


class DeviceEmbeddings(DynamicEmbeddings):
    """The tables of a GPU, also where the interpreter plays one."""

    target_device = TARGET_DEVICE

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, device=self.target_device, **more)

    def _rows_of(self, spec: DynamicSpec, seed: int, init_bound: float) -> Any:
        return DeviceRows(spec, self.collective.world, seed, self.target_device, init_bound=init_bound)


class OneOnDevice(dynamic.SingleTable, DeviceEmbeddings):
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return super().__call__(ids).cpu()


def batches(world: int, seed: int) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    names = np.concatenate([EDGES, np.arange(2, 22)])
    popular = 1 / (1.0 + np.arange(len(names)))
    return [
        [rng.choice(names, rng.integers(0, 9), p=popular / popular.sum()).tolist() for _ in range(world)]
        for _ in range(6)
    ]


@pytest.mark.parametrize(
    ("world", "rows", "evict", "admit_after"), [(1, 7, "lfu", 1), (1, 7, "lru", 2), (2, None, "lru", 2)]
)
def test_rows_come_and_go_as_in_a_dictionary(
    world: int,
    rows: int | None,
    evict: Any,
    admit_after: int,
    kernels_everywhere: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamic, "SingleTable", OneOnDevice)
    spec = DynamicSpec("t", dynamic.DIM, admit_after=admit_after, max_rows=rows, evict=evict)
    assert (dynamic.compare(spec, world, batches(world, 4)).evicted > 0) == (rows is not None)


@pytest.mark.skipif(HAS_GPU, reason="there is a real one")
def test_no_tensor_is_on_the_wrong_device(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pretended device, by one rank and by two."""
    monkeypatch.setattr(dynamic, "SingleTable", type("OneElsewhere", (OneOnDevice,), {"target_device": ELSEWHERE}))
    assert dynamic.compare(DynamicSpec("t", dynamic.DIM, max_rows=7), 1, batches(1, 4)).evicted > 0
    dynamic.compare(DynamicSpec("t", dynamic.DIM, admit_after=2), 2, batches(2, 4))


def train(kind: type[DynamicEmbeddings], spec: DynamicSpec, id_batches: list[list[int]]) -> DynamicEmbeddings:
    tables = kind([spec], LocalCollective(), seed=7)
    tables.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1))
    one_by_one(tables, id_batches)
    return tables


def report_without_bytes(tables: DynamicEmbeddings) -> DynamicReport:
    """Return a report without its bytes: spare room is memory on a GPU, and none elsewhere."""
    return replace(tables.report()["t"], nbytes=0)


def one_by_one(tables: DynamicEmbeddings, id_batches: list[list[int]]) -> None:
    embeddings = dynamic.alone(tables)
    for ids in id_batches:
        ((vectors, _),) = dynamic.look_up(embeddings, [torch.tensor(ids, dtype=torch.int64)])
        (vectors - 1).square().sum().backward()
        tables.step()


@pytest.mark.parametrize(
    "spec",
    [
        DynamicSpec("t", 4, admit_after=2, max_rows=9, max_waiting=6, evict="lru", evict_share=0.3),
        DynamicSpec("t", 4, admit_after=1, admit_chance=0.5, memory_mib=0.0008),
    ],
)
def test_all_that_is_saved_is_that_of_cpus(
    spec: DynamicSpec, kernels_everywhere: dict[str, int], tmp_path: Path
) -> None:
    """Ids, counts, who waits, admissions and evictions exactly; weights but for rounding; each opens the other's."""
    id_batches = [b[0] for b in batches(1, 9)] * 2
    cpu_tables, device_tables = train(DynamicEmbeddings, spec, id_batches), train(DeviceEmbeddings, spec, id_batches)
    assert cpu_tables.report()["t"].admitted > 0
    assert report_without_bytes(cpu_tables) == report_without_bytes(device_tables)
    for actual, expected in zip(device_tables.tables[0].dump(), cpu_tables.tables[0].dump(), strict=True):
        assert actual.keys() == expected.keys()
        for name, values in expected.items():
            if name == "waiting":  # in no order
                assert sorted(actual[name].tolist()) == sorted(values.tolist())
            elif values.dtype is torch.int64:
                assert torch.equal(actual[name], values), name
            else:
                torch.testing.assert_close(actual[name], values, rtol=1e-5, atol=1e-6)
    for tables in (cpu_tables, device_tables):
        tables.tables[0].track()
        one_by_one(tables, id_batches[:3])
    changes, expected_changes = device_tables.tables[0].take_changes(), cpu_tables.tables[0].take_changes()
    assert torch.equal(changes["gone"], expected_changes["gone"])
    order, expected_order = changes["ids"].argsort(), expected_changes["ids"].argsort()
    assert torch.equal(changes["ids"][order], expected_changes["ids"][expected_order])
    assert len(order) > 0
    torch.testing.assert_close(
        changes["weight"][order], expected_changes["weight"][expected_order], rtol=1e-5, atol=1e-6
    )
    for kind in (DeviceEmbeddings, DynamicEmbeddings):
        follower = kind([spec], LocalCollective(), seed=7)
        follower.tables[0].put_changes(changes)
        assert sorted(follower.tables[0].ids.tolist()) == changes["ids"][order].tolist()
    save_dynamic(device_tables, local(tmp_path))
    both_loaded = [kind([spec], LocalCollective(), seed=7) for kind in (DeviceEmbeddings, DynamicEmbeddings)]
    for loaded in both_loaded:
        loaded.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1))
        load_dynamic(loaded, local(tmp_path), with_optimizer=True)
        one_by_one(loaded, id_batches[:2])
    assert report_without_bytes(both_loaded[0]) == report_without_bytes(both_loaded[1])
    twin = device_tables.snapshot()
    dump_before = {k: v.clone() for k, v in twin.tables[0].dump()[0].items()}
    one_by_one(device_tables, id_batches[2:4])
    assert all(torch.equal(v, dump_before[k]) for k, v in twin.tables[0].dump()[0].items())
