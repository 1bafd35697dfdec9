"""The search of hyper-parameters: what it finds, that it goes on where it stopped, what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from headrace.cli import app, screen
from headrace.config import Spec, build_spec, load_overlay, load_spec
from headrace.config.installation import checkout
from headrace.config.load import flow
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.stage.manifest import Input, Manifest
from headrace.storage import local
from headrace.train import tuner as module
from headrace.train.job import Diverged, Job
from headrace.train.search_space import overlay_of, overrides_of
from headrace.train.setup.earlier_days import PRETRAINED
from headrace.train.tuner import SearchResult, Trial, Tuner, sample_dataset, sizes
from tests.train_support import read_padded

DS = "2026-01-10"
RATE = "train.embeddings.learning_rate"


def spec_with(search: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Spec:
    data: dict[str, Any] = {
        "pipeline": "clicks",
        "source": {"format": "clicks", "path": "{ds}"},
        "table": {"columns": [{"name": "click", "type": "int"}, {"name": "row"}, {"name": "query"}]},
        "features": {"label": "click", "workflow": [], "split": {"by": "position"}, "carried": ["row", "query"]},
        "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
        # Embeddings that do not move: what is to be found is hidden from such a model.
        "train": {
            "batch_size": 200,
            "seed": 3,
            "threads": 1,
            "embeddings": {"learning_rate": 1e-6},
            "dense": {"kind": "adam", "learning_rate": 0.01},
            "search": search,
        },
    }
    for path, value in (changes or {}).items():
        *parents, leaf = path.split(".")
        node = data
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return build_spec(data)


def tuner(ws: Workspace, search: Mapping[str, Any], **more: Any) -> Tuner:
    return Tuner(spec_with(search), lambda values: spec_with(search, values), ws, DS, **more)


RANGE = {RATE: {"low": 0.0001, "high": 0.5, "log": True}}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Manifest]) -> Workspace:
    ws = Workspace(tmp_path_factory.mktemp("search"))
    make_dataset(ws, train=4_000, valid=1_000, rank=30)
    return ws


def test_it_finds_a_better_rate_than_a_bad_default(home: Workspace, tmp_path: Path) -> None:
    heard: list[Trial] = []
    search = {"parameters": RANGE | {"model.top_mlp": {"choices": [[16], [8, 8]]}}, "trials": 6, "epochs": 2}
    result = tuner(home, search, on_trial=heard.append).run()
    first, *later_trials = result.trials
    assert first.number is None
    assert len(later_trials) == 6
    assert tuple(heard) == result.trials
    assert result.best is not None
    assert result.best.value is not None
    assert first.value is not None
    assert result.best.value > first.value + 0.02
    assert result.best.value == max(t.value or 0 for t in later_trials if t.state == "finished")
    assert result.best.value == result.best.metrics["auc"]
    assert result.best.steps == 40
    assert 0.0001 <= result.best.values[RATE] <= 0.5
    assert not (result.folder / "models").exists()
    # What it writes is what `--overlay` reads.
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(spec_with(search).model_dump(mode="json", by_alias=True)))
    spec = load_spec(base, load_overlay(result.overlay.local_path()))
    assert spec.train.embeddings.learning_rate == result.best.values[RATE]
    assert list(spec.model.top_mlp) == result.best.values["model.top_mlp"]
    assert "as it was" in result.overlay.read_text()


def test_a_stopped_search_goes_on_as_if_it_had_not_stopped(
    home: Workspace, make_dataset: Callable[..., Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_home = Workspace(tmp_path)
    make_dataset(other_home, train=4_000, valid=1_000, rank=30)
    search = {"parameters": RANGE, "trials": 5, "warmup_trials": 2, "seed": 4}
    uninterrupted = tuner(other_home, search).run()

    class _Killed(BaseException):
        pass

    runs: list[int] = []
    real = module.train_local

    def train_local(job: Any, on_progress: Any) -> Any:
        runs.append(1)
        if len(runs) == 4:  # the settings as they are, two trials, and this one
            job.folder.local_path().mkdir(parents=True)
            raise _Killed
        return real(job, on_progress)

    monkeypatch.setattr(module, "train_local", train_local)
    with pytest.raises(_Killed):
        tuner(home, search).run()
    # A kill has no `finally`.
    left = tuner(home, search).folder / "models" / "clicks" / DS / "trial-2"
    left.make_dir()
    heard: list[int | None] = []
    # Fewer trials at first: how many are wanted is no part of which search it is.
    part = tuner(home, search | {"trials": 4}, on_trial=lambda t: heard.append(t.number)).run()
    assert heard == [2, 3]
    assert len(part.trials) == 1 + 4
    assert not left.exists()
    healed = tuner(home, search).run()
    assert [t.values for t in healed.trials] == [t.values for t in uninterrupted.trials]
    assert [t.value for t in healed.trials] == [t.value for t in uninterrupted.trials]
    assert len({t.values[RATE] for t in healed.trials[1:]}) == 5
    assert len(runs) == 1 + 5 + 1
    finished = tuner(home, search).run()
    assert finished.trials == healed.trials
    assert len(runs) == 7


def test_whatever_a_trial_depends_on_makes_another_search(home: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    # A DLRM has neither tasks nor vectors: nothing is trained here.
    monkeypatch.setattr(module, "check_dataset", lambda job: None)

    def folder(objective: str = "auc", **train: Any) -> Any:
        search = {"parameters": RANGE, "objective": objective}
        changes = {f"train.{key}": value for key, value in train.items()}
        return Tuner(spec_with(search, changes), lambda v: spec_with(search, {**changes, **v}), home, DS).folder

    ranking = {"user": "row", "seen": ["train"]}
    folders = [
        folder(),
        folder(sample_weight="query"),
        folder(tasks={"click": {}, "later": {"label": "query"}}),
        folder("user_auc", evaluation={"user": "row"}),
        folder("user_auc", evaluation={"user": "query"}),
        folder("ndcg_at_20_full", evaluation={"full_ranking": {"user": "row"}}),
        folder("ndcg_at_20_full", evaluation={"full_ranking": ranking}),
    ]
    assert len(set(map(str, folders))) == len(folders)
    # What is not looked at is no part of it.
    assert folder(evaluation={"user": "row", "full_ranking": ranking}) == folder()


def test_trials_start_from_the_models_that_the_pipeline_starts_from(
    home: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    search = {"parameters": RANGE, "trials": 1}

    def train_local(job: Job, _: Any) -> Any:
        jobs.append(job)
        raise Diverged("of no interest", 0)

    def folder(version: str) -> Any:
        inputs = tuple(Input(kind=PRETRAINED, name=f"models/{p}", version=version) for p in ("g", "m"))
        monkeypatch.setattr(module, "find_pretrained", lambda ws, spec, ds: inputs if spec.train.pretrained else ())
        return Tuner(spec, lambda v: spec_with(search, {**changes, **v}), home, DS)

    changes = {"train.pretrained": {"mlp": "m", "gmf": "g"}}
    spec = spec_with(search, changes)
    monkeypatch.setattr(module, "train_local", train_local)
    monkeypatch.setattr(module, "check_dataset", lambda job: None)
    folder("1").run()
    assert [j.pretrained for j in jobs] == [{p: str(home.locate(f"models/{p[0]}")) for p in ("gmf", "mlp")}] * 2
    assert len({str(folder("1").folder), str(folder("2").folder), str(tuner(home, search).folder)}) == 3


def test_what_is_worse_than_the_median_ends_early(home: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    search = {
        "parameters": {"train.dense.learning_rate": {"choices": [0.01, 1e30]}, RATE: {"low": 1e-7, "high": 0.3}},
        "trials": 10,
        "epochs": 3,
        "evaluations": 3,
        "warmup_trials": 2,
        "objective": "log_loss",
    }
    result = tuner(home, search).run()
    reasons = [t.reason for t in result.trials if t.state == "pruned"]
    assert any("training diverged" in r for r in reasons), reasons
    assert any("below the median" in r for r in reasons), reasons
    assert all(t.steps < 60 for t in result.trials if t.state == "pruned")
    assert result.best is None or result.best.values["train.dense.learning_rate"] == 0.01
    values = [t.value for t in result.trials if t.state == "finished" and t.value is not None]
    assert (result.best or result.trials[0]).value == min(values)


def test_ndcg_is_of_the_split_rank_and_settings_that_are_best_stay(home: Workspace) -> None:
    search = {"parameters": {RATE: {"low": 1e-9, "high": 1e-8}}, "trials": 1, "objective": "ndcg"}

    def spec_of(values: Mapping[str, Any]) -> Spec:
        return spec_with(search, {"train.rank_group": "query", "train.rank_k": 3, RATE: 0.1, **values})

    result = Tuner(spec_of({}), spec_of, home, DS).run()
    assert [t.value for t in result.trials] == [t.metrics["ndcg_at_k"] for t in result.trials]
    assert result.best is None
    assert not result.overlay.exists()


def test_a_sample_is_spread_over_the_split(home: Workspace, tmp_path: Path) -> None:
    features = Manifest.load(home.manifest("clicks", DS, "features"))
    assert features is not None
    target = tmp_path / "dataset"
    sample = sample_dataset(features, home, local(target), {"train": 1_000, "valid": 5_000}, streams=4, seed=1)
    assert sizes(sample) == {"train": 1_000, "valid": 1_000}
    schema = features.dataset_schema
    assert schema is not None
    folder = home.home / features.output("dataset").name / "train"
    all_rows = read_padded(sorted(folder.glob("*.parquet")), schema).set_index("row")
    files = sorted((target / "train").glob("*.parquet"))
    assert len(files) == 8  # one for each of the split's row groups
    for number, path in enumerate(files):
        part = read_padded([path], schema).set_index("row")
        assert len(part) == 125
        assert part.index.is_unique
        assert part.index.min() >= number * 500
        assert part.index.max() < (number + 1) * 500
        np.testing.assert_array_equal(all_rows.loc[part.index].to_numpy(), part.to_numpy())
    # The whole split takes no room.
    assert all(p.samefile(folder.parent / "valid" / p.name) for p in (target / "valid").glob("*.parquet"))
    assert (target / "workflow" / "workflow.json").is_file()
    small_sample = sample_dataset(features, home, local(tmp_path / "few"), {"train": 40}, streams=4, seed=1)
    assert sizes(small_sample)["train"] == 40


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"train.dense.learning_rat": {"low": 0.1, "high": 1}},
            "'train.dense.learning_rat' is no field of the spec; did you mean 'train.dense.learning_rate'?",
        ),
        ({"zzz": {"low": 0.1, "high": 1}}, "fields that can be searched: model.kind, model.args, model.embedding_dim"),
        ({"train.ranks": {"choices": [1, 2]}}, "'train.ranks' changes nothing that a trial could tell"),
        ({"features.window_days": {"low": 1, "high": 3}}, "'features.window_days' changes nothing"),
        ({"model.top_mlp": {"low": 1, "high": 3}}, "'model.top_mlp' takes no numbers"),
        ({"model.embedding_dim": {"low": 1.5, "high": 3}}, "takes whole numbers"),
        ({"model.dropout": {"low": 0.5, "high": 0.1}}, "low (0.5) must be below high (0.1)"),
        ({"model.dropout": {"low": 0, "high": 0.1, "log": True}}, "begins above 0, not at 0"),
        ({"model.dropout": {"low": 0}}, "write {low: ..., high: ...} or {choices: [...]}"),
        ({"model.dropout": {"low": 0, "high": 0.2, "choices": [1]}}, "write {low: ..., high: ...} or"),
        ({}, "name parameters, or models"),
    ],
)
def test_faults_of_a_space_are_named(parameters: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        spec_with({"parameters": parameters})
    assert message in str(raised.value)


def test_values_that_the_spec_refuses_are_told_before_anything_runs(home: Workspace, ws: Workspace) -> None:
    with pytest.raises(UserError, match=r"model\.dropout cannot be 2\.0: .*less than 1"):
        tuner(home, {"parameters": {"model.dropout": {"low": 0, "high": 2}}})
    with pytest.raises(UserError, match=r"train\.batch_size cannot be 201: .*must divide batch_size"):
        tuner(home, {"parameters": {"train.batch_size": {"choices": [200, 201]}}})
    with pytest.raises(UserError, match=r"objective is 'ndcg', but train\.rank_group is not set"):
        spec_with({"parameters": RANGE, "objective": "ndcg"})
    bad_variant = {"train": {"negatives": {"column": "nobody"}}}
    with pytest.raises(UserError, match=r"train\.search\.models\.other: train\.negatives\.column: 'nobody' is not"):
        tuner(home, {"models": {"as_it_is": {}, "other": bad_variant}})
    with pytest.raises(UserError, match=r"stage 'features' of 'clicks' has not finished.*headrace run clicks --ds"):
        tuner(ws, {"parameters": RANGE})
    bare = spec_with({"parameters": RANGE}).model_copy(update={"train": load_spec("clicks").train})
    with pytest.raises(UserError, match=r"no section train\.search"):
        Tuner(bare, lambda values: bare, home, DS)


def test_overlays_and_overrides_say_the_same(tmp_path: Path) -> None:
    values = {
        "train.dense.learning_rate": 1e-05,
        "model.top_mlp": [64, 32],
        "train.embeddings.clip_norm": None,
        "train.embeddings.tables.user_id.learning_rate": 0.2,
        "model.pooling": "mean",
    }
    path = tmp_path / "best.yaml"
    path.write_text(overlay_of(values))
    assert sorted(load_overlay(path)) == sorted(overrides_of(values))
    spec = load_spec("clicks", load_overlay(path))
    assert spec.train.dense.learning_rate == 1e-05
    assert spec.model.top_mlp == (64, 32)
    assert spec.train.embeddings.clip_norm is None
    assert spec.train.embeddings.tables["user_id"].learning_rate == 0.2
    # A search is a mapping whose keys are paths: it is taken whole.
    path.write_text(f"train: {{search: {{trials: 3, parameters: {flow(RANGE)}}}}}")
    search = load_spec("clicks", load_overlay(path)).train.search
    assert search is not None
    assert (search.trials, search.parameters[RATE].high) == (3, 0.5)
    with pytest.raises(UserError, match="no such pipeline file"):
        load_overlay(tmp_path / "missing.yaml")


def test_the_command_line(home: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.out, "_file", None)
    monkeypatch.setattr(screen.out, "_width", 220)
    base, space, best = tmp_path / "base.yaml", tmp_path / "space.yaml", tmp_path / "best.yaml"
    plain = spec_with({"parameters": RANGE}).model_dump(mode="json", by_alias=True, exclude={"train": {"search"}})
    base.write_text(yaml.safe_dump(plain))
    space.write_text(yaml.safe_dump({"train": {"search": {"parameters": {RATE: {"low": 0.05, "high": 0.5}}}}}))
    words = ["tune", str(base), "--ds", DS, "--home", str(home.home)]
    result = CliRunner().invoke(app, [*words, "--overlay", str(space), "--trials", "2", "--out", str(best)])
    assert result.exit_code == 0, result.output
    assert "as it is: auc 0." in result.output
    assert "trial 2/2: auc 0." in result.output
    assert f"--from train --overlay {best}" in result.output
    assert load_spec(base, load_overlay(best)).train.embeddings.learning_rate >= 0.05
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "has no section train.search" in result.output


MODELS = {
    "mlp": {"parameters": {"model.top_mlp": {"choices": [[16], [8, 8]]}}},
    "wide": {
        "model": {"class": "wide_deep", "args": {"deep_mlp": [8]}},
        "parameters": {"model.args.dropout": {"low": 0.0, "high": 0.5}, "model.embedding_dim": {"low": 2, "high": 6}},
    },
}


def test_a_search_over_several_models(home: Workspace, tmp_path: Path, make_dataset: Callable[..., Manifest]) -> None:
    search = {"parameters": RANGE, "models": MODELS, "trials": 7, "warmup_trials": 4, "prune": False, "steps": 20}
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(spec_with(search).model_dump(mode="json", by_alias=True)))

    def run(ws: Workspace, trials: int = 7) -> SearchResult:
        overrides = [f"train.search.trials={trials}"]
        return Tuner(
            load_spec(base, overrides), lambda v: load_spec(base, [*overrides, *overrides_of(v)]), ws, DS
        ).run()

    result = run(home)
    first, *later_trials = result.trials
    assert first.model is None
    assert {t.model for t in later_trials} == {"mlp", "wide"}
    for t in later_trials:
        own_keys = {f"model.{k}" for k in (("top_mlp",) if t.model == "mlp" else ("args.dropout", "embedding_dim"))}
        variant = {"model.class", "model.args.deep_mlp"} if t.model == "wide" else set()
        assert t.values.keys() == {RATE} | own_keys | variant
        if t.model == "wide":
            assert isinstance(t.values["model.embedding_dim"], int)
            assert 0 <= t.values["model.args.dropout"] <= 0.5
    # What it writes is a model that the pipeline takes.
    assert result.best is not None
    spec = load_spec(base, load_overlay(result.overlay.local_path()))
    assert spec.model.kind == ("wide_deep" if result.best.model == "wide" else "dlrm")
    # Stopped and gone on with, it ends with the same trials.
    other_home = Workspace(tmp_path)
    make_dataset(other_home, train=4_000, valid=1_000, rank=30)
    run(other_home, 3)
    repeated = run(other_home)
    assert [(t.model, t.values, t.value) for t in repeated.trials] == [
        (t.model, t.values, t.value) for t in result.trials
    ]


def test_a_budget_of_seconds_ends_a_search(home: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    real, clock = module.train_local, [0.0]

    def train_local(job: Any, on_progress: Any) -> Any:
        clock[0] += 10
        return real(job, on_progress)

    class _Clock:
        @staticmethod
        def perf_counter() -> float:
            return clock[0]

    monkeypatch.setattr(module, "train_local", train_local)
    monkeypatch.setattr(module, "time", _Clock)
    search = {"parameters": RANGE, "trials": 9, "steps": 4, "seed": 11}
    # Ten seconds each, the first run among them.
    assert len(tuner(home, search | {"total_seconds": 25}).run().trials) == 3
    assert len(tuner(home, search | {"total_seconds": 25}).run().trials) == 3
    assert len(tuner(home, search | {"total_seconds": 35}).run().trials) == 4
    assert len(tuner(home, search | {"trials": 5}).run().trials) == 6


@pytest.mark.parametrize(("objective", "better"), [("recall_at_k", max), ("normalized_entropy", min)])
def test_any_metric_judges(home: Workspace, objective: str, better: Callable[..., float]) -> None:
    search = {"parameters": RANGE, "trials": 3, "steps": 20, "warmup_trials": 1, "objective": objective}
    changes = {"train.rank_group": "query"}
    result = Tuner(spec_with(search, changes), lambda values: spec_with(search, {**changes, **values}), home, DS).run()
    finished = [t for t in result.trials if t.state == "finished"]
    assert all(t.value == t.metrics[objective] for t in finished)
    assert (result.best or result.trials[0]).value == better(t.value for t in finished if t.value is not None)
    assert len(finished) >= 2


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"a": {"model": {"class": "nn"}}}, r"search.models.a: model.*no class 'nn'"),
        ({"a": {"train": {"epochs": 3}}}, r"'epochs' of all trials is what train.search says"),
        ({"a": {"baseline": {}}}, "trials train networks"),
        (
            {"a": {"model": {"class": "wide_deep"}, "parameters": {"model.args.drop": {"low": 0, "high": 1}}}},
            r"models.a.parameters: 'model.args.drop' is no field",
        ),
        (
            {"a": {"model": {"class": "wide_deep"}, "parameters": {"model.args.deep_mlp": {"low": 0, "high": 1}}}},
            "takes no numbers",
        ),
    ],
)
def test_models_that_cannot_be_searched_are_refused(models: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec_with({"models": models})


def test_the_search_that_is_shipped_is_one_of_neumf() -> None:
    overlays = [checkout() / "conf" / "overlays" / f"{name}.yaml" for name in ("neumf", "neumf_search")]
    spec = load_spec("movielens", [o for path in overlays for o in load_overlay(path)])
    search = spec.train.search
    assert search is not None
    assert (spec.model.kind, search.metric, search.of_lists, search.total_seconds) == ("neumf", "user_auc", False, 3600)


def test_a_search_needs_something_to_try_and_a_known_metric() -> None:
    with pytest.raises(UserError, match="name parameters, or models"):
        spec_with({"trials": 3})
    with pytest.raises(UserError, match="'acc' is none of auc, log_loss"):
        spec_with({"parameters": RANGE, "objective": "acc"})
