"""The report: complete from a whole day, honest about a part of one, and never in the way of one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config import Spec, load_spec
from headrace.errors import UserError
from headrace.manifest import Input, Manifest, Output
from headrace.monitor import facts, lineage, plots
from headrace.monitor.report import page
from headrace.monitor.sections.day import Day
from headrace.monitor.stage import Report, truth_file
from headrace.stage import identity, run_stage
from headrace.stages import ORDER
from headrace.workspace import Workspace

DS = "2026-01-08"
STAGES = ORDER[:-1]
TRUTH = {"ds": DS, "rows": 60_000, "auc_ceiling": 0.7816, "log_loss_floor": 0.4102, "base_rate": 0.1912}


def make_manifests(ds: str = DS, pipeline: str = "clicks", warm: Manifest | None = None) -> dict[str, Manifest]:
    """A whole day as the stages write it, chained by identities."""
    found: dict[str, Manifest] = {}
    clock = datetime.fromisoformat(ds).replace(hour=3, tzinfo=UTC) + timedelta(days=1)

    def add(stage: str, key: str, seconds: float, needs: tuple[str, ...] = (), **more: Any) -> None:
        nonlocal clock
        inputs = tuple(Input(kind="stage", name=n, version=identity(found[n])) for n in sorted(needs))
        found[stage] = Manifest(
            stage=stage,
            pipeline=pipeline,
            ds=ds,
            key=key,
            spec_hash="ab12",
            started=clock,
            seconds=seconds,
            inputs=inputs + more.pop("inputs", ()),
            **more,
        )
        clock += timedelta(seconds=seconds)

    steps = range(10, 310, 10)
    curve = [
        {
            "step": s,
            "epoch": s // 100,
            "loss": 0.44 + 0.25 * math.exp(-s / 60) + 0.012 * math.sin(s * 1.7),
            "samples_per_s": 41_000.0 + 500 * math.sin(s),
            "seconds": s * 0.1,
        }
        for s in steps
    ]
    add(
        "ingest",
        "1a" * 8,
        21.4,
        peak_memory_mib={"python": 160.2, "jvm": 1203.0, "children": 40.0},
        inputs=tuple(
            Input(kind="landing", name=f"landing/{pipeline}/{ds}/part-{i:04d}.json.gz", version=f"{i:016x}")
            for i in range(4)
        ),
        outputs=(
            Output(kind="delta", name=f"lake/{pipeline}/events", version="8", rows=60_012),
            Output(kind="quarantine", name=f"lake/{pipeline}/quarantine", version="8", rows=74),
        ),
        rows={"read": 60_402, "kept": 60_012, "quarantined": 74, "duplicates": 316},
        facts={
            "days": [ds],
            "drift": [{"column": "campaign", "change": "new", "detail": "text, in 60402 rows; not loaded"}],
            "expectations": [
                {"ds": "2025-12-30", "name": "rows of another day", "value": 1, "limit": 1, "ok": True},
                {"ds": "2025-12-31", "name": "a breach of another day", "value": 1, "limit": 2, "ok": False},
                {"ds": ds, "name": "rows", "value": 60_012, "limit": ">= 100", "ok": True},
                {"name": "null rate of user_age", "value": 0.0213, "limit": 0.5, "ok": True},
                {"name": "quarantined", "value": 0.0012, "limit": 0.05, "ok": True},
            ],
            "reasons": {"not JSON": 41, "event_id is null": 18, "item_price outside [0, -]": 9, "too late": 6},
        },
    )
    names = ["user_id", "item_id", "user_age", "item_price", "item_tags", "user_country", "device", "hour"]
    add(
        "features",
        "2b" * 8,
        33.9,
        ("ingest",),
        peak_memory_mib={"python": 240.0, "jvm": 2410.5},
        outputs=(Output(kind="dataset", name=f"datasets/{pipeline}/{ds}/{'2b' * 8}", version="2b" * 8, rows=480_000),),
        rows={"train": 420_300, "valid": 59_400},
        facts={
            "splits": {
                "train": {"rows": 420_300, "row_groups": 12, "files": 4},
                "valid": {"rows": 59_400, "row_groups": 12, "files": 4},
            },
            "vocabulary_version": 8,
            "vocabularies": {
                "user_id": {"size": 3184, "new": 30},
                "item_id": {"size": 861, "new": 8},
                "item_tags": {"size": 52, "new": 0},
            },
            "columns": [
                {
                    "name": n,
                    "missing_rate": 0.02 if i in (2, 3) else 0.0,
                    "oov_rate": 0.011 / (1 + i),
                    "kind": "categorical",
                }
                for i, n in enumerate(names)
            ],
            "train_range": ["2026-01-01", "2026-01-07"],
            "valid_range": [ds, ds],
        },
    )
    add(
        "drift",
        "7a" * 8,
        0.1,
        ("features",),
        rows={"columns": 3, "over_limit": 1},
        peak_memory_mib={"python": 95.0},
        facts={
            "columns": [
                {
                    "side": "input",
                    "column": "item_price",
                    "kind": "number",
                    "values": [420_300, 59_400],
                    "missing": [0.02, 0.31],
                    "oov": None,
                    "mean": [19.5, 44.25],
                    "psi": 0.4321,
                    "ks": 0.21,
                    "max_psi": 0.25,
                    "breaches": [
                        {"what": "psi", "value": 0.4321, "limit": 0.25, "action": "warn", "key": "drift.max_psi"}
                    ],
                },
                {
                    "side": "feature",
                    "column": "user_id",
                    "kind": "category",
                    "values": [420_300, 59_400],
                    "missing": [0.0, 0.0],
                    "oov": [0.004, 0.0123],
                    "mean": [None, None],
                    "psi": 0.0123,
                    "ks": None,
                    "max_psi": 0.25,
                    "breaches": [],
                },
                {
                    "side": "input",
                    "column": "ts",
                    "kind": "time",
                    "values": [420_300, 59_400],
                    "missing": [0.0, 0.0],
                    "oov": None,
                    "mean": [1.0, 2.0],
                    "psi": None,
                    "ks": None,
                    "max_psi": None,
                    "breaches": [],
                },
            ]
        },
    )
    bins = [
        {"predicted": p / 20 + 0.02, "observed": p / 20 + 0.02 + 0.008 * math.sin(p * 2), "rows": 12_000 - 1100 * p}
        for p in range(10)
    ]
    model = f"models/{pipeline}/{ds}/{'3c' * 8}/model"
    add(
        "train",
        "3c" * 8,
        61.7,
        ("features",),
        inputs=() if warm is None else (Input(kind="model", name=warm.output("model").name, version=warm.key),),
        outputs=(Output(kind="model", name=model, version="3c" * 8, rows=420_300),),
        rows={"train": 420_300, "valid": 59_400},
        peak_memory_mib={"python": 310.0, "rank0": 880.1, "rank1": 861.7},
        facts={
            "metrics": {"auc": 0.7694, "log_loss": 0.4188, "calibration": 1.012, "base_rate": 0.1912},
            "curve": curve,
            "evals": [
                {"epoch": e, "step": 100 * e, "auc": 0.74 + 0.01 * e, "log_loss": 0.45 - 0.01 * e} for e in (1, 2, 3)
            ],
            "calibration_bins": bins,
            "warm_start": warm.output("model").name if warm else None,
            "registered": {"name": pipeline, "version": 8},
            "ranks": 2,
            "resumed_from_step": 0,
            "dynamic": {
                "session_id": {
                    "rows": 4_321,
                    "waiting": 987,
                    "load": 0.31,
                    "admitted": 5_555,
                    "evicted": 1_234,
                    "hit_share": 0.912,
                    "oov_share": 0.0345,
                    "mib": 1.5,
                }
            },
            "cached": {"ad_id": {"rows": 7_654_321, "share": 0.1, "lookups": 88_888, "hit_share": 0.876}},
        },
    )
    add(
        "baseline",
        "4d" * 8,
        24.2,
        ("features",),
        outputs=(Output(kind="model", name=f"models/{pipeline}/{ds}/{'4d' * 8}/model", version="4d" * 8),),
        rows={"train": 420_300, "valid": 59_400},
        peak_memory_mib={"python": 420.0, "jvm": 1810.0},
        facts={
            "metrics": {"auc": 0.7411, "log_loss": 0.4301, "calibration": 0.997, "base_rate": 0.1912},
            "calibration_bins": [{**b, "observed": b["observed"] * 0.93} for b in bins],
            "importance": [{"feature": n, "gain": 120.0 / (1 + i)} for i, n in enumerate(names)],
            "registered": {"name": f"{pipeline}-baseline", "version": 8},
        },
    )
    sample = [
        {
            "ds": ds,
            "user_id": 17 + i // 10,
            "item_id": 804 - 31 * i,
            "rank": i % 10 + 1,
            "score": 0.81 - 0.04 * i,
            "model_version": "3c" * 8,
        }
        for i in range(10)
    ]
    add(
        "score",
        "5e" * 8,
        19.8,
        ("ingest", "features", "train", "baseline"),
        outputs=(Output(kind="delta", name=f"lake/{pipeline}/scores", version="8", rows=30_900),),
        rows={"users": 3_090, "candidates": 200, "pairs": 618_000, "scores": 30_900},
        peak_memory_mib={"python": 240.0, "jvm": 1620.0},
        facts={"model": {"kind": "dlrm"}, "sample": sample},
    )
    add(
        "publish",
        "6f" * 8,
        8.3,
        ("score",),
        outputs=(
            Output(kind="postgres", name=f"public.{pipeline}_scores", version="6f" * 8, rows=30_900),
            Output(kind="delta", name=f"lake/{pipeline}/published", version="8", rows=30_900),
        ),
        rows={"published": 30_900},
        peak_memory_mib={"python": 170.0, "jvm": 1100.0},
        facts={
            "table": f"public.{pipeline}_scores",
            "warehouse": "embedded",
            "sample": sample,
            "audit": [
                {"name": "rows", "value": 30_900, "limit": 30_900, "ok": True},
                {"name": "duplicate keys", "value": 0, "limit": 0, "ok": True},
                {"name": "scores outside [0, 1]", "value": 0, "limit": 0, "ok": True},
            ],
        },
    )
    return found


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
    assert len([t for t, _ in seen.tags if t == "svg"]) == 9
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
    manifests = {s: m for s, m in make_manifests().items() if s in ("ingest", "features", "train")}
    words = Checker(page(make_day(manifests, spec))).words
    assert "baseline: not part of this pipeline" in words
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
    s: [*sorted(m.facts), "metrics", "columns", "curve", "evals", "calibration_bins", "importance", "audit", "sample"]
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


@pytest.mark.parametrize("value", [-2.3e106, 1e300, 1e-300, 1e12])
def test_numbers_and_names_of_any_size_leave_room_for_the_bars(value: float) -> None:
    for svg in (
        plots.auc_bars([("neural", value, plots.NEURAL), ("ceiling", 0.5, plots.CEILING)]),
        plots.value_bars([("a", value), ("b" * 300, 1.0)], "seconds", "Stages"),
        plots.drift_bars([("a", value, None), ("b" * 300, 1.0, value)]),
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


# --- the stage ------------------------------------------------------------------------------------------------------


def save(ws: Workspace, manifests: Mapping[str, Manifest]) -> None:
    for stage, manifest in manifests.items():
        manifest.save(ws.manifest(manifest.pipeline, manifest.ds, stage))


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


# --- lineage --------------------------------------------------------------------------------------------------------


def titles(node: lineage.Node) -> list[str]:
    return [node.title, *(t for child in node.children for t in titles(child))]


def test_lineage_walks_from_the_warehouse_to_the_landing_files_of_all_days(ws: Workspace) -> None:
    yesterday = make_manifests("2026-01-07")
    save(ws, yesterday)
    today = make_manifests(warm=yesterday["train"])
    save(ws, today)
    runs = lineage.load_runs(ws)
    for name in ("clicks_scores", "public.clicks_scores", "lake/clicks/scores", "clicks/scores"):
        manifest, output = lineage.find(runs, name)
        assert manifest.ds == DS
        tree = lineage.trace(runs, manifest, output)
        found = titles(tree)
        assert tree.title == output.name
        for stage in ("score", "features", "train", "ingest"):
            assert f"{stage} {DS}" in found
        assert f"landing/clicks/{DS}/part-0003.json.gz" in found
        # The warm start leads into yesterday.
        assert yesterday["train"].output("model").name in found
        assert "train 2026-01-07" in found
        assert "landing/clicks/2026-01-07/part-0000.json.gz" in found


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("clicks", "train"),
        ("clicks/8", "train"),
        ("clicks-baseline", "baseline"),
        ("clicks-baseline/8", "baseline"),
        ("3c" * 8, "train"),
        ("clicks@" + "3c" * 8, "train"),
        ("2b" * 8, "features"),
        ("lake/clicks/events", "ingest"),
        ("clicks_quarantine", "ingest"),
        ("lake/clicks/published", "publish"),
    ],
)
def test_lineage_finds_tables_models_and_keys(ws: Workspace, name: str, stage: str) -> None:
    save(ws, make_manifests())
    manifest, _ = lineage.find(lineage.load_runs(ws), name)
    assert manifest.stage == stage


def test_lineage_takes_the_day_that_is_asked_for(ws: Workspace) -> None:
    for ds in ("2026-01-07", DS):
        save(ws, make_manifests(ds))
    runs = lineage.load_runs(ws)
    assert lineage.find(runs, "clicks")[0].ds == DS
    assert lineage.find(runs, "clicks", "2026-01-07")[0].ds == "2026-01-07"
    with pytest.raises(UserError, match="nothing has been made on 2026-01-06 yet"):
        lineage.find(runs, "clicks", "2026-01-06")


def test_lineage_of_an_unknown_name_offers_the_nearest(ws: Workspace) -> None:
    save(ws, make_manifests())
    with pytest.raises(UserError, match="did you mean 'lake/clicks/scores'"):
        lineage.find(lineage.load_runs(ws), "lake/clicks/score")
    with pytest.raises(UserError, match="nothing has been made yet"):
        lineage.find({}, "clicks")


def test_lineage_says_where_the_chain_is_broken(ws: Workspace) -> None:
    manifests = make_manifests()
    save(ws, manifests)
    again = manifests["features"].model_copy(update={"key": "77" * 8})
    again.save(ws.manifest("clicks", DS, "features"))
    ws.manifest("clicks", DS, "ingest").local_path().unlink()
    runs = lineage.load_runs(ws)
    tree = lineage.trace(runs, *lineage.find(runs, "clicks"))

    def warnings(node: lineage.Node) -> list[str]:
        return [f"{node.title}: {node.warning}"] * bool(node.warning) + [w for c in node.children for w in warnings(c)]

    assert warnings(tree) == [
        f"features {DS}: has been run again since with another result",
        f"ingest {DS}: its manifest is gone",
    ]
