"""The loop closed, with an experiment in it: lists are trained, scored and published, and the site's visitors click.

    python scripts/closed_loop.py --home DIR [--days N] [--rows N] [--plot FILE.png]

The first days are a random log. Then, day after day: ingest, outcomes, experiments, features, baseline, score, publish,
and the next day's visitors, who are shown the lists from the warehouse. Half of the users are in the arm `champion`
(the day's XGBoost) and half in the arm `weak` (a small network, trained once on the first day, on a few large batches),
until the experiment's rule stops the losing one. Prints a table of click-through rates by arm, beside those of random
and best possible lists, and what `headrace experiment status` says in the end.

The stages are those of `headrace run`, one after the other in one process and one Spark session.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from headrace.cli.experiment import show_experiment
from headrace.cli.generate import generate_days, simulate_day
from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.jobs.stages import load_stage
from headrace.lake.delta.log import DeltaLog
from headrace.lake.generate.click_model import ClickModel, probability
from headrace.lake.generate.site import LIST, RANDOM, SiteDay, examined, site_path, visits_of
from headrace.lake.spark.session import shared_session
from headrace.score.assignment import Stop, stopped
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest

START = date(2026, 1, 1)
_RANDOM_DAYS = 3
_NAME, _CHAMPION, _WEAK = "ranker", "champion", "weak"
_EXPERIMENT = {
    # The first version of the network, for good.
    "arms": {_CHAMPION: {}, _WEAK: {"model": "1"}},
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
_JUDGED = ("ingest", "outcomes", "experiments")


@dataclass(frozen=True)
class Rates:
    """Rates of a set of impressions: the share that was clicked, and the mean probability of a click."""

    clicked: float
    expected: float


@dataclass(frozen=True)
class DayImpressions:
    """A day of visitors, and what they did with the lists of each arm; `None`: of users without one."""

    site: SiteDay
    lists: Mapping[str | None, Rates]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Run the closed loop and print click-through rates.")
    parser.add_argument("--home", type=Path, required=True, help="the workspace; days that are there are kept")
    parser.add_argument("--days", type=int, default=6, help="days of the loop (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8_000, help="rows a day (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="a PNG of the rates by day")
    args = parser.parse_args()
    ws = Workspace(args.home)
    settings = [*_SETTINGS, f"generate.rows_per_day={args.rows}"]
    spec = load_spec("clicks", settings)
    generate_days(spec, ws, [_day(number) for number in range(_RANDOM_DAYS)], force=False, spark=False)
    last = _day(_RANDOM_DAYS - 1 + args.days)
    with shared_session(spec.spark, ws, "closed loop", begin=True) as release_memory:

        def run(stages: Sequence[str], ds: str) -> None:
            for name in stages:
                outcome = run_stage(load_stage(name), spec, ws, ds)
                print(f"{ds} {name}: {outcome.manifest.seconds:.1f} s", flush=True)
                release_memory()

        for number in range(args.days):
            ds, following = (_day(_RANDOM_DAYS - 1 + number + k) for k in (0, 1))
            network = () if number else ("train",)
            run((*_JUDGED, "features", *network, "baseline", "score", "publish"), ds)
            # By now the warehouse may have newer lists than those that this day was shown.
            if not site_path(ws.landing("clicks"), following).is_file():
                simulate_day(spec, ws, following, force=False)
        run(_JUDGED, last)
    impressions = [_impressions(ws, spec, _day(_RANDOM_DAYS - 1 + number)) for number in range(args.days)]
    stop = stopped(ws, "clicks", _NAME, _WEAK)
    print(_table(impressions))
    if stop is not None:
        print(f"\narm {stop.arm} stopped from {stop.ds} on, by {stop.by}: {stop.reason}")
    print(f"\n$ headrace experiment status {_NAME} clicks", flush=True)
    show_experiment(ws, _NAME, "clicks", None, settings, as_json=False)
    if args.plot:
        _plot(impressions, stop, args.plot)


def _day(number: int) -> str:
    return (START + timedelta(days=number)).isoformat()


def _impressions(ws: Workspace, spec: Spec, ds: str) -> DayImpressions:
    """Return the impressions of a day's lists. The visits are simulated again: they are a function of the lists."""
    following = (date.fromisoformat(ds) + timedelta(days=1)).isoformat()
    site = SiteDay.model_validate_json(site_path(ws.landing("clicks"), following).read_text())
    rows = _published(ws, ds).sort_by([("user_id", "ascending"), ("rank", "ascending")]).to_pylist()
    lists: dict[int, list[int]] = {}
    for row in rows:
        lists.setdefault(row["user_id"], []).append(row["item_id"])
    arm_of = {row["user_id"]: (row["arms"] or "").partition("=")[2] or None for row in rows}
    assert spec.generate is not None
    model = ClickModel(spec.generate, spec.table.late_days)
    day = (date.fromisoformat(following) - START).days
    visits = visits_of(model, day, lambda users: {user: lists[user] for user in users if user in lists})
    events = visits.events
    probability_of = probability(events.logit) * examined(spec.generate.site, visits.place)
    ids = events.users.id[events.user_row]
    of_list = visits.source[visits.visit] == LIST
    arms = np.array([arm_of.get(int(user)) or "" for user in ids])
    return DayImpressions(
        site,
        {
            arm or None: Rates(float(events.clicked[in_arm].mean()), float(probability_of[in_arm].mean()))
            for arm in dict.fromkeys(["", _CHAMPION, _WEAK])
            if (in_arm := of_list & (arms == arm)).any()
        },
    )


def _published(ws: Workspace, ds: str) -> pa.Table:
    manifest = Manifest.load(ws.manifest("clicks", ds, "publish"))
    assert manifest is not None
    table = manifest.output("delta")
    files = DeltaLog(ws.locate(table.name)).plain_files(int(table.version)) or []
    columns = ["user_id", "item_id", "rank", "arms"]
    paths = [file.path.local_path() for file in files if file.partition["ds"] == ds]
    return pa.concat_tables([pq.ParquetFile(path).read(columns) for path in paths])


def _table(impressions: Sequence[DayImpressions]) -> str:
    """Return a table of the rates, clicked and, in brackets, expected."""
    lines = [
        "| visitors of | lists of champion | lists of weak | its users after the stop | random | best possible | "
        "champion, of the way |",
        "|---|---|---|---|---|---|---|",
    ]
    for day in impressions:
        site, champion = day.site, day.lists[_CHAMPION]
        assert site.random_rate is not None
        assert site.best_rate is not None
        way = (champion.expected - site.random_rate) / (site.best_rate - site.random_rate)
        arms = [
            "" if (rates := day.lists.get(arm)) is None else f"{rates.clicked:.4f} ({rates.expected:.4f})"
            for arm in (_CHAMPION, _WEAK, None)
        ]
        random = f"{site.shown[RANDOM].rate:.4f} ({site.random_rate:.4f})"
        lines.append(f"| {site.ds} | {' | '.join(arms)} | {random} | ({site.best_rate:.4f}) | {100 * way:.0f} % |")
    return "\n".join(lines)


def _plot(impressions: Sequence[DayImpressions], stop: Stop | None, path: Path) -> None:
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    days = [day.site.ds[5:] for day in impressions]
    axes.plot(
        days,
        [day.site.best_rate for day in impressions],
        color="#2a9d5c",
        linestyle=":",
        label="best possible, expected",
    )
    for arm, color, label in ((_CHAMPION, "#1f6feb", "arm champion"), (_WEAK, "#d1495b", "arm weak")):
        points = [(day.site.ds[5:], day.lists[arm]) for day in impressions if arm in day.lists]
        axes.plot(
            [ds for ds, _ in points], [rates.expected for _, rates in points], color=color, label=f"{label}, expected"
        )
        axes.plot(
            [ds for ds, _ in points],
            [rates.clicked for _, rates in points],
            "o",
            color=color,
            label=f"{label}, clicked",
        )
    axes.plot(
        days, [day.site.random_rate for day in impressions], color="#888888", linestyle="--", label="random, expected"
    )
    axes.plot(days, [day.site.shown[RANDOM].rate for day in impressions], "x", color="#888888", label="random, clicked")
    if stop is not None:
        stop_x = sum(_WEAK in day.lists for day in impressions) - 0.5
        axes.axvline(stop_x, color="#bbbbbb", linewidth=1)
        axes.text(stop_x + 0.05, 0.27, "weak is stopped", va="top", fontsize=9)
    axes.set_xlabel("visitors of")
    axes.set_ylabel("click-through rate")
    axes.set_ylim(0, 0.28)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
