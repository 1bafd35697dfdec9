"""Settings of Spark that tests share."""

from __future__ import annotations

#: Spark's expressions by Java code that it generates for each plan, as they run anywhere else, or by its interpreter of
#: the same expressions: for tests of few rows and many plans, of which the compiler would take a quarter of the time.
GENERATED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
#: Of executors of this machine, for few rows: what headrace sets for local masters alone.
FEW_ROWS = INTERPRETED | {
    "spark.sql.shuffle.partitions": "4",
    "spark.python.daemon.module": "headrace.lake.spark.worker_daemon",
}
