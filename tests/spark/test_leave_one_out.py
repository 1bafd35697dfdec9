"""The pipeline `movielens` over another data set of the same form, by `source.path` alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pyspark.sql import SparkSession

from headrace.config import load_overlay, load_spec
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.features.build.stage import BuildFeatures
from headrace.lake.landing.stage import Ingest
from headrace.models.predictor import load_predictor
from headrace.stage import run_stage
from headrace.train.job import Job
from headrace.train.loop.run import train_local
from tests.train_support import read_padded

USERS, ITEMS, CANDIDATES = 60, 80, 25


@pytest.fixture
def pins(ws: Workspace) -> Workspace:
    """Pins as the authors of the protocol wrote them: three fields, no times, other names and fewer candidates."""
    rng = np.random.default_rng(4)
    folder = ws.home / "pins"
    folder.mkdir(parents=True)
    chosen = [rng.permutation(ITEMS) for _ in range(USERS)]
    lines = [f"{u}\t{i}\t1\n" for u, items in enumerate(chosen) for i in items[: 20 + u % 7]]
    (folder / "pinterest-20.train.rating").write_text("".join(lines))
    left_out = [f"{u}\t{items[30]}\t1\n" for u, items in enumerate(chosen)]
    (folder / "pinterest-20.test.rating").write_text("".join(left_out))
    listed = [f"({u},{x[30]})\t" + "\t".join(map(str, x[31 : 31 + CANDIDATES])) + "\n" for u, x in enumerate(chosen)]
    (folder / "pinterest-20.test.negative").write_text("".join(listed))
    return ws


def test_other_files_of_the_same_form_need_their_path_alone(spark: SparkSession, pins: Workspace) -> None:
    overrides = [f"source.path={pins.home / 'pins'}/*"]
    neumf = load_overlay(checkout() / "conf" / "overlays" / "neumf.yaml")
    spec = load_spec("movielens", overrides)
    assert spec.ds is not None
    for stage in (Ingest(), BuildFeatures()):
        run_stage(stage, spec, pins, spec.ds)
    manifest = run_stage(BuildFeatures(), spec, pins, spec.ds).manifest
    train_rows = sum(20 + u % 7 for u in range(USERS)) - USERS
    assert manifest.rows["train"] == train_rows
    assert manifest.rows["rank"] == USERS * (1 + CANDIDATES)
    schema = manifest.dataset_schema
    assert schema is not None
    dataset = pins.home / manifest.output("dataset").name
    rank = read_padded(sorted((dataset / "rank").glob("*.parquet")), schema)
    torch.set_num_threads(1)
    for key, overlay in (("dlrm", []), ("neumf", neumf)):
        spec = load_spec("movielens", [*overlay, *overrides])
        job = Job(
            home=pins.home,
            pipeline=spec.pipeline,
            ds=str(spec.ds),
            key=key,
            features=manifest,
            model=spec.model,
            train=spec.train.model_copy(update={"ranks": 1}),
        )
        report = train_local(job)
        rows = rank.assign(score=load_predictor(job.saved_model).predict({c: rank[c].to_numpy() for c in rank}))
        hits, gains = [], []
        for _, user_rows in rows.groupby("user_id"):
            (positive_score,) = user_rows[user_rows.label == 1].score
            place = int((user_rows[user_rows.label == 0].score >= positive_score).sum())
            hits.append(place < 10)
            gains.append(1 / np.log2(place + 2) if place < 10 else 0.0)
        assert len(hits) == USERS
        assert report.metrics["hr_at_k"] == pytest.approx(np.mean(hits))
        assert report.metrics["ndcg_at_k"] == pytest.approx(np.mean(gains))
