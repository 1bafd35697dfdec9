"""`make month-replay`: what each day's model still knows of the first day, with rows of older days in its steps.

Trains the days of `make month` again, on their datasets, in the folder `replay` of its home: those that have older days
to draw from. The days before them are as they are.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.retrain.days import PIPELINE, RetrainRun, TrainHere, ceiling_of, first_day_auc, manifest_of
from headrace.config.installation import checkout
from headrace.errors import EXIT_USER_ERROR, UserError
from headrace.quality.report.facts import ceiling_share
from headrace.stage import run_stage
from headrace.train.setup.earlier_days import replay_days

#: What the two runs read alike.
_SHARED = ("landing", "lake", "datasets")
_NAME = "replay"


@dataclass(frozen=True)
class Replayed:
    """A day's model without replay and with it: AUCs over the day's rows and over the first day's."""

    ds: str
    rows: tuple[float, float]
    first_day: tuple[float, float]


def with_overrides(run: RetrainRun, overrides: Sequence[str]) -> RetrainRun:
    """Return a run with other settings of training over the same datasets.

    Raises:
        UserError: a day has no dataset yet.
    """
    replay = replace(run, home=run.home / _NAME, overrides=(*run.overrides, *overrides))
    replay.home.mkdir(exist_ok=True)
    for name in _SHARED:
        if not (replay.home / name).is_symlink():
            (replay.home / name).symlink_to(Path("..") / name)
    for ds in run.dates():
        if manifest_of(run, ds, "features") is None:
            raise UserError(f"there is no dataset of {ds}: make month first, or take fewer --days")
        _take(run, replay, ds, "features")
    first = days_with_replay(replay)[:1]
    for ds in run.dates():
        trained = manifest_of(run, ds)
        if trained is not None and (not first or ds < first[0]):
            _take(run, replay, ds, "train")
            folder = trained.output("model").name
            if not replay.ws.locate(folder).is_dir():
                shutil.copytree(run.ws.locate(folder).local_path(), replay.ws.locate(folder).local_path())
    return replay


def days_with_replay(run: RetrainRun) -> list[str]:
    """Return the days that draw from the dataset of an earlier one."""
    dates, spec = run.dates(), run.spec()
    return [ds for ds in dates if set(replay_days(spec, ds)) & set(dates)]


def _take(run: RetrainRun, replay: RetrainRun, ds: str, stage: str) -> None:
    target = replay.ws.manifest(PIPELINE, ds, stage).local_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run.ws.manifest(PIPELINE, ds, stage).local_path(), target)


def compare(run: RetrainRun, replay: RetrainRun) -> list[Replayed]:
    """Return the days that both have trained."""
    replayed, first = [], run.dates()[0]
    for ds in run.dates():
        both = [manifest_of(r, ds) for r in (run, replay)]
        pairs = [(m.facts["metrics"]["auc"], first_day_auc(m, first)) for m in both if m is not None]
        if len(pairs) == 2 and all(on_first_day is not None for _, on_first_day in pairs):
            replayed.append(Replayed(ds, (pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1])))
    return replayed


def replayed_of(run: RetrainRun) -> Mapping[str, float]:
    """Return by day the AUC over the first day's rows of the model that was trained with replay; empty before that."""
    replay = replace(run, home=run.home / _NAME)
    return {d.ds: d.first_day[1] for d in compare(run, replay)} if replay.home.is_dir() else {}


def table(days: Sequence[Replayed], ceilings: Mapping[str, float]) -> str:
    """Return the days as a Markdown table: shares of the way to the ceiling of the rows that are measured."""
    first = ceilings[days[0].ds]
    lines = [
        "| day | its rows | its rows, replay | first day's rows | first day's rows, replay |",
        "|---|---|---|---|---|",
    ]
    for d in days:
        shares = [ceiling_share(x, ceilings[d.ds]) for x in d.rows] + [ceiling_share(x, first) for x in d.first_day]
        lines.append(f"| {d.ds} | {' | '.join(f'{x:.2%}' for x in shares if x is not None)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="make month-replay", description=__doc__)
    parser.add_argument("--days", type=int, default=30, help="how many days are trained")
    parser.add_argument("--home", type=Path, default=checkout() / "build" / "month", help="the workspace of make month")
    parser.add_argument("--overlay", type=Path, default=checkout() / "conf" / "overlays" / "month.yaml")
    parser.add_argument("--set", action="append", default=[], help="key=value over the overlay, of make month")
    parser.add_argument("--share", type=float, default=0.1, help="retrain.replay.share")
    args = parser.parse_args(arguments)
    run = RetrainRun(args.home.absolute(), args.days, args.overlay.absolute(), tuple(args.set))
    try:
        replay = with_overrides(run, [f"retrain.replay={{share: {args.share}, by: day}}"])
        for ds in days_with_replay(replay):
            run_stage(TrainHere(), replay.spec(), replay.ws, ds)
            print(ds, flush=True)
        days = compare(run, replay)
        ceilings = {d.ds: ceiling_of(run, d.ds) for d in days}
    except UserError as e:
        print(f"make month-replay: {e}", file=sys.stderr)
        return EXIT_USER_ERROR
    if not days:
        print("make month-replay: no day of make month is trained yet", file=sys.stderr)
        return EXIT_USER_ERROR
    print(table(days, ceilings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
