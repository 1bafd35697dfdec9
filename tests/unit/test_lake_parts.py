"""Landing files in tasks: their parts, the tasks' folders, and small files joined without Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.lake.delta.compact import join_files
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import create_table
from headrace.lake.landing.arrow_rows import PART_BYTES, part_size
from headrace.lake.scratch import task_folder
from headrace.stage import Context
from headrace.storage import local
from tests.score_support import shop_spec
from tests.storage_support import memory_home

MIB = 1 << 20


def most(sizes: list[int], part: int, cores: int) -> int:
    """Bytes of the busiest core: the next part to whoever is free, the largest first."""
    parts = [size // count for size in sizes for count in [-(-size // part)] for _ in range(count)]
    busy = [0] * cores
    for size in sorted(parts, reverse=True):
        busy[busy.index(min(busy))] += size
    return max(busy)


@given(st.lists(st.integers(1, 900 * MIB), min_size=1, max_size=12), st.integers(1, 8))
def test_no_core_has_much_more_than_its_share(sizes: list[int], cores: int) -> None:
    part = part_size(sizes, cores)
    assert PART_BYTES <= part <= 4 * PART_BYTES
    assert most(sizes, part, cores) <= max(1.1 * sum(sizes) / cores, sum(sizes) / cores + part)


def test_even_files_stay_whole_and_others_do_not() -> None:
    assert part_size([150 * MIB, 149 * MIB, 151 * MIB, 150 * MIB], 2) >= 151 * MIB
    assert part_size([300 * MIB, 10 * MIB], 2) < 150 * MIB
    assert part_size([600 * MIB] * 4, 2) == 256 * MIB
    assert part_size([], 2) == 256 * MIB


def test_tasks_that_read_lines_import_no_specs() -> None:
    """The classes of specs take longer to make than a task of a small day does."""
    code = "import sys, headrace.lake.landing.write_rows as r; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    # The package names its modules, and imports them when they are asked for; these two have no classes of specs.
    of_specs = {name for name in modules if name.startswith("headrace.config")}
    assert of_specs <= {"headrace.config", "headrace.config.schema", "headrace.config.installation"}


DAY = "2026-01-01"


def spec(scratch: str) -> Spec:
    types = {"user": "bigint", "ts": "timestamp", "click": "int"}
    return shop_spec(types, {"workflow": []}, spark={"master": "local[1]", "scratch": scratch})


def test_on_one_machine_it_is_in_scratch(tmp_path: Path) -> None:
    ctx = Context(spec("shared"), Workspace(tmp_path), DAY)
    killed = ctx.ws.spark_local / "ingest" / "shop" / "left.parquet"
    killed.put_text("of a killed run")
    with task_folder(ctx, "ingest") as folder:
        assert folder == killed.parent
        assert not killed.exists()
        with task_folder(ctx, "ingest", "ratings") as named:
            (named / "a").put_text("a")
        assert not named.exists()
        (folder / "b").put_text("b")
    assert not folder.exists()


def test_between_hosts_each_run_has_its_own_in_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_home(monkeypatch, tmp_path, readers=("s3",))
    ctx = Context(spec("own"), Workspace(tmp_path, "s3://bucket/lake", "s3://bucket/store"), DAY)
    place = ctx.ws.lake / "staging" / "shop" / "score"
    (place / "killed" / "a").put_text("of a killed run")
    (place / "killed" / "items").begin("t")
    with task_folder(ctx, "score") as paused:
        assert not list(place.files())
        (paused / "a").put_text("paused")
        # Its lease is over, and another run begins; its tasks go on for a while.
        with task_folder(ctx, "score") as folder:
            (folder / "a").put_text("mine")
            (paused / "b").put_text("late")
            assert [f.below(folder) for f in folder.files()] == ["a"]
            (folder / "items").begin("t")
            files = list(folder.files())
        assert not folder.exists()
        assert files
    assert not place.exists()


def test_times_of_96_and_of_64_bits(tmp_path: Path) -> None:
    """Files as Spark writes times by default, and as others do, are joined to one file of the same instants."""
    table, adds = local(tmp_path / "table"), []
    first = 1768003200123456
    for n, kind in enumerate(("INT96", "INT64", "INT96")):
        rows = pa.table({"id": [n], "at": pa.array([first + n], pa.timestamp("us", "UTC"))})
        with (table / f"{n}.parquet").new_file() as file:
            pq.write_table(rows, file, use_deprecated_int96_timestamps=kind == "INT96", store_schema=False)
        path = (table / f"{n}.parquet").local_path()
        assert pq.ParquetFile(path).schema.column(1).physical_type == kind
        size = path.stat().st_size
        adds.append({"path": f"{n}.parquet", "partitionValues": {}, "size": size, "modificationTime": n, "stats": "{}"})
    fields = [
        {"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in (("id", "long"), ("at", "timestamp"))
    ]
    create_table(table, fields, [], [add | {"dataChange": True} for add in adds], configuration={})
    join_files(table, [None], 1 << 20, None)
    log = DeltaLog(table)
    assert log.version == 1
    files = log.files(1)
    assert files is not None
    (joined,) = (pq.read_table(file.path.local_path()) for file in files)
    assert joined["at"].type == pa.timestamp("us", "UTC")
    pairs = zip(joined["id"].to_pylist(), joined["at"].cast(pa.int64()).to_pylist(), strict=True)
    assert sorted(pairs) == [(n, first + n) for n in range(3)]
