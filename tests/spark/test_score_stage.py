"""The score stage against a cross join in pandas, with features by training's own Spark expressions."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headrace as hr
from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer, Model, Spec, Task, VectorSource, build_spec
from headrace.config.rerank import Rerank
from headrace.drift.count_day import count_day
from headrace.errors import UserError
from headrace.features.build.stage import BuildFeatures
from headrace.features.engines.spark.transform import transform
from headrace.features.table_ops.external import ExternalReader
from headrace.features.types import declared
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Input, Manifest, Output
from headrace.models.predictor import load_predictor
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.registry import register
from headrace.schema import TableColumn
from headrace.score.candidates.candidates import UserCandidates, candidates_of_users
from headrace.score.candidates.source import FETCH, SourceContext
from headrace.score.candidates.vectors.source import VectorItems
from headrace.score.items import ITEM_ROW, ItemTable
from headrace.score.rank.blocks import ITEMS
from headrace.score.rerank.lists import RankedLists, Rule
from headrace.score.rerank.rerank import rerank
from headrace.score.scoring_model import pinned_model, scoring_model
from headrace.score.stage import ScoreCandidates
from headrace.score.table import score_table
from headrace.score.vectors.stage import ExportVectors
from headrace.stage import Context, run_stage
from headrace.storage import local
from headrace.train.baseline.stage import TrainBaseline
from headrace.udfs.xxhash64 import xxhash64_integers, xxhash64_strings
from headrace.workspace import Workspace

DS = "2026-01-05"
#: One name has a dot, as of a field of JSON: to Spark it is one column, quoted.
TYPES = {
    "user": "bigint",
    "age": "int",
    "home.city": "string",
    "likes": "array<string>",
    "item": "string",
    "price": "double",
    "hour": "int",
    "ts": "timestamp",
    "click": "int",
}


def spec(**score: Any) -> Spec:
    base: dict[str, Any] = {
        "user": {"key": "user", "columns": ["age", "home.city", "likes"]},
        "item": {"key": "item", "columns": ["price"], "limit": 12},
        "context": {"hour": 20},
        "top_k": 5,
    }
    return build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "jsonl", "path": "{ds}/*"},
            "table": {"columns": [{"name": k, "type": v} for k, v in TYPES.items()], "event_time": "ts"},
            "features": {
                "label": "click",
                "window_days": 3,
                "split": {"by": "time", "valid_days": 1},
                "min_row_groups": 4,
                "workflow": [
                    {"columns": ["age", "price"], "ops": ["fill_missing", "log", "normalize"]},
                    {"columns": ["hour"], "ops": ["categorify"]},
                    {"columns": ["user", "item"], "ops": [{"categorify": {"min_count": 2}}]},
                    {"columns": ["home.city"], "ops": [{"hash_bucket": {"buckets": 5}}]},
                    {"columns": ["user", "item"], "ops": ["raw_id", {"rename": {"suffix": "_raw"}}]},
                    {"columns": ["likes"], "ops": ["categorify", {"pad": {"length": 2}}]},
                    # Of both sides: computed for each pair.
                    {"columns": ["user", "hour", "item"], "ops": [{"hashed_cross": {"buckets": 3, "to": "pair"}}]},
                ],
            },
            "baseline": {"rounds": 4, "max_depth": 2, "workers": 1},
            "score": base | score,
        }
    )


def draw(rows: int = 1500, seed: int = 4) -> pd.DataFrame:
    """Six days of events; columns of a user and of an item change from one event to the next; keys may be null."""
    rng = np.random.default_rng(seed)
    start = pd.Timestamp("2025-12-31")

    def maybe(values: np.ndarray, rate: float = 0.1) -> list[Any]:
        return [None if gone else v for v, gone in zip(values.tolist(), rng.random(len(values)) < rate, strict=True)]

    # Whole hours: many events of a user happen at the same time, and the place in the source decides.
    hours = rng.integers(0, 24 * 6, rows)
    frame = pd.DataFrame(
        {
            "user": pd.Series(maybe(rng.integers(10**11, 10**11 + 60, rows), 0.02), dtype=object),
            "age": pd.Series(maybe(rng.integers(18, 60, rows)), dtype=object),
            "home.city": maybe(rng.choice(["Genf", "Zürich", "Bern"], rows)),
            "likes": [list(rng.choice(["a", "b", "c", "d"], rng.integers(0, 4))) for _ in range(rows)],
            "item": maybe(np.array([f"é{i}" if i % 2 else f"z{i}" for i in rng.zipf(1.3, rows) % 30]), 0.02),
            "price": pd.Series(maybe(rng.gamma(2, 9, rows)), dtype=object),
            "hour": hours % 24,
            "ts": start + pd.to_timedelta(hours, unit="h"),
            "click": (rng.random(rows) < 0.3).astype(int),
            "_source_file": [f"f{i % 3}.json" for i in range(rows)],
            "_source_line": np.arange(rows),
        }
    )
    late = rng.integers(0, 2, rows)
    frame["ds"] = (frame["ts"].dt.normalize() + pd.to_timedelta(late, unit="D")).dt.strftime("%Y-%m-%d")
    return frame


def to_spark(spark: SparkSession, frame: pd.DataFrame, columns: dict[str, str]) -> DataFrame:
    def values(name: str) -> list[Any]:
        found = frame[name].tolist()
        return [[str(x) for x in v] if isinstance(v, list) else None if v is None or v != v else v for v in found]

    arrow = {name: declared(TableColumn(name=name, type=type_)).arrow for name, type_ in columns.items()}
    table = pa.table([pa.array(values(name), type_) for name, type_ in arrow.items()], list(arrow))
    return spark.createDataFrame(table)


@pytest.fixture(scope="module")
def events() -> pd.DataFrame:
    return draw()


@pytest.fixture(scope="module")
def day(spark: SparkSession, events: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A day up to its two models: the real features and baseline stages, and a ShardedModel as it starts."""
    ws = Workspace(tmp_path_factory.mktemp("shop") / "home")
    stored = {**TYPES, "_source_file": "string", "_source_line": "bigint", "ds": "string"}
    path = ws.table("shop", "events").local_path()
    to_spark(spark, events, stored).write.format("delta").partitionBy("ds").save(str(path))
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
    more = to_spark(spark, events.head(50).assign(user=7, item="new"), stored)
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


def sides(events: pd.DataFrame, item_limit: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Users and items by pandas: active on 2 to 4 January, columns of the newest event up to the 5th."""
    window = events[(events.ts >= "2026-01-02") & (events.ts < "2026-01-06") & (events.ds <= DS)]
    train = window[window.ts < "2026-01-05"]
    newest = window.sort_values(["ts", "_source_file", "_source_line"])

    def side(key: str, columns: list[str], limit: int | None) -> pd.DataFrame:
        counts = train[key].value_counts()
        order = sorted(counts.index, key=lambda k: (-counts[k], k.encode() if isinstance(k, str) else k))[:limit]
        last = newest.drop_duplicates(key, keep="last").set_index(key)
        return last.loc[order, columns].reset_index()

    return side("user", ["age", "home.city", "likes"], None), side("item", ["price"], item_limit)


def expected(
    spark: SparkSession,
    ws: Workspace,
    events: pd.DataFrame,
    stage: str,
    k: int = 5,
    limit: int = 12,
    clicked: set[tuple[Any, Any]] | None = None,
    output: str | None = None,
) -> pd.DataFrame:
    """Every pair as a row of the events table, through training's transform, the model, and a sort."""
    users, items = sides(events, limit)
    pairs = users.merge(items, how="cross").assign(hour=20)
    folder = ws.home / _manifest(ws, stage).output("model").name
    fitted = FittedWorkflow.load(local(folder / "workflow"))
    columns = {c: TYPES[c] for c in pairs.columns}
    made = transform(fitted, to_spark(spark, pairs, columns), keep={"u": "user", "i": "item"}).toPandas()
    physical = {c: made[c].to_numpy() for f in fitted.features for c in f.physical}
    made = made[["u", "i"]].rename(columns={"u": "user", "i": "item"})
    made["score"] = load_predictor(folder, threads=1, output=output).predict(physical)
    if clicked is not None:
        made = made[[pair not in clicked for pair in zip(made.user, made.item, strict=True)]]
    made["bytes"] = made["item"].str.encode("utf-8")
    made = made.sort_values(["user", "score", "bytes"], ascending=[True, False, True])
    made["rank"] = made.groupby("user").cumcount() + 1
    return made[made["rank"] <= k][["user", "item", "rank", "score"]].reset_index(drop=True)


def _manifest(ws: Workspace, stage: str) -> Manifest:
    found = Manifest.load(ws.manifest("shop", DS, stage))
    assert found is not None
    return found


def scores(spark: SparkSession, ws: Workspace, ds: str = DS) -> pd.DataFrame:
    frame = spark.read.format("delta").load(str(ws.table("shop", "scores"))).where(F.col("ds") == ds)
    return frame.orderBy("user", "rank").toPandas()


def test_equals_brute_force_and_reruns(spark: SparkSession, day: Workspace, events: pd.DataFrame) -> None:
    s = spec(model="baseline")
    done = run_stage(ScoreCandidates(), s, day, DS).manifest
    found, wanted = scores(spark, day), expected(spark, day, events, "baseline")
    pd.testing.assert_frame_equal(found[["user", "item", "rank", "score"]], wanted, check_dtype=False, check_exact=True)
    # Worth something: shallow trees give many ties.
    assert wanted.duplicated(["user", "score"]).sum() > len(wanted) / 10
    assert list(found.columns) == ["ds", "user", "item", "rank", "score", "model_version"]
    assert set(found.model_version) == {_manifest(day, "baseline").key}
    users, _ = sides(events, 12)
    assert done.rows == {"users": len(users), "candidates": 12, "pairs": 12 * len(users), "scores": 5 * len(users)}
    assert done.facts["model"]["stage"] == "baseline"
    assert done.peak_memory_mib["worker"] > 50
    assert done.facts["sample"][0] == found.iloc[0].to_dict()
    assert run_stage(ScoreCandidates(), s, day, DS).skipped

    # Another day's rows stay; a run that died after its commit is made again, with nothing doubled.
    other = found.head(1).assign(ds="2026-01-04")
    types = "ds string, user bigint, item string, rank int, score float, model_version string"
    table = day.table("shop", "scores")
    spark.createDataFrame(other, types).write.format("delta").mode("append").save(str(table))
    day.manifest("shop", DS, "score").remove()
    again = run_stage(ScoreCandidates(), s, day, DS).manifest
    pd.testing.assert_frame_equal(scores(spark, day), found, check_exact=True)
    assert len(scores(spark, day, "2026-01-04")) == 1
    assert again.key == done.key

    # A lost data file is noticed, and mended.
    for path in (table.local_path() / f"ds={DS}").glob("*.parquet"):
        path.unlink()
    healed = run_stage(ScoreCandidates(), s, day, DS)
    assert not healed.skipped
    assert "is gone" in healed.reason
    pd.testing.assert_frame_equal(scores(spark, day), found, check_exact=True)


def test_neural(spark: SparkSession, day: Workspace, events: pd.DataFrame) -> None:
    done = run_stage(ScoreCandidates(), spec(model="neural"), day, DS).manifest
    assert done.facts["model"]["version"] == "t"
    found, wanted = scores(spark, day), expected(spark, day, events, "train")
    # A matrix product's last bits depend on the batch's size, so near ties may change places.
    np.testing.assert_allclose(found.score, wanted.score, rtol=1e-5)
    np.testing.assert_array_equal(found.user, wanted.user)
    assert (found.item == wanted.item).mean() > 0.98


def test_ranks_by_a_product_of_tasks(spark: SparkSession, day: Workspace, events: pd.DataFrame, tmp_path: Path) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(day.home, ws.home)
    schema = _manifest(ws, "features").dataset_schema
    assert schema is not None
    tasks = {"click": Task(), "buy": Task(label="bought"), "click_and_buy": Task(product=("click", "buy"))}
    shape = Model.model_validate({"class": "shared_bottom", "embedding_dim": 4})
    model = ShardedModel(schema, shape, LocalCollective(), 5, tasks=tasks)
    trained = _manifest(ws, "train")
    folder = ws.locate(trained.output("model").name)
    workflow = ws.locate(_manifest(ws, "features").output("dataset").name) / "workflow"
    save_model(folder, model, workflow=workflow, pipeline="shop", ds=DS, key="t", metrics={"auc": 0.5})
    if ws.manifest("shop", DS, "score").is_file():
        ws.manifest("shop", DS, "score").remove()  # of another model
    found = []
    for output in (None, "click_and_buy"):
        s = spec(model="neural")
        assert s.score is not None
        s = s.model_copy(update={"score": s.score.model_copy(update={"output": output})})
        done = run_stage(ScoreCandidates(), s, ws, DS).manifest
        assert done.facts["model"].get("output") == output
        found.append(scores(spark, ws))
        wanted = expected(spark, ws, events, "train", output=output)
        np.testing.assert_allclose(found[-1].score, wanted.score, rtol=1e-5)
        assert (found[-1].item == wanted.item).mean() > 0.98
    assert (found[0].item != found[1].item).any()
    assert found[0].score.mean() > found[1].score.mean()


def test_vectors_multiply_to_the_models_logits(
    spark: SparkSession, day: Workspace, events: pd.DataFrame, tmp_path: Path
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(day.home, ws.home)
    schema = _manifest(ws, "features").dataset_schema
    assert schema is not None
    args = {"user_features": ["user", "age", "likes", "hour"], "item_features": ["price"], "item": "item"}
    shape = Model.model_validate({"class": "two_tower", "embedding_dim": 4, "args": args})
    model = ShardedModel(schema, shape, LocalCollective(), 5)
    folder = ws.locate(_manifest(ws, "train").output("model").name)
    workflow = ws.locate(_manifest(ws, "features").output("dataset").name) / "workflow"
    # As the stage `score` of a model in no retrieval form, so `vectors` says it.
    with pytest.raises(UserError, match="a table of vectors is for models in retrieval form, and DLRM is none"):
        run_stage(ExportVectors(), spec(), ws, DS)
    save_model(folder, model, workflow=workflow, pipeline="shop", ds=DS, key="t", metrics={"auc": 0.5})
    done = run_stage(ExportVectors(), spec(), ws, DS).manifest
    users, items = sides(events, 10**6)
    assert done.rows == {"users": len(users), "items": len(items)}
    found = {}
    for side, rows in (("user", users), ("item", items)):
        table = spark.read.format("delta").load(str(ws.table("shop", f"{side}_vectors"))).toPandas()
        assert set(zip(table.ds, table.model_version, strict=True)) == {(DS, "t")}
        assert sorted(table[side]) == sorted(rows[side])
        found[side] = dict(zip(table[side], table.vector, strict=True))
    few = expected(spark, ws, events, "train", k=10**6, limit=10**6)
    dots = [float(np.dot(found["user"][u], found["item"][i])) for u, i in zip(few.user, few.item, strict=True)]
    np.testing.assert_allclose(dots, np.log(few.score / (1 - few.score)), rtol=1e-3, atol=1e-3)
    assert len(few) == len(users) * len(items)
    assert np.std(dots) > 0.1
    # Lists by these vectors: each item the one with the greatest marginal relevance behind those before it.
    everything = {"key": "item", "columns": ["price"]}
    rules = {"diversity": {"relevance": 0.3}}
    run_stage(ScoreCandidates(), spec(item=everything, rerank=rules, rank_depth=10**6, top_k=4), ws, DS)
    unit = {i: np.asarray(v, float) / np.linalg.norm(v) for i, v in found["item"].items()}
    of_user = {u: rows.set_index("item").score for u, rows in few.groupby("user")}
    lists = scores(spark, ws)
    for user, rows in lists.groupby("user"):
        score, chosen = of_user[user], rows.item.tolist()
        relevance = (score - score.min()) / (score.max() - score.min())
        for place, item in enumerate(chosen):
            nearest = {i: max((unit[i] @ unit[j] for j in chosen[:place]), default=0.0) for i in score.index}
            marginal = {i: 0.3 * relevance[i] - 0.7 * nearest[i] for i in score.index if i not in chosen[:place]}
            assert marginal[item] >= max(marginal.values()) - 1e-3
    assert len(lists) == 4 * len(users)
    assert run_stage(ExportVectors(), spec(), ws, DS).skipped
    # A run that died behind its first commit is made again, with nothing doubled.
    ws.manifest("shop", DS, "vectors").remove()
    assert run_stage(ExportVectors(), spec(), ws, DS).manifest.rows == done.rows
    _check_vector_items(spark, ws, to_spark(spark, users, _types(users)), to_spark(spark, items, _types(items)), found)


def _types(frame: pd.DataFrame) -> dict[str, str]:
    return {c: TYPES[c] for c in frame.columns}


def _check_vector_items(
    spark: SparkSession, ws: Workspace, users: DataFrame, items: DataFrame, vectors: dict[str, dict[Any, Any]]
) -> None:
    """The source `vectors` against a sort of all dot products of the tables of vectors."""
    score = {"item": {"key": "item", "columns": ["price"], "limit": None}}
    ctx = Context(spec(**score), ws, DS, {name: _manifest(ws, name) for name in ("features", "train")}, "vectors")
    table = ItemTable.write(ctx, spark, items, ws.spark_local / "score" / "shop" / "items")
    new = spark.createDataFrame([(5, None, None, None)], users.schema)
    asked = users.unionByName(new).withColumn(FETCH, F.when(F.col("user") % 7 == 0, 0).otherwise(2 + F.col("user") % 4))
    rows = table.frame(spark).select(ITEM_ROW, "item", "price")
    # What the source looks at.
    left = rows.where(F.col(ITEM_ROW) != 3)
    given = SimpleNamespace(ctx=ctx, spark=spark, users=users, items=left, model=scoring_model(ctx))
    context = cast(SourceContext, given)
    source = VectorItems(context, VectorSource(k=4), "liked")
    keys = table.keys(np.arange(table.rows)).to_pylist()

    def listed(source: VectorItems, parts: int) -> dict[Any, list[Any]]:
        made = source.first(asked.repartition(parts), 5)
        assert made.columns == [*asked.columns, ITEMS]
        return {r["user"]: r[ITEMS] for r in made.collect()}

    found = listed(source, 1)
    assert found == listed(source, 3)
    # Of nothing the model knows something: neither of users nor of items of whom all is null.
    nulls = pa.RecordBatch.from_pydict({"price": pa.array([None], pa.float64()), "item": ["never met"]})
    unlike = source._vectors("item").of(nulls)[0]
    known = {k: np.array(v) for k, v in vectors["item"].items() if k != keys[3] and not np.allclose(v, unlike)}
    assert source.facts["unknown_items"] == len(keys) - 1 - len(known)
    assert source.facts["items"] == len(known) > 5
    assert found[5] == []
    lengths = set()
    for user, vector in vectors["user"].items():
        order = sorted(known, key=lambda k: (-float(np.float32(np.dot(vector, known[k]))), keys.index(k)))
        wanted = 0 if user % 7 == 0 else 2 + user % 4
        if found[user] == [] and wanted:  # the other user of whom all is null
            assert users.where((F.col("user") == user) & F.col("age").isNull()).count() == 1
            continue
        assert [keys[i] for i in found[user]] == order[:wanted]
        lengths.add(len(found[user]))
    assert lengths == {0, 2, 3, 4, 5}
    # The index, of one cell of so few items: what it finds, and what is said of it.
    indexed = VectorItems(context, VectorSource(k=4, index="ivf", min_recall=0.9), "indexed")
    same = [set(a) == set(found[user]) for user, a in listed(indexed, 2).items()]
    assert np.mean(same) > 0.9
    assert indexed.facts["index"] == "ivf"
    assert 0.9 <= indexed.facts["recall"] <= 1
    assert indexed.facts["recall_users"] > 30
    assert (ws.spark_local / "score" / "shop" / "vectors" / "vectors-indexed.faiss").size() == indexed.facts["bytes"]


def has_changed(reader: ExternalReader) -> None:
    raise UserError("the files have changed")


def test_registered_models_score_other_days_and_tables(
    spark: SparkSession, day: Workspace, events: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(day.home, ws.home)
    source = ws.locate(_manifest(ws, "train").output("model").name)
    first = register(ws, "shop", source, {"auc": 0.5}, "t", ds="2026-01-04")
    # Today's training is not there, as if it had not run: what was trained before scores.
    ws.manifest("shop", DS, "train").remove()
    with pytest.raises(UserError, match=r"needs stage 'train', which has not finished.*--model @champion"):
        run_stage(ScoreCandidates(), spec(), ws, DS)
    for asked in ("@champion", first, int(first)):
        done = run_stage(ScoreCandidates(), spec(model=asked), ws, DS)
        assert done.manifest.facts["model"]["version"] == "t"
        assert done.manifest.facts["model"]["registered"] == {"name": "shop", "version": first}
    found, wanted = scores(spark, ws), expected(spark, day, events, "train")
    np.testing.assert_allclose(found.score, wanted.score, rtol=1e-5)
    for asked, said in (("@challenger", "no alias 'challenger'"), ("99", "no version 99")):
        with pytest.raises(UserError, match=said):
            run_stage(ScoreCandidates(), spec(model=asked), ws, DS)
    with pytest.raises(UserError, match=r"score\.model"):
        spec(model="champion")

    # Pairs of anybody's: columns of users and items are looked up. Whole rows: nothing is.
    every = expected(spark, day, events, "train", k=10**6, limit=10**6)
    pairs = every[["user", "item"]].sample(60, random_state=1)
    pairs = pd.concat([pairs, pd.DataFrame({"user": [5], "item": ["nobody's"]})]).assign(note=range(61))
    s = spec(model="@champion")
    there = ("ingest", "features")
    upstream = {stage: _manifest(ws, stage) for stage in there}
    ctx = Context(s, ws, DS, upstream)
    to_spark(spark, pairs, {"user": "bigint", "item": "string", "note": "int"}).write.parquet(str(tmp_path / "pairs"))
    target = local(tmp_path / "scored")
    assert score_table(ctx, scoring_model(ctx), spark, local(tmp_path / "pairs"), target) == 61
    scored = pd.read_parquet(tmp_path / "scored").sort_values("note")
    assert list(scored.columns) == ["user", "item", "note", "score", "model_version"]
    assert set(scored.model_version) == {"t"}
    wanted = pairs.merge(every, on=["user", "item"], how="left").sort_values("note")
    np.testing.assert_allclose(scored.score[:60], wanted.score[:60], rtol=1e-5)
    assert 0 < scored.score.iloc[60] < 1

    users, items = sides(events, 10**6)
    whole = pairs[:60].merge(users, on="user").merge(items, on="item").assign(hour=20).sort_values("note")
    types = {c: TYPES[c] for c in ("user", "item", "age", "home.city", "likes", "price", "hour")}
    frame = to_spark(spark, whole, types).coalesce(1)
    frame.write.format("delta").save(str(tmp_path / "whole"))
    alone = Context(s, ws, DS, {})  # no day is needed
    assert score_table(alone, scoring_model(alone), spark, local(tmp_path / "whole"), local(tmp_path / "rows")) == 60
    rows = spark.read.format("delta").load(str(tmp_path / "rows")).toPandas()
    by_pair = dict(zip(zip(every.user, every.item, strict=True), every.score, strict=True))
    np.testing.assert_allclose(rows.score, [by_pair[p] for p in zip(rows.user, rows.item, strict=True)], rtol=1e-5)

    # The same model in a mapInArrow of one's own, and without Spark.
    predictor = hr.Predictor(source.local_path(), column="p", maps=tmp_path / "maps")
    names = frame.columns

    def predicted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from predictor.map_in_arrow(pa.RecordBatch.from_arrays(b.columns, names) for b in batches)

    # Spark's own mapInArrow refuses a name with a dot.
    numbered = frame.toDF(*[f"c{i}" for i in range(len(names))])
    mapped = numbered.mapInArrow(predicted, predictor.schema_of(frame)).toPandas()
    np.testing.assert_allclose(sorted(mapped.p), sorted(rows.score), rtol=1e-5)
    np.testing.assert_allclose(predictor.predict(frame.toArrow()), mapped.p, rtol=1e-5)
    with pytest.raises(UserError, match="the frame has no column 'price'"):
        predictor.predict(frame.drop("price").toArrow())

    # A table that the rows were made of changes while they are scored: nothing appears.
    ctx = Context(s, ws, DS, upstream)
    with monkeypatch.context() as patch:
        patch.setattr(ExternalReader, "check_unchanged", has_changed)
        with pytest.raises(UserError, match="have changed"):
            score_table(ctx, scoring_model(ctx), spark, local(tmp_path / "pairs"), local(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    for change, said in (
        ({"source": tmp_path / "nothing"}, "there is no table"),
        ({"target": target}, "is there already"),
        ({"upstream": {}}, "is not known.*--to features"),
    ):
        given = {"source": tmp_path / "pairs", "target": local(tmp_path / "new"), "upstream": upstream} | change
        ctx = Context(s, ws, DS, given["upstream"])
        with pytest.raises(UserError, match=said):
            score_table(ctx, scoring_model(ctx), spark, local(given["source"]), given["target"])
        assert not (tmp_path / "new").exists()
    to_spark(spark, pairs, {"note": "int", "user": "bigint"}).write.parquet(str(tmp_path / "keyless"))
    ctx = Context(s, ws, DS, upstream)
    with pytest.raises(UserError, match="features of the model read 'item', which"):
        score_table(ctx, scoring_model(ctx), spark, local(tmp_path / "keyless"), local(tmp_path / "new"))


@pytest.mark.parametrize(
    ("asked", "neural", "baseline", "chosen"),
    [
        ("best", 0.7, 0.6, "train"),
        ("best", 0.6, 0.7, "baseline"),
        ("best", 0.7, 0.7, "train"),
        ("best", None, 0.6, "baseline"),
        ("best", None, None, "train"),
        ("best", 0.5, "none", "train"),
        ("neural", 0.5, 0.9, "train"),
        ("baseline", 0.9, 0.5, "baseline"),
    ],
)
def test_choice(asked: str, neural: float | None, baseline: Any, chosen: str, ws: Workspace) -> None:
    upstream = {
        stage: Manifest(
            stage=stage,
            pipeline="shop",
            ds=DS,
            key=stage,
            spec_hash="",
            facts={"metrics": {"auc": auc}},
            outputs=(Output(kind="model", name=stage, version=stage),),
        )
        for stage, auc in (("train", neural), ("baseline", baseline))
        if auc != "none"
    }
    ctx = Context(spec(model=asked), ws, DS, upstream)
    assert scoring_model(ctx).stage == chosen
    # A run is by the model that its inputs name, whatever is asked for by the time that it starts.
    assert pinned_model(replace(ctx, inputs=(scoring_model(ctx).input,))) == scoring_model(ctx)
    earlier = Input(kind="model", name=chosen, version="earlier")
    with pytest.raises(UserError, match=rf"'{asked}' has become version {chosen} of the model.*run it again"):
        ScoreCandidates().run(replace(ctx, inputs=(earlier,)))
    if baseline != "none":
        # Of a loss the lower one is the better; what one was not measured by compares nothing.
        losses = {
            n: m.model_copy(update={"facts": {"metrics": {"log_loss": m.facts["metrics"]["auc"]}}})
            for n, m in upstream.items()
        }
        context = Context(spec(model=asked, metric="log_loss"), ws, DS, losses)
        other = {"train": "baseline", "baseline": "train"}[chosen]
        told = neural is not None and neural != baseline and asked == "best"
        assert scoring_model(context).stage == (other if told else chosen)
        if asked == "best":
            with pytest.raises(UserError, match=r"best' by gauc.*stage 'train' was not measured"):
                scoring_model(Context(spec(model=asked, metric="gauc"), ws, DS, upstream))


def test_lists_by_rules_say_why_and_how_likely(
    spark: SparkSession, day: Workspace, events: pd.DataFrame, tmp_path: Path
) -> None:
    """The pure function over what pandas knows of users and items, on a table whose other days know no rules."""
    ws = Workspace(tmp_path / "home")
    shutil.copytree(day.home, ws.home)
    everything = {"key": "item", "columns": ["price"]}
    s = spec(model="baseline", item=everything)
    run_stage(ScoreCandidates(), s, ws, DS)
    plain = scores(spark, ws)
    other = plain.head(1).assign(ds="2026-01-03")
    types = "ds string, user bigint, item string, rank int, score float, model_version string"
    table = str(ws.table("shop", "scores"))
    spark.createDataFrame(other, types).write.format("delta").mode("append").save(table)
    window = events[(events.ts >= "2026-01-02") & (events.ts < "2026-01-06") & (events.ds <= DS)]
    count = window[window.ts < "2026-01-05"]["item"].value_counts()
    age = pd.Timestamp("2026-01-06") - window.groupby("item")["ts"].min()
    days, most = 3.85, 9
    rules = {
        "new_items": {"below_events": most, "share": 0.2},
        "freshness": {"days": days, "boost": 0.02},
        "explore": {"epsilon": 0.3},
    }
    done = run_stage(
        ScoreCandidates(), spec(model="baseline", item=everything, rerank=rules, rank_depth=25), ws, DS
    ).manifest
    found = scores(spark, ws)
    assert list(found.columns) == [*plain.columns, "propensity", "reason"]
    earlier = scores(spark, ws, "2026-01-03")
    assert earlier[["propensity", "reason"]].isna().all(axis=None)
    assert (done.rows["scores"], len(earlier)) == (len(plain), 1)

    wanted = expected(spark, ws, events, "baseline", k=25, limit=10**6)
    fresh = wanted.item.map(age) < pd.Timedelta(days=days)
    new = wanted.item.map(count) < most
    assert 0 < fresh.mean() < 1
    assert 0 < new.mean() < 1
    users = wanted.user.unique()
    lists = RankedLists(
        users=xxhash64_integers(users).view(np.uint64),
        offsets=np.concatenate([[0], np.cumsum(wanted.groupby("user").size())]),
        scores=wanted.score.to_numpy(),
        fresh=fresh.to_numpy(),
        new=new.to_numpy(),
    )
    listed = rerank(lists, Rerank.model_validate(rules), 5, DS)
    rows = wanted.iloc[listed.rows]
    assert found.user.tolist() == rows.user.tolist()
    assert found.item.tolist() == rows.item.tolist()
    assert found.score.tolist() == rows.score.tolist()
    assert found["rank"].tolist() == [1, 2, 3, 4, 5] * len(users)
    assert found.propensity.tolist() == listed.propensity.tolist()
    words = {Rule.SCORE: "score", Rule.FRESH: "fresh", Rule.NEW_ITEM: "new_item", Rule.EXPLORE: "explore"}
    assert found.reason.tolist() == [words[Rule(r)] for r in listed.rule]
    assert {"score", "explore", "new_item"} <= set(found.reason)
    assert found[found.reason == "explore"].propensity.max() < 0.1

    # Without the rules again the table keeps its columns, and they are null.
    run_stage(ScoreCandidates(), s, ws, DS)
    again = scores(spark, ws)
    pd.testing.assert_frame_equal(again[plain.columns], plain, check_exact=True)
    assert again.propensity.isna().all()


def test_limits_and_seen(spark: SparkSession, day: Workspace, events: pd.DataFrame) -> None:
    s = spec(
        model="baseline",
        exclude_seen=True,
        top_k=50,
        user={"key": "user", "columns": ["age", "home.city", "likes"], "limit": 7},
    )
    run_stage(ScoreCandidates(), s, day, DS)
    window = events[(events.ts >= "2026-01-02") & (events.ts < "2026-01-06") & (events.ds <= DS) & (events.click == 1)]
    clicked = set(zip(window.user, window.item, strict=True))
    wanted = expected(spark, day, events, "baseline", k=50, clicked=clicked)
    train = events[(events.ts >= "2026-01-02") & (events.ts < "2026-01-05") & (events.ds <= DS)]
    counts = train.user.value_counts()
    most = sorted(counts.index, key=lambda u: (-counts[u], u))[:7]
    wanted = wanted[wanted.user.isin(most)].reset_index(drop=True)
    found = scores(spark, day)[["user", "item", "rank", "score"]]
    pd.testing.assert_frame_equal(found, wanted, check_dtype=False, check_exact=True)
    assert len(found) < 7 * 12, "nobody has clicked anything"


def test_candidates_are_counted_before_they_are_written(
    spark: SparkSession, day: Workspace, events: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(day.home, ws.home)
    before = DeltaLog(ws.table("shop", "scores")).version
    listed = {"limit": 8, "sources": {"liked": {"kind": "popular", "k": 8}}}
    s = spec(model="baseline", candidates=listed, exclude_seen=True)

    @contextmanager
    def leaky(context: SourceContext) -> Iterator[UserCandidates]:
        with candidates_of_users(context) as found:
            yield replace(found, violations=lambda rows: rows.where("rank = 1").count())

    # A filter that lets something through cannot be written down: one is told so.
    with monkeypatch.context() as patch:
        patch.setattr("headrace.score.stage.candidates_of_users", leaky)
        with pytest.raises(RuntimeError, match=r"scores of .* are of items that"):
            run_stage(ScoreCandidates(), s, ws, DS)
    assert DeltaLog(ws.table("shop", "scores")).version == before
    done = run_stage(ScoreCandidates(), s, ws, DS).manifest
    assert DeltaLog(ws.table("shop", "scores")).version == (before or 0) + (before is not None)
    assert done.facts["candidates"]["violations"] == 0
    found = scores(spark, ws)
    window = events[(events.ts >= "2026-01-02") & (events.ts < "2026-01-06") & (events.ds <= DS) & (events.click == 1)]
    clicked = set(zip(window.user, window.item, strict=True))
    every = expected(spark, day, events, "baseline", k=100, limit=12)
    score_of = dict(zip(zip(every.user, every.item, strict=True), every.score, strict=True))
    pairs = list(zip(found.user, found.item, strict=True))
    assert not clicked & set(pairs)
    assert found.score.tolist() == [score_of[pair] for pair in pairs]
    assert (set(found.source), len(found)) == ({"liked"}, done.rows["scores"])
    assert not (ws.spark_local / "score" / "shop").exists()


def test_messages(spark: SparkSession, day: Workspace, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(day.home, ws.home)
    with pytest.raises(UserError, match="the features read 'hour'"):
        run_stage(ScoreCandidates(), spec(context={}), ws, DS)

    # The table's other days were written with other keys.
    swapped = spec(user={"key": "home.city", "columns": ["user", "age", "likes"]})
    with pytest.raises(UserError, match="its keys were others"):
        run_stage(ScoreCandidates(), swapped, ws, DS)

    # A damage that only a task finds still comes out as one message.
    dense = ws.home / _manifest(ws, "train").output("model").name / "dense.safetensors"
    data = bytearray(dense.read_bytes())
    data[-1] ^= 0xFF
    dense.write_bytes(data)
    with caplog.at_level(logging.CRITICAL), pytest.raises(UserError, match=r"dense\.safetensors"):
        run_stage(ScoreCandidates(), spec(top_k=4), ws, DS)

    ws.manifest("shop", DS, "baseline").local_path().unlink()
    with pytest.raises(UserError, match=f"no finished baseline for {DS}"):
        run_stage(ScoreCandidates(), spec(model="baseline"), ws, DS)
