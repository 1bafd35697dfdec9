"""Training on each kind of Spark master, under each fault: the weights are those of a run without any, to the bit.

Lane `all` has one lost executor; lane `long` has every master under every fault.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from headrace.comm.base import run_ranks
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.models.saved import load_model
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.job import PHASES, TrainingReport
from headrace.train.loop.run import train
from tests.dags.standalone import standalone
from tests.fault.cluster_side import CHECKPOINT_STEPS, FAULTS, RANKS, STEPS, job_of
from tests.hadoop_servers import require_jars, yarn

EXECUTORS = f"local-cluster[{RANKS},1,1024]"
#: By name: the masters of lane `long`.
MASTERS = ("local", "local_cluster", "standalone", "yarn")
#: Faults that end the attempt, not the program.
ATTEMPT_FAULTS = ("rank_killed", "rank_hangs", "executor_killed", "disk_full")
#: Faults that cost time alone.
DELAYS = ("rank_slow", "executor_late")
#: Faults that end the program, by its exit status.
DRIVER_FAULTS = {"driver_stopped": 128 + signal.SIGTERM, "driver_killed": -signal.SIGKILL}


@dataclass(frozen=True)
class CalmRun:
    """A workspace with a dataset, and the run that no fault hits, by threads of this process."""

    ws: Workspace
    report: TrainingReport
    model: str


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Manifest]) -> CalmRun:
    ws = Workspace(tmp_path_factory.mktemp("calm") / "home")
    features = make_dataset(ws, train=4_000, valid=400)
    make_uneven(ws.home / features.output("dataset").name / "train")
    # Threads sum in the order of ranks, as ranks of one machine do.
    torch.set_num_threads(1)
    job = job_of(ws, features, "calm")
    job.folder.make_dir()
    report = run_ranks(RANKS, lambda collective: train(job, collective))[0]
    return CalmRun(ws, report, str(job.saved_model))


def make_uneven(folder: Path) -> None:
    """Write the files of a split again: the rows as they were, in row groups from 60 rows to a third of them all."""
    table = pa.concat_tables([pq.read_table(p) for p in sorted(folder.glob("*.parquet"))])
    for path in folder.glob("*.parquet"):
        path.unlink()
    ends = np.r_[0, np.cumsum([60, 1500, 240, 700, 100, 900]), table.num_rows]
    for number, files in enumerate([ends[:2], ends[1:5], ends[4:]]):
        with pq.ParquetWriter(folder / f"part-{number:04d}.parquet", table.schema, compression="none") as writer:
            for start, end in pairwise(files):
                writer.write_table(table.slice(start, end - start), row_group_size=end - start)


def weights(model: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return a saved model's parameters by name."""
    dlrm = load_model(local(Path(model)))
    return {k: v.numpy() for k, v in dlrm.dense_state().items()} | {"embeddings": dlrm.embeddings.weight.numpy()}


def run_program(
    ws: Workspace, out: Path, master: str, *faults: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run cluster_side.py to its end."""
    command = [sys.executable, "-m", "tests.fault.cluster_side", str(ws.home), str(out), master, *faults]
    return subprocess.run(
        command, cwd=checkout(), env={**os.environ, **(environ or {})}, capture_output=True, text=True, check=False
    )


def output_of(program: subprocess.CompletedProcess[str]) -> str:
    """Return the end of a program's output, for a failure's message."""
    return program.stdout[-4000:] + program.stderr[-8000:]


def require_same(calm: CalmRun, outcome: Mapping[str, Any]) -> None:
    """Compare a run with the calm one: steps, metrics and weights, to the bit."""
    assert outcome["report"]["steps"] == calm.report.steps == STEPS
    assert outcome["report"]["metrics"] == calm.report.metrics
    left, right = weights(calm.model), weights(outcome["model"])
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def require_second_attempt(outcome: Mapping[str, Any]) -> None:
    """Check that one attempt failed, and that the next one resumed from a checkpoint."""
    resumes = [line for line in outcome["lines"] if "attempt 2 of 2 resumes from step" in line]
    assert len(resumes) == 1, outcome["lines"]
    # The last checkpoint's, or a later one: a lost executor's rank may have been asked to stop, and all left one.
    assert 2 * CHECKPOINT_STEPS <= outcome["report"]["resumed_from_step"] < STEPS


@pytest.mark.timeout(400)
def test_a_lost_executor_costs_no_more_than_the_steps_since_the_checkpoint(calm: CalmRun, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    program = run_program(calm.ws, out, EXECUTORS, "executor_killed")
    assert program.returncode == 0, output_of(program)
    outcome = json.loads(out.read_text())["executor_killed"]
    print(outcome["seconds"], outcome["happened"], *outcome["lines"], sep="\n")
    require_second_attempt(outcome)
    require_same(calm, outcome)
    assert set(outcome["report"]["peak_memory_mib"]) == {f"rank{i}" for i in range(RANKS)}
    # Where the time to the first step goes.
    parts = outcome["report"]["startup_seconds"]
    assert set(parts) == {"ranks", "imports", "horovod", "model", "first_step", "total"}
    assert list(parts)[:-1] == [p for p in PHASES if p in parts]
    assert sum(v for k, v in parts.items() if k != "total") == pytest.approx(parts["total"], abs=0.1)
    assert all(v >= 0 for v in parts.values())


@contextmanager
def started_master(name: str, folder: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Start a kind of master; yield its URL and the variables that a driver needs."""
    if name == "standalone":
        with standalone(folder, cores=RANKS) as place:
            yield place.url, {}
    elif name == "yarn":
        with yarn(folder, folder / "conf", memory_mb=16_384, cores=2 * RANKS) as cluster:
            yield "yarn", cluster.environ
    else:
        yield EXECUTORS if name == "local_cluster" else f"local[{RANKS}]", {}


@pytest.mark.long
@pytest.mark.extra
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MASTERS)
def test_every_fault_on_every_master(calm: CalmRun, tmp_path: Path, name: str) -> None:
    """Each fault in turn. `local` has no executors; the small disk is mounted, which takes root."""
    if name == "yarn":
        require_jars()
    has_executors, is_root = name != "local", os.geteuid() == 0
    in_session = [
        fault
        for fault in (*ATTEMPT_FAULTS, *DELAYS)
        if (has_executors or "executor" not in fault) and (is_root or fault != "disk_full")
    ]
    assert {*in_session, *DRIVER_FAULTS} >= (FAULTS.keys() if has_executors else FAULTS.keys() - {"executor_killed"})
    ws = Workspace(tmp_path / "home")
    shutil.copytree(calm.ws.home, ws.home, ignore=shutil.ignore_patterns("models"))
    out = tmp_path / "out.json"
    (tmp_path / "master").mkdir()
    with started_master(name, tmp_path / "master") as (master, environ):
        program = run_program(ws, out, master, *in_session, environ=environ)
        assert program.returncode == 0, output_of(program)
        outcomes = json.loads(out.read_text())
        for fault, status in DRIVER_FAULTS.items():
            completed = run_program(ws, out, master, fault, environ=environ)
            assert completed.returncode == status, output_of(completed)
            rerun = run_program(ws, out, master, fault, environ=environ)
            assert rerun.returncode == 0, output_of(rerun)
            outcomes |= json.loads(out.read_text())
    for fault, outcome in outcomes.items():
        print(f"{name}, {fault}: {outcome['seconds']} s, resumed from {outcome['report']['resumed_from_step']}")
        require_same(calm, outcome)
        if fault in ATTEMPT_FAULTS:
            require_second_attempt(outcome)
        elif fault in DRIVER_FAULTS:
            assert 2 * CHECKPOINT_STEPS <= outcome["report"]["resumed_from_step"] < STEPS
    assert outcomes.keys() == {*in_session, *DRIVER_FAULTS}
    assert any("rank 2" in line and "missing" in line for line in outcomes["rank_hangs"]["lines"])
