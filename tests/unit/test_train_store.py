"""Training from and to a store of objects: checkpoints go up while steps are taken, and a kill leaves the older one."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config.workspace import Workspace
from headrace.embeddings.checkpoint.files import TOKEN
from headrace.errors.stores import StoreAway
from headrace.stage.manifest import Manifest
from headrace.storage import Location, location
from headrace.storage.objects import calls
from headrace.storage.objects.store import ObjectStore
from headrace.train.callbacks.progress import ProgressEvent
from headrace.train.checkpoint import write as checkpoint
from headrace.train.checkpoint.read import list_steps
from headrace.train.job import Job
from headrace.train.loop.run import train_local
from tests.storage_support import left_over, memory_home
from tests.train_support import TRAIN, Stopped, assert_same_weights, job_of

#: Twelve steps, all of one epoch.
ONE_EPOCH = TRAIN.model_copy(update={"epochs": 1, "max_steps": 12, "checkpoint_steps": 4, "keep": 2})


@pytest.fixture
def jobs(
    tmp_path: Path, make_dataset: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[Job, Job]]:
    """A job in a store of objects, and the same on local files."""
    ws = Workspace(tmp_path / "home")
    manifest = make_dataset(ws, train=2400, valid=300)
    memory_home(monkeypatch, tmp_path / "cache", ("s3",))
    elsewhere = Workspace(tmp_path / "elsewhere", store_uri="s3://bucket/store")
    name = manifest.output("dataset").name
    with elsewhere.locate(name).new_folder() as folder:
        folder.copy_from(ws.locate(name))

    def make(key: str, **more: Any) -> tuple[Job, Job]:
        train = ONE_EPOCH.model_copy(update=more)
        return (
            job_of(elsewhere, manifest, key, train, store="s3://bucket/store", threads=1),
            job_of(ws, manifest, key, train, threads=1),
        )

    return make


@pytest.mark.parametrize("background", [False, True])
def test_steps_go_on_while_one_checkpoint_goes_up(
    background: bool, jobs: Callable[..., tuple[Job, Job]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload of the first waits for a step behind the next one's `lag`; that of the second begins after it."""
    stored, local = jobs("k", background_checkpoints=background)
    later, real, going = threading.Event(), calls.upload, set()

    def upload(bucket: Any, key: str, file: Path) -> None:
        if "/checkpoints/" in key:
            step = key[key.index("step-") :][: len("step-00000004")]
            going.add(step)
            if step == "step-00000004":
                assert later.wait(timeout=100)
                assert going == {step}
        real(bucket, key, file)

    monkeypatch.setattr(calls, "upload", upload)

    def on_progress(event: ProgressEvent) -> None:
        if event.phase == "train" and event.step == 7:
            assert list_steps(stored.checkpoints) == []
            later.set()

    report = train_local(stored, on_progress)
    assert later.is_set()
    assert going == {f"step-{n:08d}" for n in (4, 8, 12)}
    assert report.checkpoint_wait_seconds > 0
    train_local(local)
    assert list_steps(stored.checkpoints) == list_steps(local.checkpoints) == [12, 8]
    assert_same_weights(stored, local)
    assert left_over(stored.folder) == []
    assert list((tmp_path / "cache" / "new").iterdir()) == []


class Killed(BaseException):
    """The process is gone."""


#: A call that is the last one, and of which key.
_CALLS = {"upload": ("upload", "/data/step-00000008/"), "list": ("put_new", "/lists/step-00000008")}


@pytest.mark.parametrize("moment", _CALLS)
def test_a_kill_while_a_checkpoint_goes_up_leaves_the_one_before(
    moment: str, jobs: Callable[..., tuple[Job, Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, local = jobs("k")
    seen = []
    name, key_part = _CALLS[moment]
    with monkeypatch.context() as patch:
        real = getattr(calls, name)

        def call(bucket: Any, key: str, *more: Any) -> Any:
            if key_part in key:
                seen.append(key)
                raise Killed
            return real(bucket, key, *more)

        patch.setattr(calls, name, call)
        with pytest.raises(Killed):
            train_local(stored)
    assert seen
    assert list_steps(stored.checkpoints) == [4]
    assert train_local(stored).resumed_from_step == 4
    train_local(local)
    assert_same_weights(stored, local)
    assert left_over(stored.folder) == []


def test_what_ranks_of_a_lost_launch_upload_late_is_in_no_later_checkpoint(
    jobs: Callable[..., tuple[Job, Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost ranks are cut off from the driver, not from the store: they write just before the next launch publishes."""
    lost, local = jobs("k")
    lost = lost.model_copy(update={"token": "first"})
    lost.fence.put_text(lost.token)
    sent: set[str] = set()
    real_upload, real_put_new = calls.upload, calls.put_new

    def upload(bucket: Any, key: str, file: Path) -> None:
        real_upload(bucket, key, file)
        if "/data/step-00000008/" in key:
            sent.add(key)

    def put_new(bucket: Any, key: str, data: bytes) -> str | None:
        if "/lists/step-00000008" in key:
            if not late:
                raise Killed
            for sent_key in sent:
                calls.put(bucket, sent_key, b"late")
        return real_put_new(bucket, key, data)

    late = False
    with monkeypatch.context() as patch:
        patch.setattr(calls, "upload", upload)
        patch.setattr(calls, "put_new", put_new)
        with pytest.raises(Killed):
            train_local(lost)
        assert sent
        late = True
        patch.setattr(calls, "upload", real_upload)
        job = lost.model_copy(update={"token": "second"})
        job.fence.put_text(job.token)
        assert train_local(job).resumed_from_step == 4
    train_local(local)
    assert list_steps(job.checkpoints) == [12, 8]
    for step in (8, 12):
        files = (job.checkpoints / f"step-{step:08d}").files()
        assert all(file.read_bytes() != b"late" for file in files)
    assert_same_weights(job, local)


@pytest.mark.parametrize("place", ["store", "files"])
def test_a_chief_that_was_paused_empties_no_place_that_the_next_launch_fills(
    place: str, jobs: Callable[..., tuple[Job, Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chief wakes up right before the checkpoint whose files the other launch is writing."""
    job = jobs("k")[0 if place == "store" else 1].model_copy(update={"token": "first"})
    job.fence.put_text(job.token)
    step, token = job.checkpoints / "step-00000008", "second" if place == "store" else TOKEN
    real = checkpoint.CheckpointWriter._check_finite

    def paused(writer: Any, model: Any, dense: Any, number: int) -> None:
        real(writer, model, dense, number)
        if number == 8:
            job.fence.put_text("second")
            (step.begin(token) / "file").put_text("theirs")

    def exited(code: int) -> None:
        raise Killed

    monkeypatch.setattr(checkpoint.CheckpointWriter, "_check_finite", paused)
    monkeypatch.setattr(os, "_exit", exited)
    with pytest.raises(Killed):
        train_local(job)
    step.commit(token)
    assert (step / "file").read_text() == "theirs"
    assert list_steps(job.checkpoints) == [8, 4]


@pytest.mark.parametrize("part", ["checkpoint.json", "dense.safetensors", "embeddings"])
def test_a_checkpoint_with_an_object_that_was_changed_is_refused_and_the_one_before_is_used(
    part: str, jobs: Callable[..., tuple[Job, Job]], caplog: pytest.LogCaptureFixture
) -> None:
    stored, local = jobs("k")
    train_local(stored)
    step = stored.checkpoints / "step-00000012"
    changed = max((f for f in step.files() if f.below(step).startswith(part)), key=lambda f: f.path.suffix)
    store = location.STORES[changed.scheme]
    assert isinstance(store, ObjectStore)
    tree, key = store._resolve(changed.path)
    entry = tree.look(key, lambda bucket, k: calls.get_small(bucket, k, None))
    assert entry is not None
    calls.put(tree.bucket, entry[1].key, b"other")
    assert train_local(stored).resumed_from_step == 8
    assert "step-00000012 is refused" in caplog.text
    assert changed.name in caplog.text
    assert "changed in place" in caplog.text
    train_local(local)
    assert_same_weights(stored, local)


def test_a_rank_that_ends_by_an_error_uploads_no_further_file(
    jobs: Callable[..., tuple[Job, Job]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = jobs("k")
    monkeypatch.setattr(checkpoint, "_UPLOADS", 1)
    begun, rank_ended, sent = threading.Event(), threading.Event(), []
    real = calls.upload

    def upload(bucket: Any, key: str, file: Path) -> None:
        if "/checkpoints/" in key:
            sent.append(key)
            begun.set()
            assert rank_ended.wait(timeout=100)
        real(bucket, key, file)

    def on_progress(event: ProgressEvent) -> None:
        if event.phase == "train" and event.step == 5:
            assert begun.wait(timeout=100)
            raise Stopped

    monkeypatch.setattr(calls, "upload", upload)
    with pytest.raises(Stopped):
        train_local(stored, on_progress)
    threads = [t for t in threading.enumerate() if t.name == "checkpoint"]
    rank_ended.set()
    for thread in threads:
        thread.join()
    assert threads
    assert len(sent) == 1
    assert list_steps(stored.checkpoints) == []
    assert list((tmp_path / "cache" / "new").iterdir()) == []


@pytest.mark.parametrize("background", [False, True])
def test_a_full_scratch_disk_is_named_with_the_room_on_it(
    background: bool, jobs: Callable[..., tuple[Job, Job]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Location, tensors: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    stored, _ = jobs("k", background_checkpoints=background)
    with pytest.raises(OSError, match=rf"step 4 .*No space left.*; [0-9,]+ bytes are free in {tmp_path}") as raised:
        train_local(stored)
    assert raised.value.errno == 28
    assert list((tmp_path / "cache" / "new").iterdir()) == []


def test_what_was_copied_for_a_checkpoint_is_gone_when_it_goes_up(
    jobs: Callable[..., tuple[Job, Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[weakref.ref[Any]] = []
    left: list[bool] = []
    real_save, real_upload = checkpoint.save_tensors, calls.upload

    def save(path: Location, tensors: dict[str, Any]) -> Any:
        copied[:] = [weakref.ref(x) for x in tensors.values()]
        return real_save(path, tensors)

    def upload(bucket: Any, key: str, file: Path) -> None:
        if "/checkpoints/" in key:
            for _ in range(500):  # the loop's thread may still be within `save`
                if not any(left) and any(x() is not None for x in copied):
                    time.sleep(0.01)
            left.append(any(x() is not None for x in copied))
        real_upload(bucket, key, file)

    monkeypatch.setattr(checkpoint, "save_tensors", save)
    monkeypatch.setattr(calls, "upload", upload)
    train_local(jobs("k", background_checkpoints=True)[0])
    assert copied
    assert set(left) == {False}


def test_an_upload_that_fails_ends_training_with_the_step(
    jobs: Callable[..., tuple[Job, Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = jobs("k")
    real = calls.upload

    def upload(bucket: Any, key: str, file: Path) -> None:
        if "step-00000008" in key:
            raise StoreAway(f"{key}: HTTP error: 503 Slow Down")
        real(bucket, key, file)

    monkeypatch.setattr(calls, "upload", upload)
    with pytest.raises(StoreAway, match=r"checkpoint of step 8 could not be written \(.*step-00000008.* 503 Slow Down"):
        train_local(stored)
    assert list_steps(stored.checkpoints) == [4]
