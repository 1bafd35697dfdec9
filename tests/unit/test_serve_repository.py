"""Reading a model repository that changes meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.export.serve import repository
from headrace.export.serve.repository import GRAPH, VersionFolder, read_repository


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for name in ("a", "b", "c"):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / GRAPH).write_bytes(b"graph")
    return folder


def test_every_model_and_version_is_found(models: Path) -> None:
    assert {m: list(v) for m, v in read_repository(models).versions.items()} == {"a": [1], "b": [1], "c": [1]}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_repository_that_moves_while_it_is_read_has_lost_no_model(
    models: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """A model that has not been looked at yet is not in its old place any more, yet it was not removed."""
    look = repository._version

    def then_it_moves(model: str, folder: Path) -> VersionFolder:
        version_folder = look(model, folder)
        if model == "a":
            models.rename(models.with_name("aside"))
            if replaced:
                models.mkdir()
        return version_folder

    monkeypatch.setattr(repository, "_version", then_it_moves)
    with pytest.raises(OSError, match=r"replaced|No such file"):
        read_repository(models)
