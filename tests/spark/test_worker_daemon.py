"""Python workers of a session: no task reads archives again to look for modules."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from headrace.lake.spark.tasks import run_tasks


def import_paths(number: int) -> Iterator[list[str]]:
    """Yield the folders that a worker's finders look into, and its pyspark's place."""
    yield [pyspark.__file__, *sys.path, *sys.path_importer_cache]


def imported_modules(number: int) -> Iterator[list[object]]:
    """Yield whether a worker has pandas and Arrow, and looks for no garbage among them."""
    yield ["pandas" in sys.modules, "pyarrow.compute" in sys.modules, gc.get_freeze_count() > 10_000]


def test_workers_import_pyspark_as_it_is_installed(spark: SparkSession) -> None:
    for place, *paths in run_tasks(spark, 2, import_paths):
        assert place == pyspark.__file__
        assert [path for path in paths if "pyspark.zip" in path or Path(path).suffix == ".jar"] == []


def test_workers_find_what_all_of_them_need(spark: SparkSession) -> None:
    assert run_tasks(spark, 1, imported_modules) == [[True, True, True]]
