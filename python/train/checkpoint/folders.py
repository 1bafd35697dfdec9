"""Which checkpoints a run has, by the names of their folders."""

from __future__ import annotations

from headrace.storage import Location


def step_name(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step:08d}"


def list_steps(folder: Location) -> list[int]:
    """Steps of the committed checkpoints, newest first; whether they are whole is found out by loading."""
    found = [p.name.removeprefix("step-") for p in folder.entries() if p.name.startswith("step-") and p.is_dir()]
    return sorted((int(n) for n in found if n.isdigit()), reverse=True)
