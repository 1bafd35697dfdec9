"""Rank processes for bench_train: our loop over a model of given shape, and its floor, in turns in the same processes.

The loop is headrace.train.loop.trainer as training runs it, over gloo, fed from memory; the floor is the same loop with
the embeddings replaced by a constant: the same MLPs, the same dense all-reduce, no lookups. A second floor has the
interaction in plain torch, as the dense part is in others' DLRMs: ours is one pass in C++ in the floor as well.

A third floor, `bound`, is the least that looking up and learning rows costs a step: in place of the embeddings, each
row is read once, then read and written once. Ids are known beforehand and sorted, nothing is exchanged, no vector
reaches the dense part and no gradient comes from it. What is left is memory: forward, a rank reads the rows that the
ranks ask it for (each rank's distinct ones) and writes them side by side; in the step it reads a gradient for each row
that was touched, and reads and writes the row and its state of row-wise Adagrad. Tables are dealt by rows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.peers.torchrec_step import TrainingStep, draw_ids
from headrace.comm.base import Collective
from headrace.comm.shared_memory import shared
from headrace.comm.torch_dist import TorchCollective
from headrace.compute.jagged import JaggedArray
from headrace.config import EmbeddingOptimizer, Model, Optimizer, Schedule, Sharding, Train
from headrace.config.installation import checkout
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.dataset.batches import Batch
from headrace.dataset.layout import open_split
from headrace.dataset.loaders import TrainLoader
from headrace.embeddings.addressing import CodeBatch
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.kernels import cpu
from headrace.embeddings.planner.search import plan_tables
from headrace.embeddings.sharding_plan import Lookup, Plan, Table
from headrace.embeddings.storage import empty_table
from headrace.embeddings.update_rules import fused_step
from headrace.models.dlrm import DLRM
from headrace.models.inputs import Inputs
from headrace.models.layers import pairwise_dots
from headrace.models.sharded_model import ShardedModel
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.callbacks.metrics_log import MetricsLog
from headrace.train.callbacks.progress import LoopProgress, ProgressEvent, ProgressReporter
from headrace.train.callbacks.tracing import InstrumentedCollective, NoOpTracer, Tracer, collect_profile
from headrace.train.callbacks.watchdog import Watchdog
from headrace.train.job import Job
from headrace.train.loop.trainer import Trainer
from headrace.train.optim import DenseOptimizer
from headrace.train.setup.state import TrainState


class NoMessages:
    """Prepared lookup of a constant, which sends no messages."""

    zero_copy = False

    def __init__(self, samples: int, batch: int) -> None:
        self.samples, self.batch = samples, batch

    def start(self) -> None: ...

    def prefetch(self) -> None: ...

    def drop(self) -> None: ...


class Constant(nn.Module):
    """Embeddings of nothing: the same vectors for every batch."""

    dynamic = None

    def __init__(self, like: Any, samples: int, batches: list[Batch]) -> None:
        super().__init__()
        self.plan = like.plan
        width = len(like.plan.lookups)
        self._vectors = torch.randn(samples, width, like.plan.tables[0].dim) * 0.01
        self._numbers = {b.codes.ctypes.data: number for number, b in enumerate(batches)}

    def prepare(
        self, codes: CodeBatch, weights: None = None, raw: object = (), *, zero_copy: bool = False
    ) -> NoMessages:
        if isinstance(codes, Tensor):
            return NoMessages(codes.shape[0], self._numbers[codes.data_ptr()])
        first = codes[0]
        samples = first.offsets.numel() - 1 if isinstance(first, JaggedTensor) else len(first)
        return NoMessages(samples, 0)  # which batch it is only `Touched` wants to know, whose features have one id

    def forward(self, prepared: NoMessages) -> Tensor:
        return self._vectors[: prepared.samples]

    def step_all(self, lr: float | None = None) -> None: ...


class Touched(Constant):
    """The same vectors, beside which the rows of the batch are read and changed."""

    def __init__(self, like: Any, step: TrainingStep, rank: int, batches: list[Batch]) -> None:
        super().__init__(like, step.batch, batches)
        #: By batch: the rows that ranks ask for here, and distinct ones.
        self._requested: list[tuple[Tensor, Tensor]] = []
        share = -(-max(step.rows) // step.world)
        for number in range(step.batches):
            requested = [_own_rows(draw_ids(step, r, number), share, step.world, rank) for r in range(step.world)]
            self._requested.append((torch.cat(requested), torch.cat(requested).unique()))
        self._table = empty_table(share * len(step.rows), step.dim).uniform_(-0.1, 0.1)
        self._state = empty_table(share * len(step.rows), 1).zero_()
        self._gradient = torch.randn(max(d.numel() for _, d in self._requested), step.dim) * 1e-6
        self._now = 0

    def forward(self, prepared: NoMessages) -> Tensor:
        self._now = prepared.batch
        rows, _ = self._requested[self._now]
        cpu.pool_sum(self._table, rows, rows.numel())
        return super().forward(prepared)

    def step_all(self, lr: float | None = None) -> None:
        _, rows = self._requested[self._now]
        each = torch.arange(rows.numel())
        rowwise = fused_step("rowwise_adagrad", self._table)
        assert rowwise is not None
        rowwise(self._table, [self._state], rows, each, each, rows.numel(), self._gradient, lr=1e-6, decay=0.0, step=1)


def _own_rows(ids: Any, share: int, world: int, rank: int) -> Tensor:
    """Return distinct rows of a rank's matrix that ids [B, tables, ids] ask for: int64, ascending."""
    codes = np.asarray(ids).reshape(len(ids), ids.shape[1], -1)
    rows = codes // world + (np.arange(codes.shape[1]) * share)[None, :, None]
    return torch.from_numpy(np.unique(rows[codes % world == rank]))


#: The same for both sides of every comparison: blocks that are freed stay with the process.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_TOP_PAD_": str(1 << 26)}

#: What takes turns.
_NAMES = ("loop", "floor", "torch", "bound")


@dataclass(frozen=True)
class LoopResult:
    """Seconds of each step of the slowest rank; `profile`: milliseconds of its parts (the trace is in build/bench).

    `torch`: of the floor in plain torch. `bound`: of the floor with the memory of the touched rows read and written
    (`Touched`); of single ids alone. Both are empty where the loop is fed from files.
    """

    loop: tuple[float, ...]
    floor: tuple[float, ...]
    torch: tuple[float, ...]
    bound: tuple[float, ...]
    profile: dict[str, float]


class TorchDLRM(DLRM):
    """The same dense part with nothing of ours in it."""

    reads_in_place = False

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        assert self.bottom is not None
        bottom = self.bottom(inputs.continuous)
        stacked = torch.cat([bottom.unsqueeze(1), inputs.vectors], dim=1)
        return {"logits": self.top(torch.cat([bottom, pairwise_dots(stacked)], dim=1)).squeeze(1)}


class Finished(Exception):
    """Enough steps were taken."""


def schema_of(step: TrainingStep) -> DatasetSchema:
    """Return the features of a TorchRec step: `dense` continuous ones, a categorical one for each table."""
    continuous = [Feature(name=f"c{i}", kind=Kind.CONTINUOUS, dtype="float32") for i in range(step.dense)]
    categorical = [
        Feature(
            name=f"t{i}",
            kind=Kind.CATEGORICAL,
            dtype="int32",
            cardinality=rows,
            length=step.ids,
            is_list=step.ids > 1,
            vocabulary=f"t{i}",
        )
        for i, rows in enumerate(step.rows)
    ]
    label = Feature(name="label", kind=Kind.LABEL, dtype="float32")
    return DatasetSchema(features=(*continuous, *categorical, label))


def train_of(step: TrainingStep, **more: Any) -> Train:
    """Return the settings of the loop: the optimizers that the peer has."""
    settings: dict[str, Any] = {
        "batch_size": step.batch * step.world,
        "streams": step.world,
        "ranks": step.world,
        "patience": None,
        "checkpoint_steps": 10**9,
        "epochs": 1,
    } | more
    return Train(
        dense=Optimizer(kind="sgd", learning_rate=step.learning_rate, schedule=Schedule()),
        embeddings=EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=step.learning_rate),
        **settings,
    )


def model_of(step: TrainingStep) -> Model:
    return Model(embedding_dim=step.dim, bottom_mlp=step.bottom, top_mlp=step.top)


def batches_of(step: TrainingStep, rank: int) -> list[Batch]:
    """Return the peer's ids, in memory."""
    batches = []
    for number in range(step.batches):
        rng = np.random.default_rng([7, rank, number])
        ids, lists = draw_ids(step, rank, number), {}
        codes = ids.reshape(step.batch, -1)
        if step.ids > 1:
            ends = np.arange(step.batch + 1) * step.ids
            lists = {f"t{i}": JaggedArray(ends, np.ascontiguousarray(ids[:, i]).ravel()) for i in range(len(step.rows))}
            codes = codes[:, :0]
        batches.append(
            Batch(
                rng.random((step.batch, step.dense), np.float32),
                codes,
                rng.integers(0, 2, step.batch).astype(np.float32),
                lists=lists,
            )
        )
    return batches


class Memory:
    """A source that gives the same batches again and again, and never ends an epoch."""

    steps_per_epoch = 10**9

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self._batches


def job_of(step: TrainingStep, folder: Path, key: str) -> Job:
    """Return a run in `folder`; ranks that share a key share its files."""
    features = Manifest.model_validate(
        {
            "stage": "features",
            "pipeline": "bench",
            "ds": "2026-01-01",
            "key": "bench",
            "spec_hash": "bench",
            "dataset_schema": schema_of(step),
        }
    )
    return Job(
        home=folder,
        pipeline="bench",
        ds="2026-01-01",
        key=key,
        features=features,
        model=model_of(step),
        train=train_of(step),
        progress_seconds=0.0,
    )


def take_steps(
    step: TrainingStep, state: TrainState, source: Any, collective: Collective, steps: int, folder: Path, tracer: Tracer
) -> list[float]:
    """Measure seconds of each of `steps` steps, the first left out."""
    marks: list[float] = []

    def on_progress(event: ProgressEvent) -> None:
        marks.append(time.perf_counter())
        if event.step == steps:
            raise Finished

    job, progress = job_of(step, folder, f"rank{collective.world.rank}"), LoopProgress()
    is_chief = collective.world.is_chief
    trainer = Trainer(
        job,
        state,
        source,
        progress,
        10**9,
        collective,
        lambda: None,  # type: ignore[arg-type,return-value]
        callbacks=[
            tracer,
            MetricsLog(job.metrics_file if is_chief else None, progress, 10**9, job.train.batch_size),
            ProgressReporter(on_progress, job, 0, 10**9),
        ],
    )
    try:
        trainer.fit()
    except Finished:
        trainer.lookups.drop()
    return [b - a for a, b in pairwise(marks)]


def state_of(step: TrainingStep, collective: Collective, network: type[DLRM] = DLRM) -> TrainState:
    """Return a state with tables by rows, the default; those of lists as `train.sharding.kind: auto` plans them."""
    kind: Literal["auto", "row_wise"] = "auto" if step.ids > 1 else "row_wise"

    def make_plan(tables: Sequence[Table], lookups: Sequence[Lookup], world_size: int) -> Plan:
        return plan_tables(
            tables,
            lookups,
            world_size,
            batch_size=step.batch * step.world,
            optimizer="rowwise_adagrad",
            settings=Sharding(kind=kind, zipf=step.zipf),
        ).plan

    model = ShardedModel(schema_of(step), model_of(step), collective, 1, make_plan)
    model.network = network(model.inputs, model_of(step))
    model.embeddings.configure_optimizer(train_of(step).embeddings)
    return TrainState(model, DenseOptimizer(model.dense_parameters(), train_of(step).dense, collective))


def replaced(state: TrainState, embeddings: Constant) -> TrainState:
    """Return a state with other embeddings."""
    state.model.embeddings = embeddings  # type: ignore[assignment]
    return state


def _rank_main(step: TrainingStep, rank: int, folder: Path, turns: int, profile: bool, dataset: Path | None) -> None:
    torch.set_num_threads(step.threads)
    pa.set_cpu_count(step.threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=step.world)
    tracer = Tracer() if profile else NoOpTracer()
    collective = InstrumentedCollective(shared(TorchCollective()), Watchdog(), tracer)
    product = state_of(step, collective)
    states = {"loop": product, "floor": product}
    batches = batches_of(step, rank)
    memory = Memory(batches)
    sources: dict[str, Any] = dict.fromkeys(_NAMES, memory)
    if dataset is None:
        constant = Constant(product.model.embeddings, step.batch, batches)
        states["floor"] = replaced(state_of(step, collective), constant)
        states["torch"] = replaced(state_of(step, collective, TorchDLRM), constant)
        if step.ids == 1:
            touched = Touched(product.model.embeddings, step, rank, batches)
            states["bound"] = replaced(state_of(step, collective), touched)
    else:
        layout = open_split(local(dataset), "train", schema_of(step))
        sources["loop"] = TrainLoader(layout, schema_of(step), train_of(step, streams=4), collective.world)
    tracer.attach(product.model.embeddings)
    seconds: dict[str, list[float]] = {name: [] for name in _NAMES}
    for repeat in range(turns):
        for name, state in states.items():
            noted = tracer if name == "loop" else NoOpTracer()
            measured = take_steps(step, state, sources[name], collective, step.steps, folder, noted)
            if repeat:  # the first turn fills caches and the allocator's lists
                seconds[name] += measured
    if dataset is not None:
        sources["loop"].close()
    parts: dict[str, float] = {}
    if profile:
        job = job_of(step, folder, "trace")
        job.folder.make_dir()
        parts = collect_profile(job, tracer, collective)
        if rank == 0:
            shutil.copy(job.trace, checkout() / "build" / "bench" / "train_trace.json")
    (folder / f"{rank}.json").write_text(json.dumps({**seconds, "profile": parts}))
    dist.barrier()
    dist.destroy_process_group()


def run_loop(step: TrainingStep, turns: int = 4, profile: bool = False, dataset: Path | None = None) -> LoopResult:
    """Run our loop and its floor on `step.world` processes, `step.steps` steps a turn.

    With `dataset` our loop is fed from its files, and the floor is the same loop fed from memory.

    Raises:
        subprocess.CalledProcessError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [json.dumps(asdict(step)), folder, str(turns), str(int(profile)), str(dataset or "")]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "bench.train_ranks", *words, str(rank)],
                env={**os.environ, **MALLOC, "OMP_NUM_THREADS": str(step.threads)},
                cwd=checkout(),
            )
            for rank in range(step.world)
        ]
        codes = [r.wait() for r in ranks]
        if any(codes):
            raise subprocess.CalledProcessError(1, "bench.train_ranks")
        answers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(step.world)]
    slowest = [tuple(max(t) for t in zip(*(a[n] for a in answers), strict=True)) for n in _NAMES]
    return LoopResult(*slowest, answers[0]["profile"])


def step_of(text: str) -> TrainingStep:
    return TrainingStep(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()})


if __name__ == "__main__":
    step_text, meeting, number, noted, files, me = sys.argv[1:]
    _rank_main(step_of(step_text), int(me), Path(meeting), int(number), noted == "1", Path(files) if files else None)
