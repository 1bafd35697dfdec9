"""Petastorm 0.12.1 beside current Arrow, NumPy and setuptools. The only import of Petastorm.

0.12.1 is the last release that loses no rows (docs/stack.md). It imports names that pyarrow 16, Python 3.12 and NumPy 2
removed, and opens files by Arrow's first dataset class, which pyarrow 15 removed. headrace uses four of its parts: the
reader, the worker, the ventilator and the pool that works in the caller's thread. None of them needs what was removed:

- Names of modules that are imported and never used stand in `sys.modules` while Petastorm is imported, and no longer.
- The reader finds its files by `ParquetFiles`, with every version of Arrow.
- NumPy's former aliases are visible to Petastorm's modules alone.

Importing this module raises a UserError where a version is none of those that its tests have passed with.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow.parquet as pq
from packaging.version import Version

from headrace.errors import UserError

#: Releases that tests/unit/test_petastorm_compat.py and test_dataset_loaders.py have passed with, by how they begin.
TESTED: Mapping[str, tuple[str, ...]] = {
    "petastorm": ("0.12.1",),
    "pyarrow": ("14.0", "25.0", "26.0"),
    "numpy": ("1.26", "2.5"),
}


class LocalFiles:
    """The file system of this host, as far as Petastorm asks for it."""

    def open(self, path: str) -> BinaryIO:
        return Path(path).open("rb")


class ParquetFiles:
    """The Parquet files of a dataset without summary files, with the attributes of Arrow's first dataset class.

    Args:
        paths: files, or one folder whose files are meant, sorted by name; hidden files and those that begin with "_"
            are left out.
        filesystem: opens them.
        validate_schema: accepted for Petastorm, which never validates.
        metadata_nthreads: accepted for Petastorm; one footer at a time is read.
        filters: must be None.
    """

    metadata = common_metadata = partitions = None

    def __init__(
        self,
        paths: str | Sequence[str],
        filesystem: LocalFiles,
        validate_schema: bool = False,
        metadata_nthreads: int = 1,
        filters: None = None,
    ) -> None:
        if filters is not None:
            raise NotImplementedError("headrace gives Petastorm no filters")
        self.fs = filesystem
        files = sorted(_data_files(Path(paths))) if isinstance(paths, str) else list(paths)
        self.pieces = [RowGroupOfFile(file) for file in files]


def _data_files(path: Path) -> Iterator[str]:
    if path.is_file():
        yield str(path)
    else:
        yield from (str(f) for f in path.rglob("*") if f.is_file() and f.name[0] not in "._")


class RowGroupOfFile:
    """A file of a dataset, or one row group of it, with the attributes of Arrow's first class of pieces.

    Args:
        path: the file.
        open_file_func: accepted for Petastorm: the file is opened by Arrow.
        row_group: its index in the file; None: the file.
        partition_keys: accepted for Petastorm: files have none here.
    """

    def __init__(
        self, path: str, open_file_func: Any = None, row_group: int | None = None, partition_keys: Any = None
    ) -> None:
        self.path, self.row_group, self.partition_keys = path, row_group, partition_keys

    def get_metadata(self) -> pq.FileMetaData:
        """Read the footer."""
        return pq.read_metadata(self.path)

    def read(self, columns: Sequence[str], partitions: None = None) -> Any:
        """Read columns of the row group as a table."""
        with pq.ParquetFile(self.path) as file:
            return file.read_row_group(self.row_group, columns=list(columns))


class _FormerNumPy(types.ModuleType):
    """NumPy with the aliases that NumPy 2 removed."""

    unicode_, string_ = np.str_, np.bytes_

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def check_versions(installed: Mapping[str, str]) -> None:
    """Raise a UserError that names the first package whose release is none of TESTED.

    Args:
        installed: by the package's name, its version.
    """
    for package, releases in TESTED.items():
        installed_release = installed[package]
        if not any(f"{installed_release}.".startswith(f"{release}.") for release in releases):
            raise UserError(
                f"{package} {installed_release} is installed, and Petastorm, by which training reads rows, was tested "
                f"with {package} {', '.join(releases)} alone: install one of these (requirements/*.lock has them)"
            )


@contextmanager
def _in_place_of(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Let `from MODULE import NAME` succeed for the given names; put back what was imported before."""
    previous = {name: sys.modules.get(name) for name in modules}
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in previous.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before


check_versions({package: version(package) for package in TESTED})

# Petastorm compares types with the first two, and versions of HDFS clients by the third. Neither happens here: all
# files are of this host.
_REMOVED: Mapping[str, Mapping[str, Any]] = {
    "pyarrow.filesystem": {"LocalFileSystem": LocalFiles},
    "pyarrow.hdfs": {"HadoopFileSystem": type("HadoopFileSystem", (), {})},
    "distutils.version": {"LooseVersion": Version},
}
with _in_place_of(_REMOVED):
    from petastorm import arrow_reader_worker, make_batch_reader, reader, unischema
    from petastorm.arrow_reader_worker import ArrowReaderWorker
    from petastorm.etl import dataset_metadata
    from petastorm.reader import Reader
    from petastorm.workers_pool import EmptyResultError
    from petastorm.workers_pool.dummy_pool import DummyPool
    from petastorm.workers_pool.ventilator import Ventilator

for _module in (arrow_reader_worker, dataset_metadata, reader):
    _module.pq = types.SimpleNamespace(ParquetDataset=ParquetFiles, ParquetDatasetPiece=RowGroupOfFile)
for _module in (arrow_reader_worker, unischema):
    _module.np = _FormerNumPy("numpy")

__all__ = [
    "ArrowReaderWorker",
    "DummyPool",
    "EmptyResultError",
    "LocalFiles",
    "Reader",
    "Ventilator",
    "make_batch_reader",
]
