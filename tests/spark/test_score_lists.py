"""Lists of candidates, and lists by rules, as the score stage writes them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.config.score import Rerank
from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.score.candidates.candidates import UserCandidates, candidates_of_users
from headrace.score.candidates.source import CandidateContext
from headrace.score.rerank.reranker import rerank
from headrace.score.rerank.select import RankedItems, Rule
from headrace.score.stage import ScoreCandidates
from headrace.stage import run_stage
from headrace.udfs.arrow import xxhash64_integers
from tests.score_support import DS, clicked_pairs, expected, scores, spec


def test_lists_by_rules_say_why_and_how_likely(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, tmp_path: Path
) -> None:
    """The pure function over what pandas knows of users and items, on a table whose other days know no rules."""
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    everything = {"key": "item", "columns": ["price"]}
    s = spec(model="baseline", item=everything)
    run_stage(ScoreCandidates(), s, ws, DS)
    plain = scores(spark, ws)
    other_day = plain.head(1).assign(ds="2026-01-03")
    types = "ds string, user bigint, item string, rank int, score float, model_version string"
    table = str(ws.table("shop", "scores"))
    spark.createDataFrame(other_day, types).write.format("delta").mode("append").save(table)
    window = shop_events[(shop_events.ts >= "2026-01-02") & (shop_events.ts < "2026-01-06") & (shop_events.ds <= DS)]
    count = window[window.ts < "2026-01-05"]["item"].value_counts()
    age = pd.Timestamp("2026-01-06") - window.groupby("item")["ts"].min()
    days, most = 3.85, 9
    rules = {
        "new_items": {"below_events": most, "share": 0.2},
        "freshness": {"days": days, "boost": 0.02},
        "explore": {"epsilon": 0.3},
    }
    manifest = run_stage(
        ScoreCandidates(), spec(model="baseline", item=everything, rerank=rules, rank_depth=25), ws, DS
    ).manifest
    actual = scores(spark, ws)
    assert list(actual.columns) == [*plain.columns, "propensity", "reason"]
    earlier = scores(spark, ws, "2026-01-03")
    assert earlier[["propensity", "reason"]].isna().all(axis=None)
    assert (manifest.rows["scores"], len(earlier)) == (len(plain), 1)

    expected_scores = expected(spark, ws, shop_events, "baseline", k=25, limit=10**6)
    fresh = expected_scores.item.map(age) < pd.Timedelta(days=days)
    new = expected_scores.item.map(count) < most
    assert 0 < fresh.mean() < 1
    assert 0 < new.mean() < 1
    users = expected_scores.user.unique()
    lists = RankedItems(
        users=xxhash64_integers(users).view(np.uint64),
        offsets=np.concatenate([[0], np.cumsum(expected_scores.groupby("user").size())]),
        scores=expected_scores.score.to_numpy(),
        fresh=fresh.to_numpy(),
        new=new.to_numpy(),
    )
    listed = rerank(lists, Rerank.model_validate(rules), 5, DS)
    rows = expected_scores.iloc[listed.rows]
    assert actual.user.tolist() == rows.user.tolist()
    assert actual.item.tolist() == rows.item.tolist()
    assert actual.score.tolist() == rows.score.tolist()
    assert actual["rank"].tolist() == [1, 2, 3, 4, 5] * len(users)
    assert actual.propensity.tolist() == listed.propensity.tolist()
    words = {Rule.SCORE: "score", Rule.FRESH: "fresh", Rule.NEW_ITEM: "new_item", Rule.EXPLORE: "explore"}
    assert actual.reason.tolist() == [words[Rule(r)] for r in listed.rule]
    assert {"score", "explore", "new_item"} <= set(actual.reason)
    unmet = {name: listed.unmet["new_items", name] for name in ("lists", "impossible")}
    assert manifest.facts["unmet_rules"] == {"new_items": unmet}
    assert actual[actual.reason == "explore"].propensity.max() < 0.1

    # Without the rules again the table keeps its columns, and they are null.
    run_stage(ScoreCandidates(), s, ws, DS)
    without_rules = scores(spark, ws)
    pd.testing.assert_frame_equal(without_rules[plain.columns], plain, check_exact=True)
    assert without_rules.propensity.isna().all()


def test_candidates_are_counted_before_they_are_written(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    version_before = DeltaLog(ws.table("shop", "scores")).version
    listed = {"limit": 8, "sources": {"liked": {"kind": "popular", "k": 8}}}
    s = spec(model="baseline", candidates=listed, exclude_seen=True)

    @contextmanager
    def leaky(context: CandidateContext) -> Iterator[UserCandidates]:
        with candidates_of_users(context) as candidates:
            yield replace(candidates, violations=lambda rows: rows.where("rank = 1").count())

    # A filter that lets something through cannot be written down: one is told so.
    with monkeypatch.context() as patch:
        patch.setattr("headrace.score.model_lists.candidates_of_users", leaky)
        with pytest.raises(RuntimeError, match=r"scores of .* are of items that"):
            run_stage(ScoreCandidates(), s, ws, DS)
    assert DeltaLog(ws.table("shop", "scores")).version == version_before
    manifest = run_stage(ScoreCandidates(), s, ws, DS).manifest
    assert DeltaLog(ws.table("shop", "scores")).version == (version_before or 0) + (version_before is not None)
    assert manifest.facts["candidates"]["violations"] == 0
    actual = scores(spark, ws)
    clicked = clicked_pairs(shop_events)
    every = expected(spark, shop, shop_events, "baseline", k=100, limit=12)
    score_of = dict(zip(zip(every.user, every.item, strict=True), every.score, strict=True))
    pairs = list(zip(actual.user, actual.item, strict=True))
    assert not clicked & set(pairs)
    assert actual.score.tolist() == [score_of[pair] for pair in pairs]
    assert (set(actual.source), len(actual)) == ({"liked"}, manifest.rows["scores"])
    assert not (ws.spark_local / "score" / "shop").exists()
