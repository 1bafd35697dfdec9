"""Stages on two executors without a common folder: `-m tests.spark.own_scratch_side FOLDER`.

The folder has `specs.json`, the spec and the day of each stage by its name, and a home for each, with what is to be
done there. In place of what tasks would share there is a file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.features import transport
from headrace.features.arrow import fit as arrow_fit
from headrace.features.build.stage import BuildFeatures
from headrace.features.spark import fit as spark_fit
from headrace.features.vocabulary.keyed_tables import FileKeyedTable
from headrace.lake.landing import arrow_rows, compression, load
from headrace.lake.landing.stage import Ingest
from headrace.lake.spark.exchange import ExchangedBlock, exchange, small_batches
from headrace.lake.spark.session import session
from headrace.lake.spark.tasks import numbered, run_tasks
from headrace.quality.drift.count_day import count_day
from headrace.score import item_features
from headrace.score.stage import ScoreCandidates
from headrace.stage import run_stage
from tests.support import FEW_ROWS

MASTER = "local-cluster[2,1,1024]"


def executor() -> int:
    """Return the process id, in a task, of the JVM above its worker and the worker's daemon."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def of_executor(numbers: Iterator[int]) -> Iterator[tuple[int, str, list[str]]]:
    """(process, its folder, the decoded files there)."""
    time.sleep(1)  # so that the other executor gets the other task
    folder = Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])
    for _ in numbers:
        yield executor(), str(folder), [p.parent.name for p in folder.glob("encoded/*/*/*/*/pieces.json")]


def executors(spark: SparkSession) -> dict[int, tuple[str, list[str]]]:
    """Return the scratch folder and decoded files of each executor, by process."""
    by_process: dict[int, tuple[str, list[str]]] = {}
    while len(by_process) < 2:
        reports = numbered(spark.sparkContext, 2).mapPartitions(of_executor).collect()
        by_process |= {process: (folder, files) for process, folder, files in reports}
    return by_process


def lost_once(spark: SparkSession, marker: Path) -> list[list[int]]:
    """Return what 4 partitions get of 6 tasks; an executor ends at the first partition with all that it has sent."""

    def send(task: int) -> Iterator[ExchangedBlock]:
        for k in range(8):
            yield ExchangedBlock(k % 4, task, k, bytes([task, k]))

    def receive(blocks: Sequence[ExchangedBlock]) -> Iterator[pa.RecordBatch]:
        if not marker.exists():
            marker.touch()
            os.kill(executor(), signal.SIGKILL)
        yield pa.RecordBatch.from_pydict({"x": [list(b"".join(bytes(b.payload) for b in blocks))]})

    with small_batches(spark):
        return sorted(r.x for r in exchange(spark, 6, send, 4, receive, "x array<bigint>").collect())


@dataclass(frozen=True)
class Lost:
    """Work whose first task to end is lost with its executor: it has left all its files, and is not heard of."""

    work: Callable[[int], Iterable[Any]]
    marker: Path

    def __call__(self, number: int) -> Iterator[Any]:
        results = list(self.work(number))
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            yield from results
        else:
            os.kill(executor(), signal.SIGKILL)


def lose_one_of_each(module: ModuleType, folder: Path, *kinds: str) -> None:
    """Let the first task of each of these kinds that a module runs be lost."""

    def run(spark: SparkSession | None, count: int, work: Callable[[int], Iterable[Any]]) -> list[Any]:
        kind = type(getattr(work, "__self__", work)).__name__
        return run_tasks(spark, count, Lost(work, folder / f"lost-{kind}") if kind in kinds else work)

    module.run_tasks = run  # type: ignore[attr-defined]


def refused(table: FileKeyedTable) -> pa.Table:
    """Refuse to read the whole table."""
    raise AssertionError(f"the driver reads all of {table.path}")


def features(spark: SparkSession, fields: Any, ws: Workspace, ds: str) -> dict[str, Any]:
    """Build features by both engines; an executor is lost with its folder after the fit."""
    report = dict[str, Any]()
    transport.most_in_driver = lambda spark: 0
    tables = report["tables"] = {"arrow": list[str](), "spark": list[str]()}

    def noting(engine: str) -> Callable[..., Any]:
        def noting_tables(*args: Any) -> Any:
            by_key = transport.keyed_tables(*args)
            tables[engine] += sorted(name for learned in by_key.values() for name in learned.tables)
            return by_key

        return noting_tables

    # The driver may copy and describe such a table's file, and not take it into its memory.
    FileKeyedTable.table = property(refused)  # type: ignore[assignment, method-assign]
    arrow_fit.keyed_tables = noting("arrow")
    spark_fit.keyed_tables = noting("spark")

    def after(step: str) -> None:
        if step == "fit":
            report["decoded"] = lose_executor(spark)

    for engine in ("arrow", "spark"):
        fields["features"]["engine"] = engine
        stage = BuildFeatures(count_day, after if engine == "arrow" else lambda step: None)
        report[engine] = run_stage(stage, build_spec(fields), ws, ds).manifest.model_dump(mode="json")
    arrow_fit.keyed_tables = spark_fit.keyed_tables = transport.keyed_tables
    return report


def lose_executor(spark: SparkSession, earlier: Collection[str] = ()) -> list[list[str]]:
    """End the executor that has decoded most files, and remove its folder; return the files of each.

    `earlier`: files of earlier stages, which do not count.
    """
    holders = {
        process: (folder, [file for file in files if file not in earlier])
        for process, (folder, files) in executors(spark).items()
    }
    process, (folder, _) = max(holders.items(), key=lambda item: len(item[1][1]))
    os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    return [files for _, files in holders.values()]


def prepared(spark: SparkSession, fields: Any, ws: Workspace, ds: str) -> dict[str, Any]:
    """Build features of rows that Spark's table operators make; an executor is lost with its folder after the fit."""
    report = dict[str, Any]()
    earlier = {file for _, files in executors(spark).values() for file in files}

    def after(step: str) -> None:
        if step == "fit":
            # Beside the rows, learned tables are in the lake.
            rows = (ws.staging("clicks") / "prepared").files()
            report["staged"] = sum(f.suffix == ".parquet" for f in rows)
            report["decoded"] = lose_executor(spark, earlier)

    report["manifest"] = run_stage(BuildFeatures(count_day, after), build_spec(fields), ws, ds).manifest.model_dump(
        mode="json"
    )
    return report


def ingest(spec: Spec, ws: Workspace, ds: str) -> Any:
    """With tasks for everything that could be the driver's; one is lost of each kind whose files Spark reads."""
    for module, name, value in (
        (arrow_rows, "DRIVER_BYTES", 0),
        (arrow_rows, "LEAST_BYTES", 0),
        (arrow_rows, "_DRIVER_ROWS", 0),
        (arrow_rows, "_DRIVER_SORTS", 0),
        (arrow_rows, "_HASHES_AT_ONCE", 16),
        (load, "_FEW", 0),
        (compression, "LEAST_BYTES", 500),
    ):
        assert hasattr(module, name)
        setattr(module, name, value)
    lose_one_of_each(arrow_rows, ws.home, "ReadTask", "SuspectTask")
    return run_stage(Ingest(), spec, ws, ds).manifest.model_dump(mode="json")


def score(spec: Spec, ws: Workspace, ds: str) -> Any:
    """An executor is lost with the features of some items."""
    lose_one_of_each(item_features, ws.home, "_Transform")
    return run_stage(ScoreCandidates(), spec, ws, ds).manifest.model_dump(mode="json")


def main(folder: Path) -> None:
    """Print what was made and what was seen on the way, as JSON."""
    specs = json.loads((folder / "specs.json").read_text())
    homes = {stage: Workspace(folder / stage) for stage in specs}
    for data, _ in specs.values():
        data["spark"] = {"master": MASTER, "scratch": "own", "properties": FEW_ROWS | {"spark.executor.memory": "1g"}}
    for ws, place in ((homes["ingest"], "spark/ingest"), (homes["score"], "spark/score"), (homes["score"], "mapped")):
        (ws.scratch / place).put_text("no folder is here")
    spark_settings = build_spec(specs["features"][0]).spark
    with session(spark_settings, homes["features"], "own") as spark:
        report = features(spark, specs["features"][0], homes["features"], specs["features"][1])
        report["prepared"] = prepared(spark, specs["prepared"][0], homes["prepared"], specs["prepared"][1])
        for stage, run in (("ingest", ingest), ("score", score)):
            data, ds = specs[stage]
            report[stage] = run(build_spec(data), homes[stage], ds)
        folders = (Path(folder) for folder, _ in executors(spark).values())
        report["mapped"] = sorted({p.name for place in folders for p in place.glob("mapped/shop/*/*/*") if p.is_dir()})
        report["lost"] = lost_once(spark, folder / "marker")
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
