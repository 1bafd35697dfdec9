"""Reports of tests: what they are made of, and their pages, parsed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.quality.report.blocks import Day
from headrace.stage import identity
from headrace.stage.manifest import Input, Manifest, Output
from tests.support import CLICKS_STAGES

DS = "2026-01-08"
STAGES = CLICKS_STAGES[:-1]


def make_manifests(ds: str = DS, pipeline: str = "clicks", warm: Manifest | None = None) -> dict[str, Manifest]:
    """A whole day as the stages write it, chained by identities."""
    manifests: dict[str, Manifest] = {}
    clock = datetime.fromisoformat(ds).replace(hour=3, tzinfo=UTC) + timedelta(days=1)

    def add(stage: str, key: str, seconds: float, needs: tuple[str, ...] = (), **more: Any) -> None:
        nonlocal clock
        inputs = tuple(Input(kind="stage", name=n, version=identity(manifests[n])) for n in sorted(needs))
        manifests[stage] = Manifest(
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
            "sources": {
                "purchases": {
                    "days": [ds],
                    "drift": [],
                    "expectations": [{"ds": ds, "name": "min_rows", "value": 318, "limit": 100, "ok": True}],
                    "reasons": {"amount: required, but null": 3},
                }
            },
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
            "importance": [
                {"feature": n, "gain": 120.0 / (1 + i), "cover": 77.5 + i, "weight": 6_543 - i}
                for i, n in enumerate(names)
            ],
            "curve": [{"step": i, "epoch": i, "loss": 0.6 / i} for i in range(1, 41)],
            "validation_curve": [{"step": i, "loss": 0.7 / i} for i in range(1, 41)],
            "curve_metric": "logloss",
            "best_step": 37,
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
        "promote",
        "9c" * 8,
        0.4,
        ("train", "baseline"),
        rows={"promoted": 1},
        facts={"models": {pipeline: {"version": "8", "champion": "8", "before": "7", "stays": ""}}},
    )
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
    return manifests


# --- the stage ------------------------------------------------------------------------------------------------------


def save(ws: Workspace, manifests: Mapping[str, Manifest]) -> None:
    for stage, manifest in manifests.items():
        manifest.save(ws.manifest(manifest.pipeline, manifest.ds, stage))


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
