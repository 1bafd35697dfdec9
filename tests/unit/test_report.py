"""The report of a day: its page, the days before, and plots."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.quality.report import plots
from headrace.quality.report.report import page
from headrace.quality.report.stage import Report, truth_file
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest, Resources
from tests.report_support import DS, STAGES, Checker, make_day, make_manifests, save

TRUTH = {"ds": DS, "rows": 60_000, "auc_ceiling": 0.7816, "log_loss_floor": 0.4102, "base_rate": 0.1912}


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
    (absent,) = re.findall(r"Not part of this pipeline: ([\w, ]+)\.", words)
    assert {"drift", "baseline", "score", "publish"} <= set(absent.split(", "))
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


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_facts_of_any_shape_never_stop_the_page(data: st.DataObject) -> None:
    manifests = make_manifests()
    for stage in STAGES:
        changed = data.draw(st.dictionaries(st.sampled_from(FACTS[stage]), SHAPED, max_size=4))
        manifests[stage] = manifests[stage].model_copy(update={"facts": {**manifests[stage].facts, **changed}})
    truth = data.draw(st.dictionaries(st.sampled_from(["auc_ceiling", "log_loss_floor"]), JSON, max_size=2))
    Checker(page(make_day(manifests, truth=truth)))


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


def test_the_days_before_are_shown_and_none_after() -> None:
    """Rows show each day's manifest, the newest first; later days and empty columns are left out."""
    runs = {}
    for number, ds in enumerate(("2026-01-06", "2026-01-07", DS, "2026-01-09")):
        manifests = make_manifests(ds)
        train = manifests["train"]
        train_facts = {
            "metrics": {"auc": 0.71 + number / 100, "log_loss": 0.4},
            "forgetting": {"ds": "2026-01-01", "metrics": {"auc": 0.69 - number / 100}},
            "saved": {"embeddings_bytes": (number + 1) << 20, "whole_copy_bytes": 9 << 20},
            "registered": {"name": "clicks", "version": 40 + number},
        }
        manifests["train"] = train.model_copy(update={"facts": {**train.facts, **train_facts}})
        verdict = {"verdict": "refused" if number == 1 else "passed"}
        manifests["gate"] = manifests["drift"].model_copy(update={"stage": "gate", "facts": verdict})
        runs |= {("clicks", ds, stage): m for stage, m in manifests.items()}
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
    """Return a manifest as the stage outcomes writes it, with served days and their rates."""

    def record(served: str, metric: str, value: float, dimension: str = "all", group: str = "") -> dict[str, Any]:
        known = {"ripe": served <= ripe, "known": 1.0 if served <= ripe else 0.8, "expected": value * 1.1}
        counts = {"rows": 1234, "users": 321, "positives": 77}
        columns = {"served_ds": served, "label": "click", "dimension": dimension, "value": group, "metric": metric}
        return columns | counts | known | {"estimate": value, "low": value - 0.01, "high": value + 0.01}

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
