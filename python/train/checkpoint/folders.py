"""Which checkpoints a run has, by the names of their folders."""

from __future__ import annotations

from pathlib import Path


def step_name(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints, newest first; whether they are whole is found out by loading."""
    found = [p.name.removeprefix("step-") for p in folder.glob("step-*") if p.is_dir()]
    return sorted((int(n) for n in found if n.isdigit()), reverse=True)
