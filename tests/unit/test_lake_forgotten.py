"""Rows of forgotten values in the tasks that read landing files, without Spark; the hashes, as Spark's `sha2` makes
them.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.lake.forgotten import BETWEEN, ForgottenValues, words_of
from headrace.lake.landing.block_reader import Declaration, TimeRange
from headrace.lake.landing.blocks import Part
from headrace.lake.landing.read_lines import PartCounts, ReadTask, SourceFile
from headrace.schema import TableColumn
from headrace.storage import local

COLUMNS = (TableColumn(name="user", type="bigint"), TableColumn(name="note"))


def listed(column: str, *texts: str) -> ForgottenValues:
    return ForgottenValues.new().having(column, texts)


@given(st.lists(st.text(max_size=4) | st.none()), st.sets(st.text(max_size=4), min_size=1))
def test_masks_are_those_of_plain_sets(values: list[str | None], forgotten: set[str]) -> None:
    mask = listed("c", *forgotten).mask("c", pa.array(values, pa.string()))
    assert mask.tolist() == [v in forgotten for v in values]


def test_hashes_are_of_salt_column_and_text(tmp_path: Path) -> None:
    forgotten = listed("user", "17")
    assert forgotten.columns["user"] == (hashlib.sha256(f"{forgotten.salt}/user/17".encode()).hexdigest(),)
    assert forgotten.having("user", ["17"]) == forgotten
    assert forgotten.words == {}
    assert listed("user", "17").columns != forgotten.columns  # another salt
    file = local(tmp_path / "values.json")
    assert ForgottenValues.load(file) is None
    for values in (forgotten, forgotten.having("note", ["Ann B. Lee", "x|y", "(z)", "--", "w", "::"])):
        file.put_text(values.to_text())
        assert ForgottenValues.load(file) == values
    assert values.words == {"note": (1, 2, 3)}
    assert len(values.columns["note"]) == 6 + 3
    # A value that has the same words is another one.
    assert values.mask("note", pa.array(["Ann B. Lee", "Ann,B.,Lee", "z", "(z)", "x"])).tolist() == [1, 0, 0, 1, 0]
    file.put_text("{")
    with pytest.raises(UserError, match="whose rows must not be loaded again"):
        ForgottenValues.load(file)


@given(st.text("aé,;| \t\x1c\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\u200b", max_size=9))
def test_words_are_the_same_in_java_and_python(text: str) -> None:
    """Spark splits lines by Java's regular expressions, whose `\\s` has blanks of ASCII alone."""
    assert words_of(text) == re.split(BETWEEN, text, flags=re.ASCII)
    assert all(word == "".join(word.split()) for word in words_of(text))


def test_a_task_leaves_their_rows_out(tmp_path: Path) -> None:
    users = np.random.default_rng(1).integers(-3, 9, 500)
    users[7] = 5
    lines = [json.dumps({"user": int(u), "note": f"n{i}"}) for i, u in enumerate(users)]
    (tmp_path / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    schema = pa.schema(
        [("user", pa.int64()), ("note", pa.string()), ("_source_file", pa.string()), ("_source_line", pa.int64())]
    )
    task = ReadTask(
        ((Part(0, local(tmp_path / "a.jsonl")),),),
        {0: SourceFile("2026-01-01", "a.jsonl", TimeRange(None, 0), None)},
        Declaration(COLUMNS, (), "UTC", {}, {}, None),
        False,
        (),
        local(tmp_path / "table"),
        schema,
        local(tmp_path / "scratch"),
        "zstd",
        listed("user", "-3", "5"),
    )
    (result,) = task(0)
    counts = PartCounts(**result["parts"][0])
    is_forgotten = np.isin(users, [-3, 5])
    assert (counts.lines, counts.forgotten, counts.good, counts.left) == (
        500,
        is_forgotten.sum(),
        (~is_forgotten).sum(),
        0,
    )
    rows = pq.read_table(tmp_path / "table" / result["data"]["add"]["path"], partitioning=None)
    assert rows["user"].to_pylist() == users[~is_forgotten].tolist()
    assert rows["_source_line"].to_pylist() == (np.flatnonzero(~is_forgotten) + 1).tolist()
