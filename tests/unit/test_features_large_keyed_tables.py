"""Keyed tables that no process holds: those in files say what those in memory say; parts of the keys make the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.features.arrow.aggregate import aggregate_batch
from headrace.features.arrow.collect import by_key
from headrace.features.learn.statistics import BatchRows, Partial
from headrace.features.ops.base import EstimatorOp
from headrace.features.transport import FinishParts, KeyedStep, cut, decoded, encoded, packed
from headrace.features.vocabulary import lookup
from headrace.features.vocabulary.keyed_tables import FileKeyedTable, KeyedTable, MappedKeyedTable
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.storage import local

floats = st.floats(allow_nan=False, width=64)


@given(
    rows=st.lists(
        st.tuples(
            st.one_of(st.text(max_size=4), st.integers(-20, 20).map(str), st.sampled_from(["true", "false"])),
            st.integers(-(2**63), 2**63 - 1),
            st.none() | floats,
        ),
        unique_by=lambda r: r[0],
        max_size=30,
    ),
    requested_keys=st.lists(st.none() | st.text(max_size=4), max_size=8),
    group=st.integers(1, 9),
    batch=st.integers(1, 9),
)
@settings(max_examples=40)
def test_tables_in_files_say_what_those_in_memory_say(
    rows: list[tuple[str, int, float | None]],
    requested_keys: list[str | None],
    group: int,
    batch: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    schema = pa.schema([("key", pa.string()), ("n", pa.int64()), ("x", pa.float64())])
    plain = KeyedTable(pa.Table.from_pylist([dict(zip(schema.names, r, strict=True)) for r in rows], schema))
    folder = tmp_path_factory.mktemp("t")
    pq.write_table(plain.table, folder / "file", row_group_size=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_BATCH_ROWS", batch)
        maps = local(folder / "maps")
        maps.make_dir()
        MappedKeyedTable.write_file(folder / "file", maps)
    keys = [
        pa.array([*requested_keys, *(r[0] for r in rows[::-1]), *requested_keys], pa.string()),
        pa.array([7, None, -3, 7], pa.int64()),
        pa.array([True, None, False]),
        pa.array([], pa.string()),
    ]
    for table in (FileKeyedTable(folder / "file"), MappedKeyedTable(maps)):
        assert (len(table), table.values) == (len(plain), plain.values)
        assert table.schema == plain.schema
        assert table.table.combine_chunks().equals(plain.table)
        for key in keys:
            row_numbers = table.rows(key)
            assert row_numbers.tolist() == plain.rows(key).tolist()
            for name, missing in (("n", 0), ("x", None), ("x", 0.5)):
                assert table.take(name, row_numbers, missing).equals(plain.take(name, row_numbers, missing))


@given(
    rows=st.lists(st.tuples(st.text(max_size=3), st.none() | floats, st.none() | st.integers(-(2**63), 2**63 - 1))),
    start=st.integers(0, 3),
)
def test_rows_of_tables_travel_without_a_change(rows: list[tuple[str, Any, Any]], start: int) -> None:
    # The other NaNs, and the other zero.
    odd = np.array([0x7FF8000000000001, 0xFFF8000000000000, 1 << 63], np.uint64).view(np.float64)
    table = pa.table(
        {
            "x": pa.array([*odd, *(r[1] for r in rows)], pa.float64(), from_pandas=False),
            "key": pa.array([*"abc", *(r[0] for r in rows)], pa.string()),
            "n": pa.array([1, 2, None, *(r[2] for r in rows)], pa.int64()),
        }
    )
    keys, values = encoded(table)
    received = decoded(keys.combine_chunks()[start:], values[start:], table.schema)
    assert [c.null_count for c in received.columns] == [c.null_count for c in table.slice(start).columns]
    for name in ("x", "n"):
        bits = [
            t.column(name).combine_chunks().fill_null(0).to_numpy().tobytes() for t in (received, table.slice(start))
        ]
        assert bits[0] == bits[1]
    assert received.column("key").to_pylist() == table.column("key").to_pylist()[start:]


CHAINS: list[dict[str, Any]] = [
    {"columns": ["s", "n"], "ops": [{"value_count": {"log": True}}]},
    {"columns": ["s", "n"], "ops": [{"target_encoding": {"folds": 3, "smoothing": 1.5}}]},
    {"columns": ["s", "n"], "ops": [{"target_encoding": {"folds": 2, "together": True}}]},
    {
        "columns": ["s", "n", "x", "i"],
        "ops": [{"join_groupby": {"by": ["s", "n"], "stats": ["count", "sum", "mean", "std", "min", "max"]}}],
    },
]
COLUMNS = [
    TableColumn(name="s", type="string"),
    TableColumn(name="n", type="int"),
    TableColumn(name="x", type="double"),
    TableColumn(name="i", type="bigint"),
    TableColumn(name="y", type="int"),
]
row = st.tuples(
    st.none() | st.text("abü", max_size=2),
    st.none() | st.integers(-2, 2),
    st.none() | floats,
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 1),
)


def columns_of(rows: Sequence[tuple[Any, ...]]) -> dict[str, pa.Array]:
    types = (pa.string(), pa.int32(), pa.float64(), pa.int64(), pa.int32())
    cells = zip(*rows, strict=True) if rows else [()] * len(types)
    return {c.name: pa.array(list(x), t) for c, x, t in zip(COLUMNS, cells, types, strict=True)}


@given(rows=st.lists(row, max_size=25), partitions=st.integers(1, 4), block=st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_parts_of_the_keys_make_the_whole_table(rows: list[tuple[Any, ...]], partitions: int, block: int) -> None:
    workflow = Workflow([Chain.model_validate(c) for c in CHAINS], COLUMNS, "y")
    columns = columns_of(rows)
    rows_of_part = BatchRows(label=columns["y"], identity=np.arange(len(rows), dtype=np.int64) << 20)
    steps, expected_tables, sent = {}, {}, [list[tuple[int, bytes]]() for _ in range(partitions)]
    numbers: dict[tuple[tuple[int, int], str], int] = {}
    schemas: list[pa.Schema] = []
    number = 0
    for i, chain in enumerate(workflow.chains):
        step = chain.steps[0]
        assert isinstance(step.op, EstimatorOp)
        assert step.op.by_key
        taken = {name: columns[name] for name in step.inputs}
        partials_by_name: dict[str, Partial] = {
            name: aggregate_batch(statistic, taken, step.inputs, rows_of_part)
            for name, statistic in step.op.statistics(step.inputs).items()
        }
        names = {}
        for name, partial in partials_by_name.items():
            if "key" in partial.column_names:
                names[number] = name
                for partition, key_part in by_key(partial, partitions, number):
                    sent[partition] += [(number, packed(piece, number)) for piece in cut(key_part, block)]
                number += 1
        other_partials = {name: partial for name, partial in partials_by_name.items() if name not in names.values()}
        steps[i, 0] = KeyedStep(step.op, step.inputs, names, other_partials)
        expected, alone = step.op.finish(partials_by_name, step.inputs), steps[i, 0].finish({})
        assert alone.states == expected.states
        for name, table in expected.tables.items():
            numbers[(i, 0), name] = len(schemas)
            schemas.append(alone.tables[name].schema)
            expected_tables[numbers[(i, 0), name]] = KeyedTable(table).table
            assert schemas[-1] == expected_tables[numbers[(i, 0), name]].schema
    received_tables: dict[int, list[pa.Table]] = {i: [schema.empty_table()] for i, schema in enumerate(schemas)}
    for key_part in sent:
        batches = [pa.RecordBatch.from_pydict({"name": [n], "statistic": [data]}) for n, data in key_part]
        for batch in FinishParts(steps, numbers).run(batches):
            (table,) = set(batch.column(0).to_pylist())
            received_tables[table].append(decoded(batch.column(1), batch.column(2), schemas[table]))
    for i, expected_table in expected_tables.items():
        whole_table = KeyedTable(pa.concat_tables(received_tables[i])).table
        assert whole_table.equals(expected_table)
        for name in whole_table.column_names:
            if name != "key":
                bits = [t.column(name).combine_chunks().fill_null(0) for t in (whole_table, expected_table)]
                assert bits[0].to_numpy().tobytes() == bits[1].to_numpy().tobytes(), name


def test_a_saved_workflow_is_the_same_whoever_holds_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workflow = Workflow([Chain.model_validate(CHAINS[i]) for i in (0, 3)], COLUMNS, "y")
    rows = [(f"s{i % 7}", i % 5, i * 0.25, i, i % 2) for i in range(60)]
    columns = columns_of(rows)
    tables, states = {}, []
    for i, chain in enumerate(workflow.chains):
        step = chain.steps[0]
        assert isinstance(step.op, EstimatorOp)
        taken = {name: columns[name] for name in step.inputs}
        outputs = {
            name: aggregate_batch(statistic, taken, step.inputs, BatchRows(label=columns["y"]))
            for name, statistic in step.op.statistics(step.inputs).items()
        }
        learned = step.op.finish(outputs, step.inputs)
        states.append([learned.states])
        tables |= {f"{i}.0.{name}": KeyedTable(table) for name, table in learned.tables.items()}
    fitted = FittedWorkflow(workflow, states, {}, tables)
    home = local(tmp_path / "workflow")
    fitted.save(home)
    batch = pa.RecordBatch.from_pydict(
        {name: pa.concat_arrays([x, x.slice(0, 3)]) for name, x in columns_of([*rows, (None, 9, 1.0, 1, 0)]).items()}
    )
    expected = fitted.transform_batch(batch)
    monkeypatch.setattr("headrace.features.workflow.fitted.MAPPED_VALUES", 6)
    in_files = FittedWorkflow.load(home, most_values=6)
    mapped = FittedWorkflow.load(home, maps=local(tmp_path / "maps"))
    for loaded, kind in ((in_files, FileKeyedTable), (mapped, MappedKeyedTable)):
        # Five values are few: that one stays in memory.
        assert [type(t) for t in loaded.tables.values()] == [kind, KeyedTable, kind]
        assert loaded.transform_batch(batch).equals(expected)
    # What stays in a file is saved as that file.
    in_files.save(local(tmp_path / "again"))
    for file in (tmp_path / "workflow").rglob("*"):
        if file.is_file():
            assert (tmp_path / "again" / file.relative_to(tmp_path / "workflow")).read_bytes() == file.read_bytes()
