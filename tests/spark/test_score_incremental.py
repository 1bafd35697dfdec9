"""Scoring those alone whose inputs have changed, against scoring everybody."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config.workspace import Workspace
from headrace.score.items import row_hashes
from headrace.score.stage import ScoreCandidates
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest
from tests.score_support import DS, TYPES, manifest_of, scores, spec, to_spark


def test_unchanged_users_keep_their_lists_to_the_bit(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, tmp_path: Path
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    if ws.manifest("shop", DS, "score").is_file():
        ws.manifest("shop", DS, "score").remove()
    # All candidates are in the scores: who has an item is seen there.
    settings: dict[str, Any] = {
        "candidates": {"limit": 8, "sources": {"liked": {"kind": "popular", "k": 8}}},
        "exclude_seen": True,
        "top_k": 8,
    }
    s = spec(**settings, incremental=True)
    first = run_stage(ScoreCandidates(), s, ws, DS).manifest
    assert first.rows["users_scored"] == first.rows["users"]
    assert first.facts["incremental"] == {"all": "there is no run before to compare with"}
    scores_before = scores(spark, ws)

    # A user is older, and an item has another price: two events on the last day, each of one side alone.
    having = scores_before.groupby("item")["user"].nunique()
    users = scores_before["user"].nunique()
    item = next(i for i, n in having.items() if 0 < n < users - 5)
    touched = set(scores_before.user[scores_before.item == item])
    user = next(u for u in scores_before.user if u not in touched)
    events = shop_events.tail(2).copy()
    events["ds"], events["ts"], events["click"] = DS, pd.Timestamp("2026-01-05 23:30"), 0
    events["_source_file"], events["_source_line"] = "late.json", [1, 2]
    old = shop_events[shop_events.user == user].sort_values(["ts", "_source_file", "_source_line"]).iloc[-1]
    user_event, item_event = events.index
    for name in ("home.city", "likes"):
        events.at[user_event, name] = old[name]
    events.at[user_event, "user"], events.at[user_event, "item"], events.at[user_event, "age"] = user, None, 77
    events.at[item_event, "user"], events.at[item_event, "item"], events.at[item_event, "price"] = None, item, 123.0
    _add_events(spark, ws, events)
    manifest = run_stage(ScoreCandidates(), s, ws, DS).manifest
    assert manifest.rows["users"] == users
    assert manifest.rows["users_scored"] == len(touched) + 1
    assert manifest.rows["users_kept"] == users - len(touched) - 1 > 0
    assert manifest.rows["pairs"] == int(scores_before.user.isin([*touched, user]).sum())
    assert manifest.facts["incremental"] == {"before": {"ds": DS, "key": first.key}}
    scores_after = scores(spark, ws)

    full = Workspace(tmp_path / "full")
    shutil.copytree(ws.home, full.home)
    full_manifest = run_stage(ScoreCandidates(), spec(**settings), full, DS).manifest
    assert "users_scored" not in full_manifest.rows
    pd.testing.assert_frame_equal(scores_after, scores(spark, full), check_exact=True)
    merged = scores_after.merge(scores_before, on=["user", "item"], suffixes=("", "_before"))
    differ = merged[merged.score != merged.score_before]
    # The network as it starts may not look at the price; who is older has other scores.
    assert {user} <= set(differ.user) <= {user, *touched}


def _add_events(spark: SparkSession, ws: Workspace, events: pd.DataFrame) -> None:
    """A further version of the events, without the commit that nobody is to see."""
    path = ws.table("shop", "events").local_path()
    for file in (path / "_delta_log").glob("*00001.*"):
        file.unlink()
    stored = {**TYPES, "_source_file": "string", "_source_line": "bigint", "ds": "string"}
    # Spark keeps what it has read of a log, by the table's path.
    spark.sql("CLEAR CACHE")
    to_spark(spark, events, stored).write.format("delta").mode("append").save(str(path))
    manifest: Manifest = manifest_of(ws, "ingest")
    outputs = tuple(
        o.model_copy(update={"version": "1"}) if o.name == "lake/shop/events" else o for o in manifest.outputs
    )
    manifest.model_copy(update={"outputs": outputs, "key": "i2"}).save(ws.manifest("shop", DS, "ingest"))


_ROWS = st.tuples(
    st.sampled_from([None, "", "a", "ab", "b"]),
    st.sampled_from([None, 0.0, -0.0, 1.0, float("nan"), float("inf")]),
    st.one_of(st.none(), st.lists(st.sampled_from([None, 0, 1, 2]), max_size=3)),
    st.one_of(st.none(), st.lists(st.sampled_from([None, "", "a"]), max_size=2)),
    st.one_of(st.none(), st.lists(st.sampled_from([None, 0.0, -0.0]), max_size=2)),
)


@settings(max_examples=2)
@given(st.lists(_ROWS, min_size=2, max_size=300))
def test_hashes_tell_rows_apart_to_the_bit(spark: SparkSession, rows: list[tuple[Any, ...]]) -> None:
    rows = [*rows, (None, None, [1, 0], [None], None), (None, None, [1], None, None), (None, None, [1, None], [], None)]
    types = "`a.b` string, b double, c array<int>, d array<string>, e array<double>"
    frame = spark.createDataFrame(rows, types)
    hashes = frame.select(*row_hashes(frame, frame.columns, ("x", "y"), F.lit("said"))).collect()
    texts = [repr(r) for r in rows]
    assert len(set(hashes)) == len({*texts})
    assert len({(t, *h) for t, h in zip(texts, hashes, strict=True)}) == len(set(hashes))
    assert len({h[0] for h in hashes}) == len({h[1] for h in hashes}) == len(set(hashes))
