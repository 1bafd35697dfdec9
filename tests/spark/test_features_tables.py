"""Table operators: Spark makes the rows that Arrow makes; nothing leaks; a day's run uses them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from headrace.config import Spec, build_spec
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.build.stage import BuildFeatures
from headrace.features.table_ops import TABLE_OPERATORS, sequences
from headrace.features.table_ops.base import TrainRange
from headrace.features.table_ops.preparation import ExternalReader, Preparation
from headrace.features.types import declared
from headrace.quality.drift.count_day import count_day
from headrace.score.entities import ActiveEvents
from headrace.stage import Context, Result, check_stage, run_stage
from headrace.stage.manifest import Manifest, Output
from tests.arrow_table_ops import by_arrow
from tests.tables_support import (
    DAY,
    HOUR,
    JOINS_ASOF,
    PAST,
    PROBES,
    ROW_OF_CLICKS,
    ROWS,
    START,
    TYPES,
    Row,
    as_table,
    assert_rows,
    assert_same_rows,
    check_negatives,
    commit_delta,
    external,
    micros,
    number,
    past_of,
    perturbed,
    prepare,
    rows_before,
)

OTHER_OPS: list[dict[str, Any]] = [
    {"filter": {"where": "not (n = 3 and flag) or ts >= '2026-01-04 06:00:00'"}},
    {"dropna": {"subset": ["user", "item", "tags", "price"], "how": "all"}},
    {
        "join_external": {
            "path": "tables/items",
            "format": "parquet",
            "keys": {"item": "id"},
            "prefix": "its_",
            "add": {"brand": "string", "stock": "bigint"},
        }
    },
    *JOINS_ASOF,
    {"rename": {"to": {"n": "number", "odd.na`me": "n", "big": "odd.na`me"}}},
]
NEGATIVES = {
    "negatives": {
        "item": "item",
        "item_columns": ["price", "tags"],
        "user": "user",
        "exclude_seen": True,
        "per_positive": 3,
        "method": "popularity",
        "tries": 5,
    }
}


def as_frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    ddl = [f"`{n.replace('`', '``')}` {t}" for n, t in TYPES.items()]
    ddl += ["_source_file string", "_source_line bigint"]
    ddl += ["__query string"] if "__query" in table.schema.names else []
    return spark.createDataFrame(table, ", ".join(ddl)).repartition(3)


def both(spark: SparkSession, p: Preparation, rows: list[Row], home: Path, train: TrainRange | None = None) -> pa.Table:
    """The rows by the Arrow implementation, after the Spark implementation has made the same."""
    reader, table = external(home), as_table(rows, query=any("__query" in r for r in rows))
    expected = by_arrow(p, table, reader, train)
    by_spark = p.spark(as_frame(spark, table), reader, train).toArrow()
    assert_rows(by_spark.select(expected.schema.names), expected)
    return expected


@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(ROWS, PROBES)
def test_spark_equals_arrow(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, rows: list[Row], queries: list[str | None]
) -> None:
    rows = [{**r, "__query": p} for r, p in zip(number(rows), queries, strict=False)]
    # Lists of three and five values are then put together from lists of two, as those of hundreds are.
    with mock.patch.object(sequences, "_CHUNK", 2):
        both(spark, prepare(*OTHER_OPS[:-1], *PAST, OTHER_OPS[-1]), rows, tmp_path_factory.mktemp("tables"))


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ROW_OF_CLICKS, min_size=1, max_size=60))
def test_negatives_are_the_same_by_both(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, rows: list[Row]
) -> None:
    rows = number(rows)
    range_ = (START + DAY / 2, START + 3 * DAY)
    train = TrainRange(*map(micros, range_))
    uniform = {"negatives": {"item": "item", "per_positive": 2, "seed": 3}}
    in_batch = {"negatives": {"item": "item", "per_positive": 2, "method": "in_batch", "batch": 3}}
    for op in (NEGATIVES, uniform, in_batch):
        # Told of their own items' past, and not counted themselves.
        p = prepare(op, {"trailing": {"keys": ["item"], "windows": [2]}})
        check_negatives(both(spark, p, rows, tmp_path_factory.mktemp("n"), train), rows, op["negatives"], range_)


def test_tables_without_rows(spark: SparkSession, tmp_path: Path) -> None:
    train = TrainRange(0, 1)
    assert both(spark, prepare(NEGATIVES, *OTHER_OPS[:-1], *PAST, OTHER_OPS[-1]), [], tmp_path, train).num_rows == 0


def test_lambda(spark: SparkSession, tmp_path: Path) -> None:
    columns = {
        "half": {"expression": "n / 2", "type": "double"},
        "up": {"expression": "upper(item)", "type": "string"},
        "many": {"expression": "transform(tags, x -> concat(x, '*'))", "type": "array<string>"},
        "hour": {"expression": "hour(ts)", "type": "int"},
    }
    rows = number([{"n": 3, "item": "é", "tags": ["a"], "ts": START + DAY / 4}, {"n": None, "item": None, "ts": START}])
    result = prepare({"lambda": {"add": columns}}).spark(as_frame(spark, as_table(rows)), external(tmp_path)).toArrow()
    by_line = {r["_source_file"]: {n: r[n] for n in columns} for r in result.to_pylist()}
    assert by_line == {
        "f0ü": {"half": 1.5, "up": "É", "many": ["a*"], "hour": 6},
        "f1ü": {"half": None, "up": None, "many": None, "hour": 0},
    }
    label = prepare({"lambda": {"add": {"known": {"expression": "item = 'é'", "type": "int"}}}}, label="known")
    result = label.spark(as_frame(spark, as_table(rows)), external(tmp_path)).toArrow()
    assert {r["_source_file"]: r["known"] for r in result.to_pylist()} == {"f0ü": 1, "f1ü": None}
    spark.udf.register("mine", lambda x: x, "string")
    for expression, fault in (
        ("mine(item)", "Python function"),
        ("sum(n)", "no function of one row"),
        ("nope(n)", "nope"),
        # What the text hides, the plan shows: a quote in a comment begins no text.
        ("n /* ' */ + Click /* ' */", "'click' is the label"),
        ("n /* ' */ + rand() /* ' */", "answers otherwise"),
    ):
        bad = prepare({"lambda": {"add": {"x": {"expression": expression, "type": "string"}}}})
        with pytest.raises(UserError, match=fault):
            bad.spark(as_frame(spark, as_table(rows)), external(tmp_path))


def test_external_tables(spark: SparkSession, tmp_path: Path) -> None:
    """Delta at the pinned version, CSV; duplicates refused with their number, or the first taken by an order."""
    reader = external(tmp_path)
    path = str(tmp_path / "tables" / "shops")
    for rows in ([("a", 1, "x")], [("a", 2, "y"), ("a", 3, None), ("é", 5, "w"), ("é", 4, "q"), (None, 9, "n")]):
        spark.createDataFrame(rows, "item string, v bigint, s string").write.format("delta").mode("overwrite").save(
            path
        )
    (tmp_path / "tables" / "days.csv").write_text("item,v,s\na,2026-01-02 00:00:00,1.5\né,,\n", encoding="utf-8")
    events = number([{"item": i, "ts": START} for i in ("a", "é", None)])
    add = {"v": "bigint", "s": "string"}
    first = {"path": "tables/shops", "keys": ["item"], "add": add, "on_duplicate": "first", "order": ["-v"]}
    csv = {
        "path": "tables/days.csv",
        "format": "csv",
        "keys": ["item"],
        "prefix": "c_",
        "add": {"v": "timestamp", "s": "double"},
    }
    p = prepare({"join_external": first}, {"join_external": csv})
    joined = [(r["item"], r["v"], r["s"], r["c_v"], r["c_s"]) for r in both(spark, p, events, tmp_path).to_pylist()]
    assert sorted(joined, key=str) == sorted(
        [("a", 3, None, START + DAY, 1.5), ("é", 5, "w", None, None), (None, None, None, None, None)], key=str
    )
    old = prepare({"join_external": {"path": "tables/shops", "keys": ["item"], "add": {"v": "bigint"}}})
    pinned = ExternalReader(Workspace(tmp_path), dict.fromkeys(old.externals, "0"))
    by_both = (by_arrow(old, as_table(events), pinned), old.spark(as_frame(spark, as_table(events)), pinned).toArrow())
    for table in by_both:
        assert sorted(table.column("v").to_pylist(), key=str) == [1, None, None]
    for run in (
        lambda: by_arrow(old, as_table(events), reader),
        lambda: old.spark(as_frame(spark, as_table(events)), reader),
    ):
        with pytest.raises(UserError, match=r"tables/shops 2 values of item have more than one row \(4 rows\)"):
            run()
    wrong = prepare({"join_external": {"path": "tables/shops", "keys": ["item"], "add": {"s": "double"}}})
    with pytest.raises(UserError, match="column 's' is string, but double is wanted"):
        wrong.spark(as_frame(spark, as_table(events)), reader)


@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(ROWS, ROWS, st.integers(1, 15))
def test_nothing_of_the_future_is_seen_by_spark(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, rows: list[Row], later_rows: list[Row], quarter: int
) -> None:
    reader = external(tmp_path_factory.mktemp("leak"))
    p = prepare(*OTHER_OPS[:-1], *PAST, OTHER_OPS[-1])
    original, changed_rows = perturbed(rows, later_rows, START + quarter * DAY / 4)
    features = [
        past_of(p.spark(as_frame(spark, as_table(r)), reader).toArrow(), START + quarter * DAY / 4)
        for r in (original, changed_rows)
    ]
    assert_same_rows(*features)


def test_the_plan_has_no_python_and_shuffles_a_key_once(spark: SparkSession, tmp_path: Path) -> None:
    as_frame(spark, as_table(number([{"ts": START}]))).write.parquet(str(tmp_path / "rows"))
    frame = spark.read.parquet(str(tmp_path / "rows"))
    by_user = [op for op in PAST if next(iter(op.values()))["keys"] == ["user"]]
    plan = prepare(*by_user).spark(frame, external(tmp_path))._jdf.queryExecution().executedPlan().toString()
    assert "Python" not in plan
    assert "RangeFrame" not in plan
    assert len(by_user) == 5
    # The operators sort the key's rows in their ways, but bring them together once.
    assert plan.count("Exchange hashpartitioning") == 1


# A day's run.

EVENTS = {"user": "bigint", "item": "string", "price": "double", "ts": "timestamp", "click": "int", "bot": "boolean"}
DS = "2026-01-08"


def shop(**features: Any) -> Spec:
    return build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "jsonl", "path": "{ds}/*"},
            "table": {"columns": [{"name": k, "type": v} for k, v in EVENTS.items()], "event_time": "ts"},
            "features": {
                "label": "click",
                "window_days": 2,
                "split": {"by": "time", "valid_days": 1},
                "min_row_groups": 2,
                "carried": ["user", "item_count_3d", "cents"],
                "prepare": [
                    {"filter": {"where": "bot is null or not bot"}},
                    {"lambda": {"add": {"cents": {"expression": "100 * price", "type": "double"}}}},
                    {"join_external": {"path": "tables/brands", "keys": ["item"], "add": {"brand": "string"}}},
                    {"trailing": {"keys": ["item"], "windows": [3], "values": ["click"], "stats": ["count", "rate"]}},
                    {
                        "history": {
                            "keys": ["user"],
                            "values": ["item"],
                            "length": 3,
                            "where": "click = 1",
                            "delay_hours": 1,
                        }
                    },
                    {"target_encoding_past": {"keys": ["user"], "delay_hours": 1, "smoothing": 3}},
                ],
                "workflow": [
                    {"columns": ["item_count_3d", "item_click_rate_3d", "user_target"], "ops": ["fill_missing"]},
                    {"columns": ["item"], "ops": [{"categorify": {"vocabulary": "item"}}]},
                    {
                        "columns": ["item_history"],
                        "ops": [{"categorify": {"vocabulary": "item"}}, {"pad": {"length": 3}}],
                    },
                    {"columns": ["brand"], "ops": [{"hash_bucket": {"buckets": 50}}]},
                ],
            }
            | features,
            "score": {
                "user": {"key": "user", "columns": ["item_history", "user_target"]},
                "item": {"key": "item", "columns": ["item_count_3d", "item_click_rate_3d", "brand"], "limit": 12},
                "top_k": 3,
            },
        }
    )


def make_shop(seed: int = 3, rows: int = 900) -> list[Row]:
    """Events of 1 to 8 January, some landing a day late, some of bots."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(rows):
        ts = START + timedelta(minutes=15 * int(rng.integers(0, 8 * 96)))
        landed = min(ts + DAY * int(rng.random() < 0.1), START + 7 * DAY)
        out.append(
            {
                "user": None if rng.random() < 0.03 else int(rng.zipf(1.5) % 25),
                "item": f"é{rng.zipf(1.4) % 12}",
                "price": float(rng.integers(1, 9)),
                "ts": ts,
                "click": int(rng.random() < 0.4),
                "bot": bool(rng.random() < 0.1) or None,
                "_source_file": f"f{i % 3}",
                "_source_line": i,
                "ds": landed.strftime("%Y-%m-%d"),
            }
        )
    return out


def land(spark: SparkSession, ws: Workspace, rows: list[Row]) -> None:
    """Leave what ingest leaves, and the table of brands."""
    types = {n: declared(TableColumn(name=n, type=t)).arrow for n, t in EVENTS.items()}  # type: ignore[arg-type]
    types |= {"_source_file": pa.string(), "_source_line": pa.int64(), "ds": pa.string()}
    table = pa.table({n: pa.array([r[n] for r in rows], t) for n, t in types.items()})
    path = ws.table("shop", "events").local_path()
    spark.createDataFrame(table).repartition(2).write.format("delta").partitionBy("ds").save(str(path))
    Manifest(
        stage="ingest",
        pipeline="shop",
        ds=DS,
        key="i",
        spec_hash="",
        outputs=(Output(kind="delta", name="lake/shop/events", version="0"),),
    ).save(ws.manifest("shop", DS, "ingest"))
    brands = pa.table({"item": [f"é{i}" for i in range(9)], "brand": [f"b{i % 4}" for i in range(9)]})
    commit_delta(ws.home / "tables" / "brands", brands)


def dataset(ws: Workspace, manifest: Manifest, split: str) -> pa.Table:
    return pads.dataset(ws.home / manifest.output("dataset").name / split, format="parquet").to_table()


def test_the_day(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """The day goes from the lake to the dataset by both engines, and to the sides of scores; the last day stays out of
    others.
    """
    rows = make_shop()
    land(spark, ws, rows)
    manifest = run_stage(BuildFeatures(count_day), shop(), ws, DS).manifest
    assert run_stage(BuildFeatures(count_day), shop(), ws, DS).skipped
    assert not list((ws.spark_local / "prepared").files())

    # Train on the 6th and 7th, three days more for the windows; a late event counts from when it happened.
    known = [r for r in rows if r["ts"] >= START + 2 * DAY and not r["bot"]]
    for split, first, last in (("train", 5, 7), ("valid", 7, 8)):
        day_rows = [r for r in known if START + first * DAY <= r["ts"] < START + last * DAY]
        rows_ = dataset(ws, manifest, split)
        assert rows_.num_rows == len(day_rows) == manifest.rows[split]
        names = ("user", "item_count_3d__carried", "cents", "click", "item_click_rate_3d", "user_target")
        columns = [rows_.column(n).to_pylist() for n in names]
        assert sorted(str(v) for v in zip(*columns, strict=True)) == sorted(
            str(expected_features(known, r)) for r in day_rows
        )
        lengths = sorted(len(clicked(known, r)) for r in day_rows)
        assert sorted(len(codes) for codes in rows_.column("item_history").to_pylist()) == lengths
        assert max(lengths) == 3

    # What is asked at the end of the day, by key.
    ingest = Manifest.load(ws.manifest("shop", DS, "ingest"))
    assert ingest is not None
    active = ActiveEvents.read(Context(shop(), ws, DS, {"ingest": ingest, "features": manifest}), spark)
    score = shop().score
    assert score is not None
    with active.entities(score.user, score.item) as sides:
        users, items = (side.toArrow().to_pylist() for side in sides)
    end = START + 8 * DAY
    in_train = [r for r in known if START + 5 * DAY <= r["ts"] < START + 7 * DAY]
    assert {u["user"] for u in users} == {r["user"] for r in in_train} - {None}
    assert len(items) == len({r["item"] for r in in_train})
    for u in users:
        query = {"user": u["user"], "ts": end}
        assert u["item_history"] == [r["item"] for r in clicked(known, query)]
        assert np.float32(u["user_target"]) == np.float32(target(known, query))
    for i in items:
        item_past = rows_before(known, {"item": i["item"], "ts": end}, ["item"], window=3 * DAY)
        assert i["item_count_3d"] == len(item_past) > 0
        assert i["item_click_rate_3d"] == sum(r["click"] for r in item_past) / len(item_past)
        number_ = int(i["item"][1:])
        assert i["brand"] == (f"b{number_ % 4}" if number_ < 9 else None)

    # By Spark's expressions: the same, although the table of brands gets a commit between the key and the work.
    brands = ws.home / "tables" / "brands"

    class Overtaken(BuildFeatures):
        def run(self, ctx: Context) -> Result:
            commit_delta(brands, pa.table({"item": ["é1"], "brand": ["x"]}))
            return super().run(ctx)

    by_spark = run_stage(Overtaken(count_day), shop(engine="spark"), ws, DS).manifest
    assert [i.version for i in by_spark.inputs if i.name == "tables/brands"] == ["0"]
    for split in ("train", "valid"):
        assert dataset(ws, by_spark, split).equals(dataset(ws, manifest, split))
    # Another table of brands is another run.
    assert "inputs" in str(check_stage(BuildFeatures(count_day), shop(engine="spark"), ws, DS))

    # Another last day: the training rows are the same bits, codes and all.
    other_workspace = Workspace(tmp_path / "other")
    changed = [{**r, "_source_file": "new"} for r in make_shop(seed=8) if r["ts"] >= START + 7 * DAY]
    land(spark, other_workspace, [*(r for r in rows if r["ts"] < START + 7 * DAY), *changed])
    second_manifest = run_stage(BuildFeatures(count_day), shop(), other_workspace, DS).manifest
    assert dataset(other_workspace, second_manifest, "train").equals(dataset(ws, manifest, "train"))
    assert not dataset(other_workspace, second_manifest, "valid").equals(dataset(ws, manifest, "valid"))


def clicked(known: list[Row], row: Row) -> list[Row]:
    return rows_before(known, row, ["user"], HOUR, keep=lambda r: r["click"] == 1)[-3:]


def target(known: list[Row], row: Row) -> float:
    midnight = row["ts"].replace(hour=0, minute=0, second=0, microsecond=0)
    prior = [r["click"] for r in known if r["ts"] + HOUR < midnight]
    clicks = [r["click"] for r in rows_before(known, row, ["user"], HOUR)]
    return (sum(clicks) + 3 * (sum(prior) / len(prior))) / (len(clicks) + 3)


def expected_features(known: list[Row], row: Row) -> tuple[Any, ...]:
    """A row of the dataset, but for the codes."""
    item_past = rows_before(known, row, ["item"], window=3 * DAY)
    rate = float(np.float32(sum(r["click"] for r in item_past) / len(item_past))) if item_past else 0.0
    return (
        row["user"],
        len(item_past),
        100 * row["price"],
        float(row["click"]),
        rate,
        float(np.float32(target(known, row))),
    )


def test_every_operator_is_tested() -> None:
    """A new operator comes with its comparison of both engines."""
    tested = {name for op in [*PAST, *OTHER_OPS, NEGATIVES] for name in op} | {"lambda"}
    # Beside sources, in test_features_sources; beside pandas, in test_last_events.
    tested |= {"attribution", "last_events"}
    assert tested == set(TABLE_OPERATORS.builtin)
