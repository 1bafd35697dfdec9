"""Figures of an experiment from the table of outcomes, against pandas; a rule stops losing arms, once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from scipy import stats
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.quality.experiments.comparison import Totals, first_day, served_outcomes
from headrace.quality.experiments.stage import JudgeExperiments, figures
from headrace.quality.report.blocks import Day
from headrace.quality.report.report import page
from headrace.quality.report.stage import Report
from headrace.score.assignment import RULE, live_experiments, pinned, stopped
from headrace.stage import Outcome, run_stage
from headrace.stage.manifest import Manifest, Output

FIRST = date(2026, 1, 1)
USERS = 900
EXPERIMENT: dict[str, Any] = {
    "arms": {"champion": {"share": 0.5}, "weak": {"model": "baseline", "share": 0.25}, "same": {"share": 0.25}},
    "start": "2026-01-03",
    "before_days": 2,
    "min_users": 50,
    "stop": {"worse_than": 0.01, "min_days": 2},
}


def day(number: int) -> str:
    return (FIRST + timedelta(days=number)).isoformat()


def make_spec(**changes: Any) -> Spec:
    return load_spec(
        "clicks", ["table.late_days=0", "outcomes={}", f"experiments={json.dumps({'ranker': EXPERIMENT | changes})}"]
    )


@dataclass
class Log:
    """Rows of the outcomes' table: all of a served day's labels are there a day later."""

    rows: pd.DataFrame

    @staticmethod
    def make(days: int, weak: float = -0.12) -> Log:
        rng = np.random.default_rng(5)
        rate = rng.beta(3, 9, USERS)
        arm = rng.choice(["champion", "champion", "weak", "same"], USERS)
        rows = []
        for number in range(days):
            for user in np.flatnonzero(rng.random(USERS) < 0.7).tolist():
                live = number >= 2
                effect = weak if live and arm[user] == "weak" else 0.0
                views = int(rng.integers(1, 9))
                clicks = rng.random(views) < np.clip(rate[user] + effect, 0, 1)
                text = f"other=x,ranker={arm[user]}" if live else None
                rows += [(day(number), user, text, int(c)) for c in clicks]
        return Log(pd.DataFrame(rows, columns=["served_ds", "user_id", "arms", "click"]))

    def land(self, ws: Workspace, spec: Spec, number: int, looks_back: int = 3) -> None:
        """Write the partition that the stage `outcomes` writes: some days before its own, the newest without all
        labels.
        """
        rows = self.rows[(self.rows.served_ds < day(number)) & (self.rows.served_ds >= day(number - looks_back))].copy()
        table = ws.table(spec.pipeline, "outcomes")
        rows.insert(0, "ds", day(number))
        types = dict.fromkeys(("ds", "served_ds", "arms"), "string") | {"user_id": "int64"}
        schema = pa.schema([(name, pa.type_for_alias(types.get(name, "int32"))) for name in rows.columns])
        written = pa.Table.from_pandas(rows, schema, False)
        again = (
            {"mode": "overwrite", "predicate": f"ds = '{day(number)}'"} if DeltaTable.is_deltatable(str(table)) else {}
        )
        write_deltalake(str(table), written, partition_by=["ds"], schema_mode="merge", **again)
        version, name = DeltaTable(str(table)).version(), ws.name_of(table)
        facts = {"days": [{"served_ds": ds} for ds in sorted(set(rows.served_ds))]}
        outputs = (
            Output(kind="delta", name=name, version=str(version), rows=len(rows)),
            Output(kind="delta", name=f"{name.removesuffix('outcomes')}outcome_metrics", version="0", rows=0),
        )
        manifest = Manifest(
            stage="outcomes", pipeline=spec.pipeline, ds=day(number), key=f"k{number}", spec_hash="", outputs=outputs
        )
        manifest.model_copy(update={"facts": facts}).save(ws.manifest(spec.pipeline, day(number), "outcomes"))


@pytest.fixture(scope="module")
def log() -> Log:
    return Log.make(8)


@pytest.fixture
def ws(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def judge(spec: Spec, ws: Workspace, number: int) -> Outcome:
    return run_stage(JudgeExperiments(), spec, ws, day(number))


def test_figures_are_those_of_pandas(ws: Workspace, log: Log) -> None:
    spec = make_spec()
    for number in range(1, 7):
        log.land(ws, spec, number)
    assert spec.experiments is not None
    experiment = spec.experiments["ranker"]
    served = served_outcomes(ws, spec, day(6), first_day(experiment))
    # Each served day by the newest run that looked at it.
    assert {entry.served_ds: entry.run_ds for entry in served} == {day(d): day(min(d + 3, 6)) for d in range(6)}
    judged = figures(spec, "ranker", experiment, Totals.read(ws, spec, "ranker", experiment, served), day(6), {})
    rows = log.rows[log.rows.served_ds < day(6)]
    rows = rows.assign(arm=rows.arms.str.extract("ranker=(\\w+)")[0])
    live = rows[rows.arm.notna()]
    assert judged["ripe_days"] == judged["days"] == [day(d) for d in range(2, 6)]
    for arm, figures_of_arm in judged["arms"].items():
        rows_of_arm = live[live.arm == arm]
        assert (figures_of_arm["users"], figures_of_arm["rows"]) == (rows_of_arm.user_id.nunique(), len(rows_of_arm))
        assert figures_of_arm["value"] == pytest.approx(rows_of_arm.click.mean())
    users = live.groupby("arm").user_id.nunique()
    assert judged["sample_ratio"]["users"] == users.to_dict()
    expected = np.array([0.5, 0.25, 0.25]) * users.sum()
    assert judged["sample_ratio"]["p"] == pytest.approx(
        stats.chisquare(users[["champion", "weak", "same"]], expected).pvalue
    )
    # CUPED by least squares: of each user's linearised rate on what the user had done before, with a mean for each arm.
    weak_difference = judged["differences"]["weak"]
    both = live[live.arm.isin(["champion", "weak"])]
    of_user = both.groupby(["user_id", "arm"]).click.agg(["sum", "count"]).reset_index()
    earlier = rows[rows.served_ds < day(2)].groupby("user_id").click.agg(["sum", "count"])
    ratio = earlier["sum"].sum() / earlier["count"].sum()
    linear = {}
    for arm, part in of_user.groupby("arm"):
        rate = part["sum"].sum() / part["count"].sum()
        linear[arm] = (rate, rate + (part["sum"] - rate * part["count"]) / part["count"].mean(), part.user_id)
    known = {
        arm: earlier.reindex(ids).fillna(0).pipe(lambda b: b["sum"] - ratio * b["count"]).to_numpy()
        for arm, (_, _, ids) in linear.items()
    }
    y = np.concatenate([linear[a][1] - linear[a][1].mean() for a in ("champion", "weak")])
    x = np.concatenate([known[a] - known[a].mean() for a in ("champion", "weak")])
    slope = np.linalg.lstsq(x[:, None], y, rcond=None)[0][0]
    plain = linear["weak"][0] - linear["champion"][0]
    assert weak_difference["plain"]["estimate"] == pytest.approx(plain)
    assert weak_difference["estimate"] == pytest.approx(
        plain - slope * (known["weak"].mean() - known["champion"].mean())
    )
    variance = sum(np.var(linear[a][1].to_numpy() - slope * known[a], ddof=1) / len(known[a]) for a in linear)
    assert weak_difference["high"] - weak_difference["estimate"] == pytest.approx(
        1.959964 * np.sqrt(variance), rel=1e-5
    )
    assert weak_difference["variance_ratio"] < 0.97
    assert judged["expected_effect"] == pytest.approx(0.1 * ratio)
    assert weak_difference["conclusion"] == "worse"
    assert weak_difference["sequential"]["confidence"] == pytest.approx(0.975)
    assert weak_difference["sequential"]["p"] < 0.05
    assert judged["differences"]["same"]["conclusion"] == "undecided"
    second_day = judged["by_day"][1]
    assert second_day["arms"]["same"]["value"] == pytest.approx(
        live[(live.served_ds == day(3)) & (live.arm == "same")].click.mean()
    )
    assert judged["moved_users"] == 0


def test_days_of_runs_without_the_label_are_not_known(ws: Workspace, log: Log) -> None:
    """A label that was declared when the experiment ran already: it is told by the days of later runs."""
    labels = {"click": {}, "purchase": {}}
    experiments = json.dumps({"ranker": EXPERIMENT | {"label": "purchase"}})
    spec = load_spec(
        "clicks", ["table.late_days=0", f"outcomes={json.dumps({'labels': labels})}", f"experiments={experiments}"]
    )
    for number in range(1, 5):
        log.land(ws, spec, number)
    (no_days,) = judge(spec, ws, 4).manifest.facts["experiments"]
    assert no_days["days"] == no_days["ripe_days"] == no_days["by_day"] == []
    assert no_days["differences"] == {"weak": None, "same": None}
    bought = Log(log.rows.assign(purchase=1 - log.rows.click))
    bought.land(ws, spec, 5, looks_back=2)
    (experiment,) = judge(spec, ws, 5).manifest.facts["experiments"]
    # The day before them is known by the run of day 4 alone.
    assert experiment["days"] == [entry["served_ds"] for entry in experiment["by_day"]] == [day(3), day(4)]
    live = bought.rows[bought.rows.served_ds.isin([day(3), day(4)]) & bought.rows.arms.str.endswith("weak", na=False)]
    weak = experiment["arms"]["weak"]
    assert (weak["rows"], weak["positives"]) == (len(live), live.purchase.sum())


def test_a_day_is_ripe_by_the_run_that_its_outcomes_are_of(ws: Workspace, log: Log) -> None:
    """After a gap of the pipeline, days that no run looked at again are as provisional as their last run left them."""
    experiments = json.dumps({"ranker": EXPERIMENT | {"stop": {"min_days": 3}}})
    spec = load_spec("clicks", ["table.late_days=0", "outcomes={starts_after_hours: 24}", f"experiments={experiments}"])
    assert spec.days_until_ripe("click") == 2
    # By day 4 no click of the arms but the control's has landed: they seem to lose.
    early = log.rows.arms.isna() | log.rows.arms.str.endswith("champion", na=False)
    late = Log(log.rows.assign(click=log.rows.click * early))
    for number in range(1, 5):
        late.land(ws, spec, number)
    log.land(ws, spec, 7, looks_back=2)
    (experiment,) = judge(spec, ws, 7).manifest.facts["experiments"]
    assert experiment["days"] == [day(d) for d in range(2, 7) if d != 4]
    # The day 3 was looked at a day later for the last time; of 5 and 6, looked at by day 7, 5 is ripe.
    assert experiment["ripe_days"] == [day(2), day(5)]
    assert [entry["ripe"] for entry in experiment["by_day"]] == [True, False, True, False]
    live = pd.concat([late.rows[late.rows.served_ds == day(2)], log.rows[log.rows.served_ds == day(5)]])
    assert experiment["arms"]["weak"]["rows"] == live.arms.str.endswith("weak").sum()
    assert experiment["differences"]["weak"]["days"] == [day(2), day(5)]
    # A third ripe day would stop it.
    assert experiment["differences"]["weak"]["conclusion"] == "worse"
    assert experiment["stopped_now"] == []


def test_what_was_known_of_users_before_is_of_ripe_days_alone(ws: Workspace, log: Log) -> None:
    """The day before the start whose labels no run has looked at again says nothing of its users."""
    experiments = json.dumps({"ranker": EXPERIMENT})
    spec = load_spec("clicks", ["table.late_days=0", "outcomes={starts_after_hours: 24}", f"experiments={experiments}"])
    for number, looks_back in ((1, 3), (2, 3), (5, 2)):  # day 0 is known by the run of 2 days later, day 1 by the next
        log.land(ws, spec, number, looks_back)
    assert spec.experiments is not None
    experiment = spec.experiments["ranker"]
    served = served_outcomes(ws, spec, day(5), first_day(experiment))
    assert {entry.served_ds: entry.run_ds for entry in served} == {
        day(0): day(2),
        day(1): day(2),
        day(3): day(5),
        day(4): day(5),
    }
    totals = Totals.read(ws, spec, "ranker", experiment, served)
    ripe = log.rows[log.rows.served_ds == day(0)]
    assert (totals.before_below.sum(), totals.before_above.sum()) == (len(ripe), ripe.click.sum())
    assert sorted(totals.before_below[totals.before_below > 0]) == sorted(ripe.groupby("user_id").size())


def test_a_losing_arm_is_stopped_once_and_its_users_get_the_controls_model(ws: Workspace, log: Log) -> None:
    spec = make_spec()
    decided = []
    for number in range(1, 7):
        log.land(ws, spec, number)
        outcome = judge(spec, ws, number)
        (experiment,) = outcome.manifest.facts["experiments"]
        decided.append(experiment["stopped_now"])
        assert judge(spec, ws, number).skipped
    first = next(i for i, arms in enumerate(decided) if arms)
    assert decided == [[]] * first + [["weak"]] + [[]] * (5 - first)
    assert first + 1 >= 4  # two ripe days of the arm
    stop = stopped(ws, "clicks", "ranker", "weak")
    assert stop is not None
    assert (stop.ds, stop.by) == (day(first + 1), RULE)
    assert "surely worse than champion by more than 0.01" in stop.reason
    # The day that decided is done again: the same verdict, the same record.
    ws.manifest("clicks", stop.ds, "experiments").remove()
    again = judge(spec, ws, first + 1)
    assert again.manifest.facts["experiments"][0]["stopped_now"] == ["weak"]
    assert stopped(ws, "clicks", "ranker", "weak") == stop
    assert again.manifest.facts["experiments"][0]["arms"]["weak"]["stopped"] == stop.model_dump(mode="json")
    # Its record is gone: the stage decides again.
    ws.stopped_arm("clicks", "ranker", "weak").remove()
    assert not judge(spec, ws, first + 1).skipped

    (running,) = live_experiments(ws, spec, day(first))
    (after,) = live_experiments(ws, spec, day(first + 1))
    assert (running.model_of("weak"), after.model_of("weak")) == ("baseline", None)
    assert after.model_of("same") is None
    assert pinned("clicks", [running]) != pinned("clicks", [after])
    assert live_experiments(ws, spec, day(1)) == []
    assert pinned("clicks", []) == ()

    manifest = Manifest.load(ws.manifest("clicks", day(first + 1), "experiments"))
    assert manifest is not None
    assert "experiments?" in Report.needs
    html = page(Day(spec, day(first + 1), {"experiments": manifest}))
    assert "Stopped by its rule from this day&#39;s lists on: weak." in html
    assert "Arms of ranker: click" in html

    # Once more, by outcomes with which the arm does not lose: the record stands, and the lists obey it.
    stop = stopped(ws, "clicks", "ranker", "weak")
    assert stop is not None
    Log.make(8, weak=0.0).land(ws, spec, first + 1)
    (experiment,) = judge(spec, ws, first + 1).manifest.facts["experiments"]
    assert experiment["stopped_now"] == []
    assert experiment["arms"]["weak"]["stopped"] == stop.model_dump(mode="json")
    assert live_experiments(ws, spec, stop.ds)[0].model_of("weak") is None
    # Without the record nothing is stopped any more, and the stage says so.
    ws.stopped_arm("clicks", "ranker", "weak").remove()
    (experiment,) = judge(spec, ws, first + 1).manifest.facts["experiments"]
    assert experiment["arms"]["weak"]["stopped"] is None


def test_the_rule_waits_for_users_days_and_the_sample_ratio(ws: Workspace, log: Log) -> None:
    for number in range(1, 7):
        log.land(ws, make_spec(), number)
    for changes in (
        {"stop": {"worse_than": 0.2}},
        {"stop": {"min_days": 5}},
        {"min_users": 600},
        {"stop": None},
        {"lower_is_better": True},
        {"arms": {"champion": {"share": 0.8}, "weak": {"model": "baseline", "share": 0.1}, "same": {"share": 0.1}}},
    ):
        (experiment,) = judge(make_spec(**changes), ws, 6).manifest.facts["experiments"]
        assert experiment["stopped_now"] == [], changes
    assert experiment["sample_ratio"]["ok"] is False
    (experiment,) = judge(make_spec(metric="per_user", stop={}), ws, 6).manifest.facts["experiments"]
    assert experiment["stopped_now"] == ["weak"]
    live = log.rows[(log.rows.served_ds >= day(2)) & (log.rows.served_ds < day(6)) & log.rows.arms.str.endswith("weak")]
    assert experiment["arms"]["weak"]["value"] == pytest.approx(live.groupby("user_id").click.sum().mean())


def test_stop_by_hand_and_status_on_the_command_line(ws: Workspace, log: Log) -> None:
    spec = make_spec(stop=None)
    settings = [
        *("--set", "table.late_days=0", "--set", "outcomes={}"),
        *("--set", f"experiments={json.dumps({'ranker': EXPERIMENT | {'stop': None}})}", "--home", str(ws.home)),
    ]

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["experiment", *words, *settings])

    assert "no outcome of experiment 'ranker' of 'clicks' is known yet; its first lists" in text_of(
        run("status", "ranker", "clicks")
    )
    for number in range(1, 7):
        log.land(ws, spec, number)
    score_manifest = Manifest(stage="score", pipeline="clicks", ds=day(4), key="k", spec_hash="")
    score_manifest.save(ws.manifest("clicks", day(4), "score"))
    for words, message in (
        (("stop", "ranker", "clicks", "--arm", "weak"), "say why: --reason TEXT"),
        (("stop", "ranker", "clicks", "--arm", "champion", "--reason", "x"), "'champion' is the control"),
        (("stop", "ranker", "clicks", "--arm", "week", "--reason", "x"), "no arm 'week'; did you mean 'weak'?"),
        (
            ("stop", "rank", "clicks", "--arm", "weak", "--reason", "x"),
            "no experiment 'rank' (experiments: ranker); did",
        ),
        (("status", "ranker"), "say which pipeline has the experiment"),
    ):
        failed = run(*words)
        assert failed.exit_code == 2
        assert message in failed.output
    done = run("stop", "ranker", "clicks", "--arm", "weak", "--reason", "complaints")
    assert done.exit_code == 0, done.output
    stop = stopped(ws, "clicks", "ranker", "weak")
    assert stop is not None
    assert (stop.ds, stop.reason) == (day(5), "complaints")
    again = run("stop", "ranker", "clicks", "--arm", "weak", "--reason", "once more")
    assert again.exit_code == 2
    assert f"was stopped from {day(5)} on" in again.output

    document = json.loads(run("status", "ranker", "clicks", "--json").stdout)
    assert (document["pipeline"], document["state"], document["ds"]) == ("clicks", "running", day(6))
    assert document["arms"]["weak"]["stopped"]["reason"] == "complaints"
    # The ratio of the arms is that of the days on which all were there.
    early = log.rows[(log.rows.served_ds >= day(2)) & (log.rows.served_ds < day(5))]
    assert sum(document["sample_ratio"]["users"].values()) == early.user_id.nunique()
    text = text_of(run("status", "ranker", "clicks", "--ds", day(4)))
    assert f"lists of {day(2)} to {day(3)}" in text
    assert "sample ratio: champion" in text
    assert "baseline" in text


def text_of(result: Any) -> str:
    assert result.exit_code == 0, result.output
    return str(result.output)


def test_an_estimate_beforehand_wants_propensities_and_a_day(ws: Workspace) -> None:
    experiments = {"ranker": {"arms": {"a": {}, "b": {"model": "baseline"}}}}
    words = ["--set", "outcomes={}", "--set", f"experiments={json.dumps(experiments)}", "--home", str(ws.home)]
    none = CliRunner().invoke(app, ["experiment", "estimate", "ranker", "clicks", *words])
    assert none.exit_code == 2
    assert "train.evaluation.off_policy" in none.output
    policy = {"off_policy": {"propensity": "ts", "action": "item_id"}}
    words += ["--set", f"train.evaluation={json.dumps(policy)}", "--set", "features.carried=[event_id, ts]"]
    none = CliRunner().invoke(app, ["experiment", "estimate", "ranker", "clicks", *words])
    assert none.exit_code == 2
    assert "no day of 'clicks' has features" in none.output
