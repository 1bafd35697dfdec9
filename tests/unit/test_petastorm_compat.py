"""Petastorm beside the installed Arrow and NumPy: the same batches as ever, and a refusal of untested versions.

`make test-pythons` runs this in environments with other versions of both.
"""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.comm import World
from headrace.config import Negatives, Train
from headrace.config.workspace import Workspace
from headrace.dataset.layout import split_of
from headrace.dataset.loaders import TrainLoader
from headrace.dataset.petastorm_compat import TESTED, LocalFiles, ParquetFiles, check_versions, make_batch_reader
from headrace.errors import UserError
from headrace.stage.manifest import Manifest

#: SHA-256 of 40 steps' rows and codes: pyarrow 14.0.2 with NumPy 1.26.4 gave it first.
BATCHES = "2ff055db52d6a453da5602a10c67d9e0bbfa82845053c5369fa7c6d1bfb174d5"


@pytest.mark.parametrize("world", [1, 2])
def test_batches_are_the_same_to_the_bit_with_every_version(
    tmp_path: Path, make_dataset: Callable[..., Manifest], world: int
) -> None:
    home = Workspace(tmp_path)
    layout, schema = split_of(make_dataset(home, train=1003, valid=203, groups=10), home, "train", ["row"])
    train = Train(batch_size=64, streams=4, seed=3, negatives=Negatives(column="item", per_positive=2))
    ranks = []
    for rank in range(world):
        with TrainLoader(layout, schema, train, World(rank, world), carried=["row"]) as batches:
            ranks.append(list(itertools.islice(batches, 40)))
    digest = hashlib.sha256()
    for step in zip(*ranks, strict=True):
        digest.update(np.concatenate([b.carried["row"] for b in step]).astype("<i8").tobytes())
        digest.update(np.concatenate([b.codes for b in step]).astype("<i8").tobytes())
        for b in step:
            digest.update(b.lists["tags"].flat().astype("<i4").tobytes())
    assert digest.hexdigest() == BATCHES


def test_columns_of_every_type_are_known_to_petastorm(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": ["a", None, "c"],
            "bytes": pa.array([b"x", b"y", b"z"]),
            "flag": [True, False, True],
            "small": pa.array([1, 2, 3], pa.int8()),
            "price": pa.array([0.5, 1.5, 2.5], pa.float32()),
            "day": pa.array([1, 2, 3], pa.date32()),
        }
    )
    for name in ("part-1.parquet", "part-0.parquet", "_SUCCESS", ".part-2.parquet.crc"):
        pq.write_table(table, tmp_path / name, row_group_size=2)
    with make_batch_reader(
        tmp_path.as_uri(), filesystem=LocalFiles(), reader_pool_type="dummy", shuffle_row_groups=False, num_epochs=1
    ) as batches:
        read = list(batches)
    assert [len(b.text) for b in read] == [2, 1, 2, 1]
    assert read[0]._fields == tuple(table.column_names)
    assert [b.price.tolist() for b in read[:2]] == [[0.5, 1.5], [2.5]]
    assert read[1].bytes.tolist() == [b"z"]
    assert [Path(p.path).name for p in ParquetFiles(str(tmp_path), LocalFiles()).pieces] == [
        "part-0.parquet",
        "part-1.parquet",
    ]


@pytest.mark.parametrize(
    ("package", "untested"),
    [("petastorm", "0.13.1"), ("petastorm", "0.12.10"), ("pyarrow", "99.0.0"), ("pyarrow", "1.0"), ("numpy", "3.0.0")],
)
def test_an_untested_version_is_refused_by_name(package: str, untested: str) -> None:
    installed = {name: version(name) for name in TESTED}
    check_versions(installed)
    with pytest.raises(
        UserError, match=rf"{package} {untested.replace('.', '[.]')} is installed.*{package}"
    ) as refused:
        check_versions(installed | {package: untested})
    assert "\n" not in str(refused.value)
    assert all(release in str(refused.value) for release in TESTED[package])


def test_the_import_warns_of_nothing_and_leaves_no_stand_in_behind() -> None:
    program = (
        "import sys, pyarrow\n"
        "names = ['pyarrow.filesystem', 'pyarrow.hdfs', 'distutils.version']\n"
        "before = [sys.modules.get(n) for n in names]\n"
        "import headrace.dataset.petastorm_reader\n"
        "assert [sys.modules.get(n) for n in names] == before"
    )
    result = subprocess.run([sys.executable, "-W", "error:::petastorm", "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
