"""Scratch of a process, and its copies of a store's files: on the driver's host, and on others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.storage.objects import copies
from headrace.train.job import Job
from headrace.train.launch.worker import place_copies
from tests.train_support import job_of

STORE = "s3://bucket/folder"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HEADRACE_SCRATCH of this process, of which no workspace has said yet where its copies are."""
    monkeypatch.delenv(copies.VARIABLE, raising=False)
    monkeypatch.setattr(copies, "_workspace_folder", [])
    monkeypatch.setenv(copies.SCRATCH, str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def job(tmp_path: Path, make_dataset: Callable[..., Manifest]) -> Job:
    """Return a job whose driver has its home on another host."""
    features = make_dataset(Workspace(tmp_path / "made"), train=40, valid=40)
    return job_of(Workspace(tmp_path / "elsewhere" / "home"), features, "k", store=STORE)


def test_the_drivers_own_scratch_is_not_that_of_other_hosts(tmp_path: Path, scratch: Path) -> None:
    """A pipeline names one for all hosts; the environment that of the host whose it is."""
    ws = Workspace.from_environment(tmp_path / "home", {"HEADRACE_LAKE": STORE, "HEADRACE_SCRATCH": str(scratch)})
    assert ws.encoded("clicks") == local(scratch).transient() / "encoded" / "clicks"
    assert copies.folder() == scratch / "cache"
    assert (ws.scratch_folder, ws.on_hosts(ws.encoded("clicks")).folder) == (None, None)
    named = ws.of(load_spec("clicks", [f"scratch={tmp_path / 'disk'}"]))
    assert named.encoded("clicks") == local(tmp_path / "disk").transient() / "encoded" / "clicks"
    assert named.on_hosts(named.encoded("clicks")).folder == local(tmp_path / "disk")
    # Without both it is all below the home.
    assert Workspace.from_environment(tmp_path / "home", {}).scratch == local(tmp_path / "home").transient()


def test_a_rank_has_its_copies_where_its_host_says(job: Job, scratch: Path) -> None:
    place_copies(job)
    assert job.ws.scratch == local(scratch).transient()
    assert copies.folder() == scratch / "cache"


def test_a_rank_has_its_copies_where_the_pipeline_says(job: Job, scratch: Path) -> None:
    job = job.model_copy(update={"scratch": str(scratch.with_name("disk"))})
    place_copies(job)
    assert job.ws.store.scheme == "s3"
    assert copies.folder() == scratch.with_name("disk") / "cache"


def test_a_rank_of_a_host_that_says_nothing_writes_nothing_below_the_drivers_home(
    job: Job, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(copies.SCRATCH)
    place_copies(job)
    assert job.ws.store.scheme == "s3"
    assert copies.folder() == Path(tempfile.gettempdir()) / f"headrace-cache-{os.getuid()}"
    # On the driver's host, and where its home is shared, it does as the driver.
    monkeypatch.setattr(copies, "_workspace_folder", [])
    job.home.mkdir(parents=True)
    place_copies(job)
    assert job.ws.store.scheme == "s3"
    assert copies.folder() == job.home / "cache"


def test_what_others_keep_in_a_store_is_no_folder_of_headraces_own(tmp_path: Path) -> None:
    ws = Workspace.from_environment(
        tmp_path / "home", {"HEADRACE_LAKE": "s3://mine/lake", "HEADRACE_STORE": "s3://mine/store"}
    )
    assert not ws.locate("s3://mine/lake/lake/clicks/events").plain
    assert not ws.locate("s3://mine/store/models/x").plain
    assert ws.locate("s3://mine/other/events").plain
    assert ws.locate("s3://theirs/events").plain


def test_a_workspace_changes_nothing_of_the_process_s_environment(scratch: Path, tmp_path: Path) -> None:
    environ = dict(os.environ)
    first = Workspace(tmp_path / "first", store_uri=STORE, scratch_folder=str(tmp_path / "disk"))
    Workspace(tmp_path / "second", store_uri=STORE)
    assert first.store.scheme == "s3"
    assert copies.folder() == tmp_path / "disk" / "cache"
    assert os.environ == environ
