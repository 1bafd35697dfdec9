"""The report's view beyond its day: the days before, what they cost, outcomes of earlier lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.config import load_spec
from headrace.manifest import Manifest, Resources
from headrace.quality.report.report import page
from tests.report_page import Checker, make_day
from tests.report_support import DS, make_manifests


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
