"""The verdict on a challenger: the rules of the day's model, and when it becomes the champion instead."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Gate, Loss, Train, load_spec
from headrace.config.gate import check_gate
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.quality.gate.rules import (
    CHALLENGER_KEY,
    PASSED,
    REFUSED,
    better_rule,
    judge,
    judge_challenger,
    verdict_on_challenger,
)
from headrace.quality.gate.stage import JudgedModel, JudgeModel, challenger_to_evaluate
from headrace.stage import Context, run_stage
from headrace.stage.manifest import Manifest, Output
from headrace.train.callbacks.progress import spec_monitor


def model(version: str, auc: float, log_loss: float = 0.4) -> dict[str, Any]:
    return {
        "version": version,
        "key": f"k{version}",
        "name": f"models/{version}",
        "metrics": {"auc": auc, "log_loss": log_loss},
        "own_metrics": {},
        "finite": 100,
        "known": {},
        "bytes": 10,
        "batch_ms": 1.0,
        "rows_per_second": 1e5,
    }


def minus(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    differences = {m: left["metrics"][m] - right["metrics"][m] for m in left["metrics"]}
    return {m: {"value": v, "low": v - 0.001, "high": v + 0.001, "p": 0.1} for m, v in differences.items()}


def evaluated(today: float, champion: float | None, challenger: float, **losses: float) -> dict[str, Any]:
    """Facts of the stage evaluate, by AUC."""
    day, third = model("2", today, losses.get("loss_today", 0.4)), model("3", challenger, losses.get("loss", 0.4))
    facts: dict[str, Any] = {"split": "test", "registered": "clicks", "model": day, "champion": None, "note": ""}
    third |= {"note": "", "beside_model": minus(third, day), "beside_champion": None}
    if champion is not None:
        facts["champion"] = model("1", champion)
        facts |= {"differences": minus(day, facts["champion"]), "slices": [], "score_psi": 0.1}
        comparison = {"differences": minus(third, facts["champion"]), "slices": [], "score_psi": 0.3}
        third["beside_champion"] = comparison
    return {**facts, "rows": 100, "challenger": third}


def test_its_rules_are_those_of_a_day_model_with_its_figures() -> None:
    gate = Gate.model_validate(
        {"metrics": {"auc": {"min": 0.7}}, "champion": {"auc": 0.02}, "drift": {"max_score_psi": 0.2}}
    )
    facts = evaluated(0.71, 0.72, 0.69)
    of_day = {r.key: r for r in judge(gate, facts, None)}
    challenger_rules = {r.key: r for r in judge_challenger(gate, facts, None)}
    assert of_day.keys() == challenger_rules.keys()
    assert [r.passed for r in of_day.values()] == [True, True, True, True]
    # As if it were the day's model: what it was held against is the same champion.
    challenger_facts = {**facts, "model": facts["challenger"], **facts["challenger"]["beside_champion"]}
    assert list(challenger_rules.values()) == judge(gate, challenger_facts, None)
    assert {k: r.passed for k, r in challenger_rules.items()} == {
        "gate.metrics.auc.min": False,
        "gate.champion.auc": False,
        "gate.coverage.min_finite": True,
        "gate.drift.max_score_psi": False,
    }
    unmeasured = evaluated(0.71, None, 0.69)
    assert {r.passed for r in judge_challenger(gate, unmeasured, None) if "champion" in r.key} == {None}


auc = st.floats(0.5, 0.9)


@given(auc, st.none() | auc, auc, st.floats(0, 0.1), st.sampled_from(["report", "promote"]))
def test_it_becomes_champion_where_it_is_better_than_who_would_be(
    today: float, champion: float | None, challenger: float, margin: float, mode: Any
) -> None:
    """The plain rule: the challenger must pass, and beat by `behind` the model that would be champion without it."""
    gate = Gate.model_validate({"metrics": {"auc": {"min": 0.7}}, "challenger": mode})
    verdict = PASSED if today >= 0.7 else REFUSED
    facts = evaluated(today, champion, challenger)
    outcome = verdict_on_challenger(gate, facts, None, verdict, "auc", margin)
    assert outcome["verdict"] == (PASSED if challenger >= 0.7 else REFUSED)
    rival = today if verdict == PASSED else champion
    beats = rival is None or challenger - rival > margin
    assert outcome["becomes_champion"] == (mode == "promote" and challenger >= 0.7 and beats)
    behind_rules = [r for r in outcome["rules"] if r["key"] == CHALLENGER_KEY]
    assert len(behind_rules) == (mode == "promote" and rival is not None)


def test_losses_are_better_where_they_are_lower() -> None:
    facts = evaluated(0.7, 0.7, 0.7, loss_today=0.40, loss=0.39)
    rule = better_rule(facts, PASSED, "log_loss", 0.001)
    assert rule is not None
    assert (rule.value, rule.low, rule.high) == pytest.approx((0.01, 0.009, 0.011))
    assert (rule.passed, rule.margin) == (True, pytest.approx(0.009))
    assert "log_loss beside that of version 2: better by +0.01" in rule.text
    unknown = better_rule(facts, PASSED, "ndcg_at_k", 0.0)
    assert unknown is not None
    assert (unknown.passed, "was not measured" in unknown.text) == (False, True)


def judged(ws: Workspace, facts: dict[str, Any], *more: str) -> Manifest:
    rows = facts.pop("rows")
    manifest = Manifest(stage="evaluate", pipeline="clicks", ds="2026-01-10", key="e", spec_hash="")
    manifest.model_copy(update={"facts": facts, "rows": {"rows": rows}}).save(
        ws.manifest("clicks", "2026-01-10", "evaluate")
    )
    sections = ("gate={metrics: {auc: {min: 0.7}}}", "challenger={behind: 0.01}", "train.monitor=auc")
    spec = load_spec("clicks", [*sections, *more])
    return run_stage(JudgeModel(), spec, ws, "2026-01-10").manifest


def test_the_verdict_on_it_decides_nothing_about_the_days_model(ws: Workspace) -> None:
    """A pipeline without a challenger has the manifest that it had."""
    without_challenger = judged(ws, {k: v for k, v in evaluated(0.72, None, 0.5).items() if k != "challenger"})
    assert "challenger" not in without_challenger.facts
    reported = judged(ws, evaluated(0.72, None, 0.5))
    assert reported.key == without_challenger.key
    ws.manifest("clicks", "2026-01-10", "gate").local_path().unlink()
    refused = judged(ws, evaluated(0.72, None, 0.5))
    assert {k: v for k, v in refused.facts.items() if k != "challenger"} == without_challenger.facts
    assert (refused.facts["challenger"]["verdict"], refused.rows) == (REFUSED, without_challenger.rows)
    promoted = judged(ws, evaluated(0.72, None, 0.74), "gate.challenger=promote")
    challenger_facts = promoted.facts["challenger"]
    assert (challenger_facts["version"], challenger_facts["key"], challenger_facts["name"]) == ("3", "k3", "models/3")
    assert (challenger_facts["verdict"], challenger_facts["becomes_champion"]) == (PASSED, True)
    # How much better it must be is what the verdict depends on.
    stricter = judged(ws, evaluated(0.72, None, 0.74), "gate.challenger=promote", "challenger.behind=0.05")
    assert stricter.key != promoted.key
    assert stricter.facts["challenger"]["becomes_champion"] is False
    cannot = evaluated(0.72, None, 0.74)
    cannot["challenger"] = {name: cannot["challenger"][name] for name in ("version", "key", "name")} | {"note": "gone"}
    ws.manifest("clicks", "2026-01-10", "gate").local_path().unlink()
    assert "challenger" not in judged(ws, cannot, "gate.challenger=promote").facts


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["gate.challenger=promote"], "there is no section `challenger`"),
        (["gate.challenger=promote", "gate.model=baseline", "score.model=baseline", "challenger={}"], "'baseline'"),
    ],
)
def test_only_a_neural_challenger_is_promoted(more: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_spec("clicks", ["gate={}", *more])


def test_no_challenger_is_promoted_by_what_evaluate_does_not_measure() -> None:
    features, gate = load_spec("clicks").features, Gate(challenger="promote")
    task, full = {"tasks": {"click": {}, "buy": {"label": "buy"}}}, {"evaluation": {"full_ranking": {"k": 20}}}
    for more, monitor, fits in (
        (task, "auc.buy", False),
        (task, "auc", True),
        (full, "ndcg_at_20_full", False),
        (full, "auc", True),
    ):
        train = Train.model_validate({**more, "monitor": monitor})

        def check(numbers: bool, train: Train = train) -> None:
            check_gate(gate, {}, None, train, features, has_drift=False, has_challenger=True, predicts_numbers=numbers)

        check(True)  # by rmse, whatever is monitored
        if fits:
            check(False)
        else:
            with pytest.raises(ValueError, match=f"does not measure '{monitor}'"):
                check(False)


def test_a_challenger_that_predicts_numbers_is_better_by_their_errors() -> None:
    """The figure is that by which training chooses its model, whatever `train.monitor` is by default."""
    spec = load_spec("clicks", ["gate={challenger: promote}", "challenger={behind: 0.01}"])
    assert spec_monitor(spec) == ("log_loss", True)
    for kind, monitor in (("squared_error", ("rmse", True)), ("bpr", ("auc", False)), ("bce", ("log_loss", True))):
        model = spec.model.model_copy(update={"loss": Loss.model_construct(kind=kind)})
        of_kind = spec.model_copy(update={"model": model})
        facts = evaluated(0.7, None, 0.72)
        facts["challenger"]["beside_model"]["rmse"] = {"value": -0.02, "low": None, "high": None, "p": None}
        challenger_facts = JudgeModel()._on_challenger(of_kind, facts, None, PASSED)
        assert spec_monitor(of_kind) == monitor
        assert challenger_facts is not None
        assert challenger_facts["becomes_champion"] == (kind != "bce")


def test_days_that_were_judged_without_their_challenger_stay_so(tmp_path: Path) -> None:
    """Such days have no version to evaluate; with another model of the day, or one trained later, they have."""
    ws, ds, noon = Workspace(tmp_path), "2026-01-10", datetime(2026, 1, 11, 12, tzinfo=UTC)
    spec = load_spec("clicks", ["gate={metrics: {auc: {min: 0.7}}}", "challenger={}"])

    def save(stage: str, started: datetime, **facts: Any) -> None:
        output = Output(kind="model", name=f"models/{stage}", version=f"{stage}-key")
        manifest = Manifest(
            stage=stage, pipeline="clicks", ds=ds, key="k", spec_hash="", outputs=(output,), started=started
        )
        manifest.model_copy(update={"facts": facts, "seconds": 60.0}).save(ws.manifest("clicks", ds, stage))

    def version_to_evaluate(key: str = "2-key") -> str | None:
        challenger = challenger_to_evaluate(Context(spec, ws, ds, {}), JudgedModel("2", key, "models/2"))
        return None if challenger is None else challenger.version

    assert version_to_evaluate() is None
    save("challenger", noon, registered={"version": "3"})
    assert version_to_evaluate() == "3"
    save("evaluate", noon + timedelta(hours=1), model={"key": "2-key"})
    assert (version_to_evaluate(), version_to_evaluate("another-key")) == (None, "3")
    save("evaluate", noon + timedelta(hours=1), model={"key": "2-key"}, challenger={"version": "3"})
    assert version_to_evaluate() == "3"
    save("evaluate", noon, model={"key": "2-key"})  # it was trained meanwhile
    assert version_to_evaluate() == "3"
