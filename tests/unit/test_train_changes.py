"""Models saved as what changed since the day before: every reader finds what a whole one has."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
import torch

from headrace.comm.base import run_ranks
from headrace.config import build_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import load_predictor, maps_of, needed_models, read_meta
from headrace.models.saved import load_model
from headrace.stage import Context
from headrace.stage.manifest import Manifest, Output
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.run import train
from headrace.train.setup.earlier_days import find_warm_start
from headrace.train.stage import Train
from tests.train_support import MODEL, TRAIN, assert_same_weights, job_of

_DAYS = range(10, 14)
_ONCE = TRAIN.model_copy(update={"epochs": 1, "max_steps": 2})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("changes"))


@pytest.fixture(scope="module")
def days(home: Workspace, make_dataset: Callable[..., Manifest]) -> dict[str, list[tuple[Job, TrainingReport]]]:
    """Four days from model to model, on one or two ranks: as changes, a whole copy in three days; and all whole."""
    torch.set_num_threads(1)
    runs: dict[str, list[tuple[Job, TrainingReport]]] = {"changes": [], "whole": []}
    for day in _DAYS:
        features = make_dataset(home, train=800, valid=50, users=3_000 + day, ds=f"2026-01-{day}", seed=day)
        for form, full_copy_days in (("changes", 3), ("whole", None)):
            start = home.name_of(runs[form][-1][0].saved_model) if runs[form] else None
            more = {"warm_start": start, "full_copy_days": full_copy_days, "new_rows": "mean"}
            job = job_of(home, features, f"{form}-{day}", _ONCE, **more)
            runs[form].append((job, run_ranks(1 + day % 2, lambda c, job=job: train(job, c))[0]))
    return runs


def test_each_days_model_is_the_same_in_both_forms(
    days: dict[str, list[tuple[Job, TrainingReport]]], home: Workspace
) -> None:
    for (changes, report), (whole_job, plain) in zip(days["changes"], days["whole"], strict=True):
        assert_same_weights(changes, whole_job)
        assert plain.saved == {}
        assert report.metrics == plain.metrics
    saved = [report.saved for _, report in days["changes"]]
    assert [s["saves"] for s in saved] == [1, 2, 3, 1]
    assert [s["base"] for s in saved] == [None, *(home.name_of(j.saved_model) for j, _ in days["changes"][:2]), None]
    for s in saved[1:3]:
        assert s["whole_copy_bytes"] == saved[0]["embeddings_bytes"] > 2 * s["embeddings_bytes"]


def test_predictors_read_both_saves(days: dict[str, list[tuple[Job, TrainingReport]]], home: Workspace) -> None:
    changes, whole_model = (days[form][2][0].saved_model for form in ("changes", "whole"))
    rng = np.random.default_rng(3)
    columns = {"age": rng.normal(size=50).astype("f4"), "price": rng.normal(size=50).astype("f4")}
    columns |= {"user": rng.integers(0, 3_012, 50), "item": rng.integers(0, 40, 50)}
    columns |= {f"tags__{i}": rng.integers(0, 12, 50) for i in range(3)}
    expected = load_predictor(whole_model).predict(columns)
    np.testing.assert_array_equal(load_predictor(changes).predict(columns), expected)
    mapped = load_predictor(changes, maps=home.mapped("clicks"))
    np.testing.assert_array_equal(mapped.predict(columns), expected)
    assert maps_of(changes, home.mapped("clicks")) != maps_of(whole_model, home.mapped("clicks"))
    folders = [job.saved_model for job, _ in days["changes"]]
    assert needed_models(folders[2]) == (folders[2], folders[1], folders[0])
    assert needed_models(folders[3]) == (folders[3],)
    assert needed_models(whole_model) == (whole_model,)
    assert "base" not in read_meta(whole_model)


def test_a_base_that_is_gone_is_said(days: dict[str, list[tuple[Job, TrainingReport]]], home: Workspace) -> None:
    first, second = (job.saved_model for job, _ in days["changes"][:2])
    aside = first.local_path().with_name("aside")
    shutil.move(first.local_path(), aside)
    try:
        for reader in (read_meta, needed_models, load_predictor):
            with pytest.raises(UserError, match=r"holds the rows that changed since the model .*cannot be opened"):
                reader(second)
        with pytest.raises(UserError, match=r"holds the rows that changed since .*cannot be read"):
            load_model(second)
    finally:
        shutil.move(aside, first.local_path())
    load_model(second)


def test_a_base_that_was_trained_again_makes_the_days_upon_it_stale(
    days: dict[str, list[tuple[Job, TrainingReport]]], home: Workspace
) -> None:
    spec = build_spec(
        {
            "pipeline": "clicks",
            "source": {"format": "clicks", "path": "{ds}"},
            "table": {"columns": [{"name": "click", "type": "int"}]},
            "features": {"label": "click", "workflow": [], "split": {"by": "position"}},
            "model": MODEL.model_dump(mode="json", by_alias=True),
        }
    )
    with closing(sqlite3.connect(home.home / "mlflow.db")) as db:
        db.execute("CREATE TABLE model_versions (name TEXT, version INTEGER)")
    jobs, schema = [job for job, _ in days["changes"][:3]], days["changes"][3][0].features.dataset_schema
    assert schema is not None
    manifests = []
    for day, job in zip(_DAYS, jobs, strict=False):
        output = Output(kind="model", name=home.name_of(job.saved_model), version=job.key)
        ds = f"2026-01-{day}"
        manifest = Manifest(stage="train", pipeline="clicks", ds=ds, key=job.key, spec_hash="", outputs=(output,))
        manifest.save(home.manifest("clicks", ds, "train"))
        manifests.append(manifest)

    def stale() -> list[bool]:
        reasons = [Train().verify(Context(spec, home, m.ds), m) for m in manifests]
        assert all(reason is None or "that is another save by now" in reason for reason in reasons)
        return [reason is not None for reason in reasons]

    def start() -> str | None:
        warm_start = find_warm_start(home, spec, "2026-01-13", schema)
        return None if warm_start is None else warm_start.ds

    assert (stale(), start()) == ([False] * 3, "2026-01-12")
    first = jobs[0].saved_model.local_path()
    aside = first.with_name("aside")
    shutil.copytree(first, aside)
    try:
        run_ranks(4, lambda c: train(jobs[0], c))  # the same key and weights, written by another number of ranks
        assert (stale(), start()) == ([False, True, True], "2026-01-10")
        for reader in (read_meta, load_model):
            with pytest.raises(UserError, match="that is another save by now"):
                reader(jobs[2].saved_model)
    finally:
        shutil.rmtree(first)
        shutil.move(aside, first)
    assert stale() == [False] * 3
