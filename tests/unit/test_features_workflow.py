"""Workflows without Spark: refusals and their messages, the Arrow kernels, saving and loading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.config import Chain, load_spec
from headrace.config.schema import Kind, TableColumn
from headrace.errors import UserError
from headrace.features.functions.arrays import input_values, is_missing
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.storage import local

COLUMNS = [
    TableColumn(name="price", type="double"),
    TableColumn(name="age", type="int"),
    TableColumn(name="user", type="bigint"),
    TableColumn(name="city", type="string"),
    TableColumn(name="tags", type="array<string>"),
    TableColumn(name="scores", type="array<double>"),
    TableColumn(name="when", type="timestamp"),
    TableColumn(name="new", type="boolean"),
    TableColumn(name="click", type="int"),
]


def workflow(*chains: dict[str, Any], **more: Any) -> Workflow:
    return Workflow([Chain.model_validate(c) for c in chains], COLUMNS, label=more.pop("label", "click"), **more)


def chain(columns: str, *ops: Any) -> dict[str, Any]:
    return {"columns": columns.split(), "ops": list(ops)}


@pytest.mark.parametrize(
    ("chains", "parts"),
    [
        (
            [chain("price", "fil_missing")],
            ["features.workflow[0].ops[0]", "fil_missing", "did you mean 'fill_missing'?"],
        ),
        (
            [chain("price", "log"), chain("user", "log", {"categorify": {"mincount": 2}})],
            ["features.workflow[1].ops[1]", "categorify", "mincount", "did you mean 'min_count'?"],
        ),
        (
            [chain("user", {"categorify": {"min_count": 0}})],
            ["ops[0]", "'min_count'", "greater than or equal to 1", "0"],
        ),
        ([chain("user", "hash_bucket")], ["ops[0] (hash_bucket)", "parameter 'buckets' is missing"]),
        ([chain("price", {"clip": {"min": 3, "max": 2}})], ["ops[0] (clip)", "min (3) is above max (2)"]),
        ([chain("price", "clip")], ["ops[0] (clip)", "give min, max or both"]),
        ([chain("price", {"fill_missing": {"value": float("nan")}})], ["fill_missing", "'value'", "finite"]),
        ([chain("price", {"fill_missing": {"value": "x"}})], ["'price'", "double", "'x'"]),
        ([chain("city", "fill_missing", "categorify")], ["'city'", "must be a text"]),
        ([chain("city", "log")], ["ops[0] (log)", "column 'city'", "takes numbers, not string"]),
        ([chain("when", "categorify")], ["column 'when'", "not timestamp"]),
        ([chain("price", "categorify")], ["column 'price'", "not double"]),
        ([chain("user", "categorify", "normalize")], ["ops[1] (normalize)", "'user' has been through categorify"]),
        (
            [chain("user city", "categorify", {"join_groupby": {"by": "user"}})],
            ["(join_groupby)", "begin another chain"],
        ),
        (
            [chain("user", "categorify", "tests.plugin_operators:LessTheMean", "normalize")],
            ["ops[2] (normalize)", "'user' has been through categorify", "begin another chain"],
        ),
        ([chain("user", "categorify", "value_count")], ["ops[1] (value_count)", "nothing can be learned from them"]),
        ([chain("user", "categorify", "target_encoding")], ["(target_encoding)", "begin another chain"]),
        ([chain("user", "categorify", "categorify")], ["ops[1] (categorify)", "begin another chain"]),
        ([chain("user", "categorify", {"hash_bucket": {"buckets": 3}})], ["ops[1] (hash_bucket)", "not code"]),
        ([chain("scores", "normalize", {"pad": {"length": 2}})], ["'scores'", "takes scalars"]),
        ([chain("tags", "categorify")], ["features.workflow[0]", "'tags'", "pad: {length: N}"]),
        ([chain("tags", {"pad": {"length": 2}}, "categorify")], ["ops[0] (pad)", "put categorify"]),
        (
            [chain("tags", "categorify", {"pad": {"length": 2}}, {"list_slice": {"length": 1}})],
            ["ops[2]", "put it last"],
        ),
        ([chain("user", {"list_slice": {"length": 1}})], ["takes lists, not bigint"]),
        ([chain("city")], ["'city'", "add categorify"]),
        ([chain("prise")], ["features.workflow[0].columns", "did you mean 'price'?"]),
        ([chain("click")], ["'click' is the label"]),
        ([chain("price"), chain("age price")], ["workflow[1]", "'price' is already a feature", "workflow[0]"]),
        (
            [
                chain("user", {"categorify": {"vocabulary": "v"}}),
                chain("age", {"categorify": {"vocabulary": "v", "min_count": 2}}),
            ],
            ["workflow[1].ops[0] (categorify)", "vocabulary 'v'", "both the same"],
        ),
        ([chain("user", {"categorify": {"vocabulary": "../x"}})], ["'vocabulary'"]),
        ([{"columns": []}], ["features.workflow[0]: names no column"]),
    ],
)
def test_refused_when_built(chains: list[dict[str, Any]], parts: list[str]) -> None:
    with pytest.raises(UserError) as e:
        workflow(*chains)
    for part in parts:
        assert part in str(e.value)


def test_label_and_carried_columns_are_checked() -> None:
    with pytest.raises(UserError, match="a label is a number"):
        workflow(chain("price"), label="city")
    with pytest.raises(UserError, match=r"carried: column 'tags' is array<string>"):
        workflow(chain("price"), carried=["tags"])
    with pytest.raises(UserError, match=r"carried.*'usr'.*did you mean 'user'"):
        workflow(chain("price"), carried=["usr"])


def test_a_carried_column_that_is_a_feature_has_a_name_of_its_own() -> None:
    schema = workflow(chain("user", "categorify"), carried=["user", "city"]).schema_of({"user": 5})
    assert [(f.name, f.kind) for f in schema.features] == [
        ("user", Kind.CATEGORICAL),
        ("click", Kind.LABEL),
        ("user__carried", Kind.CARRIED),
        ("city", Kind.CARRIED),
    ]
    assert schema.carried_name("user") == "user__carried"
    assert schema.carried_name("city") == "city"


def vocabulary(*values: str) -> Lookup:
    return Lookup(pa.table({"value": list(values), "code": pa.array(range(2, 2 + len(values)), pa.int64())}))


def fitted() -> FittedWorkflow:
    w = workflow(
        chain("price", "fill_missing", {"clip": {"min": 0, "max": 1000}}, "log", "normalize"),
        chain("age new", {"fill_missing": {"value": -1}}),
        chain("user city", {"categorify": {"vocabulary": "both"}}),
        chain("tags", "categorify", {"list_slice": {"start": 1, "length": 9}}, {"pad": {"length": 3}}),
        chain("scores", {"fill_missing": {"value": 5}}, "log", {"pad": {"length": 2}}),
    )
    states = [[{}, {}, {}, {"price": {"mean": 2.5, "std": 1.25, "count": 9}}], [{}], [{}], [{}, {}, {}], [{}, {}, {}]]
    return FittedWorkflow(w, states, {"both": vocabulary("7", "Ulm"), "tags": vocabulary("a", "b")})


ROWS = {
    "price": [10.0, None, float("nan"), 1e9, -5.0, float("inf")],
    "age": [3, None, 0, 2**31 - 1, -7, 1],
    "new": [True, None, False, True, True, True],
    "user": [7, 8, None, 2**53 + 1, 7, 7],
    "city": ["Ulm", "7", None, "", "ulm", "Ulm"],
    "tags": [["x", "a", "b"], [], None, ["a", None, "b", "zz", "a"], ["a"], ["b", "b"]],
    "scores": [[1.0, None, 3.0], [], None, [float("nan")], [-3.0, 0.0], [float("inf")]],
}


def batch() -> pa.RecordBatch:
    w = fitted().workflow
    return pa.RecordBatch.from_pydict({n: pa.array(v, w.input_type(n).arrow) for n, v in ROWS.items()})


def test_arrow_body_against_hand_made_values() -> None:
    out = fitted().transform_batch(batch()).to_pydict()
    price = (np.log1p([10.0, 0, 0, 1000, 0, 1000]) - 2.5) / 1.25
    np.testing.assert_allclose(out["price"], price.astype(np.float32), rtol=1e-6)
    assert out["age"] == [3.0, -1.0, 0.0, 2147483648.0, -7.0, 1.0]
    assert out["new"] == [1.0, -1.0, 0.0, 1.0, 1.0, 1.0]
    assert out["user"] == [2, 1, 0, 1, 2, 2]
    assert out["city"] == [3, 2, 0, 1, 1, 3]
    tags = [out[f"tags__{i}"] for i in range(3)]
    assert [list(row) for row in zip(*tags, strict=True)] == [
        [2, 3, 0],
        [0, 0, 0],
        [0, 0, 0],
        [0, 3, 1],
        [0, 0, 0],
        [3, 0, 0],
    ]
    log6 = float(np.float32(np.log(6)))
    np.testing.assert_allclose(out["scores__0"], [float(np.float32(np.log(2))), 0, 0, log6, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(out["scores__1"], [log6, 0, 0, 0, 0, 0], rtol=1e-6)


def test_arrow_body_does_not_depend_on_how_rows_come_in_batches() -> None:
    complete = fitted().transform_batch(batch())
    for start in range(6):
        part = fitted().transform_batch(batch().slice(start, 2))
        assert part.equals(complete.slice(start, 2))
    empty = fitted().transform_batch(batch().slice(0, 0))
    assert empty.num_rows == 0
    assert empty.schema == complete.schema


def test_schema_says_what_comes_out() -> None:
    f = fitted()
    assert f.input_columns == ("price", "age", "new", "user", "city", "tags", "scores")
    assert f.transform_batch(batch()).schema.names == [c for x in f.features for c in x.physical]
    by_name = {x.name: x for x in f.schema.features}
    assert (by_name["user"].cardinality, by_name["user"].vocabulary) == (4, "both")
    assert (by_name["tags"].length, by_name["tags"].is_list, by_name["scores"].kind) == (3, True, Kind.CONTINUOUS)
    types = {str(t) for t in f.arrow_schema.types}
    assert types == {"float", "int32"}


def with_column(rows: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {n: values if n == name else c for n, c in zip(rows.schema.names, rows.columns, strict=True)}
    )


def test_other_types_and_missing_columns() -> None:
    f, rows = fitted(), batch()
    wider = with_column(rows, "age", rows.column(1).cast(pa.int64()))
    assert f.transform_batch(wider).equals(f.transform_batch(rows))
    with pytest.raises(UserError, match=r"column 'user' \(bigint\) is missing"):
        f.transform_batch(pa.RecordBatch.from_arrays(rows.columns[:3], names=rows.schema.names[:3]))
    texts = with_column(rows, "user", pa.array(["x"] * 6))
    with pytest.raises(UserError, match=r"column 'user' is string and cannot be read as bigint"):
        f.transform_batch(texts)


@pytest.mark.parametrize(
    ("values", "type_", "expected", "missing"),
    [
        ([1.0, float("nan"), None], pa.float64(), [1.0, None, None], [False, True, True]),
        ([1, None], pa.int32(), [1, None], [False, True]),
        (["", None], pa.string(), ["", None], [False, True]),
        ([[1.0, float("nan")], [], None], pa.list_(pa.float64()), [[1.0, None], [], []], [False, True, True]),
        ([["a"], [None], None], pa.list_(pa.string()), [["a"], [None], []], [False, False, True]),
    ],
)
def test_what_is_missing(values: list[Any], type_: pa.DataType, expected: list[Any], missing: list[bool]) -> None:
    x = input_values(pa.array(values, type_))
    assert x.to_pylist() == expected
    assert is_missing(x).tolist() == missing


def test_keep_takes_columns_along() -> None:
    out = fitted().transform_batch(batch().slice(0, 2), keep=["scores"])
    assert out.column(out.num_columns - 1).to_pylist() == [[1.0, None, 3.0], []]


def test_save_and_load(tmp_path: Path) -> None:
    f = fitted()
    f.save(local(tmp_path))
    again = FittedWorkflow.load(local(tmp_path))
    assert again.transform_batch(batch()).equals(f.transform_batch(batch()))
    assert again.schema == f.schema
    assert sorted(p.name for p in (tmp_path / "vocabulary").iterdir()) == ["both.parquet", "tags.parquet"]


def test_damaged_saves_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no saved workflow"):
        FittedWorkflow.load(local(tmp_path))
    fitted().save(local(tmp_path))
    file = tmp_path / "vocabulary" / "tags.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"tags\.parquet cannot be read"):
        FittedWorkflow.load(local(tmp_path))
    saved = json.loads((tmp_path / "workflow.json").read_text())
    saved["chains"][0]["ops"][0]["op"] = "exec"
    (tmp_path / "workflow.json").write_text(json.dumps(saved))
    fitted_again = "no operator 'exec'"
    (tmp_path / "vocabulary" / "tags.parquet").unlink()
    with pytest.raises(UserError, match=r"tags\.parquet cannot be read"):
        FittedWorkflow.load(local(tmp_path))
    saved["vocabularies"] = {}
    (tmp_path / "workflow.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match=fitted_again):
        FittedWorkflow.load(local(tmp_path))


def test_no_spark_in_the_process(tmp_path: Path) -> None:
    fitted().save(local(tmp_path / "w"))
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as f, pa.ipc.new_file(f, batch().schema) as writer:
        writer.write_batch(batch())
    code = """
import sys
from headrace.storage import local
import pyarrow as pa
from headrace.features.workflow.fitted import FittedWorkflow
rows = pa.ipc.open_file(sys.argv[2]).get_batch(0)
out = FittedWorkflow.load(local(sys.argv[1])).transform_batch(rows)
assert not [m for m in sys.modules if m.split('.')[0] in ('pyspark', 'py4j', 'delta')], 'Spark was imported'
print(out.to_pydict()['user'])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "w"), str(tmp_path / "rows.arrow")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[2, 1, 0, 1, 2, 2]"


def test_the_shipped_pipeline_builds() -> None:
    w = Workflow.from_spec(load_spec("clicks"))
    assert "item_tags" in w.input_columns
