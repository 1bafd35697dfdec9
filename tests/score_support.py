"""A small shop of events, its items and models, and its pairs by pandas, Spark's expressions and a sort."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.comm.base import LocalCollective
from headrace.config import Model, Spec, build_spec
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.features.spark.transform import transform
from headrace.features.types import declared
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.predictor import load_predictor
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.stage.manifest import Manifest
from headrace.storage import Location, local


def shop_spec(types: Mapping[str, str], features: Mapping[str, Any], **sections: Any) -> Spec:
    """Clicks by their time `ts`; the last day of the window is `valid`.

    Args:
        types: of the events' columns.
        features: what the section has besides label and split.
        sections: the spec's others.
    """
    return build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "jsonl", "path": "{ds}/*"},
            "table": {"columns": [{"name": k, "type": v} for k, v in types.items()], "event_time": "ts"},
            "features": {"label": "click", "split": {"by": "time", "valid_days": 1}, **features},
            **sections,
        }
    )


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
    features = {
        "window_days": 3,
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
    }
    return shop_spec(TYPES, features, baseline={"rounds": 4, "max_depth": 2, "workers": 1}, score=base | score)


def draw(rows: int = 1500, seed: int = 4) -> pd.DataFrame:
    """Six days of events; columns of a user and of an item change from one event to the next; keys may be null."""
    rng = np.random.default_rng(seed)
    start = pd.Timestamp("2025-12-31")

    def maybe(values: np.ndarray, rate: float = 0.1) -> list[Any]:
        return [
            None if is_null else v for v, is_null in zip(values.tolist(), rng.random(len(values)) < rate, strict=True)
        ]

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
        column = frame[name].tolist()
        return [[str(x) for x in v] if isinstance(v, list) else None if v is None or v != v else v for v in column]

    arrow = {name: declared(TableColumn(name=name, type=type_)).arrow for name, type_ in columns.items()}
    table = pa.table([pa.array(values(name), type_) for name, type_ in arrow.items()], list(arrow))
    return spark.createDataFrame(table)


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


def clicked_pairs(events: pd.DataFrame, any_label: bool = False) -> set[tuple[Any, Any]]:
    """(user, item) of the clicks of the window, up to the 5th; or of all its events."""
    window = events[(events.ts >= "2026-01-02") & (events.ts < "2026-01-06") & (events.ds <= DS)]
    window = window if any_label else window[window.click == 1]
    return set(zip(window.user, window.item, strict=True))


def expected(
    spark: SparkSession,
    ws: Workspace,
    events: pd.DataFrame,
    stage: str,
    k: int = 5,
    limit: int = 12,
    clicked: set[tuple[Any, Any]] | None = None,
    output: str | None = None,
    answer: Callable[[Location, Mapping[str, Any]], Any] | None = None,
) -> pd.DataFrame:
    """Every pair as a row of the events table, through training's transform, the model, and a sort.

    Args:
        answer: what says of a saved model's folder and features by name what the model would; None: the model.
    """
    users, items = sides(events, limit)
    pairs = users.merge(items, how="cross").assign(hour=20)
    folder = ws.home / manifest_of(ws, stage).output("model").name
    fitted = FittedWorkflow.load(local(folder / "workflow"))
    columns = {c: TYPES[c] for c in pairs.columns}
    transformed = transform(fitted, to_spark(spark, pairs, columns), keep={"u": "user", "i": "item"}).toPandas()
    physical = {c: transformed[c].to_numpy() for f in fitted.features for c in f.physical}
    transformed = transformed[["u", "i"]].rename(columns={"u": "user", "i": "item"})
    if answer is None:
        transformed["score"] = load_predictor(folder, threads=1, output=output).predict(physical)
    else:
        transformed["score"] = answer(local(folder), physical)
    if clicked is not None:
        transformed = transformed[
            [pair not in clicked for pair in zip(transformed.user, transformed.item, strict=True)]
        ]
    transformed["bytes"] = transformed["item"].str.encode("utf-8")
    transformed = transformed.sort_values(["user", "score", "bytes"], ascending=[True, False, True])
    transformed["rank"] = transformed.groupby("user").cumcount() + 1
    return transformed[transformed["rank"] <= k][["user", "item", "rank", "score"]].reset_index(drop=True)


def manifest_of(ws: Workspace, stage: str) -> Manifest:
    manifest = Manifest.load(ws.manifest("shop", DS, stage))
    assert manifest is not None
    return manifest


def scores(spark: SparkSession, ws: Workspace, ds: str = DS) -> pd.DataFrame:
    frame = spark.read.format("delta").load(str(ws.table("shop", "scores"))).where(F.col("ds") == ds)
    return frame.orderBy("user", "rank").toPandas()


def save_two_tower(ws: Workspace) -> None:
    """A model in retrieval form, as it starts, in place of the shop's."""
    schema = manifest_of(ws, "features").dataset_schema
    assert schema is not None
    args = {"user_features": ["user", "age", "likes", "hour"], "item_features": ["price"], "item": "item"}
    shape = Model.model_validate({"class": "two_tower", "embedding_dim": 4, "args": args})
    model = ShardedModel(schema, shape, LocalCollective(), 5)
    folder = ws.locate(manifest_of(ws, "train").output("model").name)
    workflow = ws.locate(manifest_of(ws, "features").output("dataset").name) / "workflow"
    save_model(folder, model, workflow=workflow, pipeline="shop", ds=DS, key="t", metrics={"auc": 0.5})
