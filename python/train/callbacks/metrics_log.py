"""metrics.jsonl: what the loop measured, one JSON object a line, for people's own tools.

    {"kind": "train", "step": 20, "epoch": 1, "loss": 0.51, "samples_per_s": 20110.5, "dense_rate": 0.001, ...}
    {"kind": "eval", "step": 400, "epoch": 1, "auc": 0.74, "log_loss": 0.44, ...}

Lines appear as they come. A run that goes on from a checkpoint takes back the lines after it, and a torn last one, so
the file reads like that of a run that was never interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headrace.storage import local


class Journal:
    """The chief's end of metrics.jsonl.

    Args:
        path: the file; None: this rank keeps none.
        step: lines of later steps are removed.
    """

    def __init__(self, path: Path | None, step: int) -> None:
        self._path = path
        if path is not None:
            kept = [line for line in read_journal(path) if line["step"] <= step] if path.is_file() else []
            local(path).put_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(self, kind: str, values: Mapping[str, float | int | None]) -> None:
        """Add a line."""
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as f:
                f.write(json.dumps({"kind": kind, **values}) + "\n")


def read_journal(path: Path) -> list[dict[str, float]]:
    """The whole lines of a metrics.jsonl."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
