"""The stage around the loop: what it starts from, what it asks of Spark, what it shows."""

from __future__ import annotations

import io
import json
import logging
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Model, Spark, Spec, build_spec
from headrace.config.operations import with_slots
from headrace.config.schema import DatasetSchema
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.stores import StoreError
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import Location, local
from headrace.train.callbacks.progress import ProgressBar, ProgressEvent, ProgressReader, ProgressWriter, show
from headrace.train.setup.earlier_days import find_warm_start


@pytest.fixture
def spec() -> Spec:
    return build_spec(
        {
            "pipeline": "clicks",
            "source": {"format": "clicks", "path": "{ds}"},
            "table": {"columns": [{"name": "click", "type": "int"}]},
            "features": {"label": "click", "workflow": [], "split": {"by": "position"}},
            "model": {"embedding_dim": 4},
        }
    )


@pytest.fixture
def schema(ws: Workspace, make_dataset: Callable[..., Manifest]) -> DatasetSchema:
    dataset_schema = make_dataset(ws, train=10, valid=2).dataset_schema
    assert dataset_schema is not None
    return dataset_schema


def finished(ws: Workspace, ds: str, schema: DatasetSchema, model: Model, *, complete: bool = True) -> str:
    """A day's finished training, as far as looking for a start goes."""
    folder = ws.model("clicks", ds, f"key-{ds}").local_path() / "model"
    for part in ("embeddings", "workflow"):
        (folder / part).mkdir(parents=True)
    meta = {
        "kind": "dlrm",
        "model": model.model_dump(mode="json"),
        "schema": schema.model_dump(mode="json"),
        "pipeline": "clicks",
        "ds": ds,
        "key": f"key-{ds}",
        "metrics": {},
    }
    (folder / "model.json").write_text(json.dumps(meta))
    if complete:
        (folder / "dense.safetensors").write_bytes(b"")
    name = str(folder.relative_to(ws.home))
    Manifest(
        stage="train",
        pipeline="clicks",
        ds=ds,
        key=f"key-{ds}",
        spec_hash="",
        outputs=(Output(kind="model", name=name, version=f"key-{ds}"),),
    ).save(ws.manifest("clicks", ds, "train"))
    return name


def grown(schema: DatasetSchema, by: int) -> DatasetSchema:
    return DatasetSchema(
        features=tuple(
            f.model_copy(update={"cardinality": f.cardinality + by}) if f.cardinality else f for f in schema.features
        )
    )


def test_the_newest_earlier_model_that_fits(
    ws: Workspace, spec: Spec, schema: DatasetSchema, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace")
    assert find_warm_start(ws, spec, "2026-01-05", schema) is None
    finished(ws, "2026-01-01", schema, spec.model)
    name = finished(ws, "2026-01-02", schema, spec.model)
    finished(ws, "2026-01-03", schema, Model(embedding_dim=8))
    finished(ws, "2026-01-04", schema, spec.model, complete=False)
    finished(ws, "2026-01-05", schema, spec.model)  # the day itself does not count
    finished(ws, "2026-01-06", schema, spec.model)
    start = find_warm_start(ws, spec, "2026-01-05", grown(schema, 3))
    assert start is not None
    assert (start.ds, start.name, start.version) == ("2026-01-02", name, "key-2026-01-02")
    assert (
        "not starting from the model of stage train of 2026-01-03: its model.embedding_dim is 8, now 4" in caplog.text
    )
    assert "not starting from the model of stage train of 2026-01-04" in caplog.text


def test_a_start_that_was_removed_is_that_of_a_run_that_began_with_it(
    ws: Workspace, spec: Spec, schema: DatasetSchema
) -> None:
    first = finished(ws, "2026-01-01", schema, spec.model)
    second = finished(ws, "2026-01-02", schema, spec.model)
    file = ws.manifest("clicks", "2026-01-02", "train")
    manifest = Manifest.load(file)
    assert manifest is not None
    manifest.with_removed({second}).save(file)
    ws.locate(second).remove()
    start = find_warm_start(ws, spec, "2026-01-03", schema)
    assert start is not None
    assert start.name == first  # a new run begins with what is there
    begun_inputs = (Input(kind="model", name=second, version="key-2026-01-02"),)
    start = find_warm_start(ws, spec, "2026-01-03", schema, begun_inputs)
    assert start is not None
    assert start.name == second  # one that is done keeps its key


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: grown(s, -1), "its vocabulary of 'user' has 60 codes, the dataset's 59"),
        (lambda s: DatasetSchema(features=s.features[1:]), "its continuous features are others"),
        (lambda s: DatasetSchema(features=(*s.features[:2], *s.features[3:])), "its categorical features are others"),
    ],
)
def test_a_model_that_does_not_fit_is_named_with_the_reason(
    ws: Workspace,
    spec: Spec,
    schema: DatasetSchema,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[DatasetSchema], DatasetSchema],
    reason: str,
) -> None:
    caplog.set_level(logging.INFO, "headrace")
    finished(ws, "2026-01-01", schema, spec.model)
    assert find_warm_start(ws, spec, "2026-01-02", change(schema)) is None
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("master", "ranks", "expected"),
    [
        ("local[1]", 2, "local[2]"),
        ("local", 3, "local[3]"),
        ("local[8]", 2, "local[8]"),
        ("yarn", 4, "yarn"),
        ("local-cluster[2,1,1024]", 4, "local-cluster[2,1,1024]"),
    ],
)
def test_the_session_has_a_slot_for_each_rank(master: str, ranks: int, expected: str) -> None:
    assert with_slots(Spark(master=master), ranks).master == expected


def test_all_cores_are_kept_where_there_are_more_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert with_slots(Spark(), 2).master == "local[6]"
    assert with_slots(Spark(), 8).master == "local[8]"


TICKS = [
    ProgressEvent(
        phase="train", step=step, total=100, epoch=1, epochs=2, loss=0.5123, samples_per_s=12_345.6, seconds_left=75.2
    )
    for step in (1, 2, 100)
]


def test_what_rank_0_says_is_heard_while_it_speaks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace")
    path = tmp_path / "progress.jsonl"
    heard: list[int] = []
    first = threading.Event()

    def on_progress(tick: ProgressEvent) -> None:
        heard.append(tick.step)
        first.set()

    with ProgressReader(local(path), ProgressBar(io.StringIO(), every=3600), on_progress):
        writer = ProgressWriter(local(path))
        writer.handle(logging.makeLogRecord({"msg": "%d ranks", "args": (2,), "levelno": logging.WARNING}))
        writer.write(TICKS[0])
        assert first.wait(30)  # heard before the file is closed
        with open(path, "a") as f:
            f.write('{"text": "half a l')
            f.flush()
            f.write('ine", "level": 20}\n')
        writer.write(TICKS[1])
        writer.write(TICKS[2])
    assert heard == [1, 2, 100]
    assert [r.message for r in caplog.records] == ["2 ranks", show(TICKS[0]), "half a line", show(TICKS[2])]
    assert caplog.records[0].levelno == logging.WARNING
    assert "epoch 1/2  step 100/100  loss 0.5123  12,346 samples/s  1:15 left" in caplog.text


def test_rank_0_is_heard_again_when_the_store_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, opened, away = threading.Event(), Location.open, iter([StoreError("503 Slow Down")] * 2)

    def open_when_back(self: Location, *args: Any) -> Any:
        for error in away:
            raise error
        return opened(self, *args)

    monkeypatch.setattr(Location, "open", open_when_back)
    path = local(tmp_path / "progress.jsonl")
    ProgressWriter(path).write(TICKS[0])
    with ProgressReader(path, ProgressBar(io.StringIO()), lambda tick: heard.set()):
        assert heard.wait(30)


def test_progress_on_a_terminal_is_one_line_that_is_rewritten() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    console = ProgressBar(out)
    for tick in TICKS:
        console.update(tick)
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().count("\r") == 3


def test_a_model_that_is_gone_is_made_again(ws: Workspace, spec: Spec, schema: DatasetSchema, tmp_path: Path) -> None:
    from headrace.stage import Context
    from headrace.train.stage import Train

    ctx = Context(spec=spec, ws=ws, ds="2026-01-01")
    name = finished(ws, "2026-01-01", schema, spec.model)
    manifest = Manifest.load(ws.manifest("clicks", "2026-01-01", "train"))
    assert manifest is not None
    (ws.home / name / "embeddings" / "index.json").write_text('{"files": []}')
    with closing(sqlite3.connect(ws.home / "mlflow.db")) as db:
        db.execute("CREATE TABLE model_versions (name TEXT, version INTEGER)")
    assert Train().verify(ctx, manifest) is None
    (ws.home / "mlflow.db").unlink()
    assert "registry is gone" in str(Train().verify(ctx, manifest))
    (ws.home / name / "model.json").unlink()
    assert "model.json is missing" in str(Train().verify(ctx, manifest))


def test_a_dataset_that_cannot_be_trained_on_is_refused_before_any_launch(
    ws: Workspace, make_dataset: Callable[..., Manifest]
) -> None:
    from headrace.train.job import Job
    from headrace.train.stage import check_dataset

    features = make_dataset(ws, train=100, groups=2)

    def job(**train: Any) -> Job:
        return Job.model_validate(
            {
                "home": ws.home,
                "pipeline": "clicks",
                "ds": "2026-01-10",
                "key": "k",
                "features": features,
                "model": Model(),
                "train": train,
            }
        )

    check_dataset(job(streams=2, batch_size=10))
    with pytest.raises(UserError, match=r"fewer than train.streams"):
        check_dataset(job(streams=4, batch_size=8))
    with pytest.raises(UserError, match=r"train.negatives.column"):
        check_dataset(job(streams=2, batch_size=10, negatives={"column": "colour"}))
    with pytest.raises(UserError, match="has no split 'rank'"):
        check_dataset(job(streams=2, batch_size=10, rank_group="query"))
