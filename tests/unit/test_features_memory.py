"""Memory of the Arrow engine: bounded by what it takes at once, not by the rows of a row group."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config import Chain
from headrace.features.arrow import decode, kernels
from headrace.features.arrow.decode import FILE, LINE, LakeFile
from headrace.features.arrow.scan import Splitter, lake_rows
from headrace.features.arrow.write_lake import write_lake_rows
from headrace.features.build.lake_files import fit_files
from headrace.features.layout.files import plan_files
from headrace.features.layout.split import SplitRows
from headrace.features.layout.split_rule import PositionRule
from headrace.features.workflow.workflow import Workflow
from headrace.schema import TableColumn
from headrace.storage import local
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
