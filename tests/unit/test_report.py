"""The report: complete from a whole day, honest about a part of one, and never in the way of one."""

from __future__ import annotations

import json
import re
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config import load_spec
from headrace.quality.report.report import page
from headrace.quality.report.stage import Report, truth_file
from headrace.stage import run_stage
from headrace.workspace import Workspace
from tests.report_page import Checker, make_day
from tests.report_support import DS, STAGES, make_manifests, save

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
