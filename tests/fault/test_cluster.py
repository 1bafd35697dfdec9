"""Four ranks in four executors. One executor dies in the middle; the weights are those of a run that lost none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from headrace.comm.base import run_ranks
from headrace.manifest import Manifest
from headrace.models.saved import load_model
from headrace.storage import local
from headrace.train.loop.run import train
from headrace.train.result import PHASES
from headrace.workspace import Workspace, checkout
from tests.fault.cluster_side import CHECKPOINT_STEPS, RANKS, STEPS, job_of


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
    dlrm = load_model(local(Path(model)))
    return {k: v.numpy() for k, v in dlrm.dense_state().items()} | {"embeddings": dlrm.embeddings.weight.numpy()}


@pytest.mark.timeout(400)
def test_a_lost_executor_costs_no_more_than_the_steps_since_the_checkpoint(
    ws: Workspace, make_dataset: Callable[..., Manifest], tmp_path: Path
) -> None:
    features = make_dataset(ws, train=4_000, valid=400)
    make_uneven(ws.home / features.output("dataset").name / "train")
    # Nothing happens to threads; they sum in the order of ranks, as ranks of one machine do.
    torch.set_num_threads(1)
    whole = job_of(ws, features, "calm")
    calm = run_ranks(RANKS, lambda collective: train(whole, collective))[0]
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "tests.fault.cluster_side", str(ws.home), str(out), "killed"]
    done = subprocess.run(command, cwd=checkout(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    killed = json.loads(out.read_text())["killed"]
    print(killed["seconds"], killed["done"], *killed["lines"], sep="\n")
    assert len(killed["done"]) == 2
    again = [line for line in killed["lines"] if "attempt 2 of 2 resumes from step" in line]
    assert len(again) == 1, killed["lines"]
    resumed = killed["report"]["resumed_from_step"]
    # The last checkpoint's, or a later one: the lost executor's rank may have been asked to stop, and all left one.
    assert 2 * CHECKPOINT_STEPS <= resumed < STEPS
    assert calm.steps == killed["report"]["steps"] == STEPS
    assert set(killed["report"]["peak_memory_mib"]) == {f"rank{i}" for i in range(RANKS)}
    # To the bit.
    left, right = weights(str(whole.saved_model)), weights(killed["model"])
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)
    assert calm.metrics == killed["report"]["metrics"]
    # Where the time to the first step goes.
    parts = killed["report"]["startup_seconds"]
    assert set(parts) == {"ranks", "imports", "horovod", "model", "first_step", "total"}
    assert list(parts)[:-1] == [p for p in PHASES if p in parts]
    assert sum(v for k, v in parts.items() if k != "total") == pytest.approx(parts["total"], abs=0.1)
    assert all(v >= 0 for v in parts.values())
