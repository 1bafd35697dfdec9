"""A picture of one step of a trace: what each rank did, and what its loader did meanwhile.

python -m bench.draw_trace [build/bench/train_trace.json [docs/trace.png]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from headrace.train.callbacks.tracing import PARTS

COLOURS = dict(zip(PARTS, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]


def draw(trace: Path, picture: Path, step: int | None = None) -> None:
    """Draw the step (default: the one of median length) with a margin of a tenth."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    steps = sorted((e for e in spans if e["name"] == "step" and e["pid"] == 0), key=lambda e: e["dur"])
    chosen = steps[len(steps) // 2]["args"]["step"] if step is None else step
    step_spans = [e for e in spans if e["name"] == "step" and e["args"]["step"] == chosen]
    first = min(e["ts"] for e in step_spans)
    last = max(e["ts"] + e["dur"] for e in step_spans)
    rows = sorted({(e["pid"], e["tid"]) for e in spans})
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    figure, axes = plt.subplots(figsize=(10, 0.6 + 0.65 * len(rows)))
    seen: set[str] = set()
    # Inner spans are shorter, and drawn over those that they are in.
    for e in sorted(spans, key=lambda e: -e["dur"]):
        if e["name"] not in (*COLOURS, "decode") or e["ts"] > last or e["ts"] + e["dur"] < first:
            continue
        label = None if e["name"] in seen else e["name"]
        seen.add(e["name"])
        axes.barh(
            rows.index((e["pid"], e["tid"])),
            e["dur"] / 1e3,
            left=(e["ts"] - first) / 1e3,
            height=0.7,
            label=label,
            color=COLOURS.get(e["name"], "lightgrey"),
            linewidth=0,
        )
    axes.set_yticks(range(len(rows)), [f"rank {pid}: {names[pid, tid]}" for pid, tid in rows])
    axes.invert_yaxis()
    axes.set_xlim(-0.02 * (last - first) / 1e3, 1.02 * (last - first) / 1e3)
    axes.set_xlabel("ms")
    axes.legend(ncols=len(seen), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    figure.savefig(picture, dpi=80, bbox_inches="tight")


if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:]]
    draw(*(paths + [Path("build/bench/train_trace.json"), Path("docs/trace.png")][len(paths) :]))
