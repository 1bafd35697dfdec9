"""Challengers: when one is trained, what the next day starts from, and what models forget."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from headrace.comm.base import run_ranks
from headrace.config import Spec, build_spec
from headrace.config.schema import DatasetSchema
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models import registry
from headrace.models.predictor import load_predictor
from headrace.models.registry.promotion import promote, roll_back, settle
from headrace.stage import plan_run, run_stage
from headrace.stage.manifest import Manifest, Output
from headrace.train.challenger import TrainChallenger, due, how_far_behind, newest_from_nothing
from headrace.train.loop.run import train
from headrace.train.setup.earlier_days import find_forgetting_dataset, find_warm_start
from headrace.train.stage import Train
from tests.train_support import TRAIN, job_of, read_padded


def spec_of(**sections: Any) -> Spec:
    return build_spec(
        {
            "pipeline": "clicks",
            "source": {"format": "clicks", "path": "{ds}"},
            "table": {"columns": [{"name": "click", "type": "int"}]},
            "features": {"label": "click", "workflow": [], "split": {"by": "position"}},
            "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
            "challenger": {"every_days": 3, "behind": 0.01},
        }
        | sections
    )


def trained(ws: Workspace, ds: str, stage: str = "train", model: str | None = None, **facts: Any) -> Manifest:
    output = Output(kind="model", name=model or f"models/clicks/{ds}/{stage}/model", version=f"{stage}-{ds}")
    manifest = Manifest(
        stage=stage,
        pipeline="clicks",
        ds=ds,
        key=f"{stage}-{ds}",
        spec_hash="",
        outputs=(output,),
        facts={"warm_start": "models/before", "metrics": {"auc": 0.7, "log_loss": 0.5}, **facts},
    )
    manifest.save(ws.manifest("clicks", ds, stage))
    return manifest


def test_a_challenger_is_due_some_days_after_the_last_model_from_nothing(ws: Workspace) -> None:
    spec = spec_of()
    trained(ws, "2026-01-01", warm_start=None)
    assert due(ws, spec, "2026-01-01") is None  # the day's own model is one
    for day in range(2, 8):
        trained(ws, f"2026-01-{day:02d}")
    assert [due(ws, spec, f"2026-01-0{d}") is None for d in range(2, 6)] == [True, True, False, False]
    trained(ws, "2026-01-04", "challenger", due="it was")
    trained(ws, "2026-01-05", "challenger", due=None)  # none was due, so there is no model
    newest = newest_from_nothing(ws, spec, "2026-01-06")
    assert newest is not None
    assert (newest.ds, newest.stage) == ("2026-01-04", "challenger")
    assert due(ws, spec, "2026-01-06") is None
    assert due(ws, spec, "2026-01-07") == "no model of the 3 days before was trained from nothing"


def test_a_model_that_fell_behind_is_challenged_the_next_day(ws: Workspace) -> None:
    trained(ws, "2026-01-01")
    trained(ws, "2026-01-01", "challenger", due="it was", behind=0.02)
    trained(ws, "2026-01-02")
    assert due(ws, spec_of(), "2026-01-02") == "on 2026-01-01 the day's model was 0.0200 behind by log_loss"
    assert due(ws, spec_of(challenger={"every_days": 3, "behind": 0.02}), "2026-01-02") is None


def test_how_far_behind_by_metrics_that_rise_and_fall() -> None:
    day, challenger = ({"metrics": {"auc": a, "log_loss": b, "x": None}} for a, b in ((0.70, 0.50), (0.72, 0.45)))
    assert how_far_behind(spec_of(), day, challenger) == pytest.approx(0.05)
    assert how_far_behind(spec_of(train={"monitor": "auc"}), day, challenger) == pytest.approx(0.02)
    assert how_far_behind(spec_of(), day, {"metrics": {}}) is None


def test_where_none_is_due_the_stage_says_so(ws: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    make_dataset(ws, train=100, valid=20, ds="2026-01-02")
    trained(ws, "2026-01-01", warm_start=None)
    trained(ws, "2026-01-02")
    outcome = run_stage(TrainChallenger(), spec_of(), ws, "2026-01-02")
    assert (outcome.manifest.outputs, outcome.manifest.facts) == ((), {"due": None})
    assert run_stage(TrainChallenger(), spec_of(), ws, "2026-01-02").skipped


def test_its_training_is_the_days_with_other_keys() -> None:
    spec = spec_of(
        challenger={"train": {"epochs": 7, "dense": {"learning_rate": 0.5}}}, retrain={"warm": {"epochs": 1}}
    )
    settings = spec.of_challenger().train
    assert (settings.epochs, settings.warm_start, settings.dense.learning_rate, settings.dense.kind) == (
        7,
        False,
        0.5,
        "adam",
    )
    for wrong, message in (({"train": {"epoch": 1}}, "challenger.train.epoch"), ({"every_days": 0}, "every_days")):
        with pytest.raises(UserError, match=message):
            spec_of(challenger=wrong)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("challenger"))


@pytest.fixture(scope="module")
def earlier(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=800, valid=300, users=60, ds="2026-01-10")


@pytest.fixture(scope="module")
def today(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=800, valid=200, users=80, ds="2026-01-12", seed=1)


def test_the_next_day_starts_from_the_better_of_both(home: Workspace, earlier: Manifest, today: Manifest) -> None:
    spec, schema = spec_of(), today.dataset_schema
    assert schema is not None
    job = job_of(home, earlier, "start", TRAIN.model_copy(update={"epochs": 1}), spec.model)
    run_ranks(1, lambda c: train(job, c))
    own_model, other_model = home.name_of(job.saved_model), home.name_of(job.folder / "other")
    shutil.copytree(job.saved_model.local_path(), home.locate(other_model).local_path())
    trained(home, "2026-01-10", model=own_model)

    def start(**facts: Any) -> str:
        trained(home, "2026-01-10", "challenger", other_model, due="it was", **facts)
        chosen = find_warm_start(home, spec, "2026-01-12", schema)
        assert chosen is not None
        return chosen.name

    assert [start(behind=b) for b in (0.011, 0.01, -0.3, None)] == [other_model, own_model, own_model, own_model]
    assert start(behind=0.5) == other_model
    shutil.rmtree(home.locate(other_model).local_path())
    assert start(behind=0.5) == own_model
    start_alone = find_warm_start(home, spec_of(challenger=None), "2026-01-12", schema)
    assert start_alone is not None
    assert start_alone.name == own_model

    # What the gate has refused is no start, but of a run that has begun with it.
    gated = spec_of(challenger=None, gate={})
    for verdict, key, expected in (
        ("passed", start_alone.version, start_alone),
        ("refused", start_alone.version, None),
        ("refused", "another", start_alone),
    ):
        gate = Manifest(stage="gate", pipeline="clicks", ds="2026-01-10", key="g", spec_hash="")
        gate = gate.model_copy(update={"facts": {"verdict": verdict, "model": {"key": key}}})
        gate.save(home.manifest("clicks", "2026-01-10", "gate"))
        assert find_warm_start(home, gated, "2026-01-12", schema) == expected
        assert find_warm_start(home, gated, "2026-01-12", schema, [start_alone.input]) == start_alone

    # Nor is a challenger that it has refused; one that became champion is, whoever was behind.
    shutil.copytree(home.locate(own_model).local_path(), home.locate(other_model).local_path())
    gated_spec = spec_of(gate={})
    for margin, verdict, expected in (
        (0.5, {"verdict": "passed", "becomes_champion": False}, other_model),
        (0.5, {"verdict": "refused", "becomes_champion": False}, own_model),
        (-0.3, {"verdict": "passed", "becomes_champion": False}, own_model),
        (-0.3, {"verdict": "passed", "becomes_champion": True}, other_model),
    ):
        trained(home, "2026-01-10", "challenger", other_model, due="it was", behind=margin)
        model = {"verdict": "passed", "model": {"key": start_alone.version}}
        facts = model | {"challenger": {"key": "challenger-2026-01-10", **verdict}}
        Manifest(stage="gate", pipeline="clicks", ds="2026-01-10", key="g", spec_hash="", facts=facts).save(
            home.manifest("clicks", "2026-01-10", "gate")
        )
        warm_start = find_warm_start(home, gated_spec, "2026-01-12", schema)
        assert warm_start is not None
        assert warm_start.name == expected
    shutil.rmtree(home.locate(other_model).local_path())

    # Nor is what was rolled back, with or without a gate.
    for ds, name in (("2026-01-09", other_model), ("2026-01-10", own_model)):
        home.locate(name).make_dir()
        version = registry.register(home, "clicks", home.locate(name), {}, f"train-{ds}", ds=ds)
        settle(home, "clicks", version)
    trained(home, "2026-01-10", model=own_model, registered={"name": "clicks", "version": version})
    assert find_warm_start(home, gated, "2026-01-12", schema) == start_alone
    roll_back(home, "clicks")
    for spec_variant in (gated, spec_of(challenger=None)):
        assert find_warm_start(home, spec_variant, "2026-01-12", schema) is None


def measured_dataset(ws: Workspace, day: str | None, ds: str, schema: DatasetSchema | None) -> str | None:
    retrain: Mapping[str, Any] = {"forgetting_day": day}
    return find_forgetting_dataset(ws, spec_of(retrain=retrain), ds, schema)


def test_a_model_is_measured_on_the_rows_of_another_day(home: Workspace, earlier: Manifest, today: Manifest) -> None:
    schema = today.dataset_schema
    assert schema is not None
    dataset_name = measured_dataset(home, "2026-01-10", "2026-01-12", schema)
    assert dataset_name == earlier.output("dataset").name
    assert {measured_dataset(home, day, "2026-01-12", schema) for day in (None, "2026-01-12", "2026-01-09")} == {None}
    assert measured_dataset(home, "2026-01-10", "2026-01-12", DatasetSchema(features=schema.features[1:])) is None
    fewer = tuple(f.model_copy(update={"cardinality": 59}) if f.name == "user" else f for f in schema.features)
    assert measured_dataset(home, "2026-01-10", "2026-01-12", DatasetSchema(features=fewer)) is None

    once = TRAIN.model_copy(update={"epochs": 1})
    job = job_of(home, today, "measured", once, forgetting=dataset_name)
    reports = run_ranks(2, lambda c: train(job, c))
    assert earlier.dataset_schema is not None
    folder = home.locate(dataset_name).local_path() / "valid"
    rows = read_padded(sorted(folder.glob("*.parquet")), earlier.dataset_schema)
    p = load_predictor(job.saved_model).predict({c: rows[c].to_numpy() for c in rows.columns})
    clicked = rows["click"].to_numpy() > 0
    pairs = p[clicked][:, None] - p[~clicked][None, :]
    expected = float(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    for report in reports:
        assert report.forgetting["rows"] == 300
        assert report.forgetting["metrics"]["auc"] == pytest.approx(expected, abs=1e-6)


def test_rows_of_another_day_that_are_gone_end_no_training(
    ws: Workspace, make_dataset: Callable[..., Manifest], caplog: pytest.LogCaptureFixture
) -> None:
    earlier_day = make_dataset(ws, train=400, valid=200, users=60, ds="2026-01-10")
    now = make_dataset(ws, train=400, valid=100, users=60, ds="2026-01-12", seed=1)
    name = earlier_day.output("dataset").name
    once = TRAIN.model_copy(update={"epochs": 1, "max_steps": 1})
    file = next((ws.locate(name).local_path() / "valid").glob("*.parquet"))
    content = file.read_bytes()
    # One of two ranks sees it, at most: after the footer was read, and where there is no file.
    file.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])
    for report in run_ranks(2, lambda c: train(job_of(ws, now, "torn", once, forgetting=name), c)):
        assert report.forgetting == {}
    shutil.rmtree(ws.locate(name).local_path() / "valid")
    for report in run_ranks(2, lambda c: train(job_of(ws, now, "gone", once, forgetting=name), c)):
        assert report.forgetting == {}
    assert caplog.text.count("not measured on the rows of") == 2
    assert "has no split 'valid'" in caplog.text

    # And before: neither started with it, nor once it is known to be removed.
    assert measured_dataset(ws, "2026-01-10", "2026-01-12", now.dataset_schema) is None
    earlier_day.with_removed({name}).save(ws.manifest("clicks", "2026-01-10", "features"))
    assert measured_dataset(ws, "2026-01-10", "2026-01-12", now.dataset_schema) is None
    assert "retention" in caplog.text


def test_the_day_of_forgetting_changes_no_key(ws: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    make_dataset(ws, train=100, valid=20, ds="2026-01-10")
    make_dataset(ws, train=100, valid=20, ds="2026-01-12")
    plain, with_day = (spec_of(retrain=r) for r in ({}, {"forgetting_day": "2026-01-10"}))
    keys = [plan_run(Train(), spec, ws, "2026-01-12").ctx.key for spec in (plain, with_day)]
    make_dataset(ws, train=100, valid=30, ds="2026-01-10", seed=1)
    assert {*keys, plan_run(Train(), with_day, ws, "2026-01-12").ctx.key} == {keys[0]}


def test_a_refused_day_is_skipped_by_the_key_of_the_next(ws: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    """The key of a day names the model it starts from, so that a verdict that turns later makes the day stale."""
    gated, now = spec_of(challenger=None, gate={}), "2026-01-12"
    make_dataset(ws, train=400, valid=100, users=60, ds=now)
    first = make_dataset(ws, train=400, valid=100, users=60, ds="2026-01-08")
    job = job_of(ws, first, "start", TRAIN.model_copy(update={"epochs": 1, "max_steps": 1}), gated.model)
    run_ranks(1, lambda c: train(job, c))
    for day in ("2026-01-08", "2026-01-09"):
        name = f"models/clicks/{day}/train/model"
        shutil.copytree(job.saved_model.local_path(), ws.locate(name).local_path())
        version = registry.register(ws, "clicks", ws.locate(name), {}, f"train-{day}", ds=day)
        trained(ws, day, registered={"name": "clicks", "version": version})
    settle(ws, "clicks", "1")

    def judge(verdict: str, key: str = "train-2026-01-09") -> None:
        facts = {"verdict": verdict, "model": {"key": key}}
        gate = Manifest(stage="gate", pipeline="clicks", ds="2026-01-09", key="g", spec_hash="", facts=facts)
        gate.save(ws.manifest("clicks", "2026-01-09", "gate"))

    def plan() -> tuple[str, str, str | None]:
        """The key of the day's training, the model that it starts from, why it would be done now."""
        planned = plan_run(Train(), gated, ws, now, verify=False)
        (start,) = (i.version for i in planned.inputs if i.kind == "model")
        return planned.ctx.key, start, planned.reason

    def finish() -> None:
        planned = plan_run(Train(), gated, ws, now)
        output = Output(kind="model", name="models/clicks/today", version="today")
        manifest = Manifest(
            stage="train",
            pipeline="clicks",
            ds=now,
            key=planned.ctx.key,
            spec_hash=planned.spec_hash,
            inputs=planned.inputs,
            outputs=(output,),
        )
        manifest.save(ws.manifest("clicks", now, "train"))

    judge("refused")
    key, start, reason = plan()
    assert (start, reason) == ("train-2026-01-08", "not yet run for this date")
    finish()
    assert plan() == (key, start, None)
    # The refused day trained and refused again: the same start, nothing to do.
    retrained_model = "models/clicks/2026-01-09/other/model"
    trained(ws, "2026-01-09", model=retrained_model, registered={"name": "clicks", "version": "2"})
    shutil.copytree(job.saved_model.local_path(), ws.locate(retrained_model).local_path())
    assert plan() == (key, start, None)
    # Its verdict turned by other rules, or overruled: the next day is to be done again, from it.
    judge("passed")
    changed = "its inputs or its part of the spec have changed"
    other_key, start_of_other, cause = plan()
    assert (other_key != key, start_of_other, cause) == (True, "train-2026-01-09", changed)
    judge("refused")
    trained(ws, "2026-01-09", registered={"name": "clicks", "version": "2"})
    settle(ws, "clicks", "2", passed=False)
    assert plan() == (key, start, None)
    promote(ws, "clicks", "2", "the labels were late")
    overruled, start_of_other, cause = plan()
    assert (overruled != key, start_of_other, cause) == (True, "train-2026-01-09", changed)
    finish()
    # Rolled back once the next day has begun with it: that one stands; a new training would not start from it.
    roll_back(ws, "clicks")
    assert plan() == (overruled, "train-2026-01-09", None)
    ws.manifest("clicks", now, "train").local_path().unlink()
    assert plan()[:2] == (key, "train-2026-01-08")
