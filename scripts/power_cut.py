"""Power cuts over a day of the pipeline `clicks`: what the disk has then, and whether the same command heals it.

    .venv/bin/python -m scripts.power_cut recorded [--cuts 200] [--seed 36] [--minutes 60] [--days 2]
    .venv/bin/python -m scripts.power_cut image        (root; loop devices, ext4)

`recorded` records all changes of an undisturbed run and rebuilds the home as a disk that promises no more than POSIX
may have it (tests/fault/recorded_disk.py): right after each stage, and at moments drawn by the seed. Moments that leave
the same home are one state. Each state is checked without running a stage; then the day is run again in as many of
them, in an order drawn by the seed, as the minutes allow, and compared with the undisturbed run. Runs are forks of one
process that has Spark (tests/fault/warm_runs.py); some states are run again by the command line, too.

`image` runs the day stage by stage in an ext4 image on a loop device. The image is copied the moment a stage returns:
what the copy has is what a power cut leaves. The copy is mended by e2fsck, mounted, and the day is run again in it.

A line is printed for each state, and appended to WORK/outcomes.jsonl; one that is in it is not done again. Ends with 1
where a cut did harm, with 2 where the machine cannot do it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config import load_spec
from headrace.config.stages import ORDER, STAGES
from tests.fault.power_cuts import (
    FIFTEEN,
    TINY,
    Cut,
    RecordedDays,
    comparable,
    damages_apart,
    of_stages,
    rerun,
    results,
)
from tests.fault.warm_runs import WarmRuns, in_fork
from tests.support import DAY, NEXT_DAY, Run, assert_same, headrace

_IMAGE_MIB = 700
#: Of so many states that are run again, one is run again by the command line, too.
_BY_COMMAND = 25


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("disk", choices=("recorded", "image"))
    parser.add_argument("--work", type=Path, default=Path("build/power-cut"), help="a folder for homes and outcomes")
    parser.add_argument("--cuts", type=int, default=200, help="moments to draw, besides those after each stage")
    parser.add_argument("--seed", type=int, default=36, help="of the draws")
    parser.add_argument("--nine", action="store_true", help="the nine stages of clicks, in place of all fifteen")
    parser.add_argument("--days", type=int, choices=(1, 2), default=1, help="days to record")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for runs of the day again")
    parser.add_argument(
        "--stage",
        action="store_true",
        help="run again to the end of the stage that was at work or had ended, not the whole day",
    )
    parser.add_argument("--first", metavar="STAGE", help="image: the first stage that a cut follows; default: all")
    parser.add_argument("--drawn", action="store_true", help="run again only at drawn moments")
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="K/N",
        help="run again in each Nth state: N processes, each with its copy of WORK",
    )
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    outcomes = Outcomes(work / "outcomes.jsonl")
    settings = TINY if arguments.nine else FIFTEEN
    if arguments.disk == "image":
        return _image(work, settings, outcomes, arguments.stage, arguments.first)
    days = (DAY, NEXT_DAY)[: arguments.days]
    return _recorded(work / f"recorded-{len(days)}", days, settings, arguments, outcomes)


class Outcomes:
    """Outcomes of the cuts, as lines of JSON."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.is_file() else []
        self._known: dict[tuple[str, str], Any] = {(o["cut"], o["how"]): o["harm"] for o in map(json.loads, lines)}

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._known

    def add(self, cut: str, how: str, harm: object, seconds: float) -> None:
        """Print and keep an outcome: `harm` is empty or None where there was none."""
        self._known[cut, how] = harm
        with self._file.open("a") as f:
            f.write(json.dumps({"cut": cut, "how": how, "harm": harm, "seconds": round(seconds, 1)}) + "\n")
        print(f"{how:<7} {'HARM' if harm else 'healed' if how != 'checked' else 'whole':<6} {cut}", flush=True)
        if harm:
            print(f"        {str(harm)[:600]}", flush=True)

    def summary(self) -> int:
        """Print the counts; 1 where there was harm."""
        counts = Counter((how, bool(harm)) for (_, how), harm in self._known.items())
        for how in ("checked", "rerun", "stage", "command", "image"):
            done, harmed = counts[how, False] + counts[how, True], counts[how, True]
            if done:
                print(f"{how}: {done} states, {harmed} with harm")
        return 1 if any(harm for harm in self._known.values()) else 0


def _recorded(
    work: Path, days: Sequence[str], settings: Mapping[str, Any], arguments: argparse.Namespace, outcomes: Outcomes
) -> int:
    if (work / "calm").is_dir():
        recorded = RecordedDays(work, days, settings)
    else:
        print(f"recording {', '.join(days)} in {work}", flush=True)
        recorded = RecordedDays.record(work, days, settings)
    drawn = recorded.draw(arguments.cuts, arguments.seed)
    cuts = recorded.after_stages(arguments.seed) + drawn
    first = recorded.states(cuts)
    states = list(dict.fromkeys(first.values()))
    print(
        f"{len(recorded.recording.records)} records; {len(cuts)} cuts, {len(drawn)} drawn by seed {arguments.seed}; "
        f"{len(states)} states",
        flush=True,
    )
    disk = recorded.disk()
    for cut in states:
        if (str(cut), "checked") not in outcomes:
            begin = time.monotonic()
            recorded.rebuild(cut, disk, warehouse=False)
            outcomes.add(str(cut), "checked", damages_apart(recorded, cut, disk), time.monotonic() - begin)
    again = [cut for cut in states if not arguments.drawn or cut.kind != "end"]
    random.Random(arguments.seed).shuffle(again)
    part, parts = map(int, arguments.part.split("/"))
    if arguments.minutes:
        _run_states_again(recorded, again[part - 1 :: parts], arguments, outcomes)
    return outcomes.summary()


def _run_states_again(
    recorded: RecordedDays, states: Sequence[Cut], arguments: argparse.Namespace, outcomes: Outcomes
) -> None:
    deadline = time.monotonic() + 60 * arguments.minutes
    # By a fork: delta-rs and Arrow begin threads, which this process must not have.
    recorded.result = in_fork(lambda: results(recorded.calm, recorded.days))
    warm = WarmRuns(recorded.spec, recorded.work / "warm")
    programs: dict[str, Callable[..., Run]] = {"stage" if arguments.stage else "rerun": warm, "command": headrace}
    for number, cut in enumerate(states):
        for how, program in programs.items():
            if how == "command" and number % _BY_COMMAND:
                continue
            if (str(cut), how) in outcomes or time.monotonic() > deadline:
                continue
            begin = time.monotonic()
            recorded.rebuild(cut, recorded.disk())
            harm = _harm_in_fork(recorded, cut.stage if arguments.stage else None, program)
            outcomes.add(str(cut), how, harm, time.monotonic() - begin)
    warm.stop()


def _harm_in_fork(recorded: RecordedDays, last: str | None, program: Callable[..., Run]) -> str | None:
    try:
        return in_fork(lambda: rerun(recorded, last, program))
    except RuntimeError as e:
        return str(e)


def _image(
    work: Path, settings: Mapping[str, Any], outcomes: Outcomes, to_stage: bool, first: str | None = None
) -> int:
    missing = [name for name in ("mkfs.ext4", "e2fsck", "mount", "losetup") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing or not Path("/dev/loop-control").exists():
        print(f"image: needs root, loop devices and e2fsprogs (missing: {', '.join(missing) or 'rights'})")
        return 2
    image, copy, disk = work / "disk.img", work / "cut.img", work / "disk"
    home = disk / "home"
    _unmount(disk)
    disk.mkdir(exist_ok=True)
    calm, stages = _calm(work, settings), _stages(settings)
    image.unlink(missing_ok=True)
    with image.open("wb") as f:
        f.truncate(_IMAGE_MIB << 20)
    _call("mkfs.ext4", "-q", str(image))
    try:
        _mount(image, disk)
        shutil.copytree(work / "calm" / "landing", home / "landing")
        os.sync()
        for stage in stages[stages.index(first) if first else 0 :]:
            begin = time.monotonic()
            run = headrace(home, "run", "clicks", "--ds", DAY, "--to", stage, settings=settings)
            shutil.copyfile(image, copy)  # the file of the loop device has what the disk has
            if run.code != 0:
                raise SystemExit(f"{stage} ended with {run.code}:\n{run.output}")
            headrace(home, "warehouse", "stop", settings={})
            _unmount(disk)
            _call("e2fsck", "-fy", str(copy), codes=(0, 1))
            _mount(copy, disk)
            harm = _run_again(home, stages[: stages.index(stage) + 1], calm, settings, to_stage)
            _unmount(disk)
            outcomes.add(f"{DAY} after {stage}, ext4", "image", harm, time.monotonic() - begin)
            _mount(image, disk)
    finally:
        _unmount(disk)
    return outcomes.summary()


def _stages(settings: Mapping[str, Any]) -> tuple[str, ...]:
    spec = load_spec("clicks", [f"{key}={value}" for key, value in settings.items()])
    return tuple(name for name in ORDER if STAGES[name].applies(spec))


def _calm(work: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an undisturbed day made, and leave its home in WORK/calm."""
    home = work / "calm"
    if not (home / "reports").is_dir():
        for words in (("generate", "clicks", "--until", DAY, "--no-spark"), ("run", "clicks", "--ds", DAY)):
            run = headrace(home, *words, settings=settings)
            if run.code != 0:
                raise SystemExit(run.output)
        headrace(home, "warehouse", "stop", settings={})
    return comparable(results(home, (DAY,))[DAY])


def _run_again(
    home: Path, finished: Sequence[str], calm: Mapping[str, Any], settings: Mapping[str, Any], to_stage: bool
) -> str | None:
    """Run the day in what a cut left after some stages, or up to the last of them; return what is wrong, or None."""
    done = {p.stem for p in (home / "runs" / "clicks" / DAY).glob("*.json")}
    lost = [name for name in finished if name not in done]
    words = ("--to", finished[-1]) if to_stage else ()
    run = headrace(home, "run", "clicks", "--ds", DAY, *words, settings=settings)
    if run.code != 0:
        headrace(home, "warehouse", "stop", settings={})
        return f"the rerun ended with {run.code}: {run.output[-3000:]}"
    again = [name for name in finished if f"{name}: done" in run.output]
    try:
        actual = comparable(results(home, (DAY,))[DAY])
        assert_same(of_stages(calm, actual) if to_stage else calm, actual)
    except Exception as e:  # whatever it is: the home cannot be read, or it has other values
        return f"other results: {type(e).__name__}: {str(e)[:2000]}"
    return f"healed, but of stages that had ended lost were {lost}, and run again {again}" if lost or again else None


def _mount(image: Path, folder: Path) -> None:
    _call("mount", "-o", "loop", str(image), str(folder))


def _unmount(folder: Path) -> None:
    if folder.is_mount():
        _call("umount", str(folder))


def _call(*words: str, codes: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
