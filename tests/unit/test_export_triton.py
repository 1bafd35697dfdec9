"""A model repository of Triton: configurations, ensembles as a server would have them (tests.triton_support)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.workspace import Workspace
from headrace.errors import BusyError, UserError
from headrace.export.record import read_record
from headrace.export.triton.config import Batching, EnsembleStep, ModelConfig
from headrace.export.triton.publish import RepositoryModel, publish
from headrace.models.predictor import load_predictor
from headrace.models.registry.versions import register, registered_name
from headrace.storage import local
from tests.storage_support import Killed, faulty
from tests.triton_support import PbError, Repository, read_config

support = pytest.importorskip("tests.export_support", reason="ONNX is not installed: run `make onnx`")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
pytest.importorskip("tritonclient", reason="tritonclient is not installed: run `make serve`")
repository = pytest.importorskip("headrace.export.triton.repository")
fitted, predicted, request, rows, saved_model = (
    getattr(support, name) for name in ("fitted", "predicted", "request", "rows", "saved_model")
)


def write(saved: Path, to: Path, version: int, **more: Any) -> None:
    exported = saved.parent / saved.name.replace("model", "export")
    options = repository.Options(**more)
    repository.write_repository(
        local(exported), local(saved), local(to), name="clicks", version=version, options=options
    )


@pytest.mark.parametrize("with_hash", [False, True], ids=["onnx", "python"])
def test_an_ensemble_answers_as_the_saved_model_does(with_hash: bool, tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "home", with_hash)
    write(saved, tmp_path / "repo", 7)
    repo = Repository(tmp_path / "repo")
    assert sorted(p.name for p in repo.folder.iterdir() if p.is_dir()) == ["clicks", "clicks.features", "clicks.model"]
    assert repo.versions("clicks.model") == repo.versions("clicks.features") == [7]
    features = read_config(repo.folder / "clicks.features")
    assert features.backend == ("python" if with_hash else "onnxruntime")
    if with_hash:
        assert "text is hashed (city)" in features.parameters["why Python"].string_value
    for batch in (rows(), rows().slice(3, 1), rows().slice(0, 2)):
        (answers,) = repo.ask("clicks", request(batch)).values()
        np.testing.assert_allclose(answers[:, 0], predicted(saved, batch, with_hash), rtol=1e-5, atol=1e-7)
    assert np.std(answers) > 0
    if with_hash:
        with pytest.raises(PbError, match="column 'tags': lengths must be 0 to"):
            repo.ask("clicks", request(batch) | {"tags.length": np.array([[1], [99]])})


def test_what_configurations_say(tmp_path: Path) -> None:
    batching = {"max_rows": 64, "delay_microseconds": 900, "instances": 3}
    write(saved_model(tmp_path / "home"), tmp_path / "repo", 7, batching=repository.Batching(**batching))
    model = read_config(tmp_path / "repo" / "clicks.model")
    assert model.max_batch_size == 64
    assert model.dynamic_batching.max_queue_delay_microseconds == 900
    assert [(g.count, g.kind) for g in model.instance_group] == [(3, g.KIND_AUTO) for g in model.instance_group]
    assert model.version_policy.HasField("all")
    assert model.model_warmup[0].inputs["user"].zero_data
    parameter = model.parameters["input.tags"].string_value
    assert '"is_list": true' in parameter
    assert '"vocabulary": "city"' in parameter
    ensemble = read_config(tmp_path / "repo" / "clicks")
    assert [(s.model_name, s.model_version) for s in ensemble.ensemble_scheduling.step] == [
        ("clicks.features", 7),
        ("clicks.model", 7),
    ]
    names = [t.name for t in ensemble.input]
    assert "user" in names
    assert "user.missing" not in names  # declared as required
    assert {"city", "city.missing", "tags", "tags.length", "tags.missing", "age"} <= set(names)


def test_versions_come_go_and_go_back(tmp_path: Path) -> None:
    """A new version is asked by the ensemble's configuration alone; older ones go, but for that before."""
    repo = tmp_path / "repo"
    saved = {v: saved_model(tmp_path / "home", seed=v) for v in (3, 4, 5)}
    batch = rows()
    for version in (3, 4, 5):
        write(saved[version], repo, version)
        (answers,) = Repository(repo).ask("clicks", request(batch)).values()
        np.testing.assert_allclose(answers[:, 0], predicted(saved[version], batch), rtol=1e-5, atol=1e-7)
    assert Repository(repo).versions("clicks.model") == [4, 5]
    write(saved[4], repo, 4)  # back
    (answers,) = Repository(repo).ask("clicks", request(batch)).values()
    np.testing.assert_allclose(answers[:, 0], predicted(saved[4], batch), rtol=1e-5, atol=1e-7)
    assert Repository(repo).versions("clicks.model") == [4, 5]
    with pytest.raises(UserError, match=r"clicks.model/4 is there with other files, and an ensemble names it"):
        write(saved[5], repo, 4)
    write(saved[3], repo, 5)  # which no ensemble names
    (answers,) = Repository(repo).ask("clicks", request(batch)).values()
    np.testing.assert_allclose(answers[:, 0], predicted(saved[3], batch), rtol=1e-5, atol=1e-7)
    with pytest.raises(UserError, match=r"config.pbtxt is another one"):
        write(saved[3], repo, 6, batching=repository.Batching(max_rows=8))
    assert Repository(repo).versions("clicks.model") == [4, 5]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_versions_that_any_ensemble_names_stay(tmp_path: Path) -> None:
    """Two ensembles share a model; one of them stays at its first version."""
    repo, batching = local(tmp_path / "repo"), Batching()
    shared = RepositoryModel(
        ModelConfig("shared", (), (), batching, "onnxruntime"), lambda to: (to / "model.onnx").put_text(str(to))
    )

    def asking(name: str, version: int) -> ModelConfig:
        return ModelConfig(name, (), (), batching, steps=(EnsembleStep("shared", version, {}, {}),))

    publish(repo, [shared], [asking("slow", 1)], 1)
    for version in (2, 3, 4):
        publish(repo, [shared], [asking("quick", version)], version)
    assert Repository(tmp_path / "repo").versions("shared") == [1, 3, 4]
    publish(repo, [shared], [asking("slow", 5)], 5)  # which `quick` does not follow
    assert Repository(tmp_path / "repo").versions("shared") == [4, 5]
    # Of two processes that export at once one is told to wait, and leaves what the other one stages.
    staged = local(tmp_path / ".repo.staging" / "shared" / "6" / "model.onnx")
    staged.put_text("of another process")
    with (repo / ".push").lease(), pytest.raises(BusyError, match="another process changes") as busy:
        publish(repo, [shared], [asking("slow", 6)], 6)
    assert busy.value.exit_code == 69
    assert staged.read_text() == "of another process"
    assert Repository(tmp_path / "repo").versions("shared") == [4, 5]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("kills", [False, True], ids=["fails", "killed"])
def test_a_server_that_polls_never_sees_a_part(kills: bool, tmp_path: Path) -> None:
    """At each call that changes the disk, and after it ended there: the ensemble names one version of all, whole.

    The third version takes the first one away.
    """
    saved = {v: saved_model(tmp_path / "home", seed=v) for v in (3, 4, 5)}
    expected: dict[tuple[str, int], dict[str, bytes]] = {}
    for version in saved:
        write(saved[version], tmp_path / "whole", version)
        for model in ("clicks.features", "clicks.model"):
            expected[model, version] = files_of(tmp_path / "whole" / model / str(version))
    assert expected["clicks.model", 3] != expected["clicks.model", 4]

    def seen(repo: Path) -> int | None:
        """Return the version that answers, or None; check that Triton would load complete versions alone."""
        for model in filter(Path.is_dir, repo.iterdir()) if repo.is_dir() else ():
            read_config(model)  # each folder is a model
            for version in Repository(repo).versions(model.name) if model.name != "clicks" else ():
                assert files_of(model / str(version)) == expected[model.name, version]
        if not (repo / "clicks").is_dir():
            return None
        steps = read_config(repo / "clicks").ensemble_scheduling.step
        (version,) = {s.model_version for s in steps}
        assert all((repo / s.model_name / str(version)).is_dir() for s in steps)
        return int(version)

    for n in range(1, 400):
        repo = tmp_path / "repos" / str(n) / "repo"
        repo.parent.mkdir(parents=True)
        calls = []
        for previous, version in ((None, 3), (3, 4), (4, 5)):
            with faulty(n, kills) as fault, contextlib.suppress(OSError, UserError, Killed):
                write(saved[version], repo, version)
            calls.append(fault.calls_made)
            assert seen(repo) in (previous, version)
            write(saved[version], repo, version)  # the rerun
            assert seen(repo) == version
            assert [p.name for p in repo.parent.iterdir()] == ["repo"]
        assert Repository(repo).versions("clicks.model") == [4, 5]
        if max(calls) < n:
            break
    assert 10 < n < 399


def test_trees_as_onnx_and_for_fil(tmp_path: Path) -> None:
    from headrace.export.tree_graph import write_xgboost

    saved, workflow = support.saved_trees(tmp_path / "home", 1), fitted()
    exported = tmp_path / "exported"
    exported.mkdir()
    write_xgboost(local(saved), local(exported))
    record = read_record(local(exported))
    assert (record.kind, record.tables, list(record.graphs)) == ("xgboost", None, ["model"])
    batch = rows()
    features = workflow.transform_batch(batch)
    expected = load_predictor(local(saved), 1).predict(
        {n: features.column(i).to_numpy() for i, n in enumerate(features.schema.names)}
    )
    for trees, models in (
        ("onnx", ["clicks", "clicks.features", "clicks.model"]),
        ("fil", ["clicks", "clicks.features", "clicks.matrix", "clicks.trees"]),
    ):
        repo = tmp_path / trees
        repository.write_repository(
            local(exported),
            local(saved),
            local(repo),
            name="clicks",
            version=1,
            options=repository.Options(trees=trees),
        )
        assert sorted(p.name for p in repo.iterdir() if p.is_dir()) == models
        (answers,) = Repository(repo).ask("clicks", request(batch)).values()
        np.testing.assert_allclose(answers[:, 0], expected, rtol=1e-5, atol=1e-6)
    assert np.std(expected) > 0.05


def test_the_python_step_needs_neither_spark_nor_torch(tmp_path: Path) -> None:
    fitted(True).save(local(tmp_path))
    code = (
        "import sys\n"
        "from headrace.export.features.columns import FeaturesStep\n"
        "from headrace.storage import local\n"
        "FeaturesStep.load(local(sys.argv[1]))\n"
        "print({'pyspark', 'torch', 'onnx', 'onnxruntime', 'xgboost', 'mlflow'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_registered_model_by_the_command(tmp_path: Path) -> None:
    """Trees as ONNX with their features, and in a repository; what is wrong is named."""
    from headrace.cli.export import TwoStages, export_model, export_triton

    ws, saved = Workspace(tmp_path / "home"), support.saved_trees(tmp_path / "home", 1)
    register(ws, registered_name("clicks", "baseline"), local(saved), {}, "k", ds="2026-01-01")
    to, options, batch = tmp_path / "out", repository.Options(), rows()
    export_model(ws, "clicks", "1", local(to / "onnx"), "fp32", stage="baseline")
    record = read_record(local(to / "onnx"))
    assert sorted(record.graphs) == ["features", "model"]
    assert record.graphs["features"].inputs[0].dtype == "int64"
    for _ in range(2):
        export_triton(ws, "clicks", "1", local(to / "repo"), "fp32", options, stage="baseline", version=5)
    assert [p.name for p in to.iterdir() if p.name.startswith(".")] == []
    repo = Repository(to / "repo")
    assert repo.versions("clicks.model") == [5]
    (answers,) = repo.ask("clicks", request(batch)).values()
    columns = fitted().transform_batch(batch)
    features = {name: columns.column(i).to_numpy() for i, name in enumerate(columns.schema.names)}
    np.testing.assert_allclose(answers[:, 0], load_predictor(local(saved), 1).predict(features), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="is no model repository"):
        export_triton(ws, "clicks", "1", local(to / "onnx"), "fp32", options, stage="baseline")
    stages = TwoStages("clicks", "3", local(tmp_path / "none"), "item", 5)
    with pytest.raises(UserError, match="no version 3"):
        export_triton(ws, "clicks", "1", local(to / "repo"), "fp32", options, stage="baseline", stages=stages)
