"""Scores with rows joined in, by two executors with a JVM each: `python -m tests.spark.joined_side HOME SCORES`.

HOME's shop is scored; the rows go to the Parquet file SCORES. Prints, as JSON, what the workers of each executor held:
the rows of all tables, part by part, and the raw ids of users.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark import AccumulatorParam
from pyspark.sql import DataFrame

from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.jobs.submit import environment
from headrace.lake.spark.session import session
from headrace.models.predictor import network_of
from headrace.models.sharded_model import ShardedModel
from headrace.score import joined_rows, model_lists
from headrace.score.joined_rows import JoinedModel
from headrace.score.stage import ScoreCandidates
from headrace.stage import run_stage
from tests.score_support import DS, scores, spec
from tests.support import FEW_ROWS


class ListAccumulator(AccumulatorParam[list[Any]]):
    """All that was said, one behind another."""

    def zero(self, value: list[Any]) -> list[Any]:
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:
        return value1 + value2


def held_by(model: ShardedModel) -> dict[str, Any]:
    """Return the rows of the tables that this process holds, and its executor."""
    assert model.dynamic is not None
    lines = [p.cmdline() for p in psutil.Process().parents()]
    jvm = next(words for words in lines if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in words)
    raw = {t.spec.name: t.ids.tolist() for t in model.dynamic.tables}
    rows = sum(len(w) for w in model.embeddings.weights) + sum(map(len, raw.values()))
    return {"executor": jvm[jvm.index("--executor-id") + 1], "rows": rows, "users": raw["user_raw"]}


def main(home: Path, out: Path) -> None:
    conf = Spark(
        master="local-cluster[2,1,1024]",
        driver_memory="1g",
        properties=FEW_ROWS | {"spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"},
    )
    os.environ.update(environment(conf))
    ws = Workspace(home)
    # Executors' work folders; Spark's default is below its installation.
    os.environ["SPARK_WORKER_DIR"] = str(ws.spark_local / "work")
    model_lists._TASK_PAIRS = 60  # many parts
    with session(conf, ws, "joined") as spark:
        reports = spark.sparkContext.accumulator([], ListAccumulator())
        original: Callable[..., DataFrame] = joined_rows.map_with_table_rows

        def reporting(*args: Any) -> DataFrame:
            """With workers that say what they hold when they are given what they work on."""
            *leading, work, schema, cached = args
            task: JoinedModel = leading[1]

            def look(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                for batch in batches:
                    network = network_of(task.load()[0])
                    assert network is not None
                    reports.add([held_by(network.model)])
                    yield batch

            return original(*leading, lambda batches: work(look(batches)), schema, cached)

        joined_rows.map_with_table_rows = reporting  # type: ignore[assignment]
        run_stage(ScoreCandidates(), spec(model="neural", embeddings={"rows": "joined"}), ws, DS)
        scores(spark, ws).to_parquet(out)
        print(json.dumps(reports.value))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
