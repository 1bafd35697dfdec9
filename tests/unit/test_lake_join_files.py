"""Small files of a table that only grows, joined without Spark. What Spark reads of them: test_delta_log.py."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.lake.delta.compact import join_files
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import create_table
from headrace.storage import local


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
