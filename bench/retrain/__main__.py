"""`make month`, `make year`: run the days that are missing, measure them, print the table and draw the picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.retrain.measure import DayResult, measure
from bench.retrain.plot import GOAL, draw
from bench.retrain.replay import replayed_of
from bench.retrain.run import RetrainRun
from headrace.errors import EXIT_USER_ERROR, UserError
from headrace.workspace import checkout


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
