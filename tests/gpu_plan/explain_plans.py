"""Runs in a process of its own, with the RAPIDS plugin in explain-only mode: explains all that is shipped, and good and
bad plans.

python tests/gpu_plan/explain_plans.py FILE      writes the explanations as JSON
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, Window
from pyspark.sql import functions as F

from headrace.cli import plan
from headrace.config import build_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.ops import OPERATORS
from headrace.features.ops.base import Elementwise, SparkOpContext
from headrace.features.spark import write as writer_spark
from headrace.jobs.gpu_plan import cases as gpu_cases
from headrace.jobs.gpu_plan import gate as gpu_gate
from headrace.jobs.gpu_plan.explain import Explainer, PhysicalPlan, explain_session
from headrace.udfs import spark as udfs


class Quarter(Elementwise):
    """An operator that a GPU cannot run: `ntile`, which besides is a rank over all rows."""

    name: ClassVar[str] = "quarter"

    def type_of(self, input_type: Any) -> Any:
        return input_type

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        return {n: F.ntile(4).over(Window.orderBy(x)) for n, x in columns.items()}


class Unseen(Elementwise):
    """An operator without a case."""

    name: ClassVar[str] = "unseen"


SPEC: dict[str, Any] = {
    "pipeline": "small",
    "source": {"format": "csv", "path": "in/{ds}/*.csv"},
    "table": {
        "event_time": "ts",
        "columns": [
            {"name": "user", "type": "bigint"},
            {"name": "text", "type": "string"},
            {"name": "x", "type": "double"},
            {"name": "tags", "type": "array<string>"},
            {"name": "ts", "type": "timestamp"},
            {"name": "y", "type": "int"},
        ],
    },
    "features": {
        "engine": "spark",
        "label": "y",
        "window_days": 3,
        "split": {"by": "time", "valid_days": 1},
        "carried": ["text"],
        "workflow": [
            {"columns": ["x"], "ops": ["fill_missing", "log", "normalize"]},
            {"columns": ["user", "text"], "ops": ["categorify"]},
            {"columns": ["tags"], "ops": ["categorify", {"pad": {"length": 2}}]},
        ],
    },
}


def main(out: Path) -> None:
    explained: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        ws = Workspace(Path(folder))
        with explain_session(ws) as spark:
            explainer = Explainer(spark)
            spark.range(100).selectExpr(
                "id", "id % 7 as k", "cast(id as string) as s", "id / 3 as x", "array(s) as l"
            ).write.parquet(f"{folder}/rows")
            rows = spark.read.parquet(f"{folder}/rows")
            explainer.ran()
            upper = F.udf(lambda s: s.upper(), "string")
            vectors = F.pandas_udf(lambda s: s.str.upper(), "string")  # type: ignore[call-overload]

            def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                return batches

            frames = {
                "good": rows.groupBy("k").agg(F.sum("id"), F.min("x")),
                "ntile": rows.select(F.ntile(4).over(Window.partitionBy("k").orderBy("id"))),
                "python udf": rows.select(upper("s")),
                "pandas udf": rows.select(vectors("s")),
                "map in arrow": rows.select("id").mapInArrow(same, "id bigint"),
                "java udf": rows.select(udfs.ngrams(F.col("s"), 3, 100), udfs.minhash(F.array("id"), 4)),
                "scala udf": rows.select(array_to_vector(F.array("x"))),
                "expression": rows.select(F.crc32(F.encode("s", "utf-8"))),
                "handed over": spark.createDataFrame(pa.table({"a": [1, 2]})).groupBy("a").count(),
            }
            for name, frame in frames.items():
                judged = explainer.explain(frame)
                explained[name] = _judged(judged)
                explained[f"{name}: on the GPU"] = [n.name for n in judged.nodes if n.mark == "*"]
            rows.groupBy("k").count().collect()
            explained["collected"] = _all(explainer.ran())
            rows.write.parquet(f"{folder}/good")
            explained["written"] = _all(explainer.ran())
            rows.drop("l").write.csv(f"{folder}/csv")
            explained["written as csv"] = _all(explainer.ran())

            gate = plan.check_plans(explainer, Workspace(Path(folder) / "gate"), plan.shipped_pipelines(), ())
            explained["gate"] = [[s.subject, s.step, s.green, s.faults()] for s in gate]

            OPERATORS.builtin.update(quarter=f"{__name__}:Quarter", unseen=f"{__name__}:Unseen")  # type: ignore[attr-defined]
            gpu_cases.ROW_CASES["quarter"] = [{"columns": ["x"], "ops": ["quarter"]}]  # type: ignore[index]
            operators = gpu_gate.check_operators(
                explainer, Workspace(ws.home / "operators"), ["clip", "quarter", "unseen"]
            )
            explained["operators"] = [[s.subject, s.step, s.green, s.faults()] for s in operators]

            explained["pipeline"] = [
                [s.step, s.green, s.faults()] for s in gpu_gate.check_pipeline(explainer, ws, build_spec(SPEC))
            ]
            writer_spark._columns = _with_crc(writer_spark._columns)  # type: ignore[assignment]
            bad = gpu_gate.check_pipeline(explainer, ws, build_spec(SPEC | {"pipeline": "bad"}))
            explained["bad pipeline"] = [[s.step, s.green, s.faults()] for s in bad]
    out.write_text(json.dumps(explained, indent=1))


def _with_crc(columns: Any) -> Any:
    """The dataset's columns, the first by an expression that no GPU has (and that changes nothing)."""

    def changed(*args: Any) -> list[Column]:
        first, *rest = columns(*args)
        zero = F.crc32(F.encode(F.col("__source_file"), "utf-8"))
        return [(first + zero.cast("float") * F.lit(0.0).cast("float")).cast("float").alias("x"), *rest]

    return changed


def _judged(plan: PhysicalPlan) -> list[Any]:
    return [[n.name, n.reason] for n in plan.leaving]


def _all(plans: list[PhysicalPlan]) -> list[Any]:
    return [[len(plans)], *[pair for p in plans for pair in _judged(p)]]


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except UserError as e:
        sys.exit(f"error: {e}")
