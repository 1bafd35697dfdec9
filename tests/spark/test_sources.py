"""Formats of landing files on tiny files that are written here, and on the real data sets where they are."""

from __future__ import annotations

import csv
import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.faults import BAD, GOOD
from headrace.lake.landing.arrow_rows import ArrowRows, arrow_plan, read_by_arrow
from headrace.lake.landing.files import find_files
from headrace.lake.landing.formats import LandingBatch, reader_of
from headrace.lake.landing.stage import Ingest
from headrace.stage import run_stage
from headrace.storage import local
from headrace_datasets.readers import CRITEO, RANK_NEGATIVES, VALID_NEGATIVES


def read(spark: SparkSession, ws: Workspace, spec: Spec, files: Mapping[str, str | bytes]) -> list[dict[str, Any]]:
    """The judged rows of some files, as the stage stages them, in the order of the source."""
    batch, judged = judge(spark, ws, spec, files)
    rows = judged.judged_rows(spark)
    assert rows is not None
    records = reader_of(batch.source).finish(rows, batch).collect()
    return sorted((r.asDict() for r in records), key=lambda r: (r["_file"], r["_line"], r["_copy"]))


def judge(
    spark: SparkSession, ws: Workspace, spec: Spec, files: Mapping[str, str | bytes]
) -> tuple[LandingBatch, ArrowRows]:
    """Put files into the landing folder and judge each of their lines by itself."""
    for name, body in files.items():
        path = ws.home / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = body if isinstance(body, bytes) else body.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    source = spec.source.model_copy(update={"path": "in/*"})
    batch = LandingBatch(spark, source, spec.table, (find_files(source, ws, str(spec.ds)),))
    plan, staged = replace(arrow_plan(batch, []), accept=True, judges_all=True), local(ws.home / "staged")
    return batch, read_by_arrow(batch, plan, staged / "table", staged / "judged", "snappy")


def shipped(name: str, **source: Any) -> Spec:
    spec = load_spec(name)
    return spec.model_copy(update={"source": spec.source.model_copy(update=source)})


def ingest(spec: Spec, ws: Workspace) -> Any:
    return run_stage(Ingest(), spec, ws, str(spec.ds)).manifest


def events(spark: SparkSession, ws: Workspace, spec: Spec) -> DataFrame:
    return spark.read.format("delta").load(str(ws.table(spec.pipeline, "events")))


# --- csv and jsonl -------------------------------------------------------------------------------------------------


def columns_spec(format_: str, **source: Any) -> Spec:
    spec = shipped("talkingdata", format=format_, **source)
    columns = [{"name": "a", "type": "int"}, {"name": "b", "type": "string"}, {"name": "c", "type": "array<double>"}]
    table = type(spec.table).model_validate({"columns": columns})
    return spec.model_copy(update={"table": table})


def test_csv_with_separator_null_value_and_no_header(spark: SparkSession, ws: Workspace) -> None:
    spec = columns_spec("csv", separator=";", header=False, null_value="NA")
    rows = read(spark, ws, spec, {"x.csv": '1;NA;1.5|2\n\n2;"x;y";\nNA;;NA\n3;4\n4;z;1|NA\n', "y.csv": "5;;"})
    good = [(r["_file"], r["_line"], r["a"], r["b"], r["c"]) for r in rows if r["_state"] == GOOD]
    assert good == [
        (0, 1, 1, None, [1.5, 2.0]),
        (0, 3, 2, "x;y", None),
        (0, 4, None, None, None),
        (1, 1, 5, None, None),
    ]
    bad = [(r["_line"], r["_reason"]) for r in rows if r["_state"] == BAD]
    assert bad == [(5, "wrong number of fields"), (6, "c: '1|NA' is not an array<double>")]


def test_csv_files_with_their_own_headers(spark: SparkSession, ws: Workspace) -> None:
    """Columns are found by name, in each file's own order; what is not there is null, what is not declared is kept."""
    files = {"x.csv": "a,b\n1,x\n", "y.csv": "b,z,a\nq,new,2\n,,3\n"}
    rows = read(spark, ws, columns_spec("csv"), files)
    good = [(r["a"], r["b"], r["c"], r["_extra"]) for r in rows if r["_state"] == GOOD]
    assert good == [(1, "x", None, None), (2, "q", None, {"z": "new"}), (3, None, None, {"z": None})]


def test_json_lines(spark: SparkSession, ws: Workspace) -> None:
    body = '{"a": 1, "b": "x", "c": [1, 2.5, null]}\n{"a": null, "z": {"k": [1]}}\n{"c": []}\n{"a": 1.5}\n{"a": 4.0}'
    rows = read(spark, ws, columns_spec("jsonl"), {"x.jsonl": body})
    good = [(r["_line"], r["a"], r["b"], r["c"], r["_extra"]) for r in rows if r["_state"] == GOOD]
    assert good == [
        (1, 1, "x", [1.0, 2.5, None], None),
        (2, None, None, None, {"z": '{"k":[1]}'}),
        (3, None, None, [], None),
        (5, 4, None, None, None),
    ]
    assert [r["_reason"] for r in rows if r["_state"] == BAD] == ["a: '1.5' is not an int"]


# --- criteo ----------------------------------------------------------------------------------------------------------


def test_criteo_lines(spark: SparkSession, ws: Workspace) -> None:
    numbers = [str(n) for n in range(-1, 12)]
    names = [f"{n:08x}" for n in range(26)]
    full = "\t".join(["1", *numbers, *names])
    blank = "\t".join(["0", *[""] * 39])
    short = "\t".join(["0", *numbers, *names[:-1]])
    word = "\t".join(["0", "many", *numbers[1:], *names])
    rows = read(spark, ws, shipped("criteo"), {"train.txt": f"{full}\n{blank}\n{short}\n{word}\n"})
    assert [rows[0][c] for c in CRITEO] == [1, *range(-1, 12), *names]
    assert [rows[1][c] for c in CRITEO] == [0, *[None] * 39]
    assert [(r["_line"], r["_reason"]) for r in rows[2:]] == [
        (3, "wrong number of fields"),
        (4, "I1: 'many' is not an int"),
    ]


def test_criteo_real(spark: SparkSession, ws: Workspace, shared_data: Path) -> None:
    spec = shipped("criteo")
    manifest = ingest(spec, ws)
    assert manifest.rows == {"read": 10_000, "kept": 10_000, "quarantined": 0, "duplicates": 0}
    records = events(spark, ws, spec).orderBy("_source_file", "_source_line").collect()
    lines = (shared_data / "criteo" / "kaggle-first-10k.txt").read_text().splitlines()
    for number, (row, line) in enumerate(zip(records, lines, strict=True), 1):
        fields = [text or None for text in line.split("\t")]
        expected = [*(None if t is None else int(t) for t in fields[:14]), *fields[14:]]
        assert [row[c] for c in CRITEO] == expected
        assert row["_source_line"] == number


# --- talkingdata -----------------------------------------------------------------------------------------------------

HEADER = "ip,app,device,os,channel,click_time,attributed_time,is_attributed\n"


def test_talkingdata_times(spark: SparkSession, ws: Workspace) -> None:
    body = (
        f"{HEADER}1,2,3,4,5,2017-11-07 9:30,,0\n"
        "1,2,3,4,5,2017-11-07 19:30,2017-11-08 2:05,1\n"
        "1,2,3,4,5,2017-11-07 09:30:59,2017-11-07 12:00:01,1\n"
        "1,2,3,4,5,7.11.2017 9:30,,0\n"
        "1,2,3,4,5,2017-11-10 0:00,,0\n"
    )
    rows = read(spark, ws, shipped("talkingdata"), {"train.csv.gz": body})
    times = [(r["click_time"], r["attributed_time"], r["is_attributed"]) for r in rows[:3]]
    assert times == [
        (datetime(2017, 11, 7, 9, 30), None, 0),
        (datetime(2017, 11, 7, 19, 30), datetime(2017, 11, 8, 2, 5), 1),
        (datetime(2017, 11, 7, 9, 30, 59), datetime(2017, 11, 7, 12, 0, 1), 1),
    ]
    assert [(r["_line"], r["_reason"]) for r in rows[3:]] == [
        (5, "click_time: '7.11.2017 9:30' is not a timestamp"),
        (6, "click_time: '2017-11-10 00:00:00' is after the end of the day"),
    ]


def test_talkingdata_real(spark: SparkSession, ws: Workspace, shared_data: Path) -> None:
    spec = shipped("talkingdata")
    manifest = ingest(spec, ws)
    assert manifest.rows["kept"] == manifest.rows["read"] == 100_000
    assert manifest.facts["drift"] == []
    times = {c: F.col(c).cast("string") for c in ("click_time", "attributed_time")}
    actual = events(spark, ws, spec).withColumns(times).orderBy("_source_line").toPandas()
    with open(shared_data / "talkingdata" / "train_sample.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    for column in ("ip", "app", "device", "os", "channel", "is_attributed"):
        assert actual[column].tolist() == [int(r[column]) for r in rows]
    for column in times:
        expected = [str(datetime.strptime(r[column], "%Y-%m-%d %H:%M")) if r[column] else None for r in rows]
        assert actual[column].tolist() == expected
    assert int(actual["is_attributed"].sum()) == 227
    # What is known only after the label is no feature.
    assert "attributed_time" not in {c for chain in spec.features.workflow for c in chain.columns}


# --- movielens -------------------------------------------------------------------------------------------------------


def splits(rows: list[dict[str, Any]]) -> dict[tuple[str, int], set[tuple[int, int]]]:
    """(split, label) -> (user, item) pairs, each there once."""
    pairs: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    for r in rows:
        if r["_state"] == GOOD:
            pair = (r["user_id"], r["item_id"])
            assert pair not in pairs[r["split"], r["label"]]
            pairs[r["split"], r["label"]].add(pair)
    return dict(pairs)


def check_negatives(
    pairs: dict[tuple[str, int], set[tuple[int, int]]], split: str, count: int, items: int, known: tuple[str, ...]
) -> None:
    """Check that each user has the required negatives, or all there are, of items outside the user's `known` splits."""
    seen: dict[int, set[int]] = defaultdict(set)
    for name in known:
        for user, item in pairs[name, 1]:
            seen[user].add(item)
    drawn = Counter(user for user, _ in pairs[split, 0])
    for user, _ in pairs[split, 1]:
        assert drawn[user] == min(count, items - len(seen[user]))
    assert not {(u, i) for u, i in pairs[split, 0] if i in seen[u]}


def test_movielens_ratings(spark: SparkSession, ws: Workspace) -> None:
    # User 1 rates 300 items (two at the same last second), user 2 five of them, user 3 two.
    lines = [f"1::{item}::{item % 5 + 1}::{978_300_000 + min(item, 299)}" for item in range(1, 301)]
    lines += [f"2::{item}::4::{978_300_000 - item}" for item in range(1, 6)]
    lines += ["3::1::4::978300000", "3::2::4::978300001", "4::x::3::978300000", "5::1::3", "6::1::9::978300000"]
    spec = shipped("movielens", format="movielens")
    rows = read(spark, ws, spec, {"ratings.dat": "\n".join(lines) + "\n"})
    bad = [(r["_line"], r["_reason"]) for r in rows if r["_state"] == BAD]
    assert bad == [
        (308, "item_id: 'x' is not a bigint"),
        (309, "wrong number of fields"),
        (310, "rating: 9.0 is outside [0, 5]"),
    ]
    pairs = splits(rows)
    # Of the two ratings of one second the later line is the last. Two ratings are too few to hold any out.
    assert pairs["rank", 1] == {(1, 300), (2, 1)}
    assert pairs["valid", 1] == {(1, 299), (2, 2)}
    assert pairs["train", 1] == {(1, i) for i in range(1, 299)} | {(2, 3), (2, 4), (2, 5), (3, 1), (3, 2)}
    assert ("train", 0) not in pairs
    check_negatives(pairs, "valid", VALID_NEGATIVES, 300, ("train", "valid", "rank"))
    check_negatives(pairs, "rank", RANK_NEGATIVES, 300, ("train", "valid", "rank"))
    # User 1 has rated all there is.
    assert Counter(u for u, _ in pairs["rank", 0]) == {2: RANK_NEGATIVES}
    first = next(r for r in rows if r["_line"] == 1)
    assert (first["ts"], first["rating"]) == (datetime(2000, 12, 31, 22, 0, 1), 2.0)
    drawn = [r for r in rows if r["label"] == 0]
    assert all(r["rating"] is None and r["_copy"] > 0 for r in drawn)
    reread = read(spark, Workspace(ws.home / "again"), spec, {"ratings.dat": "\n".join(lines) + "\n"})
    assert splits(reread) == pairs


NCF = {
    "x.train.rating": "".join(f"{u}\t{i}\t5\n" for u in range(3) for i in range(u, 40, u + 1)) + "3\t7\t4\nx\t1\t1\n",
    "x.test.rating": "".join(f"{u}\t{60 + u}\t4\t978300{u}00\n" for u in range(4)),
    "x.test.negative": "".join(f"({u},{60 + u})\t" + "\t".join(str(41 + k) for k in range(9)) + "\n" for u in range(4))
    + "broken\t1\t2\n(4,64)\n",
}


def test_movielens_ncf(spark: SparkSession, ws: Workspace) -> None:
    spec = shipped("movielens")
    rows = read(spark, ws, spec, NCF)
    bad = {(r["_source_file"], r["_line"]): r["_reason"] for r in rows if r["_state"] == BAD}
    assert bad == {
        ("in/x.train.rating", 75): "user_id: 'x' is not a bigint",
        ("in/x.test.negative", 5): "wrong number of fields",
        ("in/x.test.negative", 6): "wrong number of fields",
    }
    pairs = splits(rows)
    interactions = {(u, i) for u in range(3) for i in range(u, 40, u + 1)} | {(3, 7)}
    assert pairs["rank", 1] == {(u, 60 + u) for u in range(4)}
    assert pairs["rank", 0] == {(u, 41 + k) for u in range(4) for k in range(9)}
    # One of each user's training items is held out; user 3 has a single one, which stays.
    assert pairs["train", 1] | pairs["valid", 1] == interactions
    assert not pairs["train", 1] & pairs["valid", 1]
    assert sorted(u for u, _ in pairs["valid", 1]) == [0, 1, 2]
    assert ("train", 0) not in pairs
    # Drawn from the items of the training rows: user 0 has rated all of them.
    items = {i for _, i in interactions}
    check_negatives(pairs, "valid", VALID_NEGATIVES, len(items), ("train", "valid"))
    assert not pairs["train", 1] & (pairs["rank", 1] | pairs["rank", 0])
    times = {r["user_id"]: r["ts"] for r in rows if r["split"] == "rank" and r["label"] == 1 and r["_state"] == GOOD}
    assert times[1] == datetime(2000, 12, 31, 22, 1, 40)


def test_movielens_ncf_wants_its_three_files(spark: SparkSession, ws: Workspace) -> None:
    spec = shipped("movielens")
    with pytest.raises(UserError, match=r"no landing file ends in '\.test\.negative'"):
        read(spark, ws, spec, {k: v for k, v in NCF.items() if "negative" not in k})
    with pytest.raises(UserError, match=r"landing file in/notes\.txt is none of \*\.train\.rating"):
        read(spark, ws, spec, {**NCF, "notes.txt": "x"})


def test_lightgcn(spark: SparkSession, ws: Workspace) -> None:
    spec = shipped("gowalla")
    train = {u: list(range(u % 7, 60, u % 5 + 2)) for u in range(60)} | {60: [3], 61: []}
    test = {u: [60 + u, 130] for u in range(50)} | {70: []}
    files = {
        f"x.{name}.txt": "".join(" ".join(map(str, [u, *items])) + "\n" for u, items in lists.items())
        for name, lists in (("train", train), ("test", test))
    }
    files["x.test.txt"] += "8 y 131 \n"
    rows = read(spark, ws, spec, files)
    assert [(r["_source_file"], r["_line"], r["_reason"]) for r in rows if r["_state"] == BAD] == [
        ("in/x.test.txt", 52, "item_id: 'y' is not a bigint")
    ]
    # A user without items is a line and no row.
    assert {61, 70} & {r["user_id"] for r in rows} == set()
    pairs = splits(rows)
    interactions = {(u, i) for u, items in train.items() for i in items}
    assert pairs["test", 1] == {(u, i) for u, items in test.items() for i in items} | {(8, 131)}
    assert pairs["train", 1] | pairs["valid", 1] == interactions
    assert not pairs["train", 1] & pairs["valid", 1]
    valid_counts = Counter(u for u, _ in pairs["valid", 1])
    assert set(valid_counts.values()) == {1}
    assert 1 <= len(valid_counts) <= 20
    assert 60 not in valid_counts
    check_negatives(pairs, "valid", VALID_NEGATIVES, len({i for _, i in interactions}), ("train", "valid"))
    assert set(pairs) == {("train", 1), ("valid", 1), ("valid", 0), ("test", 1)}
    with pytest.raises(UserError, match=r"no landing file ends in 'test\.txt'"):
        read(spark, Workspace(ws.home / "one"), spec, {"x.train.txt": "1 2\n"})
    with pytest.raises(UserError, match=r"landing file in/item_list\.txt is none of \*train\.txt"):
        read(spark, Workspace(ws.home / "more"), spec, {**files, "item_list.txt": "1 2\n"})


def test_movielens_ncf_real(spark: SparkSession, ws: Workspace, shared_data: Path) -> None:
    """The first tenth of the authors' users: each of their ratings once, and all that they list."""
    users = range(604)
    for path in sorted((shared_data / "ml-1m-ncf").glob("ml-1m.t*")):
        lines = path.read_text().splitlines(keepends=True)
        (ws.home / "in" / path.name).parent.mkdir(parents=True, exist_ok=True)
        (ws.home / "in" / path.name).write_text("".join(x for x in lines if int(re.search(r"\d+", x)[0]) in users))
    interactions, left_out = (
        np.unique(lines[0] * 10**6 + lines[1])
        for lines in (
            pd.read_csv(ws.home / "in" / name, sep="\t", header=None)
            for name in ("ml-1m.train.rating", "ml-1m.test.rating")
        )
    )
    spec = shipped("movielens", path="in/ml-1m.t*")
    manifest = ingest(spec, ws)
    assert manifest.rows["quarantined"] == 0
    assert manifest.rows["read"] == len(interactions) + 2 * len(users)
    assert manifest.rows["kept"] == manifest.rows["read"] + manifest.rows["expanded"]
    frame = events(spark, ws, spec).select("user_id", "item_id", "split", "label").toPandas()
    counts = frame.groupby(["split", "label"]).size().to_dict()
    assert counts == {
        ("train", 1): len(interactions) - len(users),
        ("valid", 1): len(users),
        ("valid", 0): 4 * len(users),
        ("rank", 1): len(users),
        ("rank", 0): 99 * len(users),
    }
    pairs = {key: np.unique(g.user_id * 10**6 + g.item_id) for key, g in frame.groupby(["split", "label"])}
    assert np.array_equal(np.union1d(pairs["train", 1], pairs["valid", 1]), interactions)
    assert not np.isin(pairs["train", 1], pairs["valid", 1]).any()
    assert np.array_equal(pairs["rank", 1], left_out)
    assert not np.isin(left_out, interactions).any()
    assert not np.isin(pairs["valid", 0], interactions).any()
    negative = pd.read_csv(ws.home / "in" / "ml-1m.test.negative", sep="\t", header=None)
    users_of = negative[0].str.extract(r"^\((\d+),")[0].astype(np.int64).to_numpy()
    listed = users_of[:, None] * 10**6 + negative.drop(columns=0).to_numpy()
    assert np.array_equal(pairs["rank", 0], np.unique(listed))


# --- user_items ------------------------------------------------------------------------------------------------------


def test_user_items(spark: SparkSession, ws: Workspace) -> None:
    """The last three items of each user, files and lines in their order, whatever lies between a user's lines."""
    orders: dict[int, list[int]] = {1: [], 2: [], 7: [5, 5], 8: [3]}
    lines = []
    for k in range(300):
        user = 1 + k % 2
        orders[user].append(k * 7 % 40)
        lines.append(f"{user} {orders[user][-1]}")
    body = ["7 5", "x 1", "7\t5", "", "8  3", "2 1 9", "9"]
    rows = read(spark, ws, shipped("beauty"), {"b.txt": "\n".join(lines[200:] + body), "a.txt": "\n".join(lines[:200])})
    bad = {r["_line"]: r["_reason"] for r in rows if r["_state"] == BAD}
    assert bad == {102: "user_id: 'x' is not a bigint", 106: "wrong number of fields", 107: "wrong number of fields"}
    expected = []
    for user, items in orders.items():
        splits = ("train",) if len(items) < 3 else ("train", "valid", "test")
        for split, place in zip(splits, range(len(items) - len(splits), len(items)), strict=True):
            expected.append((user, split, items[place], items[:place]))
    actual = [(r["user_id"], r["split"], r["item_id"], r["history"]) for r in rows if r["_state"] == GOOD]
    assert sorted(actual) == sorted(expected)
    assert all(r["label"] == 1 for r in rows if r["_state"] == GOOD)


def test_user_items_real(spark: SparkSession, ws: Workspace, shared_data: Path) -> None:
    spec = shipped("beauty")
    manifest = ingest(spec, ws)
    assert manifest.rows == {"read": 3 * 40_226, "kept": 3 * 40_226, "quarantined": 0, "duplicates": 0}
    interactions = pd.read_csv(shared_data / "beauty" / "beauty.txt", sep=" ", names=["user_id", "item_id"])
    order = interactions.groupby("user_id", sort=True).item_id.agg(list)
    frame = events(spark, ws, spec).select("user_id", "item_id", "history", "split").toPandas()
    for offset, split in enumerate(("test", "valid", "train")):
        split_rows = frame[frame.split == split].sort_values("user_id")
        assert split_rows.user_id.tolist() == order.index.tolist()
        assert split_rows.item_id.tolist() == [items[-1 - offset] for items in order]
        assert [list(h) for h in split_rows.history] == [items[: -1 - offset] for items in order]
