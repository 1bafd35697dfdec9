"""Chains whose operators change names and number of columns: built in Python or YAML, bound, drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import Chain, build_spec, load_spec
from headrace.config.schema import TableColumn
from headrace.errors import UserError
from headrace.features import (
    AddMetadata,
    AddTags,
    Age,
    Bucketize,
    Categorify,
    Clip,
    Cyclic,
    FillMissing,
    FittedWorkflow,
    HashedCross,
    ListSlice,
    LogOp,
    Normalize,
    Pad,
    ReduceDtype,
    Rename,
    Workflow,
)
from headrace.features.functions.arrays import doubles
from headrace.features.ops import base
from headrace.features.types import ValueType
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.graph import draw, graph_of
from headrace.storage import local

COLUMNS = [
    TableColumn(name="price", type="double"),
    TableColumn(name="age", type="int"),
    TableColumn(name="user", type="bigint"),
    TableColumn(name="item", type="bigint"),
    TableColumn(name="device"),
    TableColumn(name="tags", type="array<string>"),
    TableColumn(name="likes", type="array<string>"),
    TableColumn(name="ts", type="timestamp"),
    TableColumn(name="since", type="timestamp"),
    TableColumn(name="born", type="date"),
    TableColumn(name="click", type="int"),
]


def bound(*chains: Any, **more: Any) -> Workflow:
    return Workflow([Chain.model_validate(c) if isinstance(c, dict) else c for c in chains], COLUMNS, "click", **more)


def chain(columns: str, *ops: Any) -> dict[str, Any]:
    return {"columns": columns.split(), "ops": list(ops)}


YAML = """
- columns: [price, age]
  ops: [{fill_missing: {indicator: true}}, log, normalize]
  tags: [continuous]
- columns: [user, item]
  ops: [categorify: {min_count: 2}]
  metadata: {owner: ads}
- {columns: [user, device], ops: [hashed_cross: {buckets: 1000}]}
- {columns: [ts], ops: [cyclic: {of: [hour, weekday]}]}
- {columns: [ts, since], ops: [{age: {event: ts, unit: hours}}, {clip: {min: 0}}]}
- {columns: [price], ops: [{bucketize: {boundaries: [1, 10.5, 100]}}, {rename: {suffix: _bin}}]}
- {columns: [tags], ops: [{list_slice: {length: 8, keep: last}}, categorify, {pad: {length: 4, keep: last}}]}
"""


def test_python_and_yaml_build_one_spec() -> None:
    conts = ["price", "age"] >> FillMissing(indicator=True) >> LogOp() >> Normalize() >> AddTags("continuous")
    cats = ["user", "item"] >> Categorify(min_count=2) >> AddMetadata(owner="ads")
    cross = ["user", "device"] >> HashedCross(buckets=1000)
    times = ("ts" >> Cyclic(of=["hour", "weekday"])) + (["ts", "since"] >> Age(event="ts", unit="hours") >> Clip(min=0))
    bins = ["price"] >> Bucketize(boundaries=[1, 10.5, 100]) >> Rename(suffix="_bin")
    tags = ["tags"] >> ListSlice(length=8, keep="last") >> Categorify() >> Pad(length=4, keep="last")
    in_python = Workflow(conts + cats + cross + times + bins + tags, columns=COLUMNS, label="click")

    in_yaml = tuple(Chain.model_validate(c) for c in yaml.safe_load(YAML))
    assert in_python.spec_chains == in_yaml
    assert in_python.schema_of({}) == bound(*in_yaml).schema_of({})
    # As a section of a pipeline's spec, and back from its JSON.
    data = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
    data["features"]["workflow"] = [c.model_dump(mode="json") for c in in_python.spec_chains]
    assert build_spec(data).features.workflow == in_yaml


def test_a_selection_can_be_used_twice() -> None:
    filled = ["price"] >> FillMissing()
    first, second = filled >> LogOp(), filled >> Rename(to="raw")
    assert len(filled.ops) == 1
    w = Workflow(first + second, columns=COLUMNS, label="click")
    assert [f.name for f in w.schema_of({}).features] == ["price", "raw", "click"]


def test_labels_may_be_written_as_operators() -> None:
    ops = ["categorify", {"add_tags": ["user", "id"]}, {"add_metadata": {"owner": "ads", "rank": 2}}]
    by_ops = Chain.model_validate(chain("user", *ops))
    by_keys = Chain.model_validate(
        {"columns": ["user"], "ops": ["categorify"], "tags": ["user", "id"], "metadata": {"owner": "ads", "rank": 2}}
    )
    assert by_ops == by_keys
    built = ["user"] >> AddTags("user") >> Categorify() >> AddTags(["id", "user"]) >> AddMetadata(owner="ads", rank=2)
    assert built.chain == by_keys
    feature = bound(by_ops).schema_of({}).features[0]
    assert (feature.tags, feature.metadata) == (("user", "id"), {"owner": "ads", "rank": 2})
    with pytest.raises(UserError, match="add_tags: write a list"):
        spec_of(chain("user_id", {"add_tags": "id"}))


@pytest.mark.parametrize("wrong", [LogOp, "log", 3])
def test_what_is_no_operator_is_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match="`>>` takes an operator"):
        ["price"] >> FillMissing() >> wrong


def test_nvtabulars_example(tmp_path: Path) -> None:
    """Their getting-started workflow in as many lines: the one of docs/features.md."""
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("fitted = ")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    names: dict[str, Any] = {}
    exec(code, names)
    spec = page.split("```yaml\n")[1].split("```")[0]
    assert names["workflow"].spec_chains == tuple(
        Chain.model_validate(c) for c in yaml.safe_load(spec)["features"]["workflow"]
    )


def test_the_operator_that_the_page_shows_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-operators.md").read_text(encoding="utf-8")
    code = page.split("## A row operator")[1].split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {n: getattr(base, n) for n in ("Elementwise", "State", "number")} | {
        "doubles": doubles,
        "ClassVar": ClassVar,
        "ValueType": ValueType,
        "pa": pa,
        "pc": pc,
        "Column": Any,
    }
    exec(code, names)
    halve = names["Halve"]()
    types = halve.types({"x": ValueType("int")})
    arrays = halve.arrow(
        {"x": pa.array([3, None])}, base.ArrowOpContext({"x": ValueType("int")}, {}, lambda v: Lookup(v))
    )
    assert (types["x"], arrays["x"].to_pylist()) == (ValueType("double"), [1.5, None])


def test_the_package_is_cheap_to_import() -> None:
    code = """
import sys
import headrace.features
assert not {'pyarrow', 'pandas', 'pydantic', 'pyspark'} & set(sys.modules)
from headrace.features import *
from headrace.features import LogOp, Workflow, AddTags
assert 'pyspark' not in sys.modules
assert {'LogOp', 'Workflow', 'HashedCross', 'AddTags'} <= set(dir(headrace.features))
try:
    headrace.features.NoSuchOp
except AttributeError as e:
    assert 'NoSuchOp' in str(e)
else:
    raise SystemExit('found')
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("chains", "parts"),
    [
        ([chain("price"), chain("price", "log")], ["workflow[1]", "'price' is already a feature", "rename"]),
        ([chain("price price")], ["names 'price' twice"]),
        ([chain("price", {"rename": {"to": "click"}})], ["would be named 'click'"]),
        ([chain("price age", {"rename": {"to": "x"}})], ["several columns (price, age)"]),
        ([chain("price", {"rename": {"to": {"cost": "x"}}})], ["no column 'cost' here"]),
        ([chain("price age", {"rename": {"to": {"age": "price"}}})], ["the same name"]),
        ([chain("price", {"rename": {"prefix": "__"}})], ["'__price'", "underscores"]),
        ([chain("price", {"rename": {}})], ["give either `to`, or `prefix`"]),
        ([chain("price", "fill_missing", {"rename": {"suffix": "_x", "to": "y"}})], ["give either"]),
        ([chain("user", {"hashed_cross": {"buckets": 9}})], ["two columns or more"]),
        ([chain("user price", {"hashed_cross": {"buckets": 9}})], ["'price'", "not double"]),
        ([chain("user tags", {"hashed_cross": {"buckets": 9}})], ["'tags'", "not array<string>"]),
        ([chain("ts", "cyclic")], ["give `of`"]),
        ([chain("ts", {"cyclic": {"of": "minute"}})], ["cyclic", "'of.0'"]),
        ([chain("ts", {"cyclic": {"period": 7}})], ["'ts'", "`period` is for integers"]),
        ([chain("price", {"cyclic": {"period": 7}})], ["'price'", "not double"]),
        ([chain("born", {"cyclic": {"of": ["hour"]}})], ["'born'", "a date has no hour"]),
        ([chain("user", {"cyclic": {"of": "hour"}})], ["'user'", "`of` is for timestamps"]),
        ([chain("ts since", {"age": {"event": "when"}})], ["'when'", "no column here"]),
        ([chain("ts", {"age": {"event": "ts"}})], ["needs a column besides"]),
        ([chain("ts user", {"age": {"event": "ts"}})], ["'user'", "not bigint"]),
        ([chain("ts")], ["'ts' ends as timestamp", "cyclic or age"]),
        ([chain("price", {"bucketize": {"boundaries": [1, 1]}})], ["'boundaries'", "must rise"]),
        ([chain("price", {"bucketize": {"boundaries": [float("nan")]}})], ["'boundaries'", "finite"]),
        ([chain("device", {"bucketize": {"boundaries": [1]}})], ["'device'", "not string"]),
        ([chain("age", {"reduce_dtype": {"min": 0.5, "max": 3}})], ["'age'", "must be integers"]),
        ([chain("age", {"reduce_dtype": {"min": 4, "max": 3}})], ["min (4) is above max (3)"]),
        ([chain("tags", "column_similarity")], ["compares two columns"]),
        ([chain("tags user", "column_similarity")], ["'user'", "not bigint"]),
        ([chain("tags", {"fill_missing": {"value": "x", "indicator": True}})], ["'tags'", "single values"]),
        (
            [
                chain(
                    "price",
                    {"rename": {"to": {"price": "a"}}},
                    {"fill_missing": {"indicator": True}},
                    {"rename": {"to": {"a": "a_missing"}}},
                )
            ],
            ["the same name"],
        ),
        (
            [chain("tags", "categorify", {"pad": {"length": 2, "keep": "last"}})],
            ["ops[0] (categorify)", "put list_slice: {length: N, keep: last} before it"],
        ),
        (
            [chain("user", "categorify"), chain("user", "categorify", {"rename": {"to": "user2"}})],
            ["workflow[1].ops[0]", "vocabulary 'user' too", "vocabulary: user"],
        ),
    ],
)
def test_refused_when_built(chains: list[dict[str, Any]], parts: list[str]) -> None:
    with pytest.raises(UserError) as e:
        bound(*chains)
    for part in parts:
        assert part in str(e.value)


def test_features_say_what_they_are_made_of() -> None:
    w = bound(
        chain("price age", {"fill_missing": {"indicator": True}}, "log", {"rename": {"to": {"age": "years"}}}),
        chain("user item device", {"rename": {"to": {"device": "d"}}}, {"hashed_cross": {"buckets": 9, "to": "cross"}}),
        chain("ts since born", {"age": {"event": "ts"}}),
        chain("ts", {"cyclic": {"of": "hour"}}),
        chain("tags likes", "column_similarity"),
        chain("tags", {"hash_bucket": {"buckets": 5}}, {"pad": {"length": 2}}, {"rename": {"suffix": "_2"}}),
    )
    assert {f.name: f.sources for f in w.schema_of({}).features if f.name != "click"} == {
        "price": ("price",),
        "years": ("age",),
        "price_missing": ("price",),
        "age_missing": ("age",),
        "cross": ("user", "item", "device"),
        "since_age": ("since", "ts"),
        "born_age": ("born", "ts"),
        "ts_hour_sin": ("ts",),
        "ts_hour_cos": ("ts",),
        "tags_likes_similarity": ("tags", "likes"),
        "tags_2": ("tags",),
    }
    assert w.input_columns == ("price", "age", "user", "item", "device", "ts", "since", "born", "tags", "likes")


def test_how_much_of_a_list_is_looked_up() -> None:
    def width(*ops: Any) -> int | None:
        (c,) = bound(chain("tags", *ops)).chains
        return next(s for s in c.steps if s.op.name == "categorify").reads["tags"]

    assert width("categorify", {"pad": {"length": 3}}) == 3
    assert width("categorify", {"list_slice": {"start": 2, "length": 9}}, {"pad": {"length": 3}}) == 5
    assert width({"list_slice": {"length": 2}}, "categorify", {"pad": {"length": 3}}) == 2
    assert (
        width({"list_slice": {"length": 6, "keep": "last"}}, "categorify", {"pad": {"length": 3, "keep": "last"}}) == 6
    )


def test_an_indicator_is_left_alone_by_later_operators(tmp_path: Path) -> None:
    w = bound(chain("price age", {"fill_missing": {"value": 2, "indicator": True}}, {"clip": {"min": 5}}))
    fitted = FittedWorkflow(w, [[{}, {}]], {})
    rows = pa.RecordBatch.from_pydict({"price": pa.array([None, 7.0]), "age": pa.array([9, None], pa.int32())})
    expected = {"price": [5.0, 7.0], "age": [9.0, 5.0], "price_missing": [1.0, 0.0], "age_missing": [0.0, 1.0]}
    assert fitted.transform_batch(rows).to_pydict() == expected
    fitted.save(local(tmp_path))
    again = FittedWorkflow.load(local(tmp_path))
    assert again.schema == fitted.schema
    assert again.transform_batch(rows).to_pydict() == expected
    saved = json.loads((tmp_path / "workflow.json").read_text())
    assert saved["dataset_schema"]["features"][2]["sources"] == ["price"]


def test_only_wanted_features_are_computed() -> None:
    w = bound(chain("price"), chain("user age", {"hashed_cross": {"buckets": 9}}))
    fitted = FittedWorkflow(w, [[], [{}]], {})
    rows = pa.RecordBatch.from_pydict({"user": pa.array([1, 2]), "age": pa.array([3, None], pa.int32())})
    features = fitted.transform_batch(rows, only={"user_X_age"})
    assert features.schema.names == ["user_X_age"]
    assert features.column(0).to_pylist()[1] == 0
    with pytest.raises(UserError, match="'price'"):
        fitted.transform_batch(rows)


def test_a_cross_does_not_depend_on_how_rows_come_in_batches() -> None:
    w = bound(chain("device user", {"hashed_cross": {"buckets": 10**6}}), chain("tags likes", "column_similarity"))
    fitted = FittedWorkflow(w, [[{}], [{}]], {})
    n = 50
    rows = pa.RecordBatch.from_pydict(
        {
            "device": pa.array([None if i % 7 == 0 else "é" * (i % 40) for i in range(n)]),
            "user": pa.array([None if i % 11 == 0 else 2**53 + i for i in range(n)]),
            "tags": pa.array([None if i % 5 == 0 else [str(i % 3), "a"] for i in range(n)]),
            "likes": pa.array([["a", None, "a"][: i % 4] for i in range(n)], pa.list_(pa.string())),
        }
    )
    crossed = fitted.transform_batch(rows)
    for start in range(0, n, 7):
        assert fitted.transform_batch(rows.slice(start, 7)).equals(crossed.slice(start, 7))
    assert fitted.transform_batch(rows.slice(0, 0)).num_rows == 0
    assert len(set(crossed.column(0).to_pylist())) > 30


def test_types_that_reduce_dtype_gives() -> None:
    def ends(column: str, low: float, high: float) -> str:
        (c,) = bound(column >> ReduceDtype(min=low, max=high)).chains
        return c.outputs[column].element

    assert [ends("user", 0, 2**31 - 1), ends("user", 0, 2**31), ends("user", -(2**31) - 1, 0)] == ["int"] + 2 * [
        "bigint"
    ]
    assert [ends("price", 0, 1), ends("price", -1e39, 0)] == ["float", "double"]


def spec_of(*chains: Any) -> Any:
    data = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
    data["features"]["workflow"] = list(chains)
    return build_spec(data)


def test_the_graph_of_a_pipeline() -> None:
    s = spec_of(
        {**chain("user_age item_price", {"fill_missing": {"indicator": True}}, "log"), "tags": ["x"]},
        chain("user_id item_id", {"hashed_cross": {"buckets": 5}}),
        chain("hour"),
    )
    graph = graph_of(s)
    nodes = {n.id: n.lines[0] for n in graph.nodes}
    flows = {(nodes[e.start], nodes[e.end]): e.columns for e in graph.edges}
    assert flows == {
        ("user_age", "fill_missing"): ("user_age: int",),
        ("item_price", "fill_missing"): ("item_price: double",),
        ("fill_missing", "log"): ("user_age: bigint", "item_price: double"),
        ("log", "user_age"): ("user_age: double",),
        ("log", "item_price"): ("item_price: double",),
        # The indicators pass by log.
        ("fill_missing", "user_age_missing"): ("user_age_missing: boolean",),
        ("fill_missing", "item_price_missing"): ("item_price_missing: boolean",),
        ("user_id", "hashed_cross"): ("user_id: bigint",),
        ("item_id", "hashed_cross"): ("item_id: bigint",),
        ("hashed_cross", "user_id_X_item_id"): ("user_id_X_item_id: code",),
        ("hour", "hour"): ("hour: int",),
    }
    text = draw(graph, "text")
    for line in (
        "user_age: int, item_price: double",
        "└─ fill_missing(indicator: true) -> user_age: bigint, item_price: double, user_age_missing: boolean, "
        "item_price_missing: boolean",
        "= user_age_missing: number float32; tags x",
        "= user_id_X_item_id: codes int32; 6 codes",
        "└─ = hour: number float32",
    ):
        assert line in text
    assert draw(graph, "dot").count(" -> ") == draw(graph, "mermaid").count("-->") == len(graph.edges)


def test_the_graph_shows_what_is_prepared() -> None:
    data = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
    data["features"]["prepare"] = [
        {"filter": {"where": "item_price > 0"}},
        {"trailing": {"keys": ["user_id"], "windows": [7]}},
    ]
    data["features"]["workflow"] = [chain("user_id_count_7d", "log")]
    graph = graph_of(build_spec(data))
    nodes = {n.id: n.lines[0] for n in graph.nodes}
    assert [(nodes[e.start], nodes[e.end]) for e in graph.edges] == [
        ("events", "filter"),
        ("filter", "trailing"),
        ("trailing", "log"),
        ("log", "user_id_count_7d"),
    ]
    assert draw(graph, "text").splitlines()[1:] == [
        "",
        "prepare: all events",
        "└─ filter(where: item_price > 0)",
        '   └─ trailing(keys: ["user_id"], windows: [7]) -> user_id_count_7d: bigint',
        "",
        "user_id_count_7d: bigint",
        "└─ log -> user_id_count_7d: double",
        "   └─ = user_id_count_7d: number float32",
    ]


def test_names_cannot_break_a_drawing() -> None:
    data = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
    data["table"]["columns"].append({"name": 'a"];#\\b', "type": "int"})
    data["features"]["workflow"] = [{"columns": ['a"];#\\b']}]
    graph = graph_of(build_spec(data))
    for line in draw(graph, "mermaid").splitlines()[4:6]:
        label = line.split('"', 1)[1].rsplit('"', 1)[0]
        assert not {'"', "]", "\\"} & set(label)
    assert r"a\"];#\\b" in draw(graph, "dot")


def test_explain_on_the_command_line() -> None:
    run = CliRunner().invoke
    result = run(app, ["features", "explain", "clicks"])
    assert result.exit_code == 0
    assert "vocabulary item_id; tags item, id" in result.output
    assert run(app, ["features", "explain", "clicks", "--format", "mermaid"]).output.startswith("---\ntitle")
    assert run(app, ["features", "explain", "clicks", "--format", "dot"]).output.startswith("digraph")
    wrong = run(app, ["features", "explain", "clicks", "--set", "features.workflow=[{columns: [hours]}]"])
    assert wrong.exit_code == 2
    assert "did you mean 'hour'" in wrong.output + wrong.stderr
    assert "features explain" in run(app, ["features", "--help"]).output
