"""`headrace init` on files that trip readers: it reads what pandas reads, or refuses with a command that mends it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from headrace.cli.init import write_pipeline
from headrace.cli.scaffold.columns import ColumnProfile, profile
from headrace.cli.scaffold.roles import Named, find_roles
from headrace.cli.scaffold.sample import take_sample
from headrace.config import load_spec
from headrace.errors import UserError
from tests.strange_inputs import KINDS, Kind


def refusal_of(path: Path, target: Path) -> str:
    """Write the pipeline of some data; return why it is refused, or nothing."""
    try:
        write_pipeline(str(path), target, None, Named(), force=False)
    except UserError as e:
        return str(e)
    return ""


def columns_of(path: Path) -> dict[str, ColumnProfile]:
    """The columns that a pipeline has, those that `prepare` adds among them."""
    sample = take_sample(str(path))
    columns = profile(sample.rows, sample.source["format"] in ("csv", "jsonl"), sample.marks)
    return {c.name: c for c in (*columns, *find_roles(columns, Named()).added)}


def assert_same(column: ColumnProfile, expected: pd.Series) -> None:
    """The values of a column are those that pandas has."""
    if isinstance(expected.dtype, pd.DatetimeTZDtype):
        seconds = (expected - pd.Timestamp("1970-01-01", tz="UTC")).dt.total_seconds().to_numpy()
        assert column.type == "timestamp"
        np.testing.assert_allclose(column.numbers, seconds, atol=1e-3)
    elif expected.dtype == object:
        assert column.type == "string"
        assert column.values.to_pylist() == expected.where(expected.notna(), None).tolist()
    else:
        assert column.is_number or column.type == "boolean", column.type
        np.testing.assert_allclose(column.numbers, expected.to_numpy(float), rtol=1e-12)


def mended(refusal: str, folder: Path) -> Path:
    """Run the command that ends a refusal, and return what it says to look at next."""
    command = re.search(r"(?:: (?P<program>[^:]+) && )?headrace init (?P<path>\S+)$", refusal)
    assert command is not None, refusal
    if command["program"]:
        subprocess.run(["bash", "-ec", command["program"]], cwd=folder, check=True, capture_output=True)
    return folder / command["path"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_read_as_pandas_reads_it_or_refused_with_what_to_do(tmp_path: Path, kind: Kind, seed: int) -> None:
    strange = kind(np.random.default_rng([seed, 38]), tmp_path)
    path, target = strange.path, tmp_path / "p.yaml"
    refusal = refusal_of(path, target)
    if strange.refusal:
        assert re.search(strange.refusal, refusal), refusal
        assert "\n" not in refusal
        assert not target.exists()
        if not strange.is_mended:
            return
        path = mended(refusal, tmp_path)
        refusal = refusal_of(path, target)
    assert not refusal
    load_spec(target)
    columns = columns_of(path)
    for name in strange.expected.columns:
        assert_same(columns[name], strange.expected[name])
