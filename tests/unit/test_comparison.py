"""Models over one dataset, tested against each other: training, kept models, and the test's figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from headrace.cli import app, screen
from headrace.cli import compare as command
from headrace.config import ModelVariant, Spec, build_spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import load_predictor
from headrace.quality.report.blocks import Day
from headrace.quality.report.report import page
from headrace.stage import check_stage, execute, identity, plan_run, run_stage
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train import stage as train_stage
from headrace.train.comparison import Compare, _differences
from headrace.train.evaluation.bootstrap import Bootstrap, Replicates, difference, read_replicates, write_replicates
from headrace.train.evaluation.click import click_metrics
from headrace.train.job import Job, TrainingReport
from headrace.train.launch import horovod_spark
from headrace.train.loop.run import train_local
from tests.evaluation_support import on_any_ranks, rows_of
from tests.train_support import read_padded

DS = "2026-01-10"
MODELS = {
    "as_it_is": {},
    "longer": {"train": {"epochs": 2}},
    "deep": {"model": {"class": "wide_deep", "args": {"deep_mlp": [8]}}},
}


def spec_of(models: Mapping[str, Any] = MODELS, against: str | None = None, **train: Any) -> Spec:
    names = ("age", "price", "user", "item", "tags", "click", "row", "query")
    evaluation = {"user": "row", "bootstrap": {"replicates": 30, "seed": 4}, "metrics": ["pr_auc"]}
    return build_spec(
        {
            "pipeline": "clicks",
            "source": {"format": "clicks", "path": "{ds}"},
            "table": {"columns": [{"name": n, "type": "int" if n == "click" else "string"} for n in names]},
            "features": {"label": "click", "workflow": [], "split": {"by": "position"}, "carried": ["row", "query"]},
            "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
            "train": {
                **{"batch_size": 200, "epochs": 1, "seed": 3, "threads": 1, "evaluation": evaluation},
                **{"rank_group": "query", "rank_k": 3},
                **train,
            },
            "compare": {"models": models, "against": against},
        }
    )


class Launches:
    """Trains in this process what a launch would train in ranks of Horovod, and keeps the keys."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.fails_at = 0

    def __call__(self, job: Job, *_: Any, **__: Any) -> TrainingReport:
        if self.fails_at and len(self.keys) + 1 == self.fails_at:
            raise KeyboardInterrupt
        self.keys.append(job.key)
        return train_local(job)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    @contextmanager
    def session(*_: Any) -> Iterator[None]:
        yield

    recorder = Launches()
    torch.set_num_threads(1)
    monkeypatch.setattr("headrace.lake.spark.session.session", session)
    monkeypatch.setattr(horovod_spark, "launch", recorder)
    return recorder


def trained_day(ws: Workspace, spec: Spec) -> Manifest:
    """Train as the stage `train` does, without the registry (MLflow takes seconds), and return the manifest."""
    plan = plan_run(train_stage.Train(), spec, ws, DS)
    manifest = execute(train_stage.Train(), replace(plan, ctx=replace(plan.ctx, registers=False)))
    manifest.save(ws.manifest("clicks", DS, "train"))
    return manifest


def test_models_are_trained_once_and_the_days_own_is_taken(
    ws: Workspace, make_dataset: Callable[..., Manifest], launches: Launches
) -> None:
    make_dataset(ws, train=1_000, valid=400, rank=20)
    day = trained_day(ws, spec_of())
    launches.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        run_stage(Compare(), spec_of(), ws, DS)
    launches.fails_at = 0
    manifest = run_stage(Compare(), spec_of(), ws, DS).manifest
    # The day's own, then one before the kill and one after it.
    assert len(launches.keys) == len(set(launches.keys)) == 3
    assert launches.keys[0] == day.key
    assert not (ws.home / "mlflow.db").exists()
    assert Manifest.load(ws.manifest("clicks", DS, "train")) == day
    assert check_stage(Compare(), spec_of(), ws, DS) is None
    models = {m["name"]: m for m in manifest.facts["models"]}
    assert list(models) == list(MODELS)
    assert [m["class"] for m in models.values()] == ["dlrm", "dlrm", "wide_deep"]
    assert [m["steps"] for m in models.values()] == [5, 10, 5]
    assert models["as_it_is"]["key"] == day.key
    assert models["as_it_is"]["metrics"].items() >= day.facts["metrics"].items()
    assert {"auc", "pr_auc", "hr_at_k", "ndcg_at_k"} <= models["deep"]["metrics"].keys()
    for m in models.values():
        assert m["seconds"] > 0
        assert m["peak_memory_mib"]["rank0"] > 0
    # The size is that of the saved files.
    folder = ws.home / manifest.outputs[2].name
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert models["deep"]["mib"] == pytest.approx(size / 2**20, abs=1e-3)
    # Another reference trains nothing, nor does a model less.
    again = run_stage(Compare(), spec_of(against="deep"), ws, DS).manifest
    run_stage(Compare(), spec_of({"deep": MODELS["deep"]}), ws, DS)
    assert len(launches.keys) == 3
    against_deep = {m["name"]: m["against"] for m in again.facts["models"]}
    against_reference = {m["name"]: m["against"] for m in manifest.facts["models"]}
    assert against_deep["deep"] == against_reference["as_it_is"] == {}
    forward, backward = against_deep["as_it_is"]["auc"], against_reference["deep"]["auc"]
    assert (forward["value"], forward["low"], forward["p"]) == (-backward["value"], -backward["high"], backward["p"])
    # A model that is gone is trained again, alone.
    local(folder).remove()
    assert "model" in str(check_stage(Compare(), spec_of({"deep": MODELS["deep"]}), ws, DS))
    run_stage(Compare(), spec_of(), ws, DS)
    assert launches.keys[3:] == [models["deep"]["key"]]


def test_what_it_says_is_what_plain_loops_say(
    ws: Workspace, make_dataset: Callable[..., Manifest], launches: Launches
) -> None:
    make_dataset(ws, train=1_000, valid=400, rank=20)
    manifest = run_stage(Compare(), spec_of(rank_group=None), ws, DS).manifest
    by_name = {m["name"]: m for m in manifest.facts["models"]}
    drawn = Bootstrap(30, 4)
    rows = _valid_rows(ws)
    values = {}
    for output, name in zip(manifest.outputs, MODELS, strict=True):
        scores = load_predictor(local(ws.home / output.name)).predict(rows)
        values[name] = [_weighted_auc(rows["click"], scores, drawn.counts(rows["row"], r)) for r in range(31)]
    for name in ("longer", "deep"):
        deltas = [a - b for a, b in zip(values[name][1:], values["as_it_is"][1:], strict=True)]
        against = by_name[name]["against"]["auc"]
        assert against["value"] == pytest.approx(values[name][0] - values["as_it_is"][0], abs=1e-9)
        assert against["low"] == pytest.approx(np.percentile(deltas, 2.5), abs=1e-9)
        assert against["high"] == pytest.approx(np.percentile(deltas, 97.5), abs=1e-9)
        below, above = sum(d <= 0 for d in deltas), sum(d >= 0 for d in deltas)
        assert against["p"] == pytest.approx(min(1, 2 * (min(below, above) + 1) / 31))


def _valid_rows(ws: Workspace) -> dict[str, Any]:
    features = Manifest.load(ws.manifest("clicks", DS, "features"))
    assert features is not None
    assert features.dataset_schema is not None
    folder = ws.home / features.output("dataset").name / "valid"
    table = read_padded(sorted(folder.glob("*.parquet")), features.dataset_schema)
    return {name: table[name].to_numpy() for name in table.columns}


def _weighted_auc(labels: Any, scores: Any, counts: Any) -> float:
    drawn = counts > 0
    return float(roc_auc_score(np.asarray(labels)[drawn], np.asarray(scores)[drawn], sample_weight=counts[drawn]))


@given(st.integers(0, 2**20), st.integers(3, 30), st.sampled_from([0.0, 0.3, 2.0]))
@settings(max_examples=12, deadline=None)
def test_differences_are_of_paired_draws(seed: int, users: int, better: float) -> None:
    rng = np.random.default_rng(seed)
    n = 8 * users
    owner, labels = rng.integers(0, users, n), rng.random(n) < 0.4
    noise = rng.normal(size=(2, n)).round(1)
    scores = [noise[0], noise[1] + better * labels]
    drawn = Bootstrap(20, seed)
    replicates = []
    for s in scores:
        rows = rows_of(s, labels, owner)
        # The same on any number of ranks, wherever the rows are.
        replicates.append(on_any_ranks(rows, lambda r, x: click_metrics(r, x, bootstrap=drawn)[0].values["auc"][:, 0]))
    expected = []
    for r in range(21):
        counts = drawn.counts(owner, r)
        pair = []
        for s in scores:
            a, b = (np.asarray(s, np.float32)[mask] for mask in (labels, ~labels))
            weight = np.outer(counts[labels], counts[~labels])
            wins = float((weight * ((a[:, None] > b) + 0.5 * (a[:, None] == b))).sum())
            total = weight.sum()
            pair.append(wins / total if total else None)
        expected.append(None if None in pair else pair[1] - pair[0])
    lists = [[None if np.isnan(v) else float(v) for v in f] for f in replicates]
    result = difference(lists[1][0], lists[0][0], lists[1][1:], lists[0][1:], 0.9)
    deltas = sorted(d for d in expected[1:] if d is not None)
    if expected[0] is None or 2 * len(deltas) < 20:
        assert result is None
        return
    assert result is not None
    assert result.value == pytest.approx(expected[0], abs=1e-12)
    assert (result.low, result.high) == pytest.approx(tuple(np.percentile(deltas, [5, 95])), abs=1e-12)
    # Differences that a plain sum finds next to 0 may be on either side.
    sides = [sum(d <= e for d in deltas) for e in (-1e-9, 1e-9)]
    upper_sides = [sum(d >= e for d in deltas) for e in (1e-9, -1e-9)]
    least, most = (2 * (1 + min(a, b)) / (1 + len(deltas)) for a, b in zip(sides, upper_sides, strict=True))
    assert min(1, least) - 1e-12 <= result.p <= min(1, most) + 1e-12


def test_the_test_says_what_it_must_of_clear_cases() -> None:
    same = [0.5] * 19
    assert difference(0.5, 0.5, same, same, 0.95).p == 1  # type: ignore[union-attr]
    better = difference(0.7, 0.5, [0.7] * 19, same, 0.95)
    assert better is not None
    assert (better.value, better.low, better.p) == (pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.1))
    assert difference(None, 0.5, same, same, 0.95) is None
    assert difference(0.5, 0.5, [None] * 10 + same[:9], same, 0.95) is None
    assert difference(0.5, 0.5, [], [], 0.95) is None
    with pytest.raises(ValueError, match="not drawn together"):
        difference(0.5, 0.5, same, same[1:], 0.95)


def test_replicates_are_kept_where_there_are_any(ws: Workspace) -> None:
    file = ws.store / "replicates.json"
    write_replicates(file, {"valid": {}})
    assert read_replicates(file) is None
    write_replicates(file, {"valid": {"auc": [0.5, None]}})
    assert read_replicates(file) == {"valid": {"auc": [0.5, None]}}
    file.put_text('{"valid": {"auc": [0.')
    assert read_replicates(file) is None


@pytest.mark.parametrize("of_rank", [0.7, None])
def test_differences_are_of_the_lists_whose_metrics_are_told(of_rank: float | None) -> None:
    """Two rankers of trees have metrics of the lists of `valid` and of `rank`, by the same names."""

    def drawn(valid: float, rank: float | None) -> Replicates:
        return {"valid_lists": {"hr_at_k": [valid] * 19}, "valid": {}, "rank": {"hr_at_k": [rank] * 19}}

    first: dict[str, Any] = {"name": "a", "metrics": {"hr_at_k": of_rank}}
    second: dict[str, Any] = {"name": "b", "metrics": {"hr_at_k": 0.5}}
    differences = _differences(first, second, {"a": drawn(0.1, of_rank), "b": drawn(0.9, 0.5)}, 0.95)
    assert {name: (interval["low"], interval["high"]) for name, interval in differences.items()} == (
        {} if of_rank is None else {"hr_at_k": pytest.approx((0.2, 0.2))}
    )


def test_variants_change_what_they_name() -> None:
    spec = spec_of()
    deep = spec.with_variant(ModelVariant.model_validate(MODELS["deep"]))
    assert (deep.model.kind, deep.model.embedding_dim, dict(deep.model.args)) == ("wide_deep", 4, {"deep_mlp": [8]})
    assert (deep.train, deep.compare) == (spec.train, None)
    wider = spec.with_variant(ModelVariant(model={"top_mlp": [32]}))
    assert (wider.model.bottom_mlp, wider.model.top_mlp) == ((8,), (32,))
    assert spec.with_variant(ModelVariant(baseline={"rounds": 3})).baseline.rounds == 3  # type: ignore[union-attr]
    assert spec.with_variant(ModelVariant()).compare is None


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"a": {"model": {"class": "dnc"}}}, r"compare.models.a: model.*no class 'dnc'"),
        ({"a": {"train": {"epoch": 1}}}, r"compare.models.a: train.epoch: "),
        ({"a": {"train": {"rank_k": 1}}}, r"'rank_k' is of all models"),
        ({"a": {}, "b": {"baseline": {"label": "query"}}}, r"compare.models: they learn click and query"),
        ({"a": {"baseline": {}, "model": {"embedding_dim": 8}}}, r"`baseline` stands for XGBoost"),
        ({"A": {}}, r"'A' must match"),
        ({}, r"compare: models: name one at least"),
    ],
)
def test_what_is_no_model_is_refused(models: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec_of(models)
    with pytest.raises(UserError, match="no model 'b'"):
        spec_of({"a": {}}, against="b")


def test_another_class_drops_the_settings_of_the_one_before() -> None:
    model = load_spec("clicks", ["model.args={deep_mlp: [8]}", "model.class=wide_deep"]).model
    assert (model.kind, dict(model.args), model.embedding_dim) == ("wide_deep", {"deep_mlp": [8]}, 16)
    same = load_spec("clicks", ["model.class=dlrm"])
    assert same.model == load_spec("clicks").model


def test_models_without_users_are_compared_without_a_test(
    ws: Workspace, make_dataset: Callable[..., Manifest], launches: Launches
) -> None:
    make_dataset(ws, train=1_000, valid=400)
    spec = spec_of(rank_group=None, evaluation={})
    manifest = run_stage(Compare(), spec, ws, DS).manifest
    assert all(m["against"] == {} and m["intervals"] == {} for m in manifest.facts["models"])


def test_the_command_shows_a_table_and_json(
    ws: Workspace,
    make_dataset: Callable[..., Manifest],
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    make_dataset(ws, train=1_000, valid=400, rank=20)
    pipeline = tmp_path / "clicks.yaml"
    data = spec_of().model_dump(mode="json", by_alias=True, exclude_unset=True)
    pipeline.write_text(json.dumps({k: v for k, v in data.items() if k != "compare"}))
    (tmp_path / "wide-deep.yaml").write_text(json.dumps(MODELS["deep"]))
    requested_stages: list[tuple[str, ...]] = []

    def run(pipeline: str, ws: Workspace, ds: str, overrides: list[str], *stages: str, show_results: bool) -> int:
        requested_stages.append(stages)
        print("what the application prints")
        run_stage(Compare(), load_spec(pipeline, overrides), ws, ds)
        return 0

    monkeypatch.setattr(command, "run_stages", run)
    monkeypatch.setattr(command, "out", screen.Console(highlight=False, width=400))
    place = ["--ds", DS, "--home", str(ws.home)]
    missing = CliRunner().invoke(app, ["compare", str(pipeline), *place])
    assert missing.exit_code == 2
    assert "has no section compare" in missing.output
    table = CliRunner().invoke(app, ["compare", str(pipeline), *place, "--models", str(tmp_path / "wide-deep.yaml")])
    assert table.exit_code == 0, table.output
    assert requested_stages == [("compare", "compare")]
    lines = [line.split() for line in table.output.splitlines()]
    assert [line[:2] for line in lines if line and line[0] in ("as_it_is", "wide_deep")] == [
        ["as_it_is", "dlrm"],
        ["wide_deep", "wide_deep"],
    ]
    monkeypatch.setattr(screen, "out", screen.Console(highlight=False, width=400))
    more = ["--models", str(tmp_path / "wide-deep.yaml"), "--against", "wide_deep", "--json"]
    as_json = CliRunner().invoke(app, ["compare", str(pipeline), *place, *more])
    document = json.loads(as_json.stdout)
    assert (document["reference"], [m["name"] for m in document["models"]]) == ("wide_deep", ["as_it_is", "wide_deep"])
    assert document["models"][0]["against"]["auc"]["p"] <= 1
    assert len(launches.keys) == 2
    twice = CliRunner().invoke(app, ["compare", str(pipeline), *place, "--models", "a/as_it_is.yaml"])
    assert twice.exit_code == 2
    assert "there is a model 'as_it_is' already" in twice.output


def test_the_report_has_the_table(ws: Workspace, make_dataset: Callable[..., Manifest], launches: Launches) -> None:
    features = make_dataset(ws, train=1_000, valid=400)
    spec = spec_of(rank_group=None)
    manifest = run_stage(Compare(), spec, ws, DS).manifest
    text = page(Day(spec=spec, ds=DS, manifests={"features": features, "compare": manifest}))
    assert "Models compared" in text
    assert "minus as_it_is" in text
    assert "Of an earlier dataset" not in text
    another_features = features.model_copy(update={"key": "other"})
    assert identity(another_features) != identity(features)
    stale = page(Day(spec=spec, ds=DS, manifests={"features": another_features, "compare": manifest}))
    assert "Of an earlier dataset" in stale
    assert "Models compared" not in page(Day(spec=spec, ds=DS, manifests={"features": features}))


def test_a_model_of_a_version_without_replicates_is_measured_anew(
    ws: Workspace, make_dataset: Callable[..., Manifest], launches: Launches
) -> None:
    make_dataset(ws, train=1_000, valid=400, rank=20)
    spec = spec_of({"as_it_is": {}})
    day = trained_day(ws, spec)
    (ws.home / day.output("model").name).parent.joinpath("replicates.json").unlink()
    run_stage(Compare(), spec, ws, DS)
    saved = (ws.home / day.output("model").name).parent
    assert (saved / "replicates.json").is_file()
    assert json.loads((saved / "compared.json").read_text())["facts"]["resumed_from_step"] == 5
