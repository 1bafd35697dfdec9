"""`headrace forget` where a tracking server has the models, too."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.housekeeping.forget.erase import forget, found_places
from headrace.jobs.housekeeping.forget.persons import Persons, Place
from headrace.models import registry
from headrace.models.predictor import load_predictor
from headrace.models.registry.versions import versions
from tests.forget_support import FORGOTTEN, USERS, save_models, shop
from tests.tracking_server import tracking_server

NOW = datetime(2026, 1, 9, tzinfo=UTC)
PERSONS = Persons("user_id", False, frozenset(FORGOTTEN))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tracking_server(tmp_path_factory.mktemp("server")) as server_url:
        yield server_url


def registered(home: Path, url: str) -> tuple[Workspace, list[str]]:
    """Register two models of a day each, the second with changed rows of the first; return the workspace and their
    runs.
    """
    ws = Workspace(home, registry_server=url)
    save_models(ws, shop())
    for folder in sorted(home.glob("models/clicks/*/*/model")):
        key = folder.parent.name
        registry.register(ws, "clicks", ws.locate(str(folder)), {"auc": 0.6}, key, ds=folder.parts[-3])
    client = MlflowClient(url)
    return ws, [client.get_model_version("clicks", v.version).run_id or "" for v in versions(ws, "clicks")]


def erase(ws: Workspace) -> list[Place]:
    *places, (request, _) = forget(shop(), ws, PERSONS, NOW)
    assert request.finished == NOW  # type: ignore[union-attr]
    return places  # type: ignore[return-value]


def on_server(url: str, run: str, to: Path) -> Path:
    to.mkdir(parents=True)
    return Path(MlflowClient(url).download_artifacts(run, "model", str(to)))


def values(artifact: Path) -> set[str]:
    """Return the users in the vocabularies of all models of an artifact."""
    import pyarrow.parquet as pq

    tables = [pq.read_table(f) for f in artifact.rglob("*.parquet")]
    return {str(v) for t in tables for name in ("value", "key") if name in t.column_names for v in t[name].to_pylist()}


def test_models_on_a_server_are_uploaded_again_and_those_that_cannot_be_are_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws, runs = registered(tmp_path / "home", url)
    for n, run in enumerate(runs):
        assert values(on_server(url, run, tmp_path / f"before-{n}")) >= set(FORGOTTEN)
    listed = {p.name: p.rows for p in found_places(shop(), ws, PERSONS, NOW) if url in p.name}
    assert listed == {f"clicks version 1 on {url}": 3, f"clicks version 2 on {url}": 4}

    # Killed when a part of the first one is there.
    def killed(self: MlflowClient, run_id: str, folder: str, path: str) -> None:
        vocabulary, *_ = sorted(Path(folder).rglob("*.parquet"))
        self.log_artifact(run_id, str(vocabulary), f"{path}/{vocabulary.parent.relative_to(folder)}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifacts", killed)
        with pytest.raises(KeyboardInterrupt):
            erase(ws)
    assert {p.name for p in erase(ws) if url in p.name} == set(listed)
    for n, run in enumerate(runs):
        artifact = on_server(url, run, tmp_path / f"after-{n}")
        assert values(artifact).isdisjoint(FORGOTTEN)
        assert values(artifact) >= set(USERS) - set(FORGOTTEN)
        models = sorted(artifact.glob("models/**/model.json"))
        assert len(models) == n + 1
        for file in models:  # whole, by its checksums, and as the store has it
            load_predictor(file.parent)
            (stored,) = tmp_path.glob(f"home/models/clicks/*/{file.parts[-3]}/model/model.json")
            assert stored.read_bytes() == file.read_bytes()
    assert [p for p in found_places(shop(), ws, PERSONS, NOW) if url in p.name] == []
    assert list((ws.scratch / "registry").files()) == []

    # Each is brought here once: to see what was uploaded, or that there was nothing to go.
    fetched: list[str] = []
    real = MlflowClient.download_artifacts

    def counted(self: MlflowClient, run_id: str, *args: str) -> str:
        fetched.append(run_id)
        return str(real(self, run_id, *args))

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "download_artifacts", counted)
        for persons in (Persons("user_id", False, frozenset([USERS[4]])), PERSONS):
            *_, (request, _) = forget(shop(), ws, persons, NOW)
            assert request.finished == NOW  # type: ignore[union-attr]
            assert sorted(fetched) == sorted(runs)
            fetched.clear()
    assert values(on_server(url, runs[1], tmp_path / "second")).isdisjoint([*FORGOTTEN, USERS[4]])

    # Somebody else asks to be forgotten, of whom a model tells that the store has no more.
    another_person = Persons("user_id", False, frozenset([USERS[3]]))
    ws.locate("models").remove()
    with pytest.raises(UserError, match=rf"not all is erased: .*clicks version 1 on {url}.*delete its run {runs[0]}"):
        list(forget(shop(), ws, another_person, NOW))
