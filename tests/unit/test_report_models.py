"""The report's part on models: metrics, slices, lift, the verdict on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import load_spec
from headrace.quality.report import facts
from headrace.quality.report.quality import lift_of
from headrace.quality.report.report import page
from headrace.stage.manifest import Manifest
from tests.report_support import DS, Checker, make_day, make_manifests


def test_tasks_have_tables_of_their_own() -> None:
    manifests = make_manifests()
    train = manifests["train"]
    of_task = {
        "rows": 1_234,
        "metrics": {"auc": 0.6123},
        "intervals": {"auc": [0.6011, 0.6222]},
        "slices": [{"slice": "device", "value": "tv", "rows": 12, "metrics": {"auc": 0.5999}, "intervals": {}}],
    }
    metrics = {**train.facts["metrics"], "auc.purchase": 0.6123}
    evaluation = {"rows": 5_000, "metrics": metrics, "intervals": {}, "slices": [], "tasks": {"purchase": of_task}}
    facts_ = {**train.facts, "metrics": metrics, "evaluation": {"valid": evaluation}}
    manifests["train"] = train.model_copy(update={"facts": facts_})
    words = Checker(page(make_day(manifests))).words
    for text in (
        "AUC of purchase",
        "Metrics of the validation split, task purchase",
        "Slices of the validation split, task purchase",
        "[0.6011, 0.6222]",
        "1,234",
        "0.5999",
    ):
        assert text in words, text
    assert words.count("AUC of purchase") == 2  # beside the other metrics of the model: alone, beside the others


def test_slices_and_intervals_are_shown_where_they_were_asked_for() -> None:
    manifests = make_manifests()
    assert 'id="evaluation"' not in page(make_day(manifests))
    evaluation = {
        "rows": 5_000,
        "metrics": {"auc": 0.7694, "gauc": 0.6543, "pr_auc": None},
        "intervals": {"auc": [0.7612, 0.7788]},
        "slices": [
            {"slice": "device", "value": "<phone>", "rows": 321, "metrics": {"auc": 0.7012}, "intervals": {}},
            {"slice": "age", "value": "old", "rows": 4_321, "metrics": {"auc": None}, "intervals": {"auc": [0, 1]}},
        ],
    }
    train = manifests["train"]
    facts_ = {**train.facts, "evaluation": {"valid": evaluation, "test": {**evaluation, "rows": 77_777}}}
    manifests["train"] = train.model_copy(update={"facts": facts_})
    html = page(make_day(manifests))
    words = Checker(html).words
    for text in (
        "Evaluation by slice",
        "0.7694 [0.7612, 0.7788]",
        "GAUC 0.6543",
        "device <phone> 321 0.7012",
        "77,777",
    ):
        assert text in words, text
    assert "Slices of the test split" in words
    # Of both models beside each other, where both were asked.
    base = manifests["baseline"]
    baseline_evaluation = {**evaluation, "metrics": {"auc": 0.7411}, "intervals": {"auc": [0.73, 0.75]}}
    manifests["baseline"] = base.model_copy(
        update={"facts": {**base.facts, "evaluation": {"valid": baseline_evaluation}}}
    )
    words = Checker(page(make_day(manifests))).words
    assert "Metric neural interval XGBoost interval AUC 0.7694 [0.7612, 0.7788] 0.7411 [0.7300, 0.7500]" in words
    assert "device <phone> neural 321 0.7012" in words
    assert "device <phone> XGBoost 321 0.7012" in words


def test_slices_with_intervals_are_drawn() -> None:
    manifests = make_manifests()
    train = manifests["train"]
    slices = [
        {
            "slice": "c",
            "value": f"v{i}",
            "rows": i,
            "metrics": {"auc": 0.7},
            "intervals": {"auc": [0.65, 0.7 + i / 100]},
        }
        for i in range(20)
    ]
    evaluations = {"valid": {"rows": 9, "metrics": {"auc": 0.7}, "intervals": {}, "slices": slices}}
    manifests["train"] = train.model_copy(update={"facts": {**train.facts, "evaluation": evaluations}})
    html = page(make_day(manifests))
    (plot,) = re.findall(r'<svg [^>]*aria-label="AUC by slice of the validation split".*?</svg>', html, flags=re.DOTALL)
    assert re.findall(r">(c v\d+)<", plot) == sorted(f"c v{i}" for i in range(8, 20))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 50)), max_size=12))
def test_lift_is_that_of_the_rows_themselves(bins: list[tuple[float, float, int]]) -> None:
    """The reference writes rows out one by one, each with its bin's rate."""
    rows = sorted(((p, o) for p, o, n in bins for _ in range(n)), reverse=True)
    rates = [o for _, o in rows]
    lift_curve = lift_of([(p, o, float(n)) for p, o, n in bins])
    if not rows or sum(rates) < 1e-9:
        assert not lift_curve or sum(rates) > 0
        return
    for share, lift in lift_curve:
        first = round(share * len(rows))
        assert lift == pytest.approx((sum(rates[:first]) / first) / (sum(rates) / len(rates)), rel=1e-6)
    assert lift_curve[-1] == pytest.approx((1.0, 1.0))


def gate_manifests() -> dict[str, Manifest]:
    """A refused day, as the stages evaluate and gate write it."""
    version_facts = {"version": "8", "key": "k8", "name": "models/x", "bytes": 3_000_000, "rows_per_second": 210_000.0}
    difference = {"value": -0.006, "low": -0.009, "high": -0.003, "p": 0.01}
    rules = [
        {"key": "gate.champion.auc", "figure": "auc beside the champion's", "value": -0.006, "limit": -0.002}
        | {"margin": -0.007, "passed": False, "text": "auc is worse", "low": -0.009, "high": -0.003},
        {"key": "gate.metrics.auc.min", "figure": "auc", "value": 0.724, "limit": 0.7, "margin": 0.024}
        | {"passed": True, "text": "auc is 0.724", "low": None, "high": None},
        {"key": "gate.slices.auc", "figure": "auc of country = li", "value": None, "limit": -0.02, "margin": None}
        | {"passed": None, "text": "20 rows", "low": None, "high": None},
    ]
    slices = [
        {"slice": "country", "value": c, "rows": n, "metrics": {"auc": 0.7}, "champion": {"auc": 0.7 - d}}
        | {"differences": {"auc": {"value": d, "low": d - 0.01, "high": d + 0.01, "p": 0.2}}}
        for c, n, d in (("ch", 40_000, 0.004), ("at", 12_000, -0.011), ("li", 20, -0.3))
    ]
    facts = {"registered": "clicks", "split": "valid", "note": ""}
    evaluate = {
        **facts,
        "model": {**version_facts, "metrics": {"auc": 0.724, "log_loss": 0.441}},
        "champion": {**version_facts, "version": "7", "metrics": {"auc": 0.73, "log_loss": 0.439}},
        "differences": {"auc": difference, "log_loss": None},
        "slices": slices,
    }
    champion = {"version": "7", "key": "k7", "name": "models/w"}
    gate = {**facts, "verdict": "refused", "rows": 59_400, "model": version_facts, "champion": champion, "rules": rules}
    return {
        stage: Manifest(
            stage=stage, pipeline="clicks", ds=DS, key=stage, spec_hash="", facts=stage_facts, rows={"rows": 59_400}
        )
        for stage, stage_facts in (("evaluate", evaluate), ("gate", gate))
    }


def test_the_challenger_is_told_beside_the_days_model() -> None:
    spec, manifests = load_spec("clicks", ["gate={metrics: {auc: {min: 0.7}}}", "challenger={}"]), gate_manifests()
    rule = {"key": "challenger.behind", "figure": "auc beside that of version 8", "value": 0.0005, "limit": 0.001}
    judged = {"version": "9", "verdict": "passed", "becomes_champion": False}
    judged |= {"rules": [rule | {"margin": -0.0005, "passed": False, "text": "auc"}]}
    differences = {"auc": {"value": 0.0005, "low": -0.001, "high": 0.002, "p": 0.4}}
    measured = {"version": "9", "note": "", "metrics": {"auc": 0.7245}, "beside_model": differences}

    def words(challenger: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> str:
        added_facts = {
            "evaluate": {"challenger": challenger},
            "gate": {} if verdict is None else {"challenger": verdict},
        }
        changed = {s: m.model_copy(update={"facts": {**m.facts, **added_facts[s]}}) for s, m in manifests.items()}
        return Checker(page(make_day(make_manifests() | changed, spec))).words

    text = words(measured, judged)
    for sentence in (
        "The challenger, version 9, was passed.",
        "challenger.behind broken auc beside that of version 8 0.0005 0.001 -0.0005",
        "AUC 0.7245 0.7240 +0.0005 [-0.0010, +0.0020]",
    ):
        assert sentence in text, sentence
    assert "was passed, and becomes champion." in words(measured, judged | {"becomes_champion": True, "rules": []})
    assert "cannot predict the day's rows: it is gone" in words({"version": "9", "note": "it is gone"}, None)


def test_a_refusal_is_told_with_every_rule() -> None:
    spec = load_spec("clicks", ["gate={metrics: {auc: {min: 0.7}}}"])
    words = Checker(page(make_day(make_manifests() | gate_manifests(), spec))).words
    for sentence in (
        "Version 8 was refused, beside version 7, the champion: 1 of 3 rules are broken.",
        "gate.champion.auc broken auc beside the champion's -0.006 -0.002 -0.007",
        "gate.slices.auc not judged",
        "AUC 0.7240 0.7300 -0.0060 [-0.0090, -0.0030]",
        "bytes on disk 3,000,000 3,000,000",
        "59,400 rows of the split valid",
    ):
        assert sentence in words, sentence
    positions = [words.index(f"country = {c}") for c in ("li", "at", "ch")]
    assert positions == sorted(positions)
    assert "The challenger" not in words
    assert "Gate" not in Checker(page(make_day(make_manifests()))).words
    without_facts = make_manifests() | {s: m.model_copy(update={"facts": {}}) for s, m in gate_manifests().items()}
    Checker(page(make_day(without_facts, spec)))
    assert "Not run: gate." in Checker(page(make_day(make_manifests(), spec))).words


@pytest.mark.parametrize(
    ("auc", "ceiling", "share"),
    [(0.75, 0.8, 0.25 / 0.3), (0.5, 0.8, 0.0), (None, 0.8, None), (0.7, None, None), (0.7, 0.5, None)],
)
def test_ceiling_share(auc: float | None, ceiling: float | None, share: float | None) -> None:
    assert facts.ceiling_share(auc, ceiling) == (None if share is None else pytest.approx(share))


def test_models_stand_side_by_side() -> None:
    """The report shows trained models, their cost and which scored; intervals are drawn of the same rows."""
    manifests = make_manifests()
    words = Checker(page(make_day(manifests))).words
    table = words[words.index("Models side by side") :]
    for sentence in ("neural XGBoost version 8", "AUC 0.7694 0.7411", "trained in 1 min 02 s", "880 MiB"):
        assert sentence in table, sentence
    without_baseline = {stage: m for stage, m in manifests.items() if stage != "baseline"}
    assert "Models side by side" not in page(make_day(without_baseline))
    # The challenger is a model of the day, where it was due; on the same rows it is one of three.
    spec = load_spec("clicks", ["gate={metrics: {auc: {min: 0.7}}}", "challenger={}"])
    challenger = manifests["train"].model_copy(update={"stage": "challenger", "seconds": 7.0, "outputs": ()})
    assert (
        "neural XGBoost challenger" not in Checker(page(make_day(manifests | {"challenger": challenger}, spec))).words
    )
    challenger = challenger.model_copy(update={"outputs": manifests["train"].outputs})
    judged = gate_manifests()
    facts_ = dict(judged["evaluate"].facts)
    for role, ends in (("model", [0.715, 0.733]), ("champion", [0.721, 0.739])):
        facts_[role] = {**facts_[role], "intervals": {"auc": ends}}
    facts_["challenger"] = {"version": "9", "metrics": {"auc": 0.7245}, "intervals": {"auc": [0.716, 0.734]}}
    judged["evaluate"] = judged["evaluate"].model_copy(update={"facts": facts_})
    html = page(make_day(manifests | judged | {"challenger": challenger}, spec))
    words = Checker(html).words
    for sentence in (
        "neural XGBoost challenger",
        "the day's champion challenger version 8 7 9 AUC 0.7240 0.7300 0.7245",
    ):
        assert sentence in words, sentence
    (plot,) = re.findall(r'<svg [^>]*aria-label="AUC of the models on the same rows".*?</svg>', html, flags=re.DOTALL)
    assert all(f">{role}<" in plot for role in ("the day&#39;s", "champion", "challenger")) or "champion" in plot
