"""Memory of the driver for vocabularies and tables by key that go through Spark: within `spark.driver_python_mib`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from headrace.config import Spark
from headrace.features.vocabulary import delta_table, table_writer
from headrace.features.vocabulary.table_writer import Pieces, TableWriter, VocabularyWriter
from headrace.workspace import checkout
from tests.unit.test_features_memory import AnonymousPeak, anonymous_mib

#: The least that a spec may say.
LEAST_MIB = 256
#: MiB of values that go by: several times that.
TEXT_MIB = 512
#: Rows of a batch on its way to the driver.
BATCH = 10_000


def batches(mib: int, length: int) -> Iterator[pa.RecordBatch]:
    """Yield new values of two vocabularies, so many bytes each, as Spark brings them."""
    rng, code = np.random.default_rng(0), 2
    rows = min(BATCH, (4 << 20) // length)
    for i in range((mib << 20) // (rows * length)):
        data = rng.integers(97, 123, rows * length, np.uint8)
        offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * np.int32(length))
        columns = [
            pa.repeat("ab"[i * rows * length > (mib << 19)], rows),
            pa.StringArray.from_buffers(rows, offsets, pa.py_buffer(data)),
            pa.array(np.arange(code, code + rows)),
            pa.repeat(1, rows),
        ]
        code += rows
        yield pa.RecordBatch.from_arrays(columns, ["name", "value", "code", "count"])


def write(mib: int, length: int) -> None:
    """Write vocabularies; prints the growth of this process's anonymous memory, MiB."""
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory() as name:

        def data_file(rows: pa.Table) -> dict[str, Any]:
            pq.write_table(rows, Path(name) / "data", 1 << 18, compression="snappy")
            return {"rows": rows.num_rows, "bytes": rows.column("value").nbytes}

        memory_before = anonymous_mib()
        with AnonymousPeak() as peak:
            limits = delta_table._ROWS_A_FILE, delta_table._BYTES_A_FILE
            writer = VocabularyWriter(Path(name), ["a", "b"], data_file, *limits)
            for batch in batches(mib, length):
                writer.add(batch)
            files, adds = writer.finish()
        rows = [pq.read_metadata(path).num_rows for path in files.values()]
    print(json.dumps({"mib": peak.mib - memory_before, "rows": sum(rows), "added": sum(a["rows"] for a in adds)}))


@pytest.mark.parametrize("length", [20, 4_096], ids=["short", "long"])
def test_what_goes_by_is_held_within_the_least_of_a_spec(length: int) -> None:
    with pytest.raises(ValidationError, match="driver_python_mib"):
        Spark(driver_python_mib=LEAST_MIB - 1)
    code = f"import tests.unit.test_features_driver_memory as t; t.write({TEXT_MIB if length > 20 else 64}, {length})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=checkout())
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["rows"] == measured["added"] > 100_000
    assert measured["mib"] <= LEAST_MIB, measured


def test_where_pieces_end_depends_on_the_rows_alone() -> None:
    rng = np.random.default_rng(1)
    texts = ["x" * int(n) for n in rng.integers(0, 9, 200)] + ["y" * 50, "z"]
    table = pa.table({"t": texts, "i": range(len(texts))})

    def cut(step: int) -> list[pa.Table]:
        pieces = Pieces(table.schema, "t", 7, 30)
        cut_pieces = [p for start in range(0, len(texts), step) for p in pieces.add(table.slice(start, step))]
        return [*cut_pieces, pieces.rest()]

    expected = cut(len(texts))
    assert pa.concat_tables(expected).equals(table)
    for step in (1, 2, 5, 13):
        assert [p.to_pylist() for p in cut(step)] == [p.to_pylist() for p in expected]
    sizes = [sum(map(len, p.column("t").to_pylist())) for p in expected]
    assert max(p.num_rows for p in expected) == 7
    # As many as fit, and one alone that is longer.
    assert sorted(s for s in sizes if s > 30) == [50]
    for piece, after in pairwise(expected):
        assert piece.num_rows == 7 or sum(map(len, [*piece["t"].to_pylist(), after["t"][0].as_py()])) > 30


def test_a_row_group_of_long_texts_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_writer, "_GROUP_BYTES", 100)
    table = pa.table({"key": ["k" * 40 + str(i) for i in range(10)], "x": range(10)})
    writer = TableWriter(tmp_path / "t", table.schema, "key")
    for start in range(0, 10, 3):
        writer.add(table.slice(start, 3))
    writer.finish()
    writer.finish()
    parquet = pq.ParquetFile(tmp_path / "t")
    assert [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)] == [2] * 5
    assert parquet.read().equals(table)
