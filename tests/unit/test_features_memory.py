"""Memory of features: of the Arrow engine, of columns with many values, and of the driver's vocabularies."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from headrace.config import Chain, Spark
from headrace.config.installation import checkout
from headrace.config.schema import TableColumn
from headrace.dataset import native
from headrace.features.arrow import decode, kernels
from headrace.features.arrow import write_lake as module
from headrace.features.arrow.decode import FILE, LINE, LakeFile
from headrace.features.arrow.scan import Splitter, lake_rows
from headrace.features.arrow.write_lake import load_part, write_lake_rows
from headrace.features.build.lake_files import fit_files
from headrace.features.layout.files import PositionRule, plan_files
from headrace.features.layout.split import SplitRows
from headrace.features.vocabulary import delta_table, keyed_tables
from headrace.features.vocabulary.codes import VocabulariesInMemory
from headrace.features.vocabulary.keyed_tables import Pieces, TableWriter, VocabularyWriter
from headrace.features.workflow.workflow import Workflow
from headrace.storage import Location, local
from tests.unit.test_features_encoded import Codes

TEXTS, NUMBERS = [f"c{i}" for i in range(6)], [f"n{i}" for i in range(6)]
#: Rows of the one row group of the one file.
SMALL, LARGE = 100_000, 600_000
#: MiB that the larger may take above the smaller: it takes 114 more where a row group is decoded at once.
ALLOWED = 48.0


def write_rows(path: Path, rows: int) -> None:
    """Write one row group."""
    rng = np.random.default_rng(rows)
    columns = {"y": pa.array(rng.integers(0, 2, rows).astype(np.int32))}
    for i, name in enumerate(TEXTS):
        texts = pa.array(rng.integers(0, 20 if i % 2 else 1_000, rows)).cast(pa.string())
        columns[name] = texts
    for name in NUMBERS:
        columns[name] = pa.array(rng.random(rows))
    columns[FILE] = pa.array(["a.txt"]).take(pa.array(np.zeros(rows, np.int32)))
    columns[LINE] = pa.array(np.arange(rows))
    pq.write_table(pa.table(columns), path, row_group_size=rows)


def anonymous_mib() -> float:
    """Return RssAnon of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


class AnonymousPeak:
    """The largest RssAnon of this process while it is entered, MiB: pages of mapped files are the kernel's to drop."""

    mib = 0.0

    def __enter__(self) -> AnonymousPeak:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.mib = max(self.mib, anonymous_mib())


def build(folder: Path) -> None:
    """Fit and write the file `rows.parquet` of a folder, with small budgets; prints peak MiB and what was made."""
    # Fractions of what is set for real files.
    decode._DECODED_BYTES = 6 << 20
    kernels._TEXTS_AT_ONCE = 1 << 15
    pa.set_cpu_count(1)
    path = folder / "rows.parquet"
    columns = [
        TableColumn(name="y", type="int"),
        *(TableColumn(name=name, type="string") for name in TEXTS),
        *(TableColumn(name=name, type="double") for name in NUMBERS),
    ]
    chains = [
        Chain(columns=tuple(TEXTS), ops=({"op": "categorify", "params": {"min_count": 15}},)),
        Chain(columns=tuple(NUMBERS), ops=({"op": "fill_missing"}, {"op": "log"}, {"op": "normalize"})),
    ]
    workflow, rule = Workflow(chains, columns, "y", ()), PositionRule("a.txt", 90_000)
    splits = SplitRows(None, ("train", "valid"), rule)  # type: ignore[arg-type]  # the frame is not looked at
    files = [LakeFile(local(path), path.stat().st_size)]
    with (
        lake_rows(workflow, files, Splitter(rule, splits.splits, "y"), local(folder / "encoded"), {}) as rows,
        AnonymousPeak() as peak,
    ):
        counts, fitted = fit_files(workflow, rows, splits, Codes(), None, "memory")
        with local(folder / "dataset").new_folder() as dataset:
            fitted.save(dataset / "workflow")
            plans = plan_files(counts, 10_000, 1)
            written = write_lake_rows(fitted, rows, plans, dataset, dataset / "workflow", None)
        time.sleep(0.01)
    values = {name: len(v) for name, v in fitted.vocabularies.items()}
    print(json.dumps({"mib": peak.mib, "rows": sum(f.rows for f in written.files), "values": values}))


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    measured = {}
    for rows in (SMALL, LARGE):
        folder = tmp_path / str(rows)
        folder.mkdir()
        write_rows(folder / "rows.parquet", rows)
        code = "import sys, pathlib, tests.unit.test_features_memory as t; t.build(pathlib.Path(sys.argv[1]))"
        done = subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True)
        measured[rows] = json.loads(done.stdout.splitlines()[-1])
        assert measured[rows]["rows"] == rows
        assert list(measured[rows]["values"].values()) == [1_000, 20] * 3
    assert measured[LARGE]["mib"] <= measured[SMALL]["mib"] + ALLOWED, measured


ROWS, TRAIN = 80_000, 75_000


@pytest.mark.parametrize("built", [True, False])
def test_codes_of_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    if not built:
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("run make native")
    rng = np.random.default_rng(1)
    # Of `few` hardly any gets a code, of `all` more than 16 bits hold; both have nulls.
    few = np.where(rng.random(ROWS) < 0.1, rng.integers(0, 9, ROWS), rng.permutation(ROWS) + 9)
    rows = pd.DataFrame({"few": few.astype(str), "all": (rng.permutation(ROWS) // 1.07).astype(int).astype(str)})
    for name in rows:
        rows[name] = rows[name].where(rng.random(ROWS) > 0.03, None)
    table = pa.table(
        {name: pa.array(list(rows[name]), pa.string()) for name in rows}
        | {"y": pa.array(rng.integers(0, 2, ROWS), pa.int32()), FILE: ["f"] * ROWS, LINE: np.arange(ROWS)}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    columns = [TableColumn(name=n, type="int" if n == "y" else "string") for n in ("few", "all", "y")]
    chains = [
        Chain(columns=(name,), ops=({"op": "categorify", "params": {"min_count": least}},))
        for name, least in (("few", 5), ("all", 1))
    ]
    workflow, rule = Workflow(chains, columns, "y", ()), PositionRule("f", TRAIN)
    splits = SplitRows(None, ("train", "valid"), rule)  # type: ignore[arg-type]  # the frame is not looked at
    files = [LakeFile(local(tmp_path / "rows.parquet"), (tmp_path / "rows.parquet").stat().st_size)]
    saved_arrays: dict[str, npt.NDArray[Any]] = {}
    save_arrays = module.save_arrays

    def save(path: Location, *arrays: Any) -> None:
        save_arrays(path, *arrays)
        saved_arrays.update(load_part(path, 0) or {})

    monkeypatch.setattr(module, "save_arrays", save)
    out = local(tmp_path / "out")
    with lake_rows(workflow, files, Splitter(rule, splits.splits, "y"), local(tmp_path / "home"), {}) as lake:
        counts, fitted = fit_files(workflow, lake, splits, VocabulariesInMemory(), None, "values")
        fitted.save(out / "workflow")
        written = module.write_lake_rows(fitted, lake, plan_files(counts, 9_000, 3), out, out / "workflow", None)
        assert not [e for e in lake.scratch.entries() if "outputs" in e.name or "partial" in e.name]
    assert (saved_arrays["row.few"].dtype, saved_arrays["row.all"].dtype) == (np.uint8, np.int32)
    for split, part in (("train", rows[:TRAIN]), ("valid", rows[TRAIN:])):
        written_rows = pq.read_table(sorted((tmp_path / "out" / split).glob("*.parquet"))).to_pandas()
        assert written.counts[split]["few"].missing == part["few"].isna().sum()
        expected = pd.DataFrame()
        for name, least in (("few", 5), ("all", 1)):
            counted = rows[name][:TRAIN].value_counts()
            counted = counted[counted >= least].reset_index().sort_values(["count", name], ascending=[False, True])
            code = dict(zip(counted[name], range(2, len(counted) + 2), strict=True))
            expected[name] = [0 if v is None else code.get(v, 1) for v in part[name]]
        # The dataset's rows are in another order.
        expected["y"] = table["y"].to_numpy()[part.index]
        order = ["few", "all", "y"]
        pd.testing.assert_frame_equal(
            written_rows[order].sort_values(order, ignore_index=True),
            expected.sort_values(order, ignore_index=True),
            check_dtype=False,
        )


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
            limits = delta_table._FILE_ROWS, delta_table._FILE_BYTES
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
    code = f"import tests.unit.test_features_memory as t; t.write({TEXT_MIB if length > 20 else 64}, {length})"
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
    monkeypatch.setattr(keyed_tables, "_GROUP_BYTES", 100)
    table = pa.table({"key": ["k" * 40 + str(i) for i in range(10)], "x": range(10)})
    writer = TableWriter(tmp_path / "t", table.schema, "key")
    for start in range(0, 10, 3):
        writer.add(table.slice(start, 3))
    writer.finish()
    writer.finish()
    parquet = pq.ParquetFile(tmp_path / "t")
    assert [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)] == [2] * 5
    assert parquet.read().equals(table)
