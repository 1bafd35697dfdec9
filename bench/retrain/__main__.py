"""`make month`, `make year`: run the days that are missing, measure them, print the table and draw the picture."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from bench.retrain.days import DayResult, RetrainRun, measure
from bench.retrain.replay import replayed_of
from headrace.config.installation import checkout
from headrace.errors import EXIT_USER_ERROR, UserError

matplotlib.use("Agg")

#: What every day is to reach.
GOAL = 0.97
# Okabe and Ito's, which colour-blind readers tell apart.
_DAILY, _ONCE, _FIRST, _REPLAYED = "#0072b2", "#d55e00", "#009e73", "#cc79a7"


def draw(days: Sequence[DayResult], picture: Path, replayed: Mapping[str, float] | None = None) -> None:
    """Draw two panels: on each day's rows the day's model and the first one; on the first day's rows each day's model.

    `replayed`: by day the AUC, over the first day's rows, of a model that was trained with replay.
    """
    places = range(len(days))
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 6.2), sharex=True, height_ratios=(3, 1.4), constrained_layout=True
    )
    upper.axhline(GOAL, color="#888888", linewidth=0.8, linestyle="--")
    upper.plot(places, [d.share(d.retrained) for d in days], color=_DAILY, marker="o", markersize=3, label="daily")
    upper.plot(places, [d.share(d.frozen) for d in days], color=_ONCE, marker="s", markersize=3, label="trained once")
    upper.set_ylabel("share of the way from 0.5\nto the day's AUC ceiling")
    upper.set_title("Rows of each day: its own model, and the first day's", loc="left", fontsize=10)
    upper.text(len(days) - 1, GOAL, f"{GOAL:.0%}", va="top", ha="right", fontsize=8, color="#666666")
    upper.legend(frameon=False, loc="lower left")
    first = days[0]
    first_day_shares = [math.nan if d.first_day is None else first.share(d.first_day) for d in days]
    lower.plot(places, first_day_shares, color=_FIRST, marker="o", markersize=3, label="daily")
    if replayed:
        again = [first.share(replayed[d.ds]) if d.ds in replayed else math.nan for d in days]
        lower.plot(places, again, color=_REPLAYED, marker="s", markersize=3, label="daily, with replay")
        lower.legend(frameon=False, loc="best")
    lower.set_ylabel("share, first day")
    lower.set_title(f"Rows of {first.ds}: each day's model (forgetting)", loc="left", fontsize=10)
    for axis in (upper, lower):
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    step = max(1, len(days) // 10)
    lower.set_xticks(list(places)[::step], [d.ds[5:] for d in days][::step])
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def table(days: Sequence[DayResult]) -> str:
    """Return the days as a Markdown table."""
    lines = [
        "| day | ceiling | daily | of the knowable | trained once | daily, first day's rows | saved | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for d in days:
        shares = f"{d.share(d.retrained):.2%} | {d.share_of_knowable:.2%} | {d.share(d.frozen):.2%}"
        first_day_share = "" if d.first_day is None else f"{days[0].share(d.first_day):.1%}"
        saved = "" if d.saved_bytes is None else f"{d.saved_bytes / 1024:.1f} KiB"
        lines.append(f"| {d.ds} | {d.ceiling:.4f} | {shares} | {first_day_share} | {saved} | {d.seconds:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 1 where something failed."""
    parser = argparse.ArgumentParser(prog="make month", description=__doc__)
    parser.add_argument("--days", type=int, default=30, help="how many days are trained")
    parser.add_argument("--home", type=Path, default=checkout() / "build" / "month", help="the workspace")
    parser.add_argument("--overlay", type=Path, default=checkout() / "conf" / "overlays" / "month.yaml")
    parser.add_argument("--set", action="append", default=[], help="key=value over the overlay")
    parser.add_argument("--show", action="store_true", help="measure and show what there is, run nothing")
    args = parser.parse_args(arguments)
    run = RetrainRun(args.home.absolute(), args.days, args.overlay.absolute(), tuple(args.set))
    try:
        if not args.show:
            for _ in run.execute():
                measure(run, run.home / "retrain.json")
        days = measure(run, run.home / "retrain.json")
    except UserError as e:
        print(f"make month: {e}", file=sys.stderr)
        return EXIT_USER_ERROR
    if not days:
        print("make month: no day is trained yet", file=sys.stderr)
        return EXIT_USER_ERROR
    print(table(days))
    draw(days, run.home / "retrain.png", replayed_of(run))
    short = [d.ds for d in days if d.share(d.retrained) < GOAL]
    print(f"{len(days) - len(short)} of {len(days)} days at {GOAL:.0%} or more; {run.home / 'retrain.png'}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
