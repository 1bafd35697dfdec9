"""Events in a Delta table of a workspace of its own, and the Arrow engine's fit, transform and write over its files."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from bench.criteo_data import CATEGORIES, COUNTS
from headrace.config import Spec, build_spec
from headrace.features.arrow.decode import LakeFile
from headrace.features.arrow.write_lake import write_lake_rows
from headrace.features.build.lake_files import files_of_day, fit_files
from headrace.features.layout.files import plan_files
from headrace.features.layout.split import split_rows
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.delta.log import DataFile, DeltaLog
from headrace.storage import local
from headrace.workspace import Workspace

DAYS = 8
DS = "2026-01-08"
MIN_COUNT = 15
_META = "_source_file string, _source_line bigint, ds string"


def spec_of(categories: tuple[str, ...] = CATEGORIES, counts: tuple[str, ...] = COUNTS, least: int = MIN_COUNT) -> Spec:
    """Return the pipeline of these columns."""
    numbers = {"columns": list(counts), "ops": ["fill_missing", {"clip": {"min": 0}}, "log", "normalize"]}
    codes = {"columns": list(categories), "ops": [{"categorify": {"min_count": least}}]}
    types = [("label", "int"), *((c, "int") for c in counts), *((c, "string") for c in categories), ("ts", "timestamp")]
    return build_spec(
        {
            "pipeline": "etl",
            "source": {"format": "csv", "path": "landing/{ds}/*.csv"},
            "table": {"columns": [{"name": n, "type": t} for n, t in types], "event_time": "ts"},
            "features": {
                "label": "label",
                "split": {"by": "time", "valid_days": 1},
                "window_days": DAYS - 1,
                "workflow": [*([numbers] if counts else []), codes],
            },
        }
    )


class Lake:
    """A Delta table of generated rows in a workspace of its own."""

    def __init__(self, spark: SparkSession, folder: Path, raw: list[Path] | DataFrame, rows: int) -> None:
        self.ws, self.rows, self._spark = Workspace(folder / "home"), rows, spark
        self.table = self.ws.table("etl", "events")
        frame = raw if isinstance(raw, DataFrame) else spark.read.parquet(*map(str, raw))
        frame.write.format("delta").partitionBy("ds").save(str(self.table))

    @property
    def files(self) -> list[DataFile]:
        files = DeltaLog(self.table).files(0)
        assert files is not None
        return files

    def paths(self, valid: bool) -> list[str]:
        """Return data files of the last day, or of those before."""
        return [str(f.path) for f in self.files if (f.partition["ds"] == DS) == valid]

    def features(self, spec: Spec, out: Path) -> tuple[float, float, FittedWorkflow]:
        """Run the Arrow engine; return (seconds of fit, seconds of transform and write, what was learned); codes from
        none.
        """
        workflow = Workflow.from_spec(spec)
        self.ws.table("etl", "vocabulary").remove()
        # The frame is not looked at: files are.
        split = split_rows(spec, self._spark.createDataFrame([], spec.table.spark_schema + ", " + _META), DS)
        vocabularies = VocabularyTable(self._spark, self.ws.table("etl", "vocabulary"), DS)
        with (
            files_of_day(spec, self.ws, DS, local(self.table), 0, workflow, split) as files,
            vocabularies.in_background(),
        ):
            assert files is not None
            tick = time.perf_counter()
            counts, fitted = fit_files(workflow, files, split, vocabularies, self._spark, "etl")
            done = time.perf_counter()
            with local(out).new_folder() as folder:
                fitted.save(folder / "workflow")
                plans = plan_files(counts, spec.features.row_group_rows, spec.features.min_row_groups)
                written = write_lake_rows(fitted, files, plans, folder, folder / "workflow", self._spark)
                vocabularies.wait()
            assert sum(f.rows for f in written.files) == self.rows
            return done - tick, time.perf_counter() - done, fitted

    def forget(self, days: int = DAYS) -> None:
        """Remove what was decoded of the newest days."""
        folder = next(p for p in self.ws.encoded("etl").local_path().iterdir() if not p.name.startswith("scratch"))
        if days == DAYS:
            shutil.rmtree(folder)
            return
        newest = sorted({f.partition["ds"] or "" for f in self.files})[-days:]
        for file in self.files:
            if file.partition["ds"] in newest:
                shutil.rmtree(folder / LakeFile(file.path, 0).key)
