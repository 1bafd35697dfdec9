"""The fitted workflow as an ONNX graph, and as tensors for Arrow, against the Arrow engine's transform."""

from __future__ import annotations

from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.config import Chain
from headrace.config.schema import Kind, TableColumn
from headrace.errors import UserError
from headrace.export.features.columns import LENGTH, MISSING, raw_columns, to_batch, to_tensors
from headrace.features.ops.groups import TargetEncoding
from headrace.features.vocabulary.keyed_tables import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.storage import local

graph_file = pytest.importorskip("headrace.export.features.graph_file", reason="ONNX is not installed: `make onnx`")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")

TYPES = {
    "x": "double",
    "f": "float",
    "i": "int",
    "b": "bigint",
    "flag": "boolean",
    "s": "string",
    "at": "timestamp",
    "born": "timestamp",
    "day": "date",
    "ss": "array<string>",
    "ids": "array<bigint>",
    "ds": "array<double>",
    "fs": "array<float>",
    "sure": "bigint",
    "label": "int",
}
REQUIRED = ("sure",)
EDGES = [-2, 0.0, 0.5, 3]
VALUES = ["a", "é", "", "1", "日本", "7", "-3", "07", str(2**62), "true", "9223372036854775808"]
#: Columns, operators; what is learned comes from `STATES`.
CHAINS: list[tuple[str, list[Any]]] = [
    ("x i flag", [{"fill_missing": {"value": 1, "indicator": True}}, "log", {"clip": {"max": 8}}]),
    ("s", [{"fill_missing": {"value": "é", "indicator": True}}, {"categorify": {"vocabulary": "v"}}]),
    ("x f b flag", [{"bucketize": {"boundaries": EDGES}}, {"rename": {"suffix": "_bin"}}]),
    ("ds", [{"bucketize": {"boundaries": EDGES}}, {"pad": {"length": 3, "keep": "last"}}]),
    ("fs", [{"clip": {"min": -1, "max": 1e30}}, {"pad": {"length": 4}}]),
    ("b flag i", [{"hashed_cross": {"buckets": 7, "to": "wide"}}]),
    ("i b flag", [{"hash_bucket": {"buckets": 1000}}, {"rename": {"suffix": "_hash"}}]),
    ("b", ["raw_id", {"rename": {"suffix": "_id"}}]),
    ("i", [{"raw_id": {"hash": True}}, {"rename": {"to": "i_id"}}]),
    ("ids", ["raw_id", {"pad": {"length": 2}}, {"rename": {"to": "ids_raw"}}]),
    ("at", [{"cyclic": {"of": ["hour", "weekday", "day", "month"]}}]),
    ("day", [{"cyclic": {"of": ["weekday", "day", "month"]}}]),
    ("b i", [{"cyclic": {"period": 7}}, {"rename": {"prefix": "p_"}}]),
    ("at born day", [{"age": {"event": "at"}}, {"reduce_dtype": {"min": -1e6, "max": 1e6}}]),
    ("b", [{"reduce_dtype": {"min": -100, "max": 2**53 + 1}}, {"clip": {"min": 2**53}}, {"rename": {"to": "b2"}}]),
    ("i", [{"reduce_dtype": {"min": -3, "max": 3}}, {"fill_missing": {"value": 9}}, {"rename": {"to": "i3"}}]),
    (
        "ids",
        [
            {"list_slice": {"start": 1, "length": 3, "keep": "last"}},
            {"hash_bucket": {"buckets": 9}},
            {"pad": {"length": 2}},
        ],
    ),
    (
        "ss",
        [
            {"list_slice": {"start": 1, "length": 4}},
            {"categorify": {"vocabulary": "v"}},
            {"pad": {"length": 3, "keep": "last"}},
        ],
    ),
    ("ids", [{"categorify": {"vocabulary": "v"}}, {"pad": {"length": 5}}, {"rename": {"to": "ids_coded"}}]),
    ("i b flag", [{"categorify": {"vocabulary": "v"}}, {"drop_low_cardinality": {}}, {"rename": {"suffix": "_code"}}]),
    ("sure", [{"categorify": {"vocabulary": "none"}}]),
    ("x b", ["fill_median", "normalize", {"rename": {"suffix": "_norm"}}]),
    ("f", ["normalize_minmax", {"rename": {"to": "f01"}}]),
    ("x", [{"quantile_bin": {"bins": 4}}, {"rename": {"to": "x_bin4"}}]),
    ("s i", ["value_count", {"rename": {"suffix": "_n"}}]),
    ("b", [{"value_count": {"log": True}}, {"rename": {"to": "b_often"}}]),
    ("s x", [{"join_groupby": {"by": "s", "stats": ["count", "mean"]}}]),
    ("s b", ["target_encoding"]),
]
STATES: dict[str, dict[str, Any]] = {
    "fill_median": {"median": 0.3},
    "normalize": {"mean": 0.1, "std": 3.7},
    "normalize_minmax": {"min": -1.25, "max": 6.1},
    "quantile_bin": {"edges": [-1.0, 0.0, 0.7]},
    "target_encoding": {"priors": [0.25, *[0.5] * TargetEncoding().folds]},
}


def keyed(*columns: tuple[str, Any]) -> KeyedTable:
    return KeyedTable(pa.table({"key": VALUES, **{name: pa.array(values) for name, values in columns}}))


@cache
def fitted() -> FittedWorkflow:
    chains = [Chain(columns=tuple(names.split()), ops=tuple(ops)) for names, ops in CHAINS]
    columns = [TableColumn(name=n, type=t, required=n in REQUIRED) for n, t in TYPES.items()]
    w = Workflow(chains, columns, label="label")
    states, tables = [], {}
    n = np.arange(1, len(VALUES) + 1)
    for i, chain in enumerate(w.chains):
        states.append([{c: STATES.get(s.op.name, {}) for c in (*s.inputs, *s.outputs)} for s in chain.steps])
        for j, step in enumerate(chain.steps):
            if step.op.name == "value_count":
                for c in step.inputs:
                    tables[f"{i}.{j}.{c}"] = keyed(("count", np.log1p(n) if step.op.log else n))  # type: ignore[attr-defined]
            if step.op.name == "join_groupby":
                means = [None if k % 3 == 0 else k / 7 for k in range(len(VALUES))]
                tables[f"{i}.{j}.groups"] = keyed(("s_count", n), ("s_x_mean", means))
            if step.op.name == "target_encoding":
                for c in step.outputs:
                    folds = [(f"without_{f}", n / 17) for f in range(TargetEncoding().folds)]
                    tables[f"{i}.{j}.{c}"] = keyed(("all", n / 13), *folds)
    table = pa.table({"value": VALUES, "code": pa.array(range(2, 2 + len(VALUES)), pa.int64())})
    return FittedWorkflow(w, states, {"v": Lookup(table), "none": Lookup(table[:0])}, tables)


@cache
def session(folder: Path, most_integers: int = 1 << 20) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    graph_file.write_features(fitted(), local(folder), most_integers=most_integers)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(folder / "features.onnx", options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


REALS = st.none() | st.floats() | st.sampled_from([-1.0, -0.0, 1e-300, -0.5, 1e-9, 1e308, 3.4028236e38, 0.5])
INTS = st.none() | st.integers(-(2**31), 2**31 - 1) | st.integers(-4, 8)
BIGS = st.none() | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([7, -3, 2**62, 2**53, 0, -(2**63)])
TEXTS = st.none() | st.sampled_from(VALUES) | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
TIMES = st.none() | st.datetimes(datetime(1890, 1, 1), datetime(2120, 1, 1), timezones=st.just(UTC))
DAYS = (
    st.none() | st.dates(date(1600, 1, 1), date(2420, 1, 1)) | st.sampled_from([date(2024, 2, 29), date(1900, 12, 31)])
)


def lists_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(values, max_size=7)


ROW = st.fixed_dictionaries(
    {
        "x": REALS,
        "f": st.none() | st.floats(width=32),
        "i": INTS,
        "b": BIGS,
        "flag": st.none() | st.booleans(),
        "s": TEXTS,
        "at": TIMES,
        "born": TIMES,
        "day": DAYS,
        "ss": lists_of(TEXTS),
        "ids": lists_of(BIGS),
        "ds": lists_of(REALS),
        "fs": lists_of(st.none() | st.floats(width=32)),
        "sure": st.integers(-(2**63), 2**63 - 1),
    }
)
EMPTY = {name: None if name != "sure" else 5 for name in TYPES if name != "label"}
LONG = EMPTY | {
    "ids": [*range(-50, 2950)],
    "ss": ["a", None] * 1500,
    "ds": [None, 0.25] * 1500,
    "at": datetime(1970, 1, 1),
}


def as_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    w = fitted().workflow
    arrays = [pa.array([row[c] for row in rows], w.input_type(c).arrow) for c in w.input_columns]
    return pa.RecordBatch.from_arrays(arrays, list(w.input_columns))


def by_arrow(batch: pa.RecordBatch) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays of the Arrow engine: [rows] of codes and ids, [rows, columns] of lists and numbers."""
    transformed = fitted().transform_batch(batch)
    out = {}
    for f in fitted().features:
        columns = [transformed.column(transformed.schema.get_field_index(c)).to_numpy() for c in f.physical]
        out[f.name] = np.stack(columns, 1) if f.is_list or f.kind is Kind.CONTINUOUS else columns[0]
    return out


@settings(max_examples=25, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=20))
@example([EMPTY])
@example([EMPTY, LONG])
def test_the_graph_is_the_arrow_engine(folder: Path, rows: list[dict[str, Any]]) -> None:
    columns = raw_columns(fitted().workflow, fitted().input_columns)
    batch = as_batch(rows)
    tensors = to_tensors(columns, batch)
    assert to_batch(columns, tensors).select(batch.schema.names).num_rows == len(rows)
    expected = by_arrow(batch)
    for runtime in (session(folder / "one"), session(folder / "files", 2)):
        outputs = dict(zip([o.name for o in runtime.get_outputs()], runtime.run(None, tensors), strict=True))
        assert sorted(outputs) == sorted(f"{name}.feature" for name in expected)
        for name, value in expected.items():
            output = outputs[f"{name}.feature"]
            assert output.shape == value.shape, name
            if value.dtype.kind == "i":
                np.testing.assert_array_equal(output, value, err_msg=name)
            else:
                np.testing.assert_allclose(output, value, rtol=1e-6, atol=1e-12, err_msg=name)


@settings(max_examples=15, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=20))
@example([EMPTY, LONG])
def test_tensors_are_the_rows(rows: list[dict[str, Any]]) -> None:
    """There and back, and by other spellings of the same tensors: [rows, 1], bytes."""
    columns = raw_columns(fitted().workflow, fitted().input_columns)
    batch = as_batch(rows)
    tensors = to_tensors(columns, batch)
    expected = by_arrow(batch)
    spelled = {
        name: np.array([str(v).encode() for v in x.ravel()], object).reshape(x.shape) if x.dtype == object else x
        for name, x in tensors.items()
    }
    spelled = {name: x[:, None] if x.ndim == 1 else x for name, x in spelled.items()}
    for request in (tensors, spelled):
        for name, value in by_arrow(to_batch(columns, request)).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
    required = {t.name for c in columns for t in c.tensors}
    assert "sure.missing" not in required
    assert {f"ids{LENGTH}", f"ids{MISSING}", f"s{MISSING}"} <= required
    assert f"x{MISSING}" not in required


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"i": None}, "tensor 'i' is missing"),
        ({"ids.length": np.array([9])}, "lengths must be 0 to 1"),
        ({"x": np.array(["a"], object)}, "'x' cannot be read as double"),
        ({"i": np.array([2**40])}, "'i' cannot be read as int"),
        ({"s.missing": np.array([True, False])}, "'s.missing' is \\[2\\]"),
        ({"x": np.array([1.0, 2.0])}, "1, 2 rows"),
        ({"b": np.zeros((1, 2), np.int64)}, "shape is \\[1, 2\\]|'b.missing'"),
        ({"s": np.array([b"\xff"], object)}, "'s' cannot be read as string"),
    ],
)
def test_tensors_that_are_wrong_are_named(changed: dict[str, Any], message: str) -> None:
    columns = raw_columns(fitted().workflow, fitted().input_columns)
    row = EMPTY | {"s": "a", "i": 1, "b": 2}
    tensors = {k: v for k, v in (to_tensors(columns, as_batch([row])) | changed).items() if v is not None}
    with pytest.raises(UserError, match=message):
        to_batch(columns, tensors)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (("s", [{"hash_bucket": {"buckets": 5}}]), "\\[0\\].ops\\[0\\] \\(hash_bucket\\): text is hashed \\(s\\)"),
        (("s i", [{"hashed_cross": {"buckets": 5}}]), "hashed_cross\\): text is hashed"),
        (("s", ["raw_id"]), "raw_id\\): text is hashed"),
        (("i", [{"categorify": {"oov_buckets": 4}}]), "oov_buckets"),
        (("s", [{"text_ngrams": {"buckets": 9}}, {"pad": {"length": 3}}]), "text_ngrams\\): no operator"),
        (("s i x", [{"join_groupby": {"by": ["s", "i"], "stats": ["mean"]}}]), "a key of several columns \\(s, i\\)"),
        (("s i", [{"target_encoding": {"together": True}}]), "a key of several columns"),
        (("x", ["tests.plugin_operators:Halve"]), "tests.plugin_operators:Halve\\): no operator"),
        (("d", ["normalize"]), "d: ONNX has no decimals"),
    ],
)
def test_what_has_no_operator_is_named_before_anything_is_written(
    chain: tuple[str, list[Any]], message: str, tmp_path: Path
) -> None:
    columns = [TableColumn(name=n, type=t) for n, t in (TYPES | {"d": "decimal(5,2)"}).items()]
    w = Workflow([Chain(columns=tuple(chain[0].split()), ops=tuple(chain[1]))], columns, label="label")
    empty = Lookup(pa.table({"value": pa.array([], pa.string()), "code": pa.array([], pa.int64())}))
    fitted_workflow = FittedWorkflow(w, [[{} for _ in c.steps] for c in w.chains], dict.fromkeys(w.rules, empty))
    with pytest.raises(UserError, match=message):
        graph_file.write_features(fitted_workflow, local(tmp_path))
    assert list(tmp_path.iterdir()) == []
