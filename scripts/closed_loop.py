"""The loop closed, with an experiment in it: lists are trained, scored and published, and the site's visitors click.

    python scripts/closed_loop.py --home DIR [--days N] [--rows N] [--plot FILE.png]

The first days are a random log. Then, day after day: ingest, outcomes, experiments, features, train, baseline, score,
publish, and the next day's visitors, who are shown the lists from the warehouse. Half of the users are in the arm
`champion` (XGBoost) and half in the arm `weak` (a network that has seen each row once, in a few large batches), until
the experiment's rule stops the losing one. Prints a table of click-through rates by arm, beside those of random and
best possible lists, and what `headrace experiment status` says in the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from headrace.experiments.stops import Stop, stopped
from headrace.generate.site import RANDOM, SiteDay
from headrace.generate.site_files import site_path
from headrace.manifest import Manifest
from headrace.workspace import Workspace

START = date(2026, 1, 1)
_RANDOM_DAYS = 3
_NAME, _CHAMPION, _WEAK = "ranker", "champion", "weak"
_EXPERIMENT = {
    "arms": {_CHAMPION: {}, _WEAK: {"model": "neural"}},
    "min_users": 50,
    "stop": {"worse_than": 0.01, "min_days": 2},
}
_SETTINGS = (
    "generate.users=600",
    "generate.items=150",
    "generate.base_rate=0.1",
    "generate.site={length: 10, position_bias: 0.3, random: 0.3}",
    "table.late_days=0",
    "model={kind: dlrm, embedding_dim: 4, bottom_mlp: [8], top_mlp: [8]}",
    "train={ranks: 1, streams: 1, epochs: 1, batch_size: 8192}",
    "baseline={rounds: 60, max_depth: 5, workers: 1}",
    "score.item.limit=null",
    "score.model=baseline",
    "drift=null",
    "outcomes={bootstrap: {replicates: 100}}",
    f"experiments={json.dumps({_NAME: _EXPERIMENT})}",
    "spark.master=local[2]",
    "spark.driver_memory=1g",
)


@dataclass(frozen=True)
class Shown:
    """A day of visitors, and what they did with the lists of each arm."""

    site: SiteDay
    #: By arm; none of one that was stopped.
    rates: Mapping[str, float]
    #: The arm `weak` less `champion`: (estimate, low, high); None: it was stopped.
    difference: tuple[float, float, float] | None


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Run the closed loop and print click-through rates.")
    parser.add_argument("--home", type=Path, required=True, help="the workspace; days that are there are kept")
    parser.add_argument("--days", type=int, default=6, help="days of the loop (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8_000, help="rows a day (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="a PNG of the rates by day")
    args = parser.parse_args()
    ws = Workspace(args.home)
    rows = (f"generate.rows_per_day={args.rows}",)
    _headrace(args.home, rows, "generate", "clicks", "--days", str(_RANDOM_DAYS))
    for number in range(args.days):
        ds, following = (_day(_RANDOM_DAYS - 1 + number + k) for k in (0, 1))
        _headrace(args.home, rows, "run", "clicks", "--ds", ds, "--to", "publish")
        # By now the warehouse may have newer lists than those that this day was shown.
        if not site_path(ws.landing("clicks"), following).is_file():
            _headrace(args.home, rows, "simulate-site", "clicks", "--ds", following)
    last = _day(_RANDOM_DAYS - 1 + args.days)
    _headrace(args.home, rows, "run", "clicks", "--ds", last, "--to", "experiments")
    shown, stop = _shown(ws, last), stopped(ws, "clicks", _NAME, _WEAK)
    print(_table(shown))
    if stop is not None:
        print(f"\narm {stop.arm} stopped from {stop.ds} on, by {stop.by}: {stop.reason}")
    print(f"\n$ headrace experiment status {_NAME} clicks", flush=True)
    _headrace(args.home, rows, "experiment", "status", _NAME, "clicks")
    if args.plot:
        _plot(shown, stop, args.plot)


def _day(number: int) -> str:
    return (START + timedelta(days=number)).isoformat()


def _headrace(home: Path, settings: tuple[str, ...], *words: str) -> None:
    sets = [part for s in (*_SETTINGS, *settings) for part in ("--set", s)]
    subprocess.run([sys.executable, "-m", "headrace.cli", *words, "--home", str(home), *sets], check=True)


def _shown(ws: Workspace, last: str) -> list[Shown]:
    """The days of visitors, as the run of the last one knows them."""
    manifest = Manifest.load(ws.manifest("clicks", last, "experiments"))
    assert manifest is not None
    (told,) = manifest.facts["experiments"]
    found = []
    for of in told["by_day"]:
        following = (date.fromisoformat(of["served_ds"]) + timedelta(days=1)).isoformat()
        site = SiteDay.model_validate_json(site_path(ws.landing("clicks"), following).read_text())
        rates = {arm: value for arm, known in of["arms"].items() if (value := known["value"]) is not None}
        against: dict[str, Any] | None = of["differences"][_WEAK]
        difference = None if against is None else (against["estimate"], against["low"], against["high"])
        found.append(Shown(site, rates, difference))
    return found


def _table(shown: Sequence[Shown]) -> str:
    lines = [
        "| visitors of | champion | weak | weak - champion | random, clicked | random, expected | best possible | "
        "champion, of the way |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for day in shown:
        site = day.site
        assert site.random_rate is not None
        assert site.best_rate is not None
        way = (day.rates[_CHAMPION] - site.random_rate) / (site.best_rate - site.random_rate)
        weak = f"{day.rates[_WEAK]:.4f}" if _WEAK in day.rates else "stopped"
        difference = "" if day.difference is None else "{:+.4f} ({:+.4f} to {:+.4f})".format(*day.difference)
        lines.append(
            f"| {site.ds} | {day.rates[_CHAMPION]:.4f} | {weak} | {difference} | {site.shown[RANDOM].rate:.4f} "
            f"| {site.random_rate:.4f} | {site.best_rate:.4f} | {100 * way:.0f} % |"
        )
    return "\n".join(lines)


def _plot(shown: Sequence[Shown], stop: Stop | None, path: Path) -> None:
    figure = Figure(figsize=(7.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    days = [day.site.ds[5:] for day in shown]
    axes.plot(days, [day.site.best_rate for day in shown], color="#2a9d5c", linestyle=":", label="best possible lists")
    axes.plot(days, [day.rates[_CHAMPION] for day in shown], "o-", color="#1f6feb", label="arm champion, clicked")
    weak = [day for day in shown if _WEAK in day.rates]
    axes.plot(
        [day.site.ds[5:] for day in weak],
        [day.rates[_WEAK] for day in weak],
        "s-",
        color="#d1495b",
        label="arm weak, clicked",
    )
    axes.plot(
        days, [day.site.random_rate for day in shown], color="#888888", linestyle="--", label="random lists, expected"
    )
    axes.plot(days, [day.site.shown[RANDOM].rate for day in shown], "x", color="#888888", label="random lists, clicked")
    if stop is not None:
        axes.axvline(len(weak) - 0.5, color="#bbbbbb", linewidth=1)
        axes.text(len(weak) - 0.45, axes.get_ylim()[1], " weak is stopped", va="top", fontsize=9)
    axes.set_xlabel("visitors of")
    axes.set_ylabel("click-through rate")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
