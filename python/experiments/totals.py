"""What users of an experiment were shown and did, user by user: the outcomes' Delta table read by Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.config import Experiment, Spec
from headrace.errors import UserError
from headrace.experiments.difference import F64, Arm
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Input, Manifest, Output
from headrace.workspace import Workspace

I64 = npt.NDArray[np.int64]
#: Where rows of the days before the start belong.
_BEFORE = -1
_KEYS = ["user", "day", "arm"]


@dataclass(frozen=True)
class ServedOutcomes:
    """Where the outcomes of a served day are, as one run of the stage knows them."""

    served_ds: str
    run_ds: str
    table: Output

    @property
    def input(self) -> Input:
        """The version that is read, among a run's inputs."""
        return Input(kind=self.table.kind, name=self.table.name, version=self.table.version)


def served_outcomes(ws: Workspace, spec: Spec, ds: str, since: str | None) -> list[ServedOutcomes]:
    """The served days whose outcomes are known, each as the newest run up to a day knows it; oldest first.

    Args:
        ws: the workspace.
        spec: the pipeline.
        ds: the day of the last run that counts.
        since: the first served day; None: all.
    """
    name = ws.name_of(ws.table(spec.pipeline, "outcomes"))
    found: dict[str, ServedOutcomes] = {}
    for run in ws.days(spec.pipeline):
        if run > ds or (since is not None and run < since):
            continue
        manifest = Manifest.load(ws.manifest(spec.pipeline, run, "outcomes"))
        table = None if manifest is None else next((o for o in manifest.outputs if o.name == name), None)
        if manifest is None or table is None or any(r.name == name for r in manifest.removed):
            continue
        for served in {str(record["served_ds"]) for record in manifest.facts["days"]}:
            if since is None or served >= since:
                found[served] = ServedOutcomes(served, run, table)
    return [found[served] for served in sorted(found)]


def first_day(experiment: Experiment) -> str | None:
    """The first served day that an experiment is told by: of what was known of users before it; None: any."""
    if experiment.start is None:
        return None
    return (date.fromisoformat(experiment.start) - timedelta(days=experiment.before_days)).isoformat()


@dataclass(frozen=True)
class Totals:
    """Of each user, day and arm the rows that were shown and those with the label."""

    #: Served days, ascending; without those whose outcomes are of a run that did not have the label yet.
    days: tuple[str, ...]
    #: Those of them whose label was ripe when the run that their outcomes are of looked at it, ascending.
    ripe_days: tuple[str, ...]
    arms: tuple[str, ...]
    #: How many users there are: of `user`.
    users: int
    #: Whose row it is, on which day, in which arm (their places): int64 [n] each.
    user: I64
    day: I64
    arm: I64
    #: Rows with the label, and rows: float64 [n] each.
    above: F64
    below: F64
    #: The same on the ripe days before the start, of each user: float64 [users] each.
    before_above: F64
    before_below: F64

    @staticmethod
    def read(ws: Workspace, spec: Spec, name: str, experiment: Experiment, served: Sequence[ServedOutcomes]) -> Totals:
        """Those of an experiment.

        In memory: a row for each user and day.

        Args:
            ws: the workspace.
            spec: the pipeline.
            name: of the experiment.
            experiment: its section.
            served: the days, those before its start among them.

        Raises:
            UserError: files of the table are gone.
        """
        assert spec.score is not None
        assert spec.outcomes is not None
        label = experiment.label or next(iter(spec.outcomes.labels))
        arms = tuple(experiment.arms)
        mine = [of for of in served if experiment.live(of.served_ds)]

        def is_ripe(of: ServedOutcomes) -> bool:
            return of.served_ds <= spec.last_ripe_day(label, of.run_ds)

        # What was known of users is known for good, too: of a day that no run looked at again, labels are missing.
        earlier = [of for of in served if experiment.start is not None and of.served_ds < experiment.start]
        earlier = [of for of in earlier if is_ripe(of)]
        runs = {of.run_ds: of.table for of in (*earlier, *mine)}
        files = {run: _files(ws, table, run, label) for run, table in runs.items()}
        mine = [of for of in mine if files[of.run_ds] is not None]
        places = {of.served_ds: i for i, of in enumerate(mine)} | {of.served_ds: _BEFORE for of in earlier}
        columns = [spec.score.user.key, "served_ds", "arms", label]
        parts = []
        for run, paths in files.items():
            wanted = {of.served_ds: places[of.served_ds] for of in (*earlier, *mine) if of.run_ds == run}
            for path in paths or ():
                rows = pq.ParquetFile(path).read(columns).rename_columns(["user", "ds", "arms", "above"])
                parts.append(_summed(rows, wanted, name, arms))
        days = tuple(of.served_ds for of in mine)
        ripe = tuple(of.served_ds for of in mine if is_ripe(of))
        found = pa.concat_tables(parts) if parts else None
        if found is None or not len(found):
            none = np.empty(0)
            empty = np.empty(0, np.int64)
            return Totals(days, ripe, arms, 0, empty, empty, empty, none, none, none, none)
        return _totals(_again(found), days, ripe, arms)

    def of_days(self, days: Sequence[str]) -> Totals:
        """Those of some of the days alone."""
        wanted = np.array([ds in set(days) for ds in self.days], bool)
        kept = wanted[self.day] if len(self.days) else np.zeros(len(self.day), bool)
        return Totals(
            self.days,
            self.ripe_days,
            self.arms,
            self.users,
            self.user[kept],
            self.day[kept],
            self.arm[kept],
            self.above[kept],
            self.below[kept],
            self.before_above,
            self.before_below,
        )

    def served_on(self, arm: str) -> list[str]:
        """The days on which users of an arm were shown something."""
        there = np.unique(self.day[self.arm == self.arms.index(arm)])
        return [self.days[i] for i in there.tolist()]

    def of_arm(self, arm: str, *, per_user: bool = False, known_before: bool = False) -> Arm:
        """The users of an arm.

        Args:
            arm: one of `arms`.
            per_user: users are what is counted, not rows.
            known_before: with what was known of them before.
        """
        rows = self.arm == self.arms.index(arm)
        users, place = np.unique(self.user[rows], return_inverse=True)
        above = np.bincount(place, self.above[rows], len(users)).astype(np.float64)
        below = np.bincount(place, self.below[rows], len(users)).astype(np.float64)
        before = None
        if known_before and self.before_below.sum() > 0:
            before = self.before_above[users]
            if not per_user:
                # Linear, as the metric is (headrace.experiments.difference); 0 of who was shown nothing.
                before = before - self.before_above.sum() / self.before_below.sum() * self.before_below[users]
        return Arm(above, None if per_user else below, before)

    def counts(self, arm: str) -> dict[str, int]:
        """Users, rows and rows with the label of an arm."""
        rows = self.arm == self.arms.index(arm)
        return {
            "users": len(np.unique(self.user[rows])),
            "rows": int(self.below[rows].sum()),
            "positives": int(self.above[rows].sum()),
        }

    @property
    def moved(self) -> int:
        """Users that were in more than one arm: none, but where shares or salts were changed."""
        pairs = np.unique(self.user * len(self.arms) + self.arm)
        return len(pairs) - len(np.unique(self.user))


def _files(ws: Workspace, table: Output, run_ds: str, label: str) -> list[Path] | None:
    """The files that a run wrote; None where they lack the label, which was declared after that run."""
    files = DeltaLog(ws.locate(table.name)).plain_files(int(table.version))
    again = f"make them again: headrace outcomes PIPELINE --ds {run_ds}"
    if files is None:
        raise UserError(
            f"{table.name} has no version {table.version} any more, which has the outcomes as of {run_ds}; {again}"
        )
    mine = [file.path for file in files if file.partition.get("ds") == run_ds]
    for path in mine:
        if not path.is_file():
            raise UserError(f"{path} is gone, with outcomes as of {run_ds}; {again}")
    local = [path.local_path() for path in mine]
    labelled = [path for path in local if label in pq.read_schema(path).names]
    return labelled if labelled or not local else None


def _summed(rows: pa.Table, places: Mapping[str, int], name: str, arms: Sequence[str]) -> pa.Table:
    """Rows of the days `places` that are of an arm, or before the start -> user, day, arm, above, below."""
    day = _mapped(rows["ds"], lambda text: places.get(text), {})
    by_name = {arm: i for i, arm in enumerate(arms)}
    arm = _mapped(rows["arms"], lambda text: _arm(text, name), by_name)
    early = pc.equal(day, _BEFORE)
    arm = pc.if_else(early, pa.scalar(_BEFORE, pa.int64()), arm)
    found = pa.table(
        {"user": rows["user"], "day": day, "arm": arm, "above": pc.cast(rows["above"], pa.int64())}
    ).append_column("below", pa.array(np.ones(len(rows), np.int64)))
    return _again(found.filter(pc.and_(pc.is_valid(day), pc.is_valid(arm))))


def _again(found: pa.Table) -> pa.Table:
    summed = found.group_by(_KEYS).aggregate([("above", "sum"), ("below", "sum")])
    return summed.rename_columns([n.removesuffix("_sum") for n in summed.column_names]).select(
        [*_KEYS, "above", "below"]
    )


def _mapped(texts: pa.ChunkedArray, of: Any, places: Mapping[str, int]) -> pa.ChunkedArray:
    """The number of each text: what `of` makes of it, through `places` where that is a text; null: none."""
    coded = texts.combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    made = [of(text) if text is not None else None for text in coded.dictionary.to_pylist()]
    numbers = pa.array([places.get(m) if isinstance(m, str) else m for m in made], pa.int64())
    return pa.chunked_array([numbers.take(coded.indices)])


def _arm(text: str, name: str) -> str | None:
    """The arm of an experiment in a row's `arms`."""
    return next((part.partition("=")[2] for part in text.split(",") if part.partition("=")[0] == name), None)


def _totals(found: pa.Table, days: tuple[str, ...], ripe: tuple[str, ...], arms: tuple[str, ...]) -> Totals:
    users = found["user"].combine_chunks().dictionary_encode()
    code = users.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    day, arm, above, below = (found[c].to_numpy().astype(np.int64) for c in ("day", "arm", "above", "below"))
    early, n = day == _BEFORE, len(users.dictionary)
    kept = ~early
    return Totals(
        days,
        ripe,
        arms,
        n,
        code[kept],
        day[kept],
        arm[kept],
        above[kept].astype(np.float64),
        below[kept].astype(np.float64),
        np.bincount(code[early], above[early], n).astype(np.float64),
        np.bincount(code[early], below[early], n).astype(np.float64),
    )
