"""Days recorded change by change, homes as power cuts leave them, and what is wrong with these.

A home is judged in two ways. `damages` asks each stage whether its finished run still stands, as `headrace run` does,
and compares what a standing run names with what its programs had written, byte by byte: some seconds, without a JVM.
`rerun` gives the same command again and compares everything that the days made with the undisturbed run: by the
command line, or in forks of one process with Spark (tests/fault/warm_runs.py).
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from headrace.config import load_spec
from headrace.config.stages import ORDER, STAGES
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.stages import load_stage
from headrace.stage import plan_run
from headrace.stage.manifest import Manifest
from tests.fault.recorded_disk import Baseline, File, Folder, RecordedDisk, Recording, RecordKind, Survival, environment
from tests.fault.warm_runs import in_fork
from tests.support import DAY, SMALL, Run, assert_same, command, everything, headrace, manifests

#: A day of some hundred rows: most of its time goes to starting programs.
TINY = SMALL | {
    "generate.rows_per_day": 500,
    "generate.users": 60,
    "generate.items": 30,
    "train.epochs": 1,
    "train.batch_size": 256,
    "baseline.rounds": 3,
    "spark.master": "local[1]",
}
#: The same with each of the fifteen stages that a day can have.
FIFTEEN = TINY | {
    "generate.site": "{length: 5, position_bias: 0.3, random: 0.5}",
    "outcomes": "{}",
    "experiments": "{ranker: {arms: {main: {}, other: {model: '1'}}, min_users: 5}}",
    "features.split": "{by: time, valid_days: 1, test_days: 1}",
    "train.warm_start": "true",
    "challenger": "{}",
    "second_stage": "{rounds: 3, max_depth: 2, workers: 1}",
    "gate": "{metrics: {auc: {min: 0}}}",
}
#: Not recorded: PostgreSQL syncs its files itself, and as root it runs as an account that cannot reach the log.
EXCLUDED = ("postgres",)
#: Folders of a home that hold nothing for the next run: no cut is drawn at their writes.
_PASSING = ("spark", "logs", "running")
#: What is drawn as a cut's event.
_KINDS = {
    "write": (RecordKind.WRITE, RecordKind.TRUNCATE, RecordKind.CONTENT),
    "rename": (RecordKind.RENAME, RecordKind.LINK, RecordKind.UNLINK),
    "fsync": (RecordKind.SYNC, RecordKind.SYNC_ALL),
}


@dataclass(frozen=True)
class Cut:
    """A moment at which the power goes."""

    #: How many records came before it.
    number: int
    #: The day and stage that were at work, or had just ended.
    ds: str
    stage: str
    #: `write`, `rename`, `fsync` or `end`.
    kind: str
    survival: Survival
    seed: int

    def __str__(self) -> str:
        moment = "after" if self.kind == "end" else f"at a {self.kind} in"
        return f"{self.ds} {moment} {self.stage} (record {self.number}, {self.survival}, seed {self.seed})"


class RecordedDays:
    """Undisturbed days of the pipeline `clicks`, with every change of the home."""

    def __init__(self, work: Path, days: Sequence[str] = (DAY,), settings: Mapping[str, Any] = TINY) -> None:
        """Open what `record` made in a folder, of the same days and settings."""
        self.work = work.resolve()
        self.days = tuple(days)
        self.settings = settings
        self.spec = load_spec("clicks", [f"{key}={value}" for key, value in settings.items()])
        #: The stages that a day has, in its order.
        self.stages = tuple(name for name in ORDER if STAGES[name].applies(self.spec))
        #: Where the recording was made, and where homes are rebuilt: paths in them stay true.
        self.home = self.work / "home"
        #: The home of the undisturbed run.
        self.calm = self.work / "calm"
        self.recording = Recording(self.work / "log", self.home)

    @staticmethod
    def record(work: Path, days: Sequence[str] = (DAY,), settings: Mapping[str, Any] = TINY) -> RecordedDays:
        """Generate landing files and run the days, recorded.

        Args:
            work: a folder for the home, the log and copies; what an earlier recording left there is replaced.
            days: the days, in order.
            settings: overrides of the pipeline.

        Raises:
            AssertionError: a run failed, or the recording missed a change.
        """
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        home = work / "home"
        generated = headrace(home, "generate", "clicks", "--until", days[-1], "--no-spark", settings=settings)
        assert generated.code == 0, generated.output
        (work / "baseline").write_bytes(pickle.dumps(Baseline.read(home, EXCLUDED)))
        variables = environment(home, work / "log", EXCLUDED)
        for ds in days:
            with open(work / f"run-{ds}.txt", "w") as output:
                completed = subprocess.run(
                    command(home, "run", "clicks", "--ds", ds, settings=settings),
                    env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT, check=False,
                )  # fmt: skip
            assert completed.returncode == 0, (work / f"run-{ds}.txt").read_text()
            headrace(home, "warehouse", "stop", settings={})
            shutil.copytree(home / "postgres", work / f"postgres-{ds}", symlinks=True)
            _keep_owner(home / "postgres", work / f"postgres-{ds}")
        recorded = RecordedDays(work, days, settings)
        disk = recorded.disk()
        disk.replay(len(recorded.recording.records))
        missed = disk.differences(home, EXCLUDED)
        assert not missed, f"the recording missed changes: {missed[:10]}"
        home.rename(recorded.calm)
        return recorded

    def disk(self) -> RecordedDisk:
        """Return the disk as it was before the days."""
        return RecordedDisk(pickle.loads((self.work / "baseline").read_bytes()), self.recording)

    @cached_property
    def ends(self) -> dict[tuple[str, str], int]:
        """Return the number of records once a stage's manifest is on the disk, by day and stage."""
        return {
            (ds, stage): self.recording.after_name(f"runs/clicks/{ds}/{stage}.json")
            for ds in self.days
            for stage in self.stages
        }

    @cached_property
    def result(self) -> dict[str, dict[str, Any]]:
        """Return the results of the undisturbed days, by day."""
        return results(self.calm, self.days)

    def after_stages(self, seed: int, survivals: Sequence[Survival] = (Survival.SYNCED, Survival.NAMES)) -> list[Cut]:
        """Return a cut right after each stage's end, for each survival."""
        return [
            Cut(number, ds, stage, "end", survival, seed)
            for (ds, stage), number in self.ends.items()
            for survival in survivals
        ]

    def draw(self, count: int, seed: int) -> list[Cut]:
        """Draw cuts: first a stage of a day, then write, rename or fsync, then one of its records of this kind."""
        chance = random.Random(seed)
        stages, begin = [], 0
        for (ds, stage), end in self.ends.items():
            stages.append((ds, stage, begin, end))
            begin = end
        cuts: list[Cut] = []
        while len(cuts) < count:
            ds, stage, begin, end = chance.choice(stages)
            kind = chance.choice(tuple(_KINDS))
            numbers = [
                n
                for n in range(begin, end)
                if self.recording.records[n].kind in _KINDS[kind]
                and self.recording.paths[n].split("/")[0] not in _PASSING
            ]
            if numbers:
                # Before or after the event: both moments are somebody's.
                number = chance.choice(numbers) + chance.randint(0, 1)
                survival = chance.choice((Survival.SYNCED, Survival.NAMES, Survival.MIXED, Survival.MIXED))
                cuts.append(Cut(number, ds, stage, kind, survival, chance.randrange(2**32)))
        return cuts

    def states(self, cuts: Iterable[Cut]) -> dict[Cut, Cut]:
        """Return for each cut, in the days' order, the first one that leaves the next run the same home.

        The same stages had ended, and what is left of the home has the same names and bytes.
        """
        disk, first, representatives = self.disk(), dict[tuple[int, str], Cut](), dict[Cut, Cut]()
        for cut in sorted(cuts, key=lambda cut: cut.number):
            disk.replay(cut.number)
            finished = sum(number <= cut.number for number in self.ends.values())
            representatives[cut] = first.setdefault((finished, disk.state(cut.survival, cut.seed, _PASSING)), cut)
        return representatives

    def rebuild(self, cut: Cut, disk: RecordedDisk, warehouse: bool = True) -> None:
        """Make `home` what the disk has after a power cut.

        Args:
            cut: the moment.
            disk: of `disk`, replayed no further than to the cut; replayed to it here.
            warehouse: bring PostgreSQL's cluster, too: that of the last day whose `publish` had ended.
        """
        disk.replay(cut.number)
        shutil.rmtree(self.home, ignore_errors=True)
        disk.rebuild(self.home, cut.survival, cut.seed)
        published = [ds for ds in self.days if self.ends[ds, "publish"] <= cut.number]
        if warehouse and published:
            shutil.copytree(self.work / f"postgres-{published[-1]}", self.home / "postgres", symlinks=True)
            _keep_owner(self.work / f"postgres-{published[-1]}", self.home / "postgres")

    def started_days(self, cut: Cut) -> tuple[str, ...]:
        """Return the days whose run had begun at a cut."""
        return self.days[: self.days.index(cut.ds) + 1]


def results(home: Path, days: Sequence[str], program: Callable[..., Run] = headrace) -> dict[str, dict[str, Any]]:
    """Return everything that days made, read without Spark; PostgreSQL is started and stopped."""
    try:
        return {ds: everything(None, home, ds) for ds in days}
    finally:
        program(home, "warehouse", "stop", settings={})


def rerun(recorded: RecordedDays, last: str | None = None, program: Callable[..., Run] = headrace) -> str | None:
    """Give the interrupted command again in a rebuilt home; return what is wrong afterwards, or None.

    All recorded days are run, so that days before the cut are shown to stand and days after it to be unharmed.

    Args:
        recorded: the days.
        last: the stage to run to, of a single recorded day, and to compare to; None: the whole day.
        program: runs headrace.
    """
    words = ("--to", last) if last else ()
    needed = recorded.stages[: recorded.stages.index(last or recorded.stages[-1]) + 1]
    for ds in recorded.days:
        completed = program(recorded.home, "run", "clicks", "--ds", ds, *words, settings=recorded.settings)
        if completed.code != 0:
            program(recorded.home, "warehouse", "stop", settings={})
            return f"the rerun of {ds} ended with {completed.code}: {completed.output[-3000:]}"
    try:
        for ds, result in results(recorded.home, recorded.days, program).items():
            if missing := set(needed) - manifests(recorded.home, ds).keys():
                return f"the rerun of {ds} left no manifest of {sorted(missing)}"
            left, right = comparable(recorded.result[ds]), comparable(result)
            assert_same(of_stages(left, right) if last else left, right)
    except Exception as e:  # whatever it is: the home cannot be read, or it has other values
        return f"other results: {type(e).__name__}: {str(e)[:2000]}"
    return None


def comparable(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two runs of a day must have in common."""
    # A rerun counts what it loaded, read and published anew; the tables themselves are compared.
    return {name: value for name, value in result.items() if name != "rows"}


def of_stages(complete: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a whole day's results those of the stages that a part of a day has finished."""
    selected = {name: value for name, value in complete.items() if name in part}
    return selected | {"metrics": {stage: complete["metrics"][stage] for stage in part["metrics"]}}


def damages(recorded: RecordedDays, cut: Cut, disk: RecordedDisk) -> list[str]:
    """Return what is wrong with a rebuilt home as far as it shows without running a stage.

    - A stage says that its finished run stands, and what its manifest names is not there as it was written.
    - A stage can neither say that it stands nor that it will run again, though its upstream stages stand.
    - A stage had ended before the cut, and does not stand: what is done stays done.

    `publish` is not asked, since it would start PostgreSQL.
    """
    problems: list[str] = []
    ws = Workspace(recorded.home)
    for ds in recorded.started_days(cut):
        upstream_stands = True
        for name in recorded.stages:
            is_done = recorded.ends[ds, name] <= cut.number
            try:
                plan = plan_run(load_stage(name), recorded.spec, ws, ds, verify=name != "publish")
            except UserError as e:
                if upstream_stands:
                    problems.append(f"{ds} {name}: refused for the user: {e}")
                break
            except Exception as e:  # a trace in the user's terminal
                problems.append(f"{ds} {name}: {type(e).__name__}: {e}")
                break
            if plan.reason is not None:
                if is_done and upstream_stands:
                    problems.append(f"{ds} {name} had ended, and would run again: {plan.reason}")
                upstream_stands = False
                continue
            assert plan.manifest is not None
            problems += [
                f"{ds} {name} stands, but {problem}" for problem in _missing(recorded.home, disk, plan.manifest)
            ]
    return problems


def damages_apart(recorded: RecordedDays, cut: Cut, disk: RecordedDisk) -> list[str]:
    """Return `damages` as a forked process sees them: MLflow keeps a database open, and the next home has its path."""
    # Imports are paid once, here.
    for name in ("mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store"):
        importlib.import_module(name)
    for name in recorded.stages:
        load_stage(name)
    try:
        return in_fork(lambda: damages(recorded, cut, disk))
    except RuntimeError as e:
        return [str(e)]


def _missing(home: Path, disk: RecordedDisk, manifest: Manifest) -> Iterator[str]:
    """Compare what a manifest names with what programs saw at the cut."""
    for output in manifest.outputs:
        if output.kind in ("delta", "quarantine"):
            yield from _table_missing(home, disk, output.name, int(output.version))
        elif output.kind in ("dataset", "model", "file"):
            yield from _tree_missing(home / output.name, disk.find(output.name), output.name)
    if manifest.stage == "features":
        folder = disk.find("lake/clicks/vocabulary/_delta_log")
        versions = [int(n[:20]) for n in folder.live if n[:20].isdigit()] if isinstance(folder, Folder) else []
        if versions:
            yield from _table_missing(home, disk, "lake/clicks/vocabulary", max(versions))
    if manifest.stage in ("train", "challenger", "baseline", "second_stage"):
        recorded = disk.find("mlflow.db")
        if isinstance(recorded, File) and not (home / "mlflow.db").is_file():
            yield "mlflow.db is gone"


def _table_missing(home: Path, disk: RecordedDisk, table: str, version: int) -> Iterator[str]:
    """Compare a table's log up to a version, and the data files that are live then."""
    log = f"{table}/_delta_log"
    live: dict[str, None] = {}
    for number in range(version + 1):
        name = f"{log}/{number:020d}.json"
        node = disk.find(name)
        if not isinstance(node, File):
            continue
        yield from _tree_missing(home / name, node, name)
        for line in bytes(node.live).splitlines():
            action = json.loads(line)
            if "add" in action:
                live[unquote(action["add"]["path"])] = None
            elif "remove" in action:
                live.pop(unquote(action["remove"]["path"]), None)
    for path in live:
        yield from _tree_missing(home / table / path, disk.find(f"{table}/{path}"), f"{table}/{path}")


def _tree_missing(real: Path, node: Any, name: str) -> Iterator[str]:
    if isinstance(node, File):
        if not real.is_file():
            yield f"{name} is gone"
        elif (content := real.read_bytes()) != node.live:
            yield f"{name} has {len(content)} bytes of {len(node.live)}, or other ones"
    elif isinstance(node, Folder):
        for each, below in node.live.items():
            if not each.startswith("."):
                yield from _tree_missing(real / each, below, f"{name}/{each}")


def _keep_owner(source: Path, target: Path) -> None:
    """Give a copy of a cluster to the account that owns the original: as root PostgreSQL runs as another one."""
    if os.geteuid() == 0:
        for path in (source, *source.rglob("*")):
            stat = path.lstat()
            os.chown(target / path.relative_to(source), stat.st_uid, stat.st_gid, follow_symlinks=False)
