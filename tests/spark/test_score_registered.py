"""Choice of the model that scores, and what else it can score: other days, any table, a mapInArrow of one's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import headrace as hr
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.table_ops.preparation import ExternalReader
from headrace.models.registry import register
from headrace.models.registry.promotion import settle
from headrace.score.score_table import score_table
from headrace.score.scoring_model import pinned_model, scoring_model
from headrace.score.stage import ScoreCandidates
from headrace.stage import Context, run_stage
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import local
from tests.score_support import DS, TYPES, expected, manifest_of, scores, sides, spec, to_spark


def has_changed(reader: ExternalReader) -> None:
    raise UserError("the files have changed")


def test_registered_models_score_other_days_and_tables(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    source = ws.locate(manifest_of(ws, "train").output("model").name)
    first = register(ws, "shop", source, {"auc": 0.5}, "t", ds="2026-01-04")
    settle(ws, "shop", first)
    # Today's training is not there, as if it had not run: what was trained before scores.
    ws.manifest("shop", DS, "train").remove()
    with pytest.raises(UserError, match=r"needs stage 'train', which has not finished.*--model @champion"):
        run_stage(ScoreCandidates(), spec(), ws, DS)
    for model_name in ("@champion", first, int(first)):
        outcome = run_stage(ScoreCandidates(), spec(model=model_name), ws, DS)
        assert outcome.manifest.facts["model"]["version"] == "t"
        assert outcome.manifest.facts["model"]["registered"] == {"name": "shop", "version": first}
    actual, expected_scores = scores(spark, ws), expected(spark, shop, shop_events, "train")
    np.testing.assert_allclose(actual.score, expected_scores.score, rtol=1e-5)
    for model_name, message in (("@challenger", "no alias 'challenger'"), ("99", "no version 99")):
        with pytest.raises(UserError, match=message):
            run_stage(ScoreCandidates(), spec(model=model_name), ws, DS)
    with pytest.raises(UserError, match=r"score\.model"):
        spec(model="champion")

    # Pairs of anybody's: columns of users and items are looked up. Whole rows: nothing is.
    every = expected(spark, shop, shop_events, "train", k=10**6, limit=10**6)
    pairs = every[["user", "item"]].sample(60, random_state=1)
    pairs = pd.concat([pairs, pd.DataFrame({"user": [5], "item": ["nobody's"]})]).assign(note=range(61))
    s = spec(model="@champion")
    finished_stages = ("ingest", "features")
    upstream = {stage: manifest_of(ws, stage) for stage in finished_stages}
    ctx = Context(s, ws, DS, upstream)
    to_spark(spark, pairs, {"user": "bigint", "item": "string", "note": "int"}).write.parquet(str(tmp_path / "pairs"))
    target = local(tmp_path / "scored")
    assert score_table(ctx, scoring_model(ctx), spark, local(tmp_path / "pairs"), target) == 61
    scored = pd.read_parquet(tmp_path / "scored").sort_values("note")
    assert list(scored.columns) == ["user", "item", "note", "score", "model_version"]
    assert set(scored.model_version) == {"t"}
    expected_scores = pairs.merge(every, on=["user", "item"], how="left").sort_values("note")
    np.testing.assert_allclose(scored.score[:60], expected_scores.score[:60], rtol=1e-5)
    assert 0 < scored.score.iloc[60] < 1

    # The same of a CSV file, whose columns are found by their names.
    pairs[["item", "user"]].to_csv(tmp_path / "pairs.csv", index=False)
    csv = local(tmp_path / "pairs.csv")
    assert score_table(ctx, scoring_model(ctx), spark, csv, local(tmp_path / "of_csv")) == 61
    of_csv = pd.read_parquet(tmp_path / "of_csv")
    assert list(of_csv.columns) == ["item", "user", "score", "model_version"]
    merged = of_csv.merge(scored, on=["user", "item"], suffixes=("", "_of_table"))
    assert len(merged) == 61
    np.testing.assert_allclose(merged.score, merged.score_of_table, rtol=1e-6)
    for text, message in (
        ("user,item,note\n1,a,1\n", r"pairs\.csv has a column 'note', which table\.columns does not declare"),
        ("user\n1\n", "read .*'item', which .*pairs.csv lacks"),
        ("user,item\n1,a\nx,b\n\ny,c\n", r"pairs\.csv: 2 rows cannot be read; the first is line 3: user: 'x' is not a"),
        ("user,item\n1,a,b\n", "the first is line 2: wrong number of fields"),
        ("", r"pairs\.csv is empty"),
    ):
        csv.put_text(text)
        with pytest.raises(UserError, match=message):
            score_table(ctx, scoring_model(ctx), spark, csv, local(tmp_path / "no_csv"))
        assert not (tmp_path / "no_csv").exists()

    users, items = sides(shop_events, 10**6)
    complete_rows = pairs[:60].merge(users, on="user").merge(items, on="item").assign(hour=20).sort_values("note")
    types = {c: TYPES[c] for c in ("user", "item", "age", "home.city", "likes", "price", "hour")}
    frame = to_spark(spark, complete_rows, types).coalesce(1)
    frame.write.format("delta").save(str(tmp_path / "whole"))
    without_day = Context(s, ws, DS, {})  # no day is needed
    assert (
        score_table(without_day, scoring_model(without_day), spark, local(tmp_path / "whole"), local(tmp_path / "rows"))
        == 60
    )
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
    for change, message in (
        ({"source": tmp_path / "nothing"}, "there is no table"),
        ({"target": target}, "is there already"),
        ({"upstream": {}}, "is not known.*--to features"),
    ):
        arguments = {"source": tmp_path / "pairs", "target": local(tmp_path / "new"), "upstream": upstream} | change
        ctx = Context(s, ws, DS, arguments["upstream"])
        with pytest.raises(UserError, match=message):
            score_table(ctx, scoring_model(ctx), spark, local(arguments["source"]), arguments["target"])
        assert not (tmp_path / "new").exists()
    to_spark(spark, pairs, {"note": "int", "user": "bigint"}).write.parquet(str(tmp_path / "keyless"))
    ctx = Context(s, ws, DS, upstream)
    with pytest.raises(UserError, match="features of the model read 'item', which"):
        score_table(ctx, scoring_model(ctx), spark, local(tmp_path / "keyless"), local(tmp_path / "new"))


@pytest.mark.parametrize(
    ("requested", "neural", "baseline", "chosen"),
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
def test_choice(requested: str, neural: float | None, baseline: Any, chosen: str, ws: Workspace) -> None:
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
    ctx = Context(spec(model=requested), ws, DS, upstream)
    assert scoring_model(ctx).stage == chosen
    # A run is by the model that its inputs name, whatever is asked for by the time that it starts.
    assert pinned_model(replace(ctx, inputs=(scoring_model(ctx).input,))) == scoring_model(ctx)
    earlier = Input(kind="model", name=chosen, version="earlier")
    with pytest.raises(UserError, match=rf"'{requested}' has become version {chosen} of the model.*run it again"):
        ScoreCandidates().run(replace(ctx, inputs=(earlier,)))
    if baseline != "none":
        # Of a loss the lower one is the better; what one was not measured by compares nothing.
        losses = {
            n: m.model_copy(update={"facts": {"metrics": {"log_loss": m.facts["metrics"]["auc"]}}})
            for n, m in upstream.items()
        }
        context = Context(spec(model=requested, metric="log_loss"), ws, DS, losses)
        other_stage = {"train": "baseline", "baseline": "train"}[chosen]
        is_reversed = neural is not None and neural != baseline and requested == "best"
        assert scoring_model(context).stage == (other_stage if is_reversed else chosen)
        if requested == "best":
            with pytest.raises(UserError, match=r"best' by gauc.*stage 'train' was not measured"):
                scoring_model(Context(spec(model=requested, metric="gauc"), ws, DS, upstream))
