"""Columns of more values than 16 bits number: what the Arrow engine leaves between its passes, against pandas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import Chain
from headrace.dataset import native
from headrace.features.arrow import write_lake as module
from headrace.features.arrow.decode import FILE, LINE, LakeFile
from headrace.features.arrow.scan import Splitter, lake_rows
from headrace.features.arrow.write_lake import load_part
from headrace.features.build.lake_files import fit_files
from headrace.features.layout.files import plan_files
from headrace.features.layout.split import SplitRows
from headrace.features.layout.split_rule import PositionRule
from headrace.features.vocabulary.codes import VocabulariesInMemory
from headrace.features.workflow.workflow import Workflow
from headrace.schema import TableColumn
from headrace.storage import Location, local

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
