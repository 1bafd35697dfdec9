"""The report: complete from a whole day, honest about a part of one, and never in the way of one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config import Spec, load_spec
from headrace.manifest import Manifest, Resources
from headrace.monitor import facts, plots
from headrace.monitor.report import page
from headrace.monitor.sections.day import Day
from headrace.monitor.sections.quality import lift_of
from headrace.monitor.stage import Report, truth_file
from headrace.stage import run_stage
from headrace.workspace import Workspace
from tests.report_support import DS, STAGES, make_manifests, save

TRUTH = {"ds": DS, "rows": 60_000, "auc_ceiling": 0.7816, "log_loss_floor": 0.4102, "base_rate": 0.1912}


def make_day(manifests: Mapping[str, Manifest], spec: Spec | None = None, **more: Any) -> Day:
    return Day(spec=spec or load_spec("clicks"), ds=DS, manifests=manifests, **more)


class Checker(HTMLParser):
    """Every tag that is opened is closed in order; collects text, attributes and ids."""

    VOID = frozenset({"meta", "br", "img", "link", "path", "use"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.stack, self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.stack[-1:] == [tag]
            self.stack.pop()

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def test_a_whole_day_has_everything_and_fetches_nothing() -> None:
    manifests = make_manifests()
    html = page(make_day(manifests, truth=TRUTH))
    seen = Checker(html)
    share = (0.7694 - 0.5) / (0.7816 - 0.5)
    for text in (
        "0.7694",
        f"{100 * share:.1f} % of the way to the ceiling, 0.7816",
        "+0.0283",
        "60,012",
        "74 quarantined of 60,402",
        "30,900",
        "618,000",
        "not JSON",
        "campaign",
        "null rate of user_age",
        "duplicate keys",
        "Expectations of source purchases",
        "amount: required, but null",
        "No schema drift of source purchases: the files have the declared columns.",
        "Vocabularies, version 8",
        "2026-01-01 to 2026-01-07",
        "2.4 GiB",
        "landing/clicks/2026-01-08/part-0000.json.gz",
        "1 min 02 s",
        "1 of 3 columns and features are over a limit",
        "0.432",
        "44.2",
        "2026-01-08 beside the training range, 2026-01-01 to 2026-01-07",
    ):
        assert text in seen.words, text
    assert len([t for t, _ in seen.tags if t == "svg"]) == 11
    assert "user_id 120.0000 77.5000 6,543" in seen.words
    assert "The model has 37 of 40 trees" in seen.words
    assert "Not run" not in seen.words
    assert "not run" not in seen.words
    # Of other days only what did not hold is shown.
    assert "Tables of raw ids" in seen.words
    assert "4,321" in seen.words
    assert "Tables larger than the GPU" in seen.words
    assert {"7,654,321", "88,888"} <= set(seen.words.split())
    assert "3.5 %" in seen.words  # of lookups in valid found no row
    assert "a breach of another day" in seen.words
    assert "rows of another day" not in seen.words
    assert "Other expectations held, of earlier days: 1." in seen.words
    assert f"First rows of public.clicks_scores (ds {DS}, model_version {'3c' * 8})" in seen.words
    # Self-contained: no element that loads anything, and no address in what would.
    assert not {"script", "link", "img", "iframe", "object", "image"} & {t for t, _ in seen.tags}
    for _, attributes in seen.tags:
        for name in ("src", "href", "xlink:href", "action"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "url(http" not in html
    assert "@import" not in html


def test_ids_on_the_page_are_unique_and_references_meet() -> None:
    html = page(make_day(make_manifests(), truth=TRUTH))
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    references = set(re.findall(r"url\(#([^)]+)\)", html)) | set(re.findall(r'href="#([^"]+)"', html))
    assert references
    assert references <= set(ids)


@pytest.mark.parametrize("size", range(len(STAGES)))
def test_any_subset_of_stages_makes_a_page_that_names_what_did_not_run(size: int) -> None:
    manifests = make_manifests()
    subsets = list(combinations(STAGES, size))
    for subset in subsets[:: max(1, len(subsets) // 2)]:
        words = Checker(page(make_day({s: manifests[s] for s in subset}))).words
        for stage in STAGES:
            assert (f"{stage}: not run" in words) == (stage not in subset), (subset, stage)


def test_a_pipeline_without_a_stage_does_not_call_it_missing() -> None:
    spec = load_spec("clicks", ["drift=null", "baseline=null", "score=null", "publish=null"])
    manifests = {s: m for s, m in make_manifests().items() if s in ("ingest", "features", "train", "promote")}
    words = Checker(page(make_day(manifests, spec))).words
    (others,) = re.findall(r"Not part of this pipeline: ([\w, ]+)\.", words)
    assert {"drift", "baseline", "score", "publish"} <= set(others.split(", "))
    assert "not run" not in words
    assert "This pipeline scores nothing" in words


def test_hostile_text_stays_text() -> None:
    evil = "<script>alert('x')</script>&amp;\"' $\\alpha$"
    manifests = make_manifests()
    ingest = manifests["ingest"]
    bad = {"reasons": {evil: 3}, "drift": [dict.fromkeys(("column", "change", "detail"), evil)]}
    manifests["ingest"] = ingest.model_copy(update={"facts": {**ingest.facts, **bad}, "rows": {evil: 5}})
    features = manifests["features"]
    columns = [{"name": evil[:25], "missing_rate": 0.5, "oov_rate": 0.1}]
    manifests["features"] = features.model_copy(update={"facts": {**features.facts, "columns": columns}})
    spec = load_spec("clicks", ["description=" + json.dumps(evil)])
    html = page(make_day(manifests, spec))
    assert "<script" not in html
    assert evil in Checker(html).words


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
    told = {"rows": 5_000, "metrics": metrics, "intervals": {}, "slices": [], "tasks": {"purchase": of_task}}
    facts_ = {**train.facts, "metrics": metrics, "evaluation": {"valid": told}}
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
    assert words.count("AUC of purchase") == 1  # beside the other metrics of the model


def test_slices_and_intervals_are_shown_where_they_were_asked_for() -> None:
    manifests = make_manifests()
    assert 'id="evaluation"' not in page(make_day(manifests))
    found = {
        "rows": 5_000,
        "metrics": {"auc": 0.7694, "gauc": 0.6543, "pr_auc": None},
        "intervals": {"auc": [0.7612, 0.7788]},
        "slices": [
            {"slice": "device", "value": "<phone>", "rows": 321, "metrics": {"auc": 0.7012}, "intervals": {}},
            {"slice": "age", "value": "old", "rows": 4_321, "metrics": {"auc": None}, "intervals": {"auc": [0, 1]}},
        ],
    }
    train = manifests["train"]
    facts_ = {**train.facts, "evaluation": {"valid": found, "test": {**found, "rows": 77_777}}}
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
    mine = {**found, "metrics": {"auc": 0.7411}, "intervals": {"auc": [0.73, 0.75]}}
    manifests["baseline"] = base.model_copy(update={"facts": {**base.facts, "evaluation": {"valid": mine}}})
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
    found = {"valid": {"rows": 9, "metrics": {"auc": 0.7}, "intervals": {}, "slices": slices}}
    manifests["train"] = train.model_copy(update={"facts": {**train.facts, "evaluation": found}})
    html = page(make_day(manifests))
    (plot,) = re.findall(r'<svg [^>]*aria-label="AUC by slice of the validation split".*?</svg>', html, flags=re.DOTALL)
    assert re.findall(r">(c v\d+)<", plot) == sorted(f"c v{i}" for i in range(8, 20))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 50)), max_size=12))
def test_lift_is_that_of_the_rows_themselves(bins: list[tuple[float, float, int]]) -> None:
    """Against rows written out one by one, each with its bin's rate."""
    rows = sorted(((p, o) for p, o, n in bins for _ in range(n)), reverse=True)
    rates = [o for _, o in rows]
    found = lift_of([(p, o, float(n)) for p, o, n in bins])
    if not rows or sum(rates) < 1e-9:
        assert not found or sum(rates) > 0
        return
    for share, lift in found:
        first = round(share * len(rows))
        assert lift == pytest.approx((sum(rates[:first]) / first) / (sum(rates) / len(rates)), rel=1e-6)
    assert found[-1] == pytest.approx((1.0, 1.0))


def test_the_days_before_are_shown_and_none_after() -> None:
    """What each day's manifest says stands in its row, the newest first; later days and columns of nothing do not."""
    runs = {}
    for number, ds in enumerate(("2026-01-06", "2026-01-07", DS, "2026-01-09")):
        made = make_manifests(ds)
        train = made["train"]
        told = {
            "metrics": {"auc": 0.71 + number / 100, "log_loss": 0.4},
            "forgetting": {"ds": "2026-01-01", "metrics": {"auc": 0.69 - number / 100}},
            "saved": {"embeddings_bytes": (number + 1) << 20, "whole_copy_bytes": 9 << 20},
            "registered": {"name": "clicks", "version": 40 + number},
        }
        made["train"] = train.model_copy(update={"facts": {**train.facts, **told}})
        verdict = {"verdict": "refused" if number == 1 else "passed"}
        made["gate"] = made["drift"].model_copy(update={"stage": "gate", "facts": verdict})
        runs |= {("clicks", ds, stage): m for stage, m in made.items()}
    of_day = {stage: m for (_, ds, stage), m in runs.items() if ds == DS}
    html = page(make_day(of_day, runs=runs))
    words = Checker(html).words
    table = words[words.index("By day") :]
    assert table.startswith("By day Day Version Gate AUC Log loss XGBoost Fixed day Saved Events")
    rows = [
        table.index(f"{ds} {40 + n} {gate} {0.71 + n / 100:.4f} 0.4000 0.7411 {0.69 - n / 100:.4f} {n + 1}.0 MiB")
        for n, ds, gate in ((2, DS, "passed"), (1, "2026-01-07", "refused"), (0, "2026-01-06", "passed"))
    ]
    assert rows == sorted(rows)
    assert "0.7400" not in table
    assert "Core-seconds" not in table.split("Day")[1].split("2026")[0]
    for label in ("AUC on the validation rows of each day", "AUC of each day", "Bytes of saved embeddings by day"):
        (plot,) = re.findall(rf'<svg [^>]*aria-label="{label}[^"]*".*?</svg>', html, flags=re.DOTALL)
        assert re.findall(r">(01-\d\d)<", plot) == ["01-06", "01-07", "01-08"]
    assert 'id="history"' not in page(make_day(of_day))


def test_what_the_stages_used_is_told_and_added_up() -> None:
    manifests = make_manifests()
    for stage, cores in (("ingest", 30.0), ("train", 123.4)):
        used = Resources(core_seconds=cores, read_bytes=5 << 20, written_bytes=2 << 30)
        manifests[stage] = manifests[stage].model_copy(update={"resources": used})
    words = Checker(page(make_day(manifests))).words
    assert "train 1 min 02 s 123.4 s 2.0 5 MiB 2.0 GiB 880 MiB" in words
    assert "features 33.9 s – – – – 2.4 GiB" in words
    assert "153.4 s 10 MiB 4.0 GiB" in words


def outcomes_manifest(ds: str, rates: Mapping[str, float], ripe: str, alerts: int = 0) -> Manifest:
    """As the stage outcomes writes it: of served days and their rates."""

    def record(served: str, metric: str, value: float, dimension: str = "all", of: str = "") -> dict[str, Any]:
        known = {"ripe": served <= ripe, "known": 1.0 if served <= ripe else 0.8, "expected": value * 1.1}
        counts = {"rows": 1234, "users": 321, "positives": 77}
        about = {"served_ds": served, "label": "click", "dimension": dimension, "value": of, "metric": metric}
        return about | counts | known | {"estimate": value, "low": value - 0.01, "high": value + 0.01}

    days = [record(served, name, rate) for served, rate in rates.items() for name in ("rate", "auc")]
    groups = [record(max(rates), "rate", 0.25, "model", "<b>m7"), record(max(rates), "rate", 0.35, "arm:look", "b")]
    alert = {"served_ds": ripe, "label": "click", "metric": "rate", "dimension": "all", "value": "", "figure": 0.05}
    broken = [alert | {"limit": 0.1, "kind": "min", "action": "warn", "key": "outcomes.alerts[0].min"}] * alerts
    return Manifest(
        stage="outcomes",
        pipeline="clicks",
        ds=ds,
        key="7a" * 8,
        spec_hash="",
        rows={"days": len(rates), "shown": 1234, "alerts": alerts},
        facts={"days": days, "groups": groups, "alerts": broken, "last_ripe_day": {"click": ripe}},
    )


def test_outcomes_are_shown_with_their_history_and_what_is_still_to_come() -> None:
    spec = load_spec("clicks", ["outcomes={}"])
    now = outcomes_manifest(DS, {"2026-01-05": 0.2, "2026-01-06": 0.21, "2026-01-07": 0.19}, "2026-01-05", alerts=1)
    past = outcomes_manifest("2026-01-06", {"2026-01-03": 0.16, "2026-01-05": 0.11}, "2026-01-03")
    later = outcomes_manifest("2026-01-09", {"2026-01-07": 0.77}, "2026-01-07")
    runs = {("clicks", m.ds, "outcomes"): m for m in (past, now, later)}
    manifests = make_manifests() | {"outcomes": now}
    html = page(make_day(manifests, spec, runs=runs))
    words = Checker(html).words
    for text in (
        "One figure is beyond a limit.",
        "outcomes.alerts[0].min",
        "2026-01-07 provisional 20.0 % 1,234 321 77 0.1900 (0.1800 to 0.2000)",
        "2026-01-05 ripe",
        "arm look b 1,234 321 0.3500",
        "<b>m7",
        "Rate of click by served day",
    ):
        assert text in words, text
    (plot,) = re.findall(r'<svg [^>]*aria-label="Rate of click by served day".*?</svg>', html, flags=re.DOTALL)
    # One tick a day: the third, which only the earlier run knew, too; of the fifth the newest run's rate is drawn.
    assert re.findall(r">(01-\d\d)<", plot) == ["01-03", "01-05", "01-06", "01-07"]
    assert "Outcomes of earlier lists" not in page(make_day(make_manifests()))
    assert "Not run: outcomes" in Checker(page(make_day(make_manifests(), spec))).words


def test_a_failed_check_is_shown_as_failed() -> None:
    manifests = make_manifests()
    publish = manifests["publish"]
    audit = [{"name": "rows", "value": 3, "limit": 30_900, "ok": False}]
    manifests["publish"] = publish.model_copy(update={"facts": {**publish.facts, "audit": audit}})
    assert '<span class="bad">failed</span>' in page(make_day(manifests))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KNOWN = st.sampled_from(
    [
        "name",
        "value",
        "limit",
        "ok",
        "predicted",
        "observed",
        "rows",
        "step",
        "loss",
        "auc",
        "log_loss",
        "feature",
        "gain",
        "missing_rate",
        "oov_rate",
        "column",
        "change",
        "samples_per_s",
        "train",
        "size",
        "new",
    ]
)
SHAPED = (
    JSON | st.lists(st.dictionaries(KNOWN, JSON, max_size=6), max_size=3) | st.dictionaries(KNOWN, JSON, max_size=5)
)
FACTS = {
    s: [
        *sorted(m.facts),
        *("metrics", "columns", "curve", "evals", "calibration_bins", "evaluation", "importance", "audit", "sample"),
    ]
    for s, m in make_manifests().items()
}


def gate_manifests() -> dict[str, Manifest]:
    """A refused day, as the stages evaluate and gate write it."""
    told = {"version": "8", "key": "k8", "name": "models/x", "bytes": 3_000_000, "rows_per_second": 210_000.0}
    beside = {"value": -0.006, "low": -0.009, "high": -0.003, "p": 0.01}
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
        "model": {**told, "metrics": {"auc": 0.724, "log_loss": 0.441}},
        "champion": {**told, "version": "7", "metrics": {"auc": 0.73, "log_loss": 0.439}},
        "differences": {"auc": beside, "log_loss": None},
        "slices": slices,
    }
    champion = {"version": "7", "key": "k7", "name": "models/w"}
    gate = {**facts, "verdict": "refused", "rows": 59_400, "model": told, "champion": champion, "rules": rules}
    return {
        stage: Manifest(stage=stage, pipeline="clicks", ds=DS, key=stage, spec_hash="", facts=of, rows={"rows": 59_400})
        for stage, of in (("evaluate", evaluate), ("gate", gate))
    }


def test_the_challenger_is_told_beside_the_days_model() -> None:
    spec, made = load_spec("clicks", ["gate={metrics: {auc: {min: 0.7}}}", "challenger={}"]), gate_manifests()
    rule = {"key": "challenger.behind", "figure": "auc beside that of version 8", "value": 0.0005, "limit": 0.001}
    judged = {"version": "9", "verdict": "passed", "becomes_champion": False}
    judged |= {"rules": [rule | {"margin": -0.0005, "passed": False, "text": "auc"}]}
    beside = {"auc": {"value": 0.0005, "low": -0.001, "high": 0.002, "p": 0.4}}
    measured = {"version": "9", "note": "", "metrics": {"auc": 0.7245}, "beside_model": beside}

    def words(challenger: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> str:
        told = {"evaluate": {"challenger": challenger}, "gate": {} if verdict is None else {"challenger": verdict}}
        found = {s: m.model_copy(update={"facts": {**m.facts, **told[s]}}) for s, m in made.items()}
        return Checker(page(make_day(make_manifests() | found, spec))).words

    text = words(measured, judged)
    for said in (
        "The challenger, version 9, was passed.",
        "challenger.behind broken auc beside that of version 8 0.0005 0.001 -0.0005",
        "AUC 0.7245 0.7240 +0.0005 [-0.0010, +0.0020]",
    ):
        assert said in text, said
    assert "was passed, and becomes champion." in words(measured, judged | {"becomes_champion": True, "rules": []})
    assert "cannot predict the day's rows: it is gone" in words({"version": "9", "note": "it is gone"}, None)


def test_a_refusal_is_told_with_every_rule() -> None:
    spec = load_spec("clicks", ["gate={metrics: {auc: {min: 0.7}}}"])
    words = Checker(page(make_day(make_manifests() | gate_manifests(), spec))).words
    for said in (
        "Version 8 was refused, beside version 7, the champion: 1 of 3 rules are broken.",
        "gate.champion.auc broken auc beside the champion's -0.006 -0.002 -0.007",
        "gate.slices.auc not judged",
        "AUC 0.7240 0.7300 -0.0060 [-0.0090, -0.0030]",
        "bytes on disk 3,000,000 3,000,000",
        "59,400 rows of the split valid",
    ):
        assert said in words, said
    at = [words.index(f"country = {c}") for c in ("li", "at", "ch")]
    assert at == sorted(at)
    assert "The challenger" not in words
    assert "Gate" not in Checker(page(make_day(make_manifests()))).words
    nothing = make_manifests() | {s: m.model_copy(update={"facts": {}}) for s, m in gate_manifests().items()}
    Checker(page(make_day(nothing, spec)))
    assert "Not run: gate." in Checker(page(make_day(make_manifests(), spec))).words


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_facts_of_any_shape_never_stop_the_page(data: st.DataObject) -> None:
    manifests = make_manifests()
    for stage in STAGES:
        changed = data.draw(st.dictionaries(st.sampled_from(FACTS[stage]), SHAPED, max_size=4))
        manifests[stage] = manifests[stage].model_copy(update={"facts": {**manifests[stage].facts, **changed}})
    truth = data.draw(st.dictionaries(st.sampled_from(["auc_ceiling", "log_loss_floor"]), JSON, max_size=2))
    Checker(page(make_day(manifests, truth=truth)))


def test_names_that_the_plots_font_has_not_stay_text() -> None:
    assert "売上\U0004f675" in plots.tree_curve([], [(1.0, 0.5), (2.0, 0.6)], "売上\U0004f675")


@pytest.mark.parametrize("value", [-2.3e106, 1e300, 1e-300, 1e12])
def test_numbers_and_names_of_any_size_leave_room_for_the_bars(value: float) -> None:
    for svg in (
        plots.auc_bars([("neural", value, plots.NEURAL), ("ceiling", 0.5, plots.CEILING)]),
        plots.value_bars([("a", value), ("b" * 300, 1.0)], "seconds", "Stages"),
        plots.drift_bars([("a", value, None), ("b" * 300, 1.0, value)]),
        plots.intervals([("a", value, value, value, plots.NEURAL), ("b" * 300, 1, 0, 2, plots.NEURAL)], "AUC", "S"),
        plots.daily([("a", [("2026-01-01", value), ("2026-01-02", 1.0)], plots.NEURAL)], "AUC", "D"),
    ):
        ElementTree.fromstring(str(svg))
        assert "0" * 20 not in svg


def test_plots_are_wellformed_and_take_their_colours_from_the_page() -> None:
    svg = plots.loss_curve([(float(i), 1.0 / (1 + i)) for i in range(5000)], [(10.0, 0.5)], 0.6)
    ElementTree.fromstring(str(svg))
    assert not re.findall(r"#[0-9a-f]{6}\b", svg)
    assert "var(--neural)" in svg
    assert "var(--baseline)" in svg
    assert len(svg) < 60_000, "5,000 points are averaged down"
    assert svg == plots.loss_curve([(float(i), 1.0 / (1 + i)) for i in range(5000)], [(10.0, 0.5)], 0.6)


def test_the_smoothed_curve_of_a_constant_is_that_constant() -> None:
    assert plots._smooth([0.7] * 50) == pytest.approx([0.7] * 50)


@pytest.mark.parametrize(
    ("auc", "ceiling", "share"),
    [(0.75, 0.8, 0.25 / 0.3), (0.5, 0.8, 0.0), (None, 0.8, None), (0.7, None, None), (0.7, 0.5, None)],
)
def test_ceiling_share(auc: float | None, ceiling: float | None, share: float | None) -> None:
    assert facts.ceiling_share(auc, ceiling) == (None if share is None else pytest.approx(share))


def test_stage_writes_once_heals_and_follows_what_it_shows(ws: Workspace) -> None:
    spec, manifests = load_spec("clicks"), make_manifests()
    save(ws, manifests)
    path = ws.report("clicks", DS).local_path()
    first = run_stage(Report(), spec, ws, DS)
    assert not first.skipped
    assert "0.7694" in path.read_text()
    assert "ceiling, 0.7816" not in path.read_text()
    assert run_stage(Report(), spec, ws, DS).skipped
    path.write_text("edited")
    assert run_stage(Report(), spec, ws, DS).reason == "the page was changed"
    path.unlink()
    assert run_stage(Report(), spec, ws, DS).reason == "the page is gone"
    truth_file(ws, "clicks", DS).put_text('{"auc_ceiling": 0.7816}')
    assert not run_stage(Report(), spec, ws, DS).skipped
    assert "ceiling, 0.7816" in path.read_text()
    ws.manifest("clicks", DS, "publish").remove()
    assert not run_stage(Report(), spec, ws, DS).skipped
    assert "publish: not run" in path.read_text()


def test_stage_reports_a_day_on_which_nothing_ran(ws: Workspace) -> None:
    outcome = run_stage(Report(), load_spec("clicks"), ws, DS)
    assert outcome.manifest.inputs == ()
    assert "train: not run" in ws.report("clicks", DS).read_text()
