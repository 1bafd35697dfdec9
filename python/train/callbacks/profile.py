"""Profile mode's results: the table of a step's parts over all ranks, and a trace that Perfetto opens.

The trace is in Chrome's Trace Event Format ("complete" events): a process a rank, a thread a row. Open it at
https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from headrace.comm.base import Collective
from headrace.storage import Location
from headrace.train.callbacks.tracing import PARTS, Tracer
from headrace.train.job import Job


def collect_profile(job: Job, tracer: Tracer, collective: Collective) -> dict[str, float]:
    """Milliseconds of a step by part, mean over steps and ranks, and `step`; write the trace. Collective.

    The trace's parts travel by the run's folder, which all ranks share.
    """
    steps = max(1, tracer.counted)
    mine = torch.tensor([[1e3 * tracer.seconds[p] / steps for p in PARTS]], dtype=torch.float64)
    by_rank = collective.all_gather(mine)
    part = job.folder / f".trace-{collective.world.rank}.partial"
    part.put_text(json.dumps(_events(tracer, collective.world.rank)))
    collective.barrier()
    if collective.world.is_chief:
        parts = [job.folder / f".trace-{r}.partial" for r in range(collective.world.size)]
        events = [e for p in parts for e in json.loads(p.read_text())]
        job.trace.put_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        for p in parts:
            p.remove()
    means = {p: round(float(ms), 3) for p, ms in zip(PARTS, by_rank.mean(0), strict=True)}
    return {**means, "step": round(float(by_rank.sum(1).mean()), 3)}


def _events(tracer: Tracer, rank: int) -> list[dict[str, Any]]:
    threads = ["loop", *sorted({e.thread for e in tracer.events} - {"loop"})]
    about = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}]
    about += [
        {"ph": "M", "pid": rank, "tid": i, "name": "thread_name", "args": {"name": name}}
        for i, name in enumerate(threads)
    ]
    return [
        *about,
        *(
            {
                "ph": "X",
                "pid": rank,
                "tid": threads.index(e.thread),
                "name": e.name,
                "cat": "train",
                "ts": round((tracer.epoch + e.start) * 1e6, 1),
                "dur": round((e.end - e.start) * 1e6, 1),
                "args": {"step": e.step},
            }
            for e in tracer.events
        ),
    ]


def show_profile(profile: dict[str, float], trace: Location) -> str:
    """The table as people read it."""
    step = profile["step"] or 1.0
    lines = [f"{name:<15} {ms:9.2f} ms {100 * ms / step:6.1f} %" for name, ms in profile.items() if name != "step"]
    return "\n".join(["a step, mean over ranks:", *lines, f"{'step':<15} {step:9.2f} ms  100.0 %", f"trace: {trace}"])
