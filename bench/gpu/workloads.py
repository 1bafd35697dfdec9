"""Workloads of the benches of a GPU, and the clock that measures them.

- Tables of the size of MLPerf's DLRM, and batches of ids for them, made on the device.
- The dense parts: MLPerf's DLRM (Naumov et al., 2019) and its DCNv2 variant (Wang et al., 2021).
- The step as training takes it: headrace's own model, tables and optimizers, in one process, without a loader. It
  needs pydantic beside torch and Triton, for the classes of the spec.
- Tables of raw ids, and tables larger than the card: the hash table's speed, the cache's hits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headrace.embeddings.kernels import gpu
from headrace.embeddings.kernels.dispatch import find_duplicates
from headrace.embeddings.kernels.gpu import DeviceMap
from headrace.embeddings.storage import RowCache
from headrace.models.feature_interaction_triton import interact, interaction_width

#: A figure: `what`, `value`, `unit`, and others by name.
Row = dict[str, Any]


class Clock:
    """Seconds of work on the device: the median of several runs, after some that do not count."""

    def __init__(self, device: str, turns: int, warm_up: int) -> None:
        self.device, self.turns, self.warm_up = device, turns, warm_up

    def seconds(self, work: Callable[[int], object]) -> float:
        """`work` is told which turn it is."""
        measured = []
        for repeat in range(self.warm_up + self.turns):
            if self.device == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                work(repeat)
                end.record()
                end.synchronize()
                measured.append(begin.elapsed_time(end) / 1000)
            else:
                start = time.perf_counter()
                work(repeat)
                measured.append(time.perf_counter() - start)
        return statistics.median(measured[self.warm_up :])


DIM, DENSE = 128, 13
#: Rows of the 26 tables of MLPerf's DLRM-DCNv2, 204 million (Criteo's click logs of 24 days, 40 million rows a table at
#: most). Source: MLCommons, github.com/mlcommons/training, recommendation_v2/torchrec_dlrm.
CARDINALITIES = (
    40_000_000,
    39_060,
    17_295,
    7_424,
    20_265,
    3,
    7_122,
    1_543,
    63,
    40_000_000,
    3_067_956,
    405_282,
    10,
    2_209,
    11_938,
    155,
    4,
    976,
    14,
    40_000_000,
    40_000_000,
    40_000_000,
    590_152,
    12_973,
    108,
    36,
)
#: Zipf's exponent.
EXPONENT = 1.05


def cardinalities(rows: int) -> list[int]:
    """Return the tables' rows, the large ones made smaller so that there are about `rows` in all."""
    share = min(1.0, rows / sum(CARDINALITIES))
    return [max(4, int(c * share)) if c > 100_000 or share < 1e-2 else c for c in CARDINALITIES]


@dataclass(frozen=True)
class IdBatch:
    """Addresses int64 [B * 26] in the matrix of all tables, sample by sample; dense float32 [B, 13]; label [B, 1]."""

    addresses: Tensor
    dense: Tensor
    label: Tensor


def batches(kind: str, sizes: list[int], batch: int, count: int, device: str) -> list[IdBatch]:
    """Draw several batches, so that no run finds the last one's rows in a cache."""
    torch.manual_seed(0)
    rows = torch.tensor(sizes, dtype=torch.float64, device=device)
    first = (rows.cumsum(0) - rows).long()
    drawn = []
    for _ in range(count):
        u = torch.rand(batch, len(sizes), dtype=torch.float64, device=device)
        if kind == "uniform":
            ids = u * rows
        else:
            # The inverse of the continuous distribution's function; popular ids first, as a vocabulary has them.
            power = 1 - EXPONENT
            ids = ((((rows + 1) ** power - 1) * u) + 1) ** (1 / power) - 1
        ids = torch.minimum(ids.long(), (rows - 1).long())
        drawn.append(
            IdBatch(
                (ids + first).flatten(),
                torch.randn(batch, DENSE, device=device),
                (torch.rand(batch, 1, device=device) < 0.03).float(),
            )
        )
    return drawn


def mlp(widths: list[int], last: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(a, b))
        if last or i < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """Dense float32 [B, 13] and vectors [B, F, D] -> logits [B, 1]: dot products of all pairs."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bottom = mlp([DENSE, 512, 256, DIM])
        pairs = torch.tril_indices(features + 1, features + 1, -1)
        self.register_buffer("pairs", pairs[0] * (features + 1) + pairs[1])
        self.top = mlp([DIM + pairs.shape[1], 1024, 1024, 512, 256, 1], last=False)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        x = self.bottom(dense)
        stacked = torch.cat([x.unsqueeze(1), vectors.to(x.dtype)], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        assert isinstance(self.pairs, Tensor)
        return self.top(torch.cat([x, products.index_select(1, self.pairs)], 1))  # type: ignore[no-any-return]


class FusedDlrm(nn.Module):
    """The same by headrace's kernel for the products, whose zeros behind them feed weights that learn nothing."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bottom = mlp([DENSE, 512, 256, DIM])
        self.top = mlp([interaction_width(features, DIM), 1024, 1024, 512, 256, 1], last=False)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.top(interact(self.bottom(dense), vectors))  # type: ignore[no-any-return]


class Dcn(nn.Module):
    """The same with three low-rank cross layers (rank 512) in place of the products."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bottom = mlp([DENSE, 512, 256, DIM])
        width = (features + 1) * DIM
        self.down = nn.ModuleList(nn.Linear(width, 512, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(512, width) for _ in range(3))
        self.top = mlp([width, 1024, 1024, 512, 256, 1], last=False)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        x = self.bottom(dense)
        first = torch.cat([x.unsqueeze(1), vectors.to(x.dtype)], 1).flatten(1)
        crossed = first
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        return self.top(crossed)  # type: ignore[no-any-return]


MODELS: dict[str, type[nn.Module]] = {"dlrm": FusedDlrm, "plain dlrm": Dlrm, "dcn": Dcn}


def product_rows(clock: Clock, sizes: list[int], kind: str, batch: int, storage: Any, dense: Any) -> Iterator[Row]:
    """Measure steps from ids on the host to the last optimizer; on a GPU the dense part as a graph."""
    from headrace.comm.base import LocalCollective
    from headrace.config import EmbeddingOptimizer, Model, Optimizer
    from headrace.config.schema import DatasetSchema, Feature, Kind
    from headrace.embeddings.sharding_plan import Lookup, Plan, Table, row_wise
    from headrace.models.categorical import CategoricalBatch
    from headrace.models.sharded_model import ShardedModel
    from headrace.train.loop.trainer import EagerForward, GraphedForward
    from headrace.train.micro_batch import MicroBatch
    from headrace.train.optim import DenseOptimizer

    numbers = [Feature(name=f"i{i}", kind=Kind.CONTINUOUS, dtype="float32") for i in range(DENSE)]
    ids = [Feature(name=f"c{i}", kind=Kind.CATEGORICAL, dtype="int32", cardinality=n) for i, n in enumerate(sizes)]
    schema = DatasetSchema(features=(*numbers, *ids, Feature(name="click", kind=Kind.LABEL, dtype="float32")))
    settings = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.01)
    shape = Model(embedding_dim=DIM, bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512, 256))

    def plan(tables: Sequence[Table], lookups: Sequence[Lookup], world: int) -> Plan:
        return row_wise([replace(t, storage=storage) for t in tables], lookups, world)

    model = ShardedModel(schema, shape, LocalCollective(), 1, plan, settings, clock.device)
    model.precision = dense
    model.configure_optimizer(settings)
    optimizer = DenseOptimizer(model.dense_parameters(), Optimizer(kind="sgd"), LocalCollective())
    passes = GraphedForward(model, batch) if clock.device == "cuda" else EagerForward(model, batch)
    first = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    parts = [
        MicroBatch(b.dense, CategoricalBatch(b.addresses.view(batch, -1).cpu() - first), b.label.squeeze(1))
        for b in batches(kind, sizes, batch, 4, clock.device)
    ]
    model.train()

    def step(repeat: int) -> None:
        part = parts[repeat % len(parts)]
        outcome = passes(part, model.prepare(part.categorical))
        outcome.backward()
        optimizer.reduce(float(outcome.loss))
        optimizer.step()
        model.step_embeddings()

    seconds = clock.seconds(step)
    yield {"what": f"training's own step, {kind}, {batch}", "value": batch / seconds / 1e6, "unit": "M samples/s"}


#: Share of the rows that the card holds.
HELD = 0.1


def map_rows(clock: Clock, ids: int) -> Iterator[Row]:
    """Measure a map that grows by half as many ids as it has, and lookups of all."""
    device = torch.device(clock.device)
    torch.manual_seed(0)
    unique_ids = torch.unique(torch.randint(-(2**62), 2**62, (ids,), device=device))
    half = len(unique_ids) // 2

    def grow(_: int) -> None:
        device_map = DeviceMap(device, unique_ids[:half])
        device_map.add(unique_ids[half:])

    seconds = clock.seconds(grow)
    yield {"what": f"map: insert {len(unique_ids)} ids", "value": len(unique_ids) / seconds / 1e6, "unit": "M ids/s"}
    device_map = DeviceMap(device, unique_ids)
    seconds = clock.seconds(lambda _: device_map.find(unique_ids))
    yield {"what": f"map: find {len(unique_ids)} ids", "value": len(unique_ids) / seconds / 1e6, "unit": "M ids/s"}


def cache_rows(clock: Clock, rows: int, batch: int) -> Iterator[Row]:
    """Measure lookups and steps under Zipf's law of a table in host memory, a tenth of it on the card."""
    host = torch.zeros(rows, DIM, pin_memory=clock.device == "cuda")
    sums = torch.zeros(rows, 1, pin_memory=clock.device == "cuda")
    table = RowCache([host, sums], max(64, int(HELD * rows)), clock.device)
    addresses = [b.addresses for b in batches("zipf", [rows], batch, 24, clock.device)]
    grad = torch.randn(batch, DIM, device=clock.device)

    def step(repeat: int) -> None:
        distinct = find_duplicates(addresses[repeat % len(addresses)])
        vectors = table.look_up(distinct, admit=True)
        gpu.pool_sum(vectors, distinct.inverse(), batch)
        cached = table.acquire(distinct.unique)
        weight, state = cached.matrices
        gpu.rowwise_adagrad(weight, state, cached.slots, distinct.starts, distinct.order, grad, lr=0.01)
        table.commit(cached)

    for repeat in range(12 if clock.device == "cuda" else 1):
        step(repeat)
    table.forget_hits()
    seconds = clock.seconds(lambda repeat: step(12 + repeat))
    ids = torch.arange(1, rows + 1, dtype=torch.float64)
    popular = ids.pow_(-EXPONENT)
    most = float(popular[: table.capacity].sum() / popular.sum())
    yield {
        "what": f"cached table, zipf, {batch}",
        "value": batch / seconds / 1e6,
        "unit": "M lookups/s",
        "hit rate": float(table.counts[0].sum() / table.counts[1].sum()),
        "at most": most,
    }
