"""Warnings about a finished day, in the summary of a run and in the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import summary
from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.quality.report.report import page
from headrace.quality.report.warnings import day_warnings
from headrace.stage.manifest import Manifest
from tests.report_support import DS, make_day, make_manifests, save

Days = dict[str, Manifest]


def with_rows(day: Days, stage: str, **rows: int) -> Days:
    return day | {stage: day[stage].model_copy(update={"rows": {**day[stage].rows, **rows}})}


def with_facts(day: Days, stage: str, **facts: Any) -> Days:
    return day | {stage: day[stage].model_copy(update={"facts": {**day[stage].facts, **facts}})}


def with_metrics(day: Days, stage: str, **metrics: float) -> Days:
    return with_facts(day, stage, metrics={**day[stage].facts["metrics"], **metrics})


#: What makes the day doubtful, and the beginning of the sentence.
CASES: Mapping[str, tuple[Callable[[Days], Days], str]] = {
    "the split takes one of eight days": (
        lambda day: with_rows(day, "features", train=0, valid=200_000),
        "the dataset has 200,000 of the 480,096 rows that were loaded: its split by time takes events of 2026-01-01 to "
        "2026-01-08 alone (features.window_days is 14; see also table.event_time)",
    ),
    "99 validation rows": (
        lambda day: with_rows(day, "features", valid=99),
        "the validation split has 99 rows: metrics of fewer than 100 say little (features.split)",
    ),
    "no positive": (
        lambda day: with_metrics(day, "train", base_rate=0.0),
        "all rows of the validation split are negative: no metric tells models apart (features.split)",
    ),
    "positives alone": (
        lambda day: with_metrics(with_metrics(day, "train", base_rate=1.0), "baseline", base_rate=1.0),
        "all rows of the validation split are positive: no metric tells models apart (features.split)",
    ),
    "a log loss of 0": (
        lambda day: with_metrics(day, "train", log_loss=0.00004),
        "version 8 of clicks was promoted with a log loss of 0: mostly a feature has the label in it, or the "
        "validation split has one class",
    ),
    "lists of what users had": (
        lambda day: with_facts(day, "score", consumed={"users": 1_000, "listed": 10_000, "consumed": 7_240}),
        "72% of the listed items are ones that their user had before (1,000 users were looked at): score.exclude_seen: "
        "true leaves them out",
    ),
}


def ingests(rows: int) -> Days:
    """Eight days of equally many rows."""
    days = [f"2026-01-0{n}" for n in range(1, 9)]
    return {ds: with_rows(make_manifests(ds), "ingest", kept=rows)["ingest"] for ds in days}


@pytest.fixture(scope="module")
def clicks() -> Spec:
    return load_spec("clicks")


@pytest.mark.parametrize("case", CASES)
def test_each_doubt_is_one_sentence(case: str, clicks: Spec) -> None:
    change, sentence = CASES[case]
    assert day_warnings(clicks, change(make_manifests()), ingests(60_012)) == [sentence]


def test_a_day_in_order_has_none(clicks: Spec) -> None:
    quiet = [
        make_manifests(),
        with_rows(make_manifests(), "features", valid=100, train=240_000),
        with_metrics(make_manifests(), "train", base_rate=1.0, ndcg_at_10=0.3),  # lists: positives alone by design
        with_metrics(make_manifests(), "train", log_loss=0.00006),
        with_facts(
            with_metrics(make_manifests(), "train", log_loss=0.0),
            "promote",
            models={"clicks": {"version": "8", "champion": "7", "before": "7", "stays": "refused"}},
        ),
        with_facts(make_manifests(), "score", consumed={"users": 1_000, "listed": 10_000, "consumed": 5_000}),
        with_facts(make_manifests(), "score", consumed={"users": 0, "listed": 0, "consumed": 0}),
        {},
    ]
    assert [day_warnings(clicks, day, ingests(60_012)) for day in quiet] == [[]] * len(quiet)


def test_rows_of_a_load_of_several_days_count_once_and_days_outside_do_not(clicks: Spec) -> None:
    day = with_rows(make_manifests(), "features", train=100_000, valid=20_000)
    of_all = {ds: manifest for ds, manifest in ingests(240_001).items() if ds in ("2026-01-01", "2026-01-02")}
    both = {
        ds: with_facts({"ingest": m}, "ingest", days=["2026-01-01", "2026-01-02"])["ingest"] for ds, m in of_all.items()
    }
    (warning,) = day_warnings(clicks, day, both)
    assert warning.startswith("the dataset has 120,000 of the 240,001 rows")
    with_older = {"2025-12-31": ingests(10**9)["2026-01-01"], "2026-01-01": ingests(240_000)["2026-01-01"]}
    assert day_warnings(clicks, day, with_older) == []


def test_a_snapshot_is_compared_with_all_of_its_rows(clicks: Spec) -> None:
    source = {"format": "csv", "path": "landing/shop.csv"}
    snapshot = clicks.model_copy(update={"source": type(clicks.source).model_validate(source), "ds": DS})
    assert not snapshot.source.daily
    day = with_rows(with_rows(make_manifests(), "ingest", kept=959_401), "features", train=420_300, valid=59_400)
    (warning,) = day_warnings(snapshot, day, {})
    assert warning.startswith("the dataset has 479,700 of the 959,401 rows that were loaded")
    assert day_warnings(snapshot, with_rows(day, "ingest", kept=959_400), {}) == []


def test_the_summary_and_the_report_have_them(clicks: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ws = Workspace(tmp_path)
    for manifest in ingests(60_012).values():
        save(ws, {"ingest": manifest})
    day = CASES["the split takes one of eight days"][0](make_manifests())
    save(ws, day)
    summary.show(clicks, ws, DS, dict.fromkeys(day, "done"))
    printed = capsys.readouterr().out
    assert printed.count("warning: ") == 1
    assert "warning: the dataset has 200,000 of the 480,096 rows" in printed
    runs = {("clicks", ds, "ingest"): m for ds, m in ingests(60_012).items()}
    text = page(make_day(day, runs=runs))
    assert text.count("The dataset has 200,000 of the 480,096 rows that were loaded") == 1
    assert "Warnings" not in page(make_day(make_manifests(), runs=runs))
