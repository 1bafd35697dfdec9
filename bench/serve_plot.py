"""A picture of latencies against offered load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

#: Okabe and Ito's, which colour-blind readers tell apart.
_LINES = (("p50", "p50", "#0072b2", "o"), ("p99", "p99", "#d55e00", "s"), ("p999", "p99.9", "#009e73", "^"))


def draw(curve: Path, picture: Path) -> None:
    """Draw three quantiles, the limit, and the floor."""
    record = json.loads(curve.read_text())
    points, floor = record["points"], record["floor"]
    figure, axis = plt.subplots(figsize=(8.5, 4.6), constrained_layout=True)
    offered = [p["offered"] / 1e3 for p in points]
    for key, label, color, marker in _LINES:
        axis.plot(offered, [p[key] for p in points], color=color, marker=marker, markersize=4, label=label)
    bound = [p["bound99"] for p in points]
    axis.plot(offered, bound, color="#d55e00", linewidth=0.9, linestyle=":", label="p99, onnxruntime as M/D/1")
    refused = [(x, p["p999"]) for x, p in zip(offered, points, strict=True) if p["refused"]]
    if refused:
        axis.plot(*zip(*refused, strict=True), "x", color="#000000", markersize=9, label="some refused (503)")
    axis.axhline(10, color="#888888", linewidth=0.8, linestyle="--")
    axis.text(offered[-1], 10, "10 ms", va="bottom", ha="right", fontsize=8, color="#666666")
    axis.axvline(floor / 1e3, color="#888888", linewidth=0.8, linestyle="--")
    axis.text(floor / 1e3, 0.12, " onnxruntime alone,\n batches of 64", fontsize=8, color="#666666", va="bottom")
    axis.set_yscale("log")
    axis.set_ylim(bottom=0.1)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.set_xlabel("offered load, thousands of rows a second, requests of 64 rows")
    axis.set_ylabel("latency, ms")
    axis.set_title(
        "headrace serve, a DLRM on one core: latency against offered load (open loop)", loc="left", fontsize=10
    )
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
