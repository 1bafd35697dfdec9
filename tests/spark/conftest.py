"""A scored shop that several files share."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyspark.sql import SparkSession

from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer, Model
from headrace.config.workspace import Workspace
from headrace.features.build.stage import BuildFeatures
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.quality.drift.count_day import count_day
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest, Output
from headrace.storage import local
from headrace.train.baseline.stage import TrainBaseline
from headrace.udfs.arrow import xxhash64_strings
from tests.score_support import DS, TYPES, draw, spec, to_spark


@pytest.fixture(scope="session")
def shop_events() -> pd.DataFrame:
    return draw()


@pytest.fixture(scope="session")
def shop(spark: SparkSession, shop_events: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A day up to its two models: the real features and baseline stages, and a ShardedModel as it starts."""
    ws = Workspace(tmp_path_factory.mktemp("shop") / "home")
    stored = {**TYPES, "_source_file": "string", "_source_line": "bigint", "ds": "string"}
    path = ws.table("shop", "events").local_path()
    to_spark(spark, shop_events, stored).write.format("delta").partitionBy("ds").save(str(path))
    Manifest(
        stage="ingest",
        pipeline="shop",
        ds=DS,
        key="i",
        spec_hash="",
        outputs=(
            Output(kind="delta", name="lake/shop/events", version="0"),
            Output(kind="quarantine", name="lake/shop/quarantine", version="0"),
        ),
    ).save(ws.manifest("shop", DS, "ingest"))
    # A later commit must not be seen: the version is pinned.
    more = to_spark(spark, shop_events.head(50).assign(user=7, item="new"), stored)
    more.write.format("delta").mode("append").save(str(path))
    features = run_stage(BuildFeatures(count_day), spec(), ws, DS).manifest
    run_stage(TrainBaseline(), spec(), ws, DS)
    assert features.dataset_schema is not None
    shape = Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,))
    model = ShardedModel(features.dataset_schema, shape, LocalCollective(), 2)
    assert model.dynamic is not None
    assert model.absent is not None
    # Rows for some of the ids; the others have one vector for all.
    model.configure_optimizer(EmbeddingOptimizer())
    model.train()
    ids = [torch.arange(10**11, 10**11 + 30), torch.from_numpy(xxhash64_strings(pa.array(["z2", "é1"])))]
    model.dynamic.answer(model.dynamic.unique_ids(ids))
    torch.nn.init.normal_(model.absent)
    folder = ws.model("shop", DS, "t").local_path() / "model"
    workflow = ws.home / features.output("dataset").name / "workflow"
    save_model(local(folder), model, workflow=local(workflow), pipeline="shop", ds=DS, key="t", metrics={"auc": 0.5})
    Manifest(
        stage="train",
        pipeline="shop",
        ds=DS,
        key="t",
        spec_hash="",
        facts={"metrics": {"auc": 0.5}},
        outputs=(Output(kind="model", name=str(folder.relative_to(ws.home)), version="t"),),
    ).save(ws.manifest("shop", DS, "train"))
    return ws
