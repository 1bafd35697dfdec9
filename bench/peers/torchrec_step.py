"""A TorchRec model's training step on gloo ranks: its time, and the bytes that each rank gives to others.

    make bench-peers                                  # TorchRec and FBGEMM's CPU operators, below build/peers
    found = run_torchrec(Step(rows=(1_000_000,) * 4, ids=4, dim=64, batch=8_192, sharding="table_wise"))

The ranks are processes of the project's Python with build/peers on the path. Without MLPs the step is the embedding
step alone (lookup, pooling, a given gradient, row-wise Adagrad fused by FBGEMM); with them it is torchrec.models.DLRM,
binary cross-entropy and SGD on the averaged dense part. Ids are those of `draw_ids`, so that both
sides of a comparison can see the same.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headrace.config.installation import checkout

_MODULE = "bench.peers.torchrec_step"
FOLDERS = ("torchrec", "fbgemm")


@dataclass(frozen=True)
class TrainingStep:
    """Training step to measure: model, tables, batch and ranks."""

    #: Rows of each table; one feature looks up each.
    rows: tuple[int, ...]
    #: Ids of a feature in one sample, pooled by a sum.
    ids: int
    dim: int
    #: Samples of a rank and step.
    batch: int
    sharding: str = "table_wise"
    world: int = 2
    #: Distinct batches, taken in turns.
    batches: int = 4
    steps: int = 20
    #: Exponent of the popularity of ids; 0: all alike.
    zipf: float = 1.05
    learning_rate: float = 0.01
    #: Continuous features, and hidden widths of a DLRM; no top: the embedding step alone.
    dense: int = 0
    bottom: tuple[int, ...] = ()
    top: tuple[int, ...] = ()
    threads: int = 1


@dataclass(frozen=True)
class StepFigures:
    """Figures of a run: seconds of its steps, and bytes that a rank sends."""

    #: Seconds of each step of the slowest rank, the first quarter left out.
    seconds: tuple[float, ...]
    #: Bytes that a rank gives to other ranks in a step, the mean over ranks: ids and lengths, vectors, gradients.
    sent: float
    #: The same without the all-reduce of the dense part.
    sent_embeddings: float


def is_installed() -> bool:
    """Return whether `make bench-peers` has run."""
    return all((checkout() / "build" / "peers" / name).is_dir() for name in FOLDERS)


def draw_ids(step: TrainingStep, rank: int, batch: int) -> Any:
    """Draw ids of one batch: int64 [B, features, ids], none 0."""
    import numpy as np

    rng = np.random.default_rng([rank, batch])
    ids = np.empty((step.batch, len(step.rows), step.ids), dtype=np.int64)
    for i, rows in enumerate(step.rows):
        if step.zipf == 0:
            ids[:, i] = rng.integers(1, rows, (step.batch, step.ids))
            continue
        edges = _zipf_edges(rows, step.zipf)
        ids[:, i] = np.searchsorted(edges, rng.random((step.batch, step.ids))).clip(1, rows - 1)
    return ids


@cache
def _zipf_edges(rows: int, exponent: float) -> Any:
    import numpy as np

    edges = np.cumsum(np.arange(1, rows + 1) ** -exponent)
    return edges / edges[-1]


def run_torchrec(step: TrainingStep, environment: dict[str, str] | None = None) -> StepFigures:
    """Train on `step.world` processes.

    Args:
        step: what.
        environment: beside this process's (the allocator's settings of the other side of the comparison).

    Raises:
        subprocess.CalledProcessError: a rank failed; its messages are on stderr.
    """
    root = checkout()
    path = os.pathsep.join([str(root), *(str(root / "build" / "peers" / name) for name in FOLDERS)])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", _MODULE, json.dumps(asdict(step)), str(rank), folder],
                env={**os.environ, **(environment or {}), "PYTHONPATH": path},
                cwd=root,
            )
            for rank in range(step.world)
        ]
        codes = [r.wait() for r in ranks]
        if any(codes):
            raise subprocess.CalledProcessError(next(c for c in codes if c), _MODULE)
        answers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(step.world)]
    seconds = tuple(max(times) for times in zip(*(a["seconds"] for a in answers), strict=True))
    mean = {k: sum(a[k] for a in answers) / len(answers) for k in ("sent", "reduced")}
    return StepFigures(seconds[len(seconds) // 4 :], mean["sent"] + mean["reduced"], mean["sent"])


class Meter:
    """Counts what a rank gives to others, at torch.distributed's functions, called by their module from now on."""

    def __init__(self, dist: Any, world: int, rank: int) -> None:
        self.sent = 0.0
        self._world, self._rank = world, rank
        self._wrap(dist, "all_to_all_single", self._all_to_all)
        self._wrap(dist, "all_to_all", lambda out, parts, *a, **k: self._add(parts[:rank] + parts[rank + 1 :]))
        self._wrap(dist, "reduce_scatter", lambda out, parts, *a, **k: self._add(parts[:rank] + parts[rank + 1 :]))
        for name in ("reduce_scatter_tensor", "_reduce_scatter_base"):
            self._wrap(dist, name, lambda out, x, *a, **k: self._add([x], (world - 1) / world))
        for name in ("all_gather", "all_gather_into_tensor", "_all_gather_base"):
            self._wrap(dist, name, lambda out, x, *a, **k: self._add([x], world - 1))

    def _wrap(self, dist: Any, name: str, count: Callable[..., None]) -> None:
        inner = getattr(dist, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            count(*args, **kwargs)
            return inner(*args, **kwargs)

        setattr(dist, name, outer)

    def _add(self, tensors: Sequence[Any], share: float = 1.0) -> None:
        self.sent += share * sum(t.numel() * t.element_size() for t in tensors)

    def _all_to_all(
        self, output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, *a: Any, **k: Any
    ) -> None:
        size = input.numel() * input.element_size()
        if not input_split_sizes:
            self.sent += size * (self._world - 1) / self._world
            return
        rows = sum(input_split_sizes)
        self.sent += size * (rows - input_split_sizes[self._rank]) / max(1, rows)


def _model(step: TrainingStep, torch: Any) -> Any:
    """Return the model, its tables on the meta device: TorchRec makes the shards."""
    from torchrec.models.dlrm import DLRM, DLRMTrain  # type: ignore[import-not-found]
    from torchrec.modules.embedding_configs import EmbeddingBagConfig  # type: ignore[import-not-found]
    from torchrec.modules.embedding_modules import EmbeddingBagCollection  # type: ignore[import-not-found]

    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=step.dim, num_embeddings=rows, feature_names=[f"f{i}"])
        for i, rows in enumerate(step.rows)
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    if not step.top:
        return bags
    cpu = torch.device("cpu")
    return DLRMTrain(DLRM(bags, step.dense, [*step.bottom, step.dim], [*step.top, 1], dense_device=cpu))


def _rank_main(step: TrainingStep, rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)  # a page of advice about its planner
    torch.set_num_threads(step.threads)
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=step.world)
    meter = Meter(dist, step.world, rank)

    import fbgemm_gpu  # type: ignore[import-not-found]  # noqa: F401  (registers the operators)
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # type: ignore[import-not-found]
    from torchrec.distributed.model_parallel import DistributedModelParallel  # type: ignore[import-not-found]
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # type: ignore[import-not-found]
    from torchrec.distributed.planner.types import ParameterConstraints  # type: ignore[import-not-found]
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward  # type: ignore[import-not-found]
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # type: ignore[import-not-found]
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # type: ignore[import-not-found]

    class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
        """On CPUs TorchRec offers neither row- nor column-wise unless it is told to."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [step.sharding]

        def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
            return ["fused"]

    model = _model(step, torch)
    bags = model.model.sparse_arch.embedding_bag_collection if step.top else model
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": step.learning_rate})
    names = [f"t{i}" for i in range(len(step.rows))]
    limits = {n: ParameterConstraints(sharding_types=[step.sharding], compute_kernels=["fused"]) for n in names}
    topology = Topology(world_size=step.world, compute_device="cpu", local_world_size=step.world)
    plan = EmbeddingShardingPlanner(topology=topology, constraints=limits).collective_plan(
        model, [Sharder()], dist.group.WORLD
    )
    ranked = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[Sharder()], init_data_parallel=bool(step.top)
    )
    dense = [p for name, p in ranked.named_parameters() if "embedding" not in name]
    optimizer = torch.optim.SGD(dense, lr=step.learning_rate) if dense else None

    lengths = torch.full((len(step.rows) * step.batch,), step.ids, dtype=torch.int32)
    keys = [f"f{i}" for i in range(len(step.rows))]
    data = []
    for number in range(step.batches):
        ids = torch.from_numpy(draw_ids(step, rank, number)).transpose(0, 1).reshape(-1)
        kjt = KeyedJaggedTensor(keys, ids, lengths=lengths)
        generator = torch.Generator().manual_seed(100 * rank + number)
        wide = len(step.rows) * step.dim
        data.append(
            (
                kjt,
                torch.rand(step.batch, max(1, step.dense), generator=generator),
                torch.randint(0, 2, (step.batch,), generator=generator),
                torch.randn(step.batch, wide, generator=generator),
            )
        )

    def once(number: int) -> None:
        kjt, features, labels, gradient = data[number % step.batches]
        if optimizer is None:
            ranked(kjt).wait().values().backward(gradient)
            return
        from torchrec.datasets.utils import Batch  # type: ignore[import-not-found]

        optimizer.zero_grad(set_to_none=True)
        loss, _ = ranked(Batch(dense_features=features, sparse_features=kjt, labels=labels))
        loss.backward()
        optimizer.step()

    once(0)
    meter.sent = 0.0
    seconds = []
    for number in range(step.steps):
        dist.barrier()
        start = time.perf_counter()
        once(number)
        seconds.append(time.perf_counter() - start)
    # DistributedDataParallel reduces in C++, where nobody counts: a ring passes on 2 (W - 1) / W of the gradients.
    reduced = 2 * (step.world - 1) / step.world * sum(p.numel() * p.element_size() for p in dense)
    answer = {"seconds": seconds, "sent": meter.sent / step.steps, "reduced": reduced}
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _main() -> None:
    fields = json.loads(sys.argv[1])
    step = TrainingStep(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    _rank_main(step, int(sys.argv[2]), Path(sys.argv[3]))


if __name__ == "__main__":
    _main()
