"""A vocabulary that chains share which come to it in different turns: its values are counted once, over all of them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.features.arrow.decode import FILE, LINE, LakeFile
from headrace.features.arrow.fit import LakeFit
from headrace.features.arrow.scan import Splitter, lake_rows
from headrace.features.layout.files import PositionRule
from headrace.features.vocabulary.codes import VocabulariesInMemory, VocabularyRule
from headrace.features.workflow.workflow import Workflow
from headrace.storage import local

COLUMNS = ("a", "b", "c")


class Noted(VocabulariesInMemory):
    """Keeps what it is fed."""

    def update(self, counts: pa.Table, rules: Mapping[str, VocabularyRule]) -> dict[str, pa.Table]:
        self.fed = counts.to_pylist()
        return super().update(counts, rules)


@given(
    rows=st.lists(st.tuples(*[st.none() | st.integers(1, 4)] * len(COLUMNS)), min_size=1, max_size=12),
    # Of each column: how many operators learn before its values get codes.
    turns=st.tuples(*[st.integers(0, 2)] * len(COLUMNS)),
    shared=st.integers(1, len(COLUMNS)),
    least=st.integers(1, 6),
)
@settings(max_examples=25, deadline=None)
def test_values_are_counted_over_all_chains(
    rows: list[tuple[int | None, ...]], turns: tuple[int, ...], shared: int, least: int
) -> None:
    chains, values_by_vocabulary = [], {"v": Counter[str](), "own": Counter[str]()}
    for i, (name, counts_ahead) in enumerate(zip(COLUMNS, turns, strict=True)):
        vocabulary = "v" if i < shared else "own"
        last = {"op": "categorify", "params": {"vocabulary": vocabulary, "min_count": least}}
        chains.append(Chain(columns=(name,), ops=(*[{"op": "value_count"}] * counts_ahead, last)))
        values = [row[i] for row in rows]
        for _ in range(counts_ahead):
            counted = Counter(values)
            values = [None if v is None else counted[v] for v in values]
        values_by_vocabulary[vocabulary].update(str(v) for v in values if v is not None)
    types = [TableColumn(name=name, type="int") for name in (*COLUMNS, "y")]
    workflow, codes = Workflow(chains, types, "y", ()), Noted()
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)) | {"y": [0] * len(rows)}
    table = pa.table({name: pa.array(values, pa.int32()) for name, values in columns.items()})
    table = table.append_column(FILE, pa.array(["f"] * len(rows))).append_column(LINE, pa.array(range(len(rows))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        pq.write_table(table, path)
        splitter = Splitter(PositionRule("f", len(rows)), ("train", "valid"), "y")
        files = [LakeFile(local(path), path.stat().st_size)]
        with lake_rows(workflow, files, splitter, local(Path(folder) / "home"), {}) as lake:
            fit = LakeFit(workflow, lake)
            passes = 0
            while (task := fit.next_task()) is not None:
                fit.merge(lake.scan(None, task))
                passes += 1
            fit.finish(codes)
    assert passes == max(turns) + 1
    expected = {(name, v): n for name, counts in values_by_vocabulary.items() for v, n in counts.items() if n >= least}
    assert {(r["name"], r["value"]): r["count"] for r in codes.fed} == expected
    assert len(codes.fed) == len(expected)
