"""Vectors of users and items: as tables, as a source of candidates, and for lists by rules."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import VectorSource
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.saved import load_model, read_card
from headrace.score.candidates.source import FETCH, CandidateContext
from headrace.score.candidates.vector_source import VectorItems
from headrace.score.items import ITEM_ROW, ItemTable
from headrace.score.ranking import ITEMS
from headrace.score.scoring_model import scoring_model
from headrace.score.stage import ScoreCandidates
from headrace.score.vectors import ExportVectors
from headrace.stage import Context, run_stage
from headrace.storage import Location, local
from tests.score_support import DS, TYPES, expected, manifest_of, save_two_tower, scores, sides, spec, to_spark


def test_vectors_multiply_to_the_models_logits(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    # As the stage `score` of a model in no retrieval form, so `vectors` says it.
    with pytest.raises(UserError, match="a table of vectors is for models in retrieval form, and DLRM is none"):
        run_stage(ExportVectors(), spec(), ws, DS)
    save_two_tower(ws)
    manifest = run_stage(ExportVectors(), spec(), ws, DS).manifest
    users, items = sides(shop_events, 10**6)
    assert manifest.rows == {"users": len(users), "items": len(items)}

    def vectors_of(side: str) -> dict[Any, Any]:
        table = spark.read.format("delta").load(str(ws.table("shop", f"{side}_vectors"))).toPandas()
        assert set(zip(table.ds, table.model_version, strict=True)) == {(DS, "t")}
        return dict(zip(table[side], table.vector, strict=True))

    vectors = {}
    for side, rows in (("user", users), ("item", items)):
        vectors[side] = vectors_of(side)
        assert sorted(vectors[side]) == sorted(rows[side])
    # The pairs' scores by the model as ONNX, where that is installed.
    answers = expected(spark, ws, shop_events, "train", k=10**6, limit=10**6, answer=_by_onnx(tmp_path / "export"))
    dots = [
        float(np.dot(vectors["user"][u], vectors["item"][i])) for u, i in zip(answers.user, answers.item, strict=True)
    ]
    np.testing.assert_allclose(dots, np.log(answers.score / (1 - answers.score)), rtol=1e-3, atol=1e-3)
    assert len(answers) == len(users) * len(items)
    assert np.std(dots) > 0.1
    # Lists by these vectors: each item the one with the greatest marginal relevance behind those before it.
    everything = {"key": "item", "columns": ["price"]}
    rules = {"diversity": {"relevance": 0.3}}
    run_stage(ScoreCandidates(), spec(item=everything, rerank=rules, rank_depth=10**6, top_k=4), ws, DS)
    unit = {i: np.asarray(v, float) / np.linalg.norm(v) for i, v in vectors["item"].items()}
    of_user = {u: rows.set_index("item").score for u, rows in answers.groupby("user")}
    lists = scores(spark, ws)
    merged = lists.merge(answers, on=["user", "item"])
    np.testing.assert_allclose(merged.score_x, merged.score_y, rtol=1e-5)
    assert len(merged) == len(lists)
    for user, rows in lists.groupby("user"):
        score, chosen = of_user[user], rows.item.tolist()
        relevance = (score - score.min()) / (score.max() - score.min())
        for place, item in enumerate(chosen):
            nearest = {i: max((unit[i] @ unit[j] for j in chosen[:place]), default=0.0) for i in score.index}
            marginal = {i: 0.3 * relevance[i] - 0.7 * nearest[i] for i in score.index if i not in chosen[:place]}
            assert marginal[item] >= max(marginal.values()) - 1e-3
    assert len(lists) == 4 * len(users)
    assert run_stage(ExportVectors(), spec(), ws, DS).skipped
    # A run that died behind its first commit is made again, with nothing doubled; now of rows that Spark joins in.
    monkeypatch.setattr("headrace.score.joined_tables._PART_ROWS", 9)  # many parts
    ws.manifest("shop", DS, "vectors").remove()
    assert run_stage(ExportVectors(), spec(embeddings={"rows": "joined"}), ws, DS).manifest.rows == manifest.rows
    for side, old_vectors in vectors.items():
        new_vectors = vectors_of(side)
        assert new_vectors.keys() == old_vectors.keys()
        # But for the last bit, which depends on how many rows there are in a batch.
        for key, vector in old_vectors.items():
            np.testing.assert_allclose(new_vectors[key], vector, rtol=1e-5, atol=1e-6)
    _check_vector_items(
        spark, ws, to_spark(spark, users, _types(users)), to_spark(spark, items, _types(items)), vectors
    )


def _by_onnx(folder: Path) -> Callable[[Location, Mapping[str, Any]], Any] | None:
    if find_spec("onnxruntime") is None:
        return None

    def answer(saved: Location, columns: Mapping[str, Any]) -> Any:
        from bench.export_parity import by_onnxruntime, inputs_of
        from headrace.export.onnx_model import write_onnx

        model, card = load_model(saved), read_card(saved)
        folder.mkdir()
        write_onnx(model, card, local(folder), "fp32")
        return by_onnxruntime(local(folder), inputs_of(model.schema, columns))["model"]["label"]

    return answer


def _types(frame: pd.DataFrame) -> dict[str, str]:
    return {c: TYPES[c] for c in frame.columns}


def _check_vector_items(
    spark: SparkSession, ws: Workspace, users: DataFrame, items: DataFrame, vectors: dict[str, dict[Any, Any]]
) -> None:
    """The source `vectors` against a sort of all dot products of the tables of vectors."""
    score = {"item": {"key": "item", "columns": ["price"], "limit": None}}
    upstream = {name: manifest_of(ws, name) for name in ("features", "train")}
    ctx = Context(spec(**score), ws, DS, upstream, "vectors")
    table = ItemTable.write(ctx, spark, items, ws.spark_local / "score" / "shop" / "items")
    new = spark.createDataFrame([(5, None, None, None)], users.schema)
    requests = users.unionByName(new).withColumn(
        FETCH, F.when(F.col("user") % 7 == 0, 0).otherwise(2 + F.col("user") % 4)
    )
    rows = table.frame(spark).select(ITEM_ROW, "item", "price")
    # What the source looks at.
    remaining_items = rows.where(F.col(ITEM_ROW) != 3)
    folder, maps = ws.exchange_folder("shop", "score", local_scratch=False) / "vectors", ws.mapped("shop")
    fields = SimpleNamespace(
        ctx=ctx, spark=spark, users=users, items=remaining_items, model=scoring_model(ctx), run_folder=folder, maps=maps
    )
    context = cast(CandidateContext, fields)
    source = VectorItems(context, VectorSource(k=4), "liked")
    keys = table.keys(np.arange(table.rows)).to_pylist()

    def listed(source: VectorItems, parts: int) -> dict[Any, list[Any]]:
        fetched = source.first(requests.repartition(parts), 5)
        assert fetched.columns == [*requests.columns, ITEMS]
        return {r["user"]: r[ITEMS] for r in fetched.collect()}

    lists = listed(source, 1)
    assert lists == listed(source, 3)
    # Of nothing the model knows something: neither of users nor of items of whom all is null.
    nulls = pa.RecordBatch.from_pydict({"price": pa.array([None], pa.float64()), "item": ["never met"]})
    unlike = source._vectors("item").vectors(nulls)[0]
    known = {k: np.array(v) for k, v in vectors["item"].items() if k != keys[3] and not np.allclose(v, unlike)}
    assert source.facts["unknown_items"] == len(keys) - 1 - len(known)
    assert source.facts["items"] == len(known) > 5
    assert lists[5] == []
    lengths = set()
    for user, vector in vectors["user"].items():
        order = sorted(known, key=lambda k: (-float(np.float32(np.dot(vector, known[k]))), keys.index(k)))
        count = 0 if user % 7 == 0 else 2 + user % 4
        if lists[user] == [] and count:  # the other user of whom all is null
            assert users.where((F.col("user") == user) & F.col("age").isNull()).count() == 1
            continue
        assert [keys[i] for i in lists[user]] == order[:count]
        lengths.add(len(lists[user]))
    assert lengths == {0, 2, 3, 4, 5}
    # The same of rows that Spark joins in.
    joined = Context(spec(embeddings={"rows": "joined"}, **score), ws, DS, upstream, "vectors")
    context = cast(CandidateContext, SimpleNamespace(**vars(fields) | {"ctx": joined}))
    same_source = VectorItems(context, VectorSource(k=4), "joined")
    assert listed(same_source, 2) == lists
    assert same_source.facts == source.facts
    # The index, of one cell of so few items: what it finds, and what is said of it.
    indexed = VectorItems(context, VectorSource(k=4, index="ivf", min_recall=0.9), "indexed")
    agreement = [set(a) == set(lists[user]) for user, a in listed(indexed, 2).items()]
    assert np.mean(agreement) > 0.9
    assert indexed.facts["index"] == "ivf"
    assert 0.9 <= indexed.facts["recall"] <= 1
    assert indexed.facts["recall_users"] > 30
    assert [f.size() for f in folder.entries() if f.suffix == ".faiss"] == [indexed.facts["bytes"]]
