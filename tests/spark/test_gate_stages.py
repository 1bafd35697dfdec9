"""Two days' trees through evaluate, gate, promote: figures against scikit-learn, verdicts, who scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from sklearn.metrics import log_loss, roc_auc_score
from typer.testing import CliRunner

import headrace as hr
from headrace.cli import app
from headrace.config import Challenger, Gate, Spec, Train
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.features.build.stage import BuildFeatures
from headrace.features.types import declared
from headrace.models import registry
from headrace.models.registry.promotion import promote, roll_back
from headrace.models.registry.versions import versions
from headrace.quality.gate.evaluation_stages import EstimatePolicies, Evaluate
from headrace.quality.gate.stage import JudgeModel, Promote
from headrace.score.stage import ScoreCandidates
from headrace.stage import check_stage, plan_run, run_stage
from headrace.stage.manifest import Manifest, Output
from headrace.train.baseline.stage import TrainBaseline
from headrace.train.loop.run import train_local
from tests.score_support import shop_spec
from tests.train_support import job_of

FIRST, SECOND = "2026-01-04", "2026-01-05"
TYPES = {
    "user": "bigint",
    "city": "string",
    "item": "string",
    "price": "double",
    "ts": "timestamp",
    "click": "int",
    "propensity": "double",
}
GATE: dict[str, Any] = {
    "model": "baseline",
    "metrics": {"auc": {"min": 0.5}},
    "champion": {"auc": {"by": 0.5}, "log_loss": 10.0},
    "slices": {"auc": {"by": 1.0, "min_rows": 5}},
    "calibration": {"ratio": [0.1, 10], "max_error": 0.9},
    "coverage": {"min_rows": 10, "min_known": {"item": 0.01}},
    "drift": {"max_score_psi": 100},
    "size": {"max_bytes": 10**9, "max_growth": 100},
    "latency": {"min_rows_per_second": 1, "max_batch_ms": 1e6, "batch_rows": 64},
    "rules": {"sane": "auc >= champion.auc - 0.9 and log_loss < 5"},
}


def spec(**gate: Any) -> Spec:
    features = {
        "window_days": 2,
        "carried": ["user", "city", "propensity"],
        "min_row_groups": 2,
        "workflow": [
            {"columns": ["price"], "ops": ["fill_missing", "log", "normalize"]},
            {"columns": ["user", "item", "city"], "ops": ["categorify"]},
        ],
    }
    return shop_spec(
        TYPES,
        features,
        train={"evaluation": {"user": "user", "slices": {"city": "city"}}},
        baseline={"rounds": 12, "max_depth": 3, "workers": 1},
        gate=GATE | gate,
        score={"user": {"key": "user", "columns": ["city"]}, "item": {"key": "item", "columns": ["price"]}}
        | {"model": "baseline"},
    )


def draw() -> pd.DataFrame:
    """Events of five days; users and items of later days are others than those of the first."""
    rng = np.random.default_rng(7)
    n = 2400
    hours = rng.integers(0, 24 * 5, n)
    item = rng.integers(0, 20, n) + hours // 24 * 3
    price = rng.gamma(2, 9, n)
    odds = np.where(item % 4 == 0, 1.5, -1.0) + np.where(price > 20, 0.8, 0)
    frame = pd.DataFrame(
        {
            "user": rng.integers(0, 80, n) + hours // 24 * 10,
            "city": rng.choice(["Genf", "Zürich", "Bern"], n, p=[0.6, 0.3, 0.1]),
            "item": [f"i{i}" for i in item],
            "price": price,
            "ts": pd.Timestamp("2026-01-01") + pd.to_timedelta(hours, unit="h"),
            "click": (rng.random(n) < 1 / (1 + np.exp(-odds))).astype(int),
            "propensity": rng.uniform(0.02, 0.2, n),
            "_source_file": "f.json",
            "_source_line": np.arange(n),
        }
    )
    return frame.assign(ds=frame.ts.dt.strftime("%Y-%m-%d"))


def make_day(spark: SparkSession, ws: Workspace, ds: str) -> None:
    """A day up to its trees: the neural model is not looked at."""
    outputs = (
        Output(kind="delta", name="lake/shop/events", version="0"),
        Output(kind="quarantine", name="lake/shop/quarantine", version="0"),
    )
    for stage, facts in (("ingest", {}), ("train", {"metrics": {}})):
        manifest_outputs = outputs if stage == "ingest" else ()
        manifest = Manifest(
            stage=stage, pipeline="shop", ds=ds, key=stage, spec_hash="", outputs=manifest_outputs, facts=facts
        )
        manifest.save(ws.manifest("shop", ds, stage))
    run_stage(BuildFeatures(), spec(), ws, ds)
    run_stage(TrainBaseline(), spec(), ws, ds)


def judged(ws: Workspace, ds: str, **gate: Any) -> tuple[Manifest, Manifest, Manifest]:
    results = [run_stage(stage, spec(**gate), ws, ds).manifest for stage in (Evaluate(), JudgeModel(), Promote())]
    return results[0], results[1], results[2]


def scoring_version(ws: Workspace, ds: str) -> str:
    (model,) = (i for i in plan_run(ScoreCandidates(), spec(), ws, ds).inputs if i.kind == "model")
    return next(v.version for v in versions(ws, "shop-baseline") if v.key == model.version)


def test_a_new_model_beside_the_champion(spark: SparkSession, tmp_path: Path) -> None:
    ws, events = Workspace(tmp_path / "home"), draw()
    columns = {**TYPES, "_source_file": "string", "_source_line": "bigint", "ds": "string"}
    arrow = [pa.array(events[c].tolist(), declared(TableColumn(name=c, type=t)).arrow) for c, t in columns.items()]
    frame = spark.createDataFrame(pa.table(arrow, list(columns)))
    frame.write.format("delta").partitionBy("ds").save(str(ws.table("shop", "events").local_path()))

    make_day(spark, ws, FIRST)
    evaluated, gate, promoted = judged(ws, FIRST)
    assert evaluated.facts["champion"] is None
    rules = {r["key"]: r for r in gate.facts["rules"]}
    assert {key for key, r in rules.items() if r["passed"] is None} == {
        "gate.champion.auc",
        "gate.champion.log_loss",
        "gate.slices.auc",
        "gate.drift.max_score_psi",
        "gate.size.max_growth",
        "gate.rules.sane",
    }
    assert (gate.facts["verdict"], promoted.rows) == ("passed", {"promoted": 1})
    assert scoring_version(ws, FIRST) == "1"

    # The second day's is refused by a figure that it cannot have: the first one goes on scoring.
    make_day(spark, ws, SECOND)
    evaluated, gate, promoted = judged(ws, SECOND, metrics={"auc": {"min": 0.99}})
    _check_figures(ws, evaluated, events[events.ds == SECOND])
    (broken,) = (r for r in gate.facts["rules"] if r["passed"] is False)
    auc = evaluated.facts["model"]["metrics"]["auc"]
    assert (broken["key"], broken["value"], broken["margin"]) == ("gate.metrics.auc.min", auc, auc - 0.99)
    assert (gate.facts["verdict"], gate.facts["champion"]["version"]) == ("refused", "1")
    assert promoted.facts["models"]["shop-baseline"]["champion"] == "1"
    assert [v.status for v in versions(ws, "shop-baseline")] == ["promoted", "refused"]
    assert scoring_version(ws, SECOND) == "1"

    # Overruled, it scores; nothing of either day is to be done again, and each day keeps its own champion.
    promote(ws, "shop-baseline", "2", "the limit was a mistake")
    refusing = spec(metrics={"auc": {"min": 0.99}})
    for stage in (Evaluate(), JudgeModel(), Promote()):
        assert check_stage(stage, spec(), ws, FIRST) is None
        assert check_stage(stage, refusing, ws, SECOND) is None
    assert [scoring_version(ws, ds) for ds in (FIRST, SECOND)] == ["1", "2"]
    roll_back(ws, "shop-baseline")
    assert scoring_version(ws, SECOND) == "1"
    # Other rules, a new verdict over the same figures; what people have decided stays.
    evaluated_again, gate, promoted = judged(ws, SECOND)
    assert evaluated_again.key == evaluated.key
    assert gate.facts["verdict"] == "passed"
    assert "rolled back by hand" in promoted.facts["models"]["shop-baseline"]["stays"]
    champion = registry.champion(ws, "shop-baseline")
    assert champion is not None
    assert champion.version == "1"

    _check_estimates(ws, events)
    _check_challenger(ws, events[events.ds == SECOND])


def _check_estimates(ws: Workspace, events: pd.DataFrame) -> None:
    """Both days' trees as policies over the second day's log, against their formulas written out for all rows."""
    arms = {"first": {"model": "1"}, "second": {"model": "2"}, "once_more": {"model": "2"}}
    policy = {"propensity": "propensity", "action": "item", "temperature": 0.7, "max_weight": 6.0}
    sections = spec().model_dump(mode="json", by_alias=True, exclude_unset=True)
    sections["train"]["evaluation"]["off_policy"] = policy
    sections |= {"outcomes": {}, "experiments": {"ranker": {"arms": arms}}}
    estimate_spec = Spec.model_validate(sections)
    manifest = run_stage(EstimatePolicies(), estimate_spec, ws, SECOND).manifest
    assert run_stage(EstimatePolicies(), estimate_spec, ws, SECOND).skipped
    train = events[(events.ts >= "2026-01-03") & (events.ts < "2026-01-05")]
    rows, actions = events[events.ds == SECOND].reset_index(drop=True), sorted(train.item.unique())
    raw = rows.drop(columns=["_source_file", "_source_line", "ds"])
    logged = rows.item.map({a: i for i, a in enumerate(actions)})
    assert logged.isna().any()  # new items: the policies do not know them
    assert manifest.rows == {"rows": len(rows), "models": 2, "actions": len(actions)}
    r, values = rows.click.to_numpy(), {}
    for version in ("1", "2"):
        (registered,) = (v for v in versions(ws, "shop-baseline") if v.version == version)
        predictor = hr.Predictor(str(registered.source))
        q = np.stack([np.asarray(predictor.predict(raw.assign(item=a)), np.float64) for a in actions], 1)
        share = (q / (1 - q)) ** (1 / 0.7)
        share /= share.sum(1, keepdims=True)
        chosen = np.array([0.0 if np.isnan(i) else share[n, int(i)] for n, i in enumerate(logged)])
        w = np.minimum(chosen / rows.propensity.to_numpy(), 6.0)
        predictions = np.asarray(predictor.predict(raw), np.float64)
        dm = (share * q).sum(1)
        values[version] = {
            "logged_value": r.mean(),
            "ips": (w * r).mean(),
            "snips": (w * r).sum() / w.sum(),
            "dm": dm.mean(),
            "dr": (dm + w * (r - predictions)).mean(),
            "effective_sample_size": w.sum() ** 2 / (w**2).sum(),
        }
    for arm, version in zip(manifest.facts["arms"], ("1", "2", "2"), strict=True):
        assert (arm["version"], arm["values"]) == (version, pytest.approx(values[version], rel=1e-4))
        assert all(low <= arm["values"][m] <= high for m, (low, high) in arm["intervals"].items())
        assert set(arm["intervals"]) == set(values[version])
    control, second, repeated = (arm["minus_control"] for arm in manifest.facts["arms"])
    assert (control, repeated) == ({}, second)
    assert second["dr"]["value"] == pytest.approx(values["2"]["dr"] - values["1"]["dr"], abs=1e-4)
    assert second["dr"]["low"] < second["dr"]["value"] < second["dr"]["high"]
    # The command finds the stage done.
    file = ws.home / "shop.yaml"
    file.write_text(json.dumps(sections))
    words = ["experiment", "estimate", "ranker", str(file), "--ds", SECOND, "--home", str(ws.home)]
    json_output = CliRunner().invoke(app, [*words, "--json"])
    assert json_output.exit_code == 0, json_output.output
    assert json.loads(json_output.stdout)["arms"] == manifest.facts["arms"]
    table_output = CliRunner().invoke(app, words)
    assert f"{len(rows)} logged rows of {SECOND}, split valid; {len(actions)} actions" in table_output.output


def _check_challenger(ws: Workspace, rows: pd.DataFrame) -> None:
    """A day's neural model of one step, and its challenger of many: a third model on the same rows."""
    trees = {"model": "neural", "champion": {}, "slices": {}, "rules": {}, "challenger": "promote"}
    gate = Gate.model_validate(GATE | trees)
    base_spec = spec().model_copy(update={"gate": gate, "score": None, "challenger": Challenger(behind=0.001)})
    features = Manifest.load(ws.manifest("shop", SECOND, "features"))
    assert features is not None
    keys = {"train": 1, "challenger": 200}
    for stage, steps in keys.items():
        train_settings = Train(batch_size=200, streams=2, ranks=1, epochs=30, max_steps=steps, patience=None)
        job = job_of(ws, features, f"{stage}-key", train_settings, pipeline="shop", ds=SECOND)
        report = train_local(job)
        name = ws.name_of(job.saved_model)
        version = registry.register(ws, "shop", job.saved_model, report.metrics, job.key, ds=SECOND)
        facts = {"registered": {"name": "shop", "version": version}, "metrics": report.metrics, "due": "it was"}
        output = Output(kind="model", name=name, version=job.key)
        stage_manifest = Manifest(stage=stage, pipeline="shop", ds=SECOND, key=job.key, spec_hash="", outputs=(output,))
        stage_manifest.model_copy(update={"facts": facts}).save(ws.manifest("shop", SECOND, stage))

    def judge(how: str) -> tuple[Manifest, Manifest, Manifest]:
        challenged_spec = base_spec.model_copy(update={"gate": gate.model_copy(update={"challenger": how})})
        results = [
            run_stage(stage, challenged_spec, ws, SECOND).manifest for stage in (Evaluate(), JudgeModel(), Promote())
        ]
        assert {check_stage(stage, challenged_spec, ws, SECOND) for stage in (Evaluate(), JudgeModel(), Promote())} == {
            None
        }
        return results[0], results[1], results[2]

    evaluated, verdict, promoted = judge("promote")
    challenger_facts = evaluated.facts["challenger"]
    y, auc = rows.click.to_numpy(), {}
    raw = rows.drop(columns=["_source_file", "_source_line", "ds"])
    for role in ("model", "challenger"):
        figures = evaluated.facts[role]
        p = np.asarray(hr.Predictor(str(ws.locate(figures["name"]))).predict(raw), np.float64)
        auc[role] = roc_auc_score(y, p)
        assert figures["metrics"]["auc"] == pytest.approx(auc[role], abs=1e-9)
        assert figures["metrics"]["log_loss"] == pytest.approx(log_loss(y, p), abs=1e-6)
    assert challenger_facts["beside_champion"] is None
    assert challenger_facts["beside_model"]["auc"]["value"] == pytest.approx(auc["challenger"] - auc["model"], abs=1e-9)
    assert auc["challenger"] > auc["model"] + 0.05
    figures = verdict.facts["challenger"]
    assert (figures["version"], figures["verdict"], figures["becomes_champion"]) == ("2", "passed", True)
    (better,) = (r for r in figures["rules"] if r["key"] == "challenger.behind")
    losses = [evaluated.facts[role]["metrics"]["log_loss"] for role in ("model", "challenger")]
    assert better["value"] == pytest.approx(losses[0] - losses[1], abs=1e-9)
    assert (verdict.facts["verdict"], verdict.facts["model"]["version"]) == ("passed", "1")
    assert [v.status for v in versions(ws, "shop")] == ["registered", "promoted"]
    assert promoted.facts["challenger"]["champion"] == promoted.facts["models"]["shop"]["champion"] == "2"
    champion = registry.champion(ws, "shop")
    assert champion is not None
    assert champion.version == "2"

    # Reported alone, the day's model is champion; what was measured stands.
    rerun, verdict, promoted = judge("report")
    assert rerun.key == evaluated.key
    figures = verdict.facts["challenger"]
    assert (figures["verdict"], figures["becomes_champion"]) == ("passed", False)
    assert [v.status for v in versions(ws, "shop")] == ["promoted", "registered"]
    assert promoted.facts["models"]["shop"]["champion"] == "1"


def _check_figures(ws: Workspace, evaluated: Manifest, rows: pd.DataFrame) -> None:
    """Both models' metrics, of all rows and by slice, by other means."""
    facts, y = evaluated.facts, rows.click.to_numpy()
    assert evaluated.rows == {"rows": len(rows)}
    predictions = {}
    for name in ("model", "champion"):
        folder = ws.locate(facts[name]["name"])
        p = hr.Predictor(str(folder)).predict(rows.drop(columns=["_source_file", "_source_line", "ds"]))
        predictions[name] = p = np.asarray(p, np.float64)
        metrics = facts[name]["metrics"]
        assert metrics["auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-9)
        assert metrics["log_loss"] == pytest.approx(log_loss(y, p), abs=1e-6)
        assert metrics["calibration"] == pytest.approx(p.sum() / y.sum(), rel=1e-6)
        assert facts[name]["finite"] == len(rows)
        assert facts[name]["bytes"] == sum(f.stat().st_size for f in folder.local_path().rglob("*") if f.is_file())
        assert facts[name]["rows_per_second"] == pytest.approx(64 / facts[name]["batch_ms"] * 1e3, rel=1e-2)
        # What each vocabulary knows: the champion has not seen the newest items.
        known = set(hr.FittedWorkflow.load(folder / "workflow").vocabularies["item"]["value"].to_pylist())
        assert facts[name]["known"]["item"] == [len(rows), int(rows.item.isin(known).sum())]
    assert facts["champion"]["known"]["item"][1] < facts["model"]["known"]["item"][1]
    assert np.abs(predictions["model"] - predictions["champion"]).max() > 0.01
    for metric, difference in facts["differences"].items():
        if difference is not None:
            model_value, champion_value = (facts[name]["metrics"][metric] for name in ("model", "champion"))
            assert difference["value"] == pytest.approx(model_value - champion_value, abs=1e-12)
            assert difference["low"] <= difference["high"]
    by_city = {s["value"]: s for s in facts["slices"]}
    assert {city: s["rows"] for city, s in by_city.items()} == rows.city.value_counts().to_dict()
    for city, slice_facts in by_city.items():
        in_city = (rows.city == city).to_numpy()
        model_value, champion_value = (
            roc_auc_score(y[in_city], predictions[name][in_city]) for name in ("model", "champion")
        )
        assert (slice_facts["metrics"]["auc"], slice_facts["champion"]["auc"]) == pytest.approx(
            (model_value, champion_value), abs=1e-9
        )
        assert slice_facts["differences"]["auc"]["value"] == pytest.approx(model_value - champion_value, abs=1e-9)
    bins = facts["score_bins"]
    assert sum(bins["model"]) == sum(bins["champion"]) == len(rows)
    share = [np.maximum(np.array(bins[name]) / len(rows), 1e-4) for name in ("model", "champion")]
    assert facts["score_psi"] == pytest.approx(float(((share[0] - share[1]) * np.log(share[0] / share[1])).sum()))
