"""The loop closed: every day lists are trained, scored and published, and the site's visitors click on them.

    python scripts/closed_loop.py --home DIR [--days N] [--weak N] [--rows N] [--plot FILE.png]

The first days are a random log. Then, day after day: ingest, outcomes, features, train, baseline, score, publish, and
the next day's visitors, who are shown the lists from the warehouse. On the first half of these days the lists are those
of a weak model (one split), on the others those of the best one. Prints a table of click-through rates: as the site saw
them, as the stage `outcomes` measured them, and of random and best possible lists.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

from matplotlib.figure import Figure

from headrace.generate.site import LIST, RANDOM, SiteDay
from headrace.generate.site_files import site_path
from headrace.manifest import Manifest
from headrace.workspace import Workspace

START = date(2026, 1, 1)
_RANDOM_DAYS = 3
_SETTINGS = (
    "generate.users=600",
    "generate.items=150",
    "generate.base_rate=0.1",
    "generate.site={length: 10, position_bias: 0.3, random: 0.3}",
    "train.ranks=1",
    "train.epochs=3",
    "train.batch_size=1024",
    "baseline={rounds: 60, max_depth: 5, workers: 1}",
    "score.item.limit=null",
    "score.model=best",
    "drift=null",
    "outcomes={bootstrap: {replicates: 100}}",
    "spark.master=local[2]",
    "spark.driver_memory=1g",
)
#: The weak model: one tree with one split.
_WEAK = ("baseline={rounds: 1, max_depth: 1, workers: 1}", "score.model=baseline")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Run the closed loop and print click-through rates.")
    parser.add_argument("--home", type=Path, required=True, help="the workspace; days that are there are kept")
    parser.add_argument("--days", type=int, default=6, help="days of the loop (default: %(default)s)")
    parser.add_argument("--weak", type=int, help="of them with a weak model (default: the first half)")
    parser.add_argument("--rows", type=int, default=8_000, help="rows a day (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="a PNG of the rates by day")
    args = parser.parse_args()
    ws = Workspace(args.home)
    rows = (f"generate.rows_per_day={args.rows}",)
    _headrace(args.home, rows, "generate", "clicks", "--days", str(_RANDOM_DAYS))
    shown: list[tuple[SiteDay, str]] = []
    for number in range(args.days):
        ds, following = (_day(_RANDOM_DAYS - 1 + number + k) for k in (0, 1))
        weak = number < (args.days // 2 if args.weak is None else args.weak)
        model = (*rows, *(_WEAK if weak else ()))
        _headrace(args.home, model, "run", "clicks", "--ds", ds, "--to", "publish")
        made = site_path(ws.landing("clicks"), following)
        if not made.is_file():  # by now the warehouse may have newer lists than those that this day was shown
            _headrace(args.home, rows, "simulate-site", "clicks", "--ds", following)
        text = made.read_text()
        shown.append((SiteDay.model_validate_json(text), "weak" if weak else "best"))
    last = _day(_RANDOM_DAYS - 1 + args.days)
    _headrace(args.home, rows, "run", "clicks", "--ds", last, "--to", "outcomes")
    measured = _measured(ws, last)
    print(_table(shown, measured))
    if args.plot:
        _plot(shown, args.plot)


def _day(number: int) -> str:
    return (START + timedelta(days=number)).isoformat()


def _headrace(home: Path, settings: tuple[str, ...], *words: str) -> None:
    sets = [part for s in (*_SETTINGS, *settings) for part in ("--set", s)]
    subprocess.run([sys.executable, "-m", "headrace.cli", *words, "--home", str(home), *sets], check=True)


def _measured(ws: Workspace, ds: str) -> dict[str, dict[str, tuple[float, float, float]]]:
    """What the stage says of each day on which a list was shown: metric -> (estimate, low, high)."""
    manifest = Manifest.load(ws.manifest("clicks", ds, "outcomes"))
    assert manifest is not None
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for record in manifest.facts["days"]:
        following = (date.fromisoformat(record["served_ds"]) + timedelta(days=1)).isoformat()
        found.setdefault(following, {})[record["metric"]] = (record["estimate"], record["low"], record["high"])
    return found


def _table(shown: list[tuple[SiteDay, str]], measured: dict[str, dict[str, tuple[float, float, float]]]) -> str:
    lines = [
        "| day | model | CTR of lists | of random | stage `outcomes` | AUC online | random lists | these lists | best "
        "possible | of the way |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for day, model in shown:
        rate, low, high = measured[day.ds]["rate"]
        auc = measured[day.ds]["auc"][0]
        assert day.random_rate is not None
        assert day.list_rate is not None
        assert day.best_rate is not None
        way = (day.list_rate - day.random_rate) / (day.best_rate - day.random_rate)
        lines.append(
            f"| {day.ds} | {model} | {day.shown[LIST].rate:.4f} | {day.shown[RANDOM].rate:.4f} "
            f"| {rate:.4f} ({low:.4f} to {high:.4f}) | {auc:.3f} "
            f"| {day.random_rate:.4f} | {day.list_rate:.4f} | {day.best_rate:.4f} | {100 * way:.0f} % |"
        )
    return "\n".join(lines)


def _plot(shown: list[tuple[SiteDay, str]], path: Path) -> None:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    days = [day.ds[5:] for day, _ in shown]
    axes.plot(days, [day.best_rate for day, _ in shown], color="#2a9d5c", linestyle=":", label="best possible lists")
    axes.plot(days, [day.list_rate for day, _ in shown], color="#1f6feb", label="published lists, expected")
    axes.plot(days, [day.shown[LIST].rate for day, _ in shown], "o", color="#1f6feb", label="published lists, clicked")
    axes.plot(
        days, [day.random_rate for day, _ in shown], color="#888888", linestyle="--", label="random lists, expected"
    )
    axes.plot(days, [day.shown[RANDOM].rate for day, _ in shown], "x", color="#888888", label="random lists, clicked")
    weak = sum(model == "weak" for _, model in shown)
    axes.axvline(weak - 0.5, color="#bbbbbb", linewidth=1)
    axes.text(weak - 0.45, axes.get_ylim()[1], " best model", va="top")
    axes.text(weak - 0.55, axes.get_ylim()[1], "weak model ", va="top", ha="right")
    axes.set_ylabel("click-through rate")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
