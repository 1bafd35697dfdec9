"""Candidates of several sources under filters, against each user's whole ranking in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import BlockedFilter, CandidateTable, SeenFilter, build_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.build.rows import SourceRows
from headrace.features.layout.split import SPLIT
from headrace.features.table_ops.base import SourceRead
from headrace.features.table_ops.preparation import ExternalReader, Preparation
from headrace.features.table_ops.spark_windows import EVENT_MICROS
from headrace.score.candidates.candidates import UserCandidates, candidates_of_users
from headrace.score.candidates.covisitation import share_of_users
from headrace.score.candidates.shared_lists import read_table
from headrace.score.candidates.source import CandidateContext, pairs_of
from headrace.score.entities import ActiveEvents
from headrace.score.scoring_model import ScoringModel
from headrace.stage import Context
from headrace.stage.manifest import Manifest, Output

DS = "2026-01-05"
END = datetime(2026, 1, 6, tzinfo=UTC)
STEPS, FIXED_ONE = 1 << 20, 1 << 40
TYPES = {"user": "bigint", "land": "string", "item": "string", "price": "double", "ts": "timestamp", "click": "int"}
LANDS = ["CH", "DE", None]
SPEC: dict[str, Any] = {
    "pipeline": "shop",
    "source": {"format": "jsonl", "path": "{ds}/*"},
    "sources": {
        name: {
            "source": {"format": "jsonl", "path": name + "/{ds}/*"},
            "table": {"columns": [{"name": n, "type": t} for n, t in columns.items()]},
        }
        for name, columns in {
            "bought": {"buyer": "bigint", "item": "string", "amount": "int"},
            "members": {"user": "bigint", "land": "string"},
        }.items()
    },
    "table": {
        "columns": [
            *({"name": n, "type": t} for n, t in TYPES.items()),
            {"name": "lands", "type": "array<string>"},
            {"name": "most", "type": "double"},
        ],
        "event_time": "ts",
    },
    "features": {
        "label": "click",
        "split": {"by": "time", "valid_days": 1},
        "workflow": [{"columns": ["price"], "ops": ["log"]}],
    },
}


class Shop:
    """A few hundred events, as frames of Spark and as plain rows."""

    def __init__(self, spark: SparkSession, home: Workspace) -> None:
        rng = np.random.default_rng(7)
        self.spark, self.ws = spark, home
        self.items = [
            {
                "item": name,
                "price": float(rng.integers(1, 100)),
                "lands": [x for x in ("CH", "DE") if rng.random() < 0.6],
                "events": None,
                "first_event": None,
            }
            # Bytes, not letters, order them: Z before a before é.
            for name in sorted((f"{'Zaé'[i % 3]}{i}" for i in range(45)), key=lambda x: x.encode())
        ]
        self.users = [
            {"user": 10**11 + u, "land": LANDS[int(rng.integers(3))], "most": float(rng.choice([5.0, 40.0, 200.0]))}
            for u in range(50)
        ]
        # Users from 40 on and items from 37 on have no event; a few make most of them.
        n = 900
        self.events = pd.DataFrame(
            {
                "user": [self.users[int(u) % 40]["user"] for u in rng.zipf(1.3, n) + rng.integers(0, 4, n)],
                "row": [int(i) * 7 % 37 for i in rng.zipf(1.25, n) + rng.integers(0, 5, n)],
                "ts": [END - timedelta(hours=int(h) + 1) for h in rng.integers(0, 24 * 5, n)],
                "click": rng.integers(0, 2, n),
            }
        )
        self.events["item"] = [self.items[r]["item"] for r in self.events["row"]]
        for row, seen in self.events.groupby("row"):
            train = (seen.ts < END - timedelta(days=1)).sum()
            self.items[int(str(row))] |= {"events": int(train), "first_event": seen.ts.min()}
        self.bought = [
            (self.users[int(u)]["user"], self.items[int(i)]["item"], int(a))
            for u, i, a in zip(rng.integers(0, 50, 200), rng.integers(0, 45, 200), rng.integers(0, 3, 200), strict=True)
        ]

    def context(self, score: dict[str, Any], more: dict[str, Any] | None = None) -> CandidateContext:
        base = {
            "user": {"key": "user", "columns": ["land", "most"], "from": "members"},
            "item": {"key": "item", "columns": ["price", "lands"]},
        }
        spec = build_spec(SPEC | (more or {}) | {"score": base | score})
        ctx = Context(spec, self.ws, DS)
        spark, reader = self.spark, ExternalReader(self.ws)
        # No source here looks at it.
        model = ScoringModel("train", Output(kind="model", name="model", version="1"), {})
        split = self.events.ts.map(lambda t: "train" if t < END - timedelta(days=1) else "valid")
        events = spark.createDataFrame(pa.table({**self.events.drop(columns="row"), SPLIT: split}))
        bought = pa.table(dict(zip(("buyer", "item", "amount"), zip(*self.bought, strict=True), strict=True)))
        sources = {"bought": spark.createDataFrame(bought).withColumn(EVENT_MICROS, F.lit(0).cast("bigint"))}

        def read(request: SourceRead) -> DataFrame:
            return sources[request.name]

        active = ActiveEvents(ctx, events, events, Preparation.from_spec(spec), reader, read)  # type: ignore[arg-type]
        users = pa.Table.from_pylist(
            self.users, pa.schema({"user": pa.int64(), "land": pa.string(), "most": pa.float64()})
        )
        timestamp_type = pa.timestamp("us", "UTC")
        types = {"item": pa.string(), "price": pa.float64(), "lands": pa.list_(pa.string()), "events": pa.int64()}
        items = pa.Table.from_pylist(self.items, pa.schema(types | {"first_event": timestamp_type}))
        frame = spark.createDataFrame(items.append_column("item_row", pa.array(range(len(items)), pa.int32())))
        folder, maps = self.ws.exchange_folder("shop", "score", local_scratch=False) / "run", self.ws.mapped("shop")
        return CandidateContext(ctx, spark, active, spark.createDataFrame(users), frame, reader, model, folder, maps)

    # Whole orders of items by plain Python.

    @property
    def liked(self) -> dict[int, dict[int, datetime]]:
        """user -> item -> its newest click."""
        by_user: dict[int, dict[int, datetime]] = {}
        for e in self.events[self.events.click == 1].sort_values("ts").itertuples():
            by_user.setdefault(int(e.user), {})[int(e.row)] = e.ts
        return by_user

    def popular(self, user: dict[str, Any], excluded_users: list[int]) -> list[int]:
        land_of_user = {u["user"]: u["land"] for u in self.users if u["user"] not in excluded_users}
        overall = Counter(row for items in self.liked.values() for row in items)
        counts = Counter(
            row for u, items in self.liked.items() if land_of_user.get(u, "") == user["land"] for row in items
        )
        first = sorted(counts, key=lambda r: (-counts[r], r))
        return first + [r for r in sorted(range(45), key=lambda r: (-overall[r], r)) if r not in counts]

    def covisited(self, user: dict[str, Any], items: set[int], history: int, most_users: int) -> list[int]:
        newest = {
            u: sorted(items & liked.keys(), key=lambda r: (-liked[r].timestamp(), r))[:history]
            for u, liked in self.liked.items()
        }
        n = Counter(r for user_items in newest.values() for r in user_items)
        share = {r: max(1, min(STEPS, most_users * STEPS // n[r])) for r in n}
        common: Counter[tuple[int, int]] = Counter()
        for u, user_items in newest.items():
            sampled = [r for r in user_items if self.hashes[u] % STEPS < share[r]]
            common.update((a, b) for a in sampled for b in sampled if a != b)
        sums: Counter[int] = Counter()
        for had in newest.get(user["user"], []):
            for (a, b), together in common.items():
                if a == had:
                    c = together * STEPS / min(share[a], share[b])
                    similarity = min(1.0, c / math.sqrt(float(n[a]) * n[b]))
                    sums[b] += math.floor(similarity * c / (c + 10.0) * FIXED_ONE)
        return sorted(sums, key=lambda r: (-sums[r], r))

    @property
    def hashes(self) -> dict[int, int]:
        """Spark's hash of a user by which users of an item are thinned."""
        if not hasattr(self, "_hashes"):
            rows = self.spark.createDataFrame(pa.table({"user": [u["user"] for u in self.users]}))
            records = rows.select("user", F.xxhash64(F.lit("users of an item"), F.col("user"))).collect()
            self._hashes = dict(tuple(r) for r in records)
        return self._hashes

    def recent(self) -> list[int]:
        first = [i["first_event"] for i in self.items]
        return sorted(range(45), key=lambda r: (first[r] is None, -first[r].timestamp() if first[r] else 0, r))


@pytest.fixture(scope="module")
def shop(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(spark, Workspace(tmp_path_factory.mktemp("shop") / "home"))


def lists_of(candidates: UserCandidates) -> dict[int, tuple[list[int], list[int]]]:
    return {r["user"]: (list(r["__items"]), list(r["__sources"])) for r in candidates.frame.collect()}


def union(sources: list[list[int]], limit: int, places: list[int]) -> tuple[list[int], list[int]]:
    order = list(dict.fromkeys(item for items in sources for item in items))
    reserved = {item for items, n in zip(sources, places, strict=True) for item in items[:n]}
    rest = [item for item in order if item not in reserved][: limit - len(reserved)]
    chosen = [item for item in order if item in reserved or item in rest]
    return chosen, [sum(1 << s for s, items in enumerate(sources) if item in items) for item in chosen]


def editors(shop: Shop) -> list[tuple[str | None, str, int]]:
    rng = np.random.default_rng(3)
    return [
        (LANDS[int(rng.integers(3))], shop.items[int(rng.integers(45))]["item"], int(rng.integers(5)))
        for _ in range(60)
    ]


def test_every_user_has_what_the_filters_leave(shop: Shop) -> None:
    spark, k = shop.spark, 6
    listed, blocked = editors(shop), [(u["user"], i["item"]) for u in shop.users[:9] for i in shop.items[:20]]
    path = shop.ws.home
    table = pa.table(dict(zip(("land", "what", "weight"), zip(*listed, strict=True), strict=True)))
    spark.createDataFrame(table).write.format("delta").save(str(path / "editors"))
    table = pa.table(dict(zip(("who", "item"), zip(*blocked, strict=True), strict=True)))
    spark.createDataFrame(table).write.parquet(str(path / "blocked"))
    unwanted = [i["item"] for i in shop.items[3::11]]
    spark.createDataFrame(pa.table({"item": unwanted})).write.parquet(str(path / "unwanted"))
    excluded_users = [shop.users[2]["user"], 77]
    spark.createDataFrame(pa.table({"user": excluded_users})).write.parquet(str(path / "gone"))
    context = shop.context(
        {
            "candidates": {
                "limit": 14,
                "sources": {
                    "together": {"kind": "covisitation", "k": k, "history": 5, "users_per_item": 6, "users": "active"},
                    "liked": {"kind": "popular", "k": k, "by": ["land"]},
                    "recent": {"kind": "recent", "k": k, "share": 0.2},
                    "editors": {
                        "kind": "table",
                        "path": "editors",
                        "k": 4,
                        "item": "what",
                        "by": ["land"],
                        "order": "weight",
                        "descending": True,
                    },
                    "welcome": {"kind": "popular", "k": 14, "by": ["land"], "users": "new"},
                },
            },
            "filters": [
                {"kind": "seen"},
                {"kind": "seen", "from": "bought", "user": "buyer", "where": "amount > 0"},
                {"kind": "table", "path": "blocked", "format": "parquet", "user": "who", "item": "item"},
                {"kind": "table", "path": "unwanted", "format": "parquet", "item": "item"},
                {"kind": "table", "path": "gone", "format": "parquet", "user": "user"},
                {"kind": "where", "where": "land is null or array_contains(lands, land)"},
                {"kind": "where", "where": "price < most"},
                {"kind": "where", "where": "price <> 50"},
            ],
        }
    )
    active = {int(u) for u in shop.events[shop.events.ts < END - timedelta(days=1)].user}
    with candidates_of_users(context) as candidates:
        lists = lists_of(candidates)
        scores = spark.createDataFrame(
            pa.table(
                {
                    "user": [u for u, (items, _) in lists.items() for _ in items],
                    "item": [shop.items[i]["item"] for items, _ in lists.values() for i in items],
                }
            )
        )
        assert candidates.violations(scores) == 0
        # The count can fail: seen, bought, blocked, unwanted, not sold there, of a user who is gone.
        bad = pa.table(
            {
                "user": [blocked[25][0], excluded_users[0], shop.users[40]["user"]],
                "item": [blocked[25][1], "Z0", unwanted[0]],
            }
        )
        assert candidates.violations(scores.unionByName(spark.createDataFrame(bad))) == 3
        facts = candidates.facts
    assert set(lists) == {u["user"] for u in shop.users} - set(excluded_users)
    # Those that no filter leaves out for everybody: of these alone the similarities are.
    eligible = {r for r, i in enumerate(shop.items) if i["item"] not in unwanted and i["price"] != 50}
    short_lists = 0
    for user in shop.users:
        if user["user"] in excluded_users:
            continue
        out = set(shop.liked.get(user["user"], ()))
        names = {i for u, i, a in shop.bought if u == user["user"] and a > 0} | set(unwanted)
        names |= {i for u, i in blocked if u == user["user"]}
        allowed = {
            r
            for r, i in enumerate(shop.items)
            if r not in out
            and i["item"] not in names
            and (user["land"] is None or user["land"] in i["lands"])
            and i["price"] < user["most"]
            and i["price"] != 50
        }
        rows = {i["item"]: r for r, i in enumerate(shop.items)}
        weights: dict[int, int] = {}
        for land, item, weight in listed:
            if land == user["land"]:
                weights[rows[item]] = max(weight, weights.get(rows[item], -1))
        is_new = user["user"] not in active
        orders = [
            (k, [] if is_new else shop.covisited(user, eligible, 5, 6)),
            (k, shop.popular(user, excluded_users)),
            (k, shop.recent()),
            (4, sorted(weights, key=lambda r: (-weights[r], r))),
            (14, shop.popular(user, excluded_users) if is_new else []),
        ]
        expected_lists = [[r for r in order if r in allowed][:n] for n, order in orders]
        assert len(expected_lists[1]) == min(k, len(allowed))
        short_lists += len(expected_lists[1]) < k
        assert lists[user["user"]] == union(expected_lists, 14, [0, 0, 2, 0, 0]), user
    # Some have fewer than k and some more than that: both ends of the rounds are met.
    assert 0 < short_lists < 40
    liked = facts["sources"]["liked"]
    assert len(liked["rounds"]) > 1
    assert liked["rounds"][-1]["lacking"] == 0
    assert liked["filtered"] > 0
    assert facts["users"] == 49
    assert facts["candidates"] == sum(len(items) for items, _ in lists.values())
    assert facts["users_with_fewer"] == sum(len(items) < 14 for items, _ in lists.values())
    assert liked["candidates"] == sum(m & 2 == 2 for _, masks in lists.values() for m in masks)
    assert liked["shared"]["recent"] == sum(m & 6 == 6 for _, masks in lists.values() for m in masks)
    assert liked["alone"] == sum(m == 2 for _, masks in lists.values() for m in masks)


def test_a_popular_items_users_are_thinned(spark: SparkSession) -> None:
    counts, most = [1, 7, 2047, 2048, 5000, 10**7, 2**33], [2, 1000, 2047, 2048, 10**6, 10**9]
    rows = spark.createDataFrame(pa.table({"n": counts}))
    shares = rows.select("n", *[share_of_users(m, F.col("n")).alias(str(m)) for m in most]).toArrow().to_pylist()
    for row in shares:
        for m in most:
            assert row[str(m)] == max(1, min(STEPS, m * STEPS // row["n"])), (m, row["n"])


@pytest.mark.parametrize("k", [3, 20])
def test_new_items_are_shared_out(shop: Shop, k: int) -> None:
    context = shop.context(
        {
            "candidates": {"limit": 20, "sources": {"fresh": {"kind": "new_items", "k": k}}},
            "filters": [{"kind": "seen", "from": "bought", "user": "buyer"}],
        }
    )
    unseen = {r for r, i in enumerate(shop.items) if not i["events"]}
    rows = {i["item"]: r for r, i in enumerate(shop.items)}
    with candidates_of_users(context) as candidates:
        lists = lists_of(candidates)
    frequency: Counter[int] = Counter()
    for user in shop.users:
        items, masks = lists[user["user"]]
        allowed = unseen - {rows[i] for u, i, _ in shop.bought if u == user["user"]}
        assert len(items) == len(set(items)) == min(k, len(allowed))
        assert set(items) <= allowed
        assert set(masks) <= {1}
        frequency.update(items)
    # Each new item finds its users: none is the first of all.
    assert set(frequency) == unseen
    assert len({tuple(items) for items, _ in lists.values()}) > 4


def source_of(spark: SparkSession, ctx: Context, tables: dict[str, pa.Table]) -> SourceRows:
    """Named sources as ingest leaves them."""
    outputs = []
    for name, rows in tables.items():
        table = ctx.ws.events("shop", name)
        write_deltalake(str(table), rows, partition_by=["ds"])
        outputs.append(Output(kind="delta", name=ctx.ws.name_of(table), version="0"))
    manifest = Manifest(stage="ingest", pipeline="shop", ds=DS, key="", spec_hash="", outputs=tuple(outputs))
    return SourceRows.for_day(replace(ctx, upstream={"ingest": manifest}), spark)


def test_named_sources_are_as_the_day_knows_them(shop: Shop) -> None:
    # Keys are texts here: one that is no number is nobody's.
    columns = {
        "orders": {"buyer": "string", "item": "string", "at": "timestamp"},
        "gone": {"item": "string", "weight": "int"},
        "returned": {"buyer": "string", "item": "string"},
        "tried": {"buyer": "string", "item": "string", "on": "date"},
    }
    times, west = {"orders": "at", "tried": "on"}, {"returned", "tried"}
    more = {
        "sources": SPEC["sources"]
        | {
            name: {
                "source": {
                    "format": "jsonl",
                    "path": name + "/{ds}/*",
                    "timezone": "America/Los_Angeles" if name in west else "UTC",
                },
                "table": {"columns": [{"name": n, "type": t} for n, t in types.items()], "event_time": times.get(name)},
            }
            for name, types in columns.items()
        },
        "features": SPEC["features"] | {"history_days": 2, "window_days": 2},
    }
    base = shop.context({}, more)
    users = [str(u["user"]) for u in shop.users[:4]]
    ages = [40, 400, 3, -1]  # days before ds
    days = [(END - timedelta(days=a + 1)).date().isoformat() for a in ages]
    orders = {
        "buyer": [*users, ""],
        "item": ["Z0"] * 5,
        "at": pa.array([END - timedelta(days=a, hours=1) for a in [*ages, 3]], pa.timestamp("us", "UTC")),
        "ds": [*days, days[2]],
    }
    withdrawn = {
        "item": ["Z0", "Z3", "Z6", "Z9"],
        "weight": pa.array([1, 2, 3, 4], pa.int32()),
        "ds": ["2026-01-03", "2026-01-04", DS, "2026-01-06"],
    }
    # A day of the west ends in UTC's next one: what is known of it by its date alone belongs to it all the same.
    landed = [(END - timedelta(days=a + 1)).date() for a in (0, 1, 3, -1)]
    returned = {"buyer": users, "item": ["Z0"] * 4, "ds": [day.isoformat() for day in landed]}
    tables = {"orders": orders, "gone": withdrawn, "returned": returned, "tried": returned | {"on": landed}}
    sources = source_of(shop.spark, base.ctx, {name: pa.table(rows) for name, rows in tables.items()})
    context = replace(base, active=replace(base.active, sources=sources))
    bought = {"kind": "seen", "from": "orders", "user": "buyer"}
    with pytest.raises(UserError, match=r"filters\[0\]\.item: the events have no column 'itm'; did you mean 'item'"):
        pairs_of(context, SeenFilter(item="itm"), "score.filters[0]")
    try:
        for window_days, expected_users in ((None, users[:3]), (60, [users[0], users[2]]), (10, [users[2]])):
            seen = SeenFilter.model_validate(bought | {"days": window_days})
            pairs = pairs_of(context, seen, "score.filters[0]").collect()
            assert {str(r["__user"]) for r in pairs} == set(expected_users), window_days
        for name in ("returned", "tried"):
            for window_days, count in ((None, 3), (1, 1), (2, 2), (3, 2), (4, 3)):
                seen = SeenFilter.model_validate({"kind": "seen", "from": name, "user": "buyer", "days": window_days})
                pairs = pairs_of(context, seen, "score.filters[0]").collect()
                assert {str(r["__user"]) for r in pairs} == set(users[:count]), (name, window_days)
        for table in (BlockedFilter, CandidateTable):
            listed = table.model_validate({"kind": "table", "from": "gone", "item": "item"})
            assert [r["item"] for r in read_table(context, listed, ["item"], "").collect()] == ["Z6"]
            # What a day without rows lists is nothing.
            later = replace(context.active, sources=replace(sources, ctx=replace(sources.ctx, ds="2026-01-07")))
            assert read_table(replace(context, active=later), listed, ["item"], "").count() == 0
    finally:
        context.release()


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            {"filters": [{"kind": "where", "where": "prize < 3"}]},
            r"filters\[0\]\.where: .*'prize'; did you mean 'price'",
        ),
        ({"filters": [{"kind": "where", "where": "price +"}]}, r"filters\[0\]\.where: 'price \+' is no Spark SQL"),
        ({"filters": [{"kind": "where", "where": "price + 1"}]}, r"'price \+ 1' is double, not true or false"),
        ({"filters": [{"kind": "where", "where": "price < 0"}]}, r"score\.filters leave no item for anybody"),
        ({"filters": [{"kind": "where", "where": "land = 'X'"}]}, r"score\.filters leave no item for any user"),
        ({"filters": [{"kind": "seen", "where": "clik = 1"}]}, r"filters\[0\]\.where: .*'clik'; did you mean 'click'"),
        (
            {"filters": [{"kind": "where", "where": "1 / (price - price) > 0"}]},
            r"score\.filters\[0\]\.where: '1 / \(price - price\) > 0': .*[Dd]ivision by zero.*try_divide",
        ),
        (
            {"filters": [{"kind": "seen"}, {"kind": "where", "where": "most / (price - price) > 0"}]},
            r"score\.filters\[1\]\.where: 'most / \(price - price\) > 0': .*[Dd]ivision by zero",
        ),
        (
            {"filters": [{"kind": "seen", "where": "cast(item as int) > 0"}]},
            r"score\.filters\[0\]\.where: 'cast\(item as int\) > 0': .*cast.*try_cast",
        ),
        ({"filters": [{"kind": "table", "path": "nowhere", "user": "user"}]}, r"score: there is no delta table"),
    ],
)
def test_filters_that_do_not_fit(shop: Shop, score: dict[str, Any], message: str) -> None:
    context = shop.context({"candidates": {"sources": {"a": {"kind": "recent", "k": 2}}}} | score)
    with pytest.raises(UserError, match=message), candidates_of_users(context):
        pass
