"""Comparison of the arms of an experiment: users' totals, and tests of the differences between arms.

Arrow reads the totals of each user from the outcomes' Delta table. The bounds of a difference hold at all looks
together, so that an experiment may be looked at every day: the mixture sequential probability ratio test with a normal
prior of the effect (Robbins, 1970; Johari, Koomen, Pekelis and Walsh, *Always valid inference: continuous monitoring of
A/B tests*, Operations Research 2022). With the estimate d of variance V and the prior's variance t^2, the likelihood
ratio of any effect to none is

    L = sqrt(V / (V + t^2)) exp(t^2 d^2 / (2 V (V + t^2)))

Without an effect L is a martingale of mean 1, so P(L >= 1 / a at any look) <= a (Ville's inequality). The interval
holds the effects that L does not reject. It is exact for normal estimates with independent increments, and nearly so
for means of many users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.compute import pc
from headrace.config import Experiment, Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.stage.manifest import Input, Manifest, Output

F64 = npt.NDArray[np.float64]


I64 = npt.NDArray[np.int64]
#: Day and arm number of rows of the days before the start.
_EARLIER_DAYS = -1
_KEYS = ["user", "day", "arm"]


@dataclass(frozen=True)
class Arm:
    """Users of an arm, with their totals so far (clicks over impressions, for example) or one value each.

    above: float64 [n]. below: float64 [n]; None: the users themselves are counted, the metric is a mean of users.
    pre_period: the same users' value of the metric before the experiment, float64 [n], or None.
    """

    above: F64
    below: F64 | None = None
    pre_period: F64 | None = None


@dataclass(frozen=True)
class ArmDifference:
    """Difference of two arms: treatment less control, and its variance."""

    control: float
    treatment: float
    estimate: float
    variance: float
    #: The variance over that without `before`; 1 where no earlier value is known.
    variance_ratio: float

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the interval for one look that was planned beforehand; for many looks see `always_valid_interval`."""
        half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(self.variance)
        return self.estimate - half, self.estimate + half


def difference(control: Arm, treatment: Arm) -> ArmDifference:
    """Compare two arms.

    A ratio of sums (clicks over impressions) has users for its units, not impressions, which are not independent: it
    is linearised at its value (the delta method; Deng, Knoblich and Lu, KDD 2018). Where both arms have `before`, the
    part of each user's value that it explains is taken out (CUPED; Deng, Xu, Kohavi and Walker, WSDM 2013), with one
    coefficient of both arms: the estimate stays unbiased, and its variance shrinks by the squared correlation.

    Raises:
        ValueError: an arm has less than two users.
    """
    sides = [_linear(arm) for arm in (control, treatment)]
    values = [linear for _, linear in sides]
    if min(len(x) for x in values) < 2:
        raise ValueError("an arm needs two users or more")
    plain = sum(x.var(ddof=1) / len(x) for x in values)
    shift = 0.0
    variance = plain
    if control.pre_period is not None and treatment.pre_period is not None:
        earlier = [control.pre_period, treatment.pre_period]
        centred = [(x - x.mean(), b - b.mean()) for x, b in zip(values, earlier, strict=True)]
        spread = sum(float((b * b).sum()) for _, b in centred)
        slope = sum(float((x * b).sum()) for x, b in centred) / spread if spread > 0 else 0.0
        shift = slope * float(earlier[1].mean() - earlier[0].mean())
        adjusted = [x - slope * b for x, b in zip(values, earlier, strict=True)]
        variance = sum(x.var(ddof=1) / len(x) for x in adjusted)
    means = [mean for mean, _ in sides]
    return ArmDifference(
        control=means[0],
        treatment=means[1],
        estimate=means[1] - means[0] - shift,
        variance=float(variance),
        variance_ratio=float(variance / plain) if plain > 0 else 1.0,
    )


def _linear(arm: Arm) -> tuple[float, F64]:
    """Return the metric, and a value of each user whose mean varies as it does: float64 [n]."""
    if arm.below is None:
        return float(arm.above.mean()), arm.above
    ratio = float(arm.above.sum() / arm.below.sum())
    linear: F64 = ratio + (arm.above - ratio * arm.below) / arm.below.mean()
    return ratio, linear


def sample_ratio_p(users: Sequence[int], shares: Sequence[float]) -> float:
    """Return the p-value of Pearson's chi-square test of the users of each arm against the arms' shares.

    A small one (below 0.001, say) means that users are lost on their way to an arm or from it, and that no difference
    between the arms can be believed (Fabijan et al., *Diagnosing sample ratio mismatch*, KDD 2019).

    Args:
        users: that were seen in each arm, at least two arms.
        shares: of the arms, above 0; their sum is 1.
    """
    total = sum(users)
    if total == 0:
        return 1.0
    statistic = sum((n - total * share) ** 2 / (total * share) for n, share in zip(users, shares, strict=True))
    return chi_square_tail(statistic, len(users) - 1)


def chi_square_tail(x: float, degrees: int) -> float:
    """P(a chi-square variable of so many degrees of freedom, from 1, is above x)."""
    half = x / 2
    if half <= 0:
        return 1.0
    if degrees % 2 == 0:
        first, terms = 0.0, [i + 1.0 for i in range(degrees // 2)]
    else:
        first, terms = math.erfc(math.sqrt(half)), [i + 0.5 for i in range(1, (degrees + 1) // 2)]
    # half^(t-1) e^-half / Gamma(t) of t = 1, 2, ... or of t = 3/2, 5/2, ..., in logarithms.
    return first + sum(math.exp((t - 1) * math.log(half) - half - math.lgamma(t)) for t in terms)


def always_valid_p(arm_difference: ArmDifference, scale: float) -> float:
    """Return the p-value of this look; the smallest of all looks so far is valid whenever one stops.

    Args:
        arm_difference: the arms' difference now.
        scale: t, the standard deviation of effects that are expected, in the metric's unit: where it is right,
            effects are found soonest; false alarms are as rare with any, so long as it is fixed beforehand.
    """
    if arm_difference.variance <= 0:
        return 1.0
    return min(1.0, math.exp(-_log_ratio(arm_difference.estimate, arm_difference.variance, scale)))


def always_valid_interval(arm_difference: ArmDifference, scale: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval that holds the effect at all looks together with this confidence.

    `scale`: see `always_valid_p`.
    """
    v, t2 = arm_difference.variance, scale * scale
    if v <= 0:
        return -math.inf, math.inf
    radius = math.sqrt(v * (v + t2) / t2 * (math.log((v + t2) / v) - 2 * math.log(1 - confidence)))
    return arm_difference.estimate - radius, arm_difference.estimate + radius


def _log_ratio(estimate: float, variance: float, scale: float) -> float:
    t2 = scale * scale
    return 0.5 * math.log(variance / (variance + t2)) + t2 * estimate**2 / (2 * variance * (variance + t2))


@dataclass(frozen=True)
class ServedOutcomes:
    """Outcomes of a served day as one run of the stage outcomes wrote them."""

    served_ds: str
    run_ds: str
    table: Output

    @property
    def input(self) -> Input:
        """Return the version that is read, among a run's inputs."""
        return Input(kind=self.table.kind, name=self.table.name, version=self.table.version)


def served_outcomes(ws: Workspace, spec: Spec, ds: str, since: str | None) -> list[ServedOutcomes]:
    """Return the served days whose outcomes are known, each as the newest run up to a day knows it; oldest first.

    Args:
        ws: the workspace.
        spec: the pipeline.
        ds: the day of the last run that counts.
        since: the first served day; None: all.
    """
    name = ws.name_of(ws.table(spec.pipeline, "outcomes"))
    by_day: dict[str, ServedOutcomes] = {}
    for run in ws.days(spec.pipeline):
        if run > ds or (since is not None and run < since):
            continue
        manifest = Manifest.load(ws.manifest(spec.pipeline, run, "outcomes"))
        table = None if manifest is None else next((o for o in manifest.outputs if o.name == name), None)
        if manifest is None or table is None or any(r.name == name for r in manifest.removed):
            continue
        for served in {str(record["served_ds"]) for record in manifest.facts["days"]}:
            if since is None or served >= since:
                by_day[served] = ServedOutcomes(served, run, table)
    return [by_day[served] for served in sorted(by_day)]


def first_day(experiment: Experiment) -> str | None:
    """Return the first served day whose outcomes an experiment reads, before its start; None: any."""
    if experiment.start is None:
        return None
    return (date.fromisoformat(experiment.start) - timedelta(days=experiment.before_days)).isoformat()


@dataclass(frozen=True)
class Totals:
    """Rows that were shown, and those with the label, by user, day and arm."""

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
        """Read the totals of an experiment. They take memory for one row per user and day.

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
        own_days = [served_day for served_day in served if experiment.live(served_day.served_ds)]

        def is_ripe(served_day: ServedOutcomes) -> bool:
            return served_day.served_ds <= spec.last_ripe_day(label, served_day.run_ds)

        # What was known of users is known for good, too: of a day that no run looked at again, labels are missing.
        earlier = [
            served_day
            for served_day in served
            if experiment.start is not None and served_day.served_ds < experiment.start
        ]
        earlier = [served_day for served_day in earlier if is_ripe(served_day)]
        runs = {served_day.run_ds: served_day.table for served_day in (*earlier, *own_days)}
        files = {run: _files(ws, table, run, label) for run, table in runs.items()}
        own_days = [served_day for served_day in own_days if files[served_day.run_ds] is not None]
        places = {served_day.served_ds: i for i, served_day in enumerate(own_days)} | {
            served_day.served_ds: _EARLIER_DAYS for served_day in earlier
        }
        columns = [spec.score.user.key, "served_ds", "arms", label]
        parts = []
        for run, paths in files.items():
            places_of_days = {
                served_day.served_ds: places[served_day.served_ds]
                for served_day in (*earlier, *own_days)
                if served_day.run_ds == run
            }
            for path in paths or ():
                rows = pq.ParquetFile(path).read(columns).rename_columns(["user", "ds", "arms", "above"])
                parts.append(_summed(rows, places_of_days, name, arms))
        days = tuple(served_day.served_ds for served_day in own_days)
        ripe = tuple(served_day.served_ds for served_day in own_days if is_ripe(served_day))
        table = pa.concat_tables(parts) if parts else None
        if table is None or not len(table):
            none = np.empty(0)
            empty = np.empty(0, np.int64)
            return Totals(days, ripe, arms, 0, empty, empty, empty, none, none, none, none)
        return _totals(_sum_by_key(table), days, ripe, arms)

    def of_days(self, days: Sequence[str]) -> Totals:
        """Return the totals of some of the days."""
        is_wanted = np.array([ds in set(days) for ds in self.days], bool)
        selected = is_wanted[self.day] if len(self.days) else np.zeros(len(self.day), bool)
        return Totals(
            self.days,
            self.ripe_days,
            self.arms,
            self.users,
            self.user[selected],
            self.day[selected],
            self.arm[selected],
            self.above[selected],
            self.below[selected],
            self.before_above,
            self.before_below,
        )

    def served_on(self, arm: str) -> list[str]:
        """Return the days on which users of an arm were shown something."""
        day_numbers = np.unique(self.day[self.arm == self.arms.index(arm)])
        return [self.days[i] for i in day_numbers.tolist()]

    def of_arm(self, arm: str, *, per_user: bool = False, known_before: bool = False) -> Arm:
        """Return the users of an arm.

        Args:
            arm: one of `arms`.
            per_user: users are what is counted, not rows.
            known_before: with what was known of them before.
        """
        rows = self.arm == self.arms.index(arm)
        users, place = np.unique(self.user[rows], return_inverse=True)
        above = np.bincount(place, self.above[rows], len(users)).astype(np.float64)
        below = np.bincount(place, self.below[rows], len(users)).astype(np.float64)
        pre_period = None
        if known_before and self.before_below.sum() > 0:
            pre_period = self.before_above[users]
            if not per_user:
                # Linear, as the metric is (headrace.quality.experiments.comparison); 0 of who was shown nothing.
                pre_period = pre_period - self.before_above.sum() / self.before_below.sum() * self.before_below[users]
        return Arm(above, None if per_user else below, pre_period)

    def counts(self, arm: str) -> dict[str, int]:
        """Return users, rows and rows with the label of an arm."""
        rows = self.arm == self.arms.index(arm)
        return {
            "users": len(np.unique(self.user[rows])),
            "rows": int(self.below[rows].sum()),
            "positives": int(self.above[rows].sum()),
        }

    @property
    def moved(self) -> int:
        """Return users that were in more than one arm: none, but where shares or salts were changed."""
        pairs = np.unique(self.user * len(self.arms) + self.arm)
        return len(pairs) - len(np.unique(self.user))


def _files(ws: Workspace, table: Output, run_ds: str, label: str) -> list[Path] | None:
    """Return the files that a run wrote; None where they lack the label, which was declared after that run."""
    files = DeltaLog(ws.locate(table.name)).plain_files(int(table.version))
    advice = f"make them again: headrace outcomes PIPELINE --ds {run_ds}"
    if files is None:
        raise UserError(
            f"{table.name} has no version {table.version} any more, which has the outcomes as of {run_ds}; {advice}"
        )
    run_files = [file.path for file in files if file.partition.get("ds") == run_ds]
    for path in run_files:
        if not path.is_file():
            raise UserError(f"{path} is gone, with outcomes as of {run_ds}; {advice}")
    local = [path.local_path() for path in run_files]
    labelled = [path for path in local if label in pq.read_schema(path).names]
    return labelled if labelled or not local else None


def _summed(rows: pa.Table, places: Mapping[str, int], name: str, arms: Sequence[str]) -> pa.Table:
    """Return rows of the days `places` that are of an arm, or before the start -> user, day, arm, above, below."""
    day = _mapped(rows["ds"], lambda text: places.get(text), {})
    by_name = {arm: i for i, arm in enumerate(arms)}
    arm = _mapped(rows["arms"], lambda text: _arm(text, name), by_name)
    early = pc.equal(day, _EARLIER_DAYS)
    arm = pc.if_else(early, pa.scalar(_EARLIER_DAYS, pa.int64()), arm)
    table = pa.table(
        {"user": rows["user"], "day": day, "arm": arm, "above": pc.cast(rows["above"], pa.int64())}
    ).append_column("below", pa.array(np.ones(len(rows), np.int64)))
    return _sum_by_key(table.filter(pc.and_(pc.is_valid(day), pc.is_valid(arm))))


def _sum_by_key(table: pa.Table) -> pa.Table:
    summed = table.group_by(_KEYS).aggregate([("above", "sum"), ("below", "sum")])
    return summed.rename_columns([n.removesuffix("_sum") for n in summed.column_names]).select(
        [*_KEYS, "above", "below"]
    )


def _mapped(texts: pa.ChunkedArray, value_of: Any, places: Mapping[str, int]) -> pa.ChunkedArray:
    """Return the number of each text: what `of` makes of it, through `places` where that is a text; null: none."""
    coded = texts.combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    values = [value_of(text) if text is not None else None for text in coded.dictionary.to_pylist()]
    numbers = pa.array([places.get(m) if isinstance(m, str) else m for m in values], pa.int64())
    return pa.chunked_array([numbers.take(coded.indices)])


def _arm(text: str, name: str) -> str | None:
    """Return the arm of an experiment in a row's `arms`."""
    return next((part.partition("=")[2] for part in text.split(",") if part.partition("=")[0] == name), None)


def _totals(table: pa.Table, days: tuple[str, ...], ripe: tuple[str, ...], arms: tuple[str, ...]) -> Totals:
    users = table["user"].combine_chunks().dictionary_encode()
    code = users.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    day, arm, above, below = (table[c].to_numpy().astype(np.int64) for c in ("day", "arm", "above", "below"))
    early, n = day == _EARLIER_DAYS, len(users.dictionary)
    in_experiment = ~early
    return Totals(
        days,
        ripe,
        arms,
        n,
        code[in_experiment],
        day[in_experiment],
        arm[in_experiment],
        above[in_experiment].astype(np.float64),
        below[in_experiment].astype(np.float64),
        np.bincount(code[early], above[early], n).astype(np.float64),
        np.bincount(code[early], below[early], n).astype(np.float64),
    )
