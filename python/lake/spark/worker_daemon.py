"""Daemon that Spark's Python workers are forked from: pyspark's own, with pyspark as it is installed.

Spark puts pyspark.zip, Py4J's and its jar in front of the workers' import path. Before each task a worker asks every
finder of that path to look again, and Python 3.11 then reads the directories of these archives anew, by Python code and
once for each package that was imported from them: 0.12 s of processor time a task. Nor does an archive hold compiled
modules. Where the very same pyspark lies beside its archives, as pip installs it, they are left out.

The libraries that nearly every task imports (Arrow looks for pandas at its first array) are imported here, once for all
workers: in each of them it took 0.3 s of processor time.

A name for `spark.python.daemon.module` (headrace.lake.spark.session).
"""

from __future__ import annotations

import gc
import logging
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

from headrace import logs

#: Modules that nearly every task imports.
_SHARED = ("numpy", "pandas", "pyarrow.compute", "pyarrow.pandas_compat", "pyarrow.parquet")
#: Packages in Spark's archives.
_PACKAGES = ("pyspark", "py4j")


def without_archives(paths: list[str]) -> list[str]:
    """Return an import path without the archives of an installed pyspark; the same where their packages are nowhere
    else.
    """
    rest = [path for path in paths if not Path(path).is_file()]
    package = PathFinder.find_spec("pyspark", rest)
    if package is None or package.origin is None or any(PathFinder.find_spec(name, rest) is None for name in _PACKAGES):
        return paths
    installed = Path(package.origin).parent
    # Spark's archives of another installation may have another version.
    return [path for path in paths if not (Path(path).is_file() and Path(path).is_relative_to(installed))]


def main() -> None:
    """Serve workers until Spark ends."""
    sys.path[:] = without_archives(sys.path)
    sys.path_importer_cache.clear()
    # Log lines of all workers: Spark writes them to the executor's log.
    logs.configure(level=logging.WARNING)
    # After the path is set.
    for name in _SHARED:
        import_module(name)
    from pyspark.daemon import manager

    # Workers need not collect garbage among the shared objects.
    gc.freeze()
    manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
