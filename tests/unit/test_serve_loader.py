"""The served part of a repository, and what is said of the rest: requests to load, releases, readiness."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
pytest.importorskip("onnx", reason="ONNX is not installed: run `make onnx`")
from headrace.export.serve.loader import Loader
from headrace.export.serve.model import Model
from headrace.export.serve.options import Control, Metrics, RequestError, ServeOptions
from headrace.export.serve.repository import VersionFolder
from tests.serve_support import add_version, exact_graph


class CountingLoader(Loader):
    """Says which versions it has tried to load."""

    def __init__(self, options: ServeOptions, runs: ThreadPoolExecutor) -> None:
        super().__init__(options, runs, Metrics())
        self.tried: list[tuple[str, int]] = []

    def _models(self, folder: VersionFolder) -> dict[str, Model]:
        self.tried.append((folder.model, folder.version))
        return super()._models(folder)


def started(
    repository: Path,
    control: Control,
    models: tuple[str, ...],
    body: Callable[[CountingLoader], Coroutine[Any, Any, None]],
) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as runs:
            options = ServeOptions(repository, control=control, models=models, poll_seconds=0.01, threads=1)
            loader = CountingLoader(options, runs)
            try:
                await loader.start()
                await body(loader)
            finally:
                loader.close()

    asyncio.run(run())


async def refusal(request: Coroutine[Any, Any, Any]) -> tuple[int, str]:
    with pytest.raises(RequestError) as refused:
        await request
    return refused.value.status, refused.value.message


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository of models a and c that can be loaded, and b that cannot."""
    for model in "ac":
        add_version(tmp_path / "models", model, 1, exact_graph(1))
    add_version(tmp_path / "models", "b", 1, b"torn")
    return tmp_path / "models"


def release(repository: Path, **models: int) -> None:
    (repository / "release.json").write_text(json.dumps({"models": models}))


def test_a_model_that_is_not_served_is_not_said_to_be_loaded(repository: Path) -> None:
    release(repository, a=1, b=1)

    async def ask(loader: CountingLoader) -> None:
        assert await refusal(loader.load("c")) == (400, "model 'c': release.json does not name it")
        status, reason = await refusal(loader.load("b"))
        assert (status, "version 1 of model 'b' cannot be loaded: onnxruntime" in reason) == (400, True)
        assert (loader.catalogue.current, loader.catalogue.failures, loader.catalogue.ready) == ({"a": 1}, {}, True)
        await loader.load("a")
        (repository / "release.json").write_text("{")
        for model in "ac":
            status, reason = await refusal(loader.load(model))
            assert (status, "release.json is no release" in reason) == (503, True)
        assert (loader.catalogue.current, loader.catalogue.ready) == ({"a": 1}, True)

    started(repository, "explicit", ("a",), ask)


def test_another_model_of_the_release_cannot_be_loaded(repository: Path) -> None:
    release(repository, a=1, b=1)

    async def ask(loader: CountingLoader) -> None:
        assert (loader.catalogue.current, loader.catalogue.ready) == ({"a": 1}, False)
        add_version(repository, "a", 2, exact_graph(2))
        release(repository, a=2, b=1)
        status, reason = await refusal(loader.load("a"))
        assert status == 400
        assert "version 2 of model 'a' is of a release of which version 1 of model 'b' cannot be loaded" in reason
        await loader.unload("b")
        assert (loader.catalogue.current, loader.catalogue.ready) == ({"a": 1}, True)
        await loader.load("a")
        assert (loader.catalogue.current, loader.catalogue.ready) == ({"a": 2}, True)

    started(repository, "explicit", ("a", "b"), ask)


def test_what_is_asked_for_and_not_there_is_not_ready(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def typo(loader: CountingLoader) -> None:
        assert (loader.catalogue.current, loader.catalogue.ready) == ({}, False)
        assert "model 'typo' is not served: model 'typo': the repository has no version of it" in caplog.text
        await loader.load("c")
        assert not loader.catalogue.ready
        await loader.unload("typo")
        assert loader.catalogue.ready

    started(repository, "explicit", ("typo",), typo)
    release(repository, c=1)

    async def all_of_a_release(loader: CountingLoader) -> None:
        assert (loader.catalogue.current, loader.catalogue.ready) == ({"c": 1}, True)

    started(repository, "explicit", (), all_of_a_release)


def test_a_release_that_fails_is_loaded_once(repository: Path) -> None:
    release(repository, a=1, c=1)

    async def follow(loader: CountingLoader) -> None:
        polling = asyncio.create_task(loader.poll())
        for model in "ac":
            add_version(repository, model, 2, exact_graph(2))
        release(repository, a=2, b=1, c=2)

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not condition():
                    await asyncio.sleep(0.01)

        await until(lambda: bool(loader.catalogue.failures))
        tried = list(loader.tried)
        assert tried.count(("b", 1)) == 1
        await asyncio.sleep(0.2)
        assert loader.tried == tried
        assert (loader.catalogue.current, loader.catalogue.ready) == ({"a": 1, "c": 1}, True)
        shutil.rmtree(repository / "b" / "1")
        add_version(repository, "b", 1, exact_graph(3))
        await until(lambda: loader.catalogue.current == {"a": 2, "b": 1, "c": 2})
        assert loader.catalogue.ready
        polling.cancel()

    started(repository, "poll", (), follow)


def test_a_repository_that_has_gone(repository: Path) -> None:
    async def ask(loader: CountingLoader) -> None:
        shutil.rmtree(repository)
        for request in (loader.index(), loader.load("a")):
            status, reason = await refusal(request)
            assert (status, "the repository cannot be read" in reason) == (503, True)

    started(repository, "explicit", ("a",), ask)
