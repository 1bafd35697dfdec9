"""Drift: the index against NumPy, bins and statistics against plain Python and pandas, the limits, the stage."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from datetime import UTC, date, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.psi import EPSILON, ks, psi
from headrace.config import Drift, Spec, build_spec, load_spec
from headrace.config.schema import Feature, Kind
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_USER_ERROR, UserError
from headrace.features.arrow.kernels import DictionaryColumn
from headrace.features.types import ValueType
from headrace.jobs.submit import PROGRAM
from headrace.quality.drift.column_statistics import ColumnStatistics, NumberBins, ValueBins, describe
from headrace.quality.drift.columns import MeasuredColumn, feature_columns, input_columns
from headrace.quality.drift.count_day import SCHEMA
from headrace.quality.drift.stage import JudgeDrift, judge
from headrace.quality.report.lineage import find, load_runs, trace
from headrace.stage import check_stage, run_stage
from headrace.stage.manifest import Manifest, Output

DS = "2026-01-08"
COUNTS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=12)
REALS = st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, 1.0, 7.5, math.inf, -math.inf])


@given(COUNTS)
def test_psi_and_ks_are_numpys(pairs: list[tuple[int, int]]) -> None:
    expected, actual = np.array(pairs).T
    distance = psi(expected.tolist(), actual.tolist())
    if not expected.sum() or not actual.sum():
        assert distance is None
        assert ks(expected.tolist(), actual.tolist()) is None
        return
    e, a = expected / expected.sum(), actual / actual.sum()
    assert ks(expected.tolist(), actual.tolist()) == pytest.approx(np.abs(np.cumsum(e) - np.cumsum(a)).max())
    e, a = np.clip(e, EPSILON, None), np.clip(a, EPSILON, None)
    assert distance == pytest.approx(float(np.sum((a - e) * np.log(a / e))), rel=1e-9, abs=1e-12)
    assert distance == pytest.approx(psi(actual.tolist(), expected.tolist()))


def test_psi_of_known_shares() -> None:
    # 0.1 * ln(3/2) + 0.1 * ln(5/4) by hand.
    assert psi([40, 60], [50, 50]) == pytest.approx(0.1 * math.log(5 / 4) + 0.1 * math.log(6 / 5))
    assert psi([10, 20, 70], [100, 200, 700]) == 0
    # A new category where there was none: an empty bin counts as one in ten thousand.
    assert psi([100, 0], [0, 100]) == pytest.approx(2 * (1 - EPSILON) * math.log(1 / EPSILON), rel=1e-6)


@given(st.lists(REALS, max_size=60), st.lists(REALS, max_size=60), st.integers(2, 12))
def test_number_bins(sample: list[float], later: list[float], count: int) -> None:
    bins = NumberBins.from_sample(np.array(sample), count)
    assert list(bins.edges) == sorted(set(bins.edges))
    assert all(math.isfinite(e) for e in bins.edges)
    indices = bins.index(np.array(later, np.float64))
    assert indices.tolist() == [sum(e <= x for e in bins.edges) for x in later]
    finite = sorted(x for x in sample if math.isfinite(x))
    if not finite:
        assert bins.edges == ()
        return
    # Everything of the sample lies between the outer bins; what is beyond the sample does not.
    inner = bins.index(np.array(finite))
    assert inner.min() >= 1
    assert inner.max() <= bins.size - 2
    assert bins.index(np.array([finite[0] - 1, finite[-1] + 1])).tolist() == [0, bins.size - 1]
    # At most an atom holds more than two quantiles, and an atom has its bin for itself.
    for i in set(inner.tolist()):
        values = [x for x in finite if bins.index(np.array([x]))[0] == i]
        assert len(set(values)) == 1 or len(values) <= 2 * len(finite) / count + 2


def test_a_constant_that_moves_is_seen() -> None:
    bins = NumberBins.from_sample(np.full(50, 3.0), 10)
    old, new = (np.bincount(bins.index(np.full(50, x)), minlength=bins.size).tolist() for x in (3.0, 3.0000001))
    assert psi(old, old) == 0
    assert (psi(old, new) or 0) > 10


@given(st.lists(st.sampled_from(["a", "b", "é", "", "日本"]), max_size=40), st.integers(1, 4))
def test_value_bins(sample: list[str], count: int) -> None:
    bins = ValueBins.from_sample(pa.array(sample, pa.string()), count)
    top = sorted(Counter(sample).items(), key=lambda kv: (-kv[1], kv[0]))[:count]
    assert bins.values == tuple(v for v, _ in top)
    later = [*sample, "new", "b"]
    counts = np.bincount(bins.index(pa.array(later)), minlength=bins.size)
    assert counts.tolist() == [later.count(v) for v in bins.values] + [sum(x not in bins.values for x in later)]
    shares = describe(bins, counts)
    assert [r["value"] for r in shares] == [*bins.values, None]
    assert sum(float(str(r["share"])) for r in shares) == pytest.approx(1)


def test_value_bins_of_other_types() -> None:
    integers = ValueBins.from_sample(pa.array([2**62, 2**62 + 1, 2**62, 1], pa.int64()), 1)
    assert integers.values == (2**62,)
    assert integers.index(pa.array([2**62 + 1, 2**62], pa.int64())).tolist() == [1, 0]
    flags = ValueBins.from_sample(pa.array([True, False, True]), 5)
    assert [r["value"] for r in describe(flags, np.array([2, 1, 0]))] == ["true", "false", None]
    # The unknown code has the first bin, whether the sample has it or not.
    assert ValueBins.from_sample(pa.array([5, 5, 1, 7], pa.int32()), 2, (1,)).values == (1, 5, 7)
    assert ValueBins.from_sample(pa.array([], pa.int32()), 2, (1,)).values == (1,)


CELLS = st.lists(
    st.none()
    | st.floats(-1e9, 1e9)
    | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e300, 5e-324, 1e9 + 0.25]),
    max_size=50,
)


@given(CELLS, st.lists(st.integers(0, 50), max_size=4))
def test_a_numbers_statistics_are_pandas_however_the_rows_are_cut(cells: list[float | None], cuts: list[int]) -> None:
    column = MeasuredColumn("input", "x", "number")
    array = pa.array(cells, pa.float64())
    sample, _ = column.values([array])
    bins = NumberBins.from_sample(sample.to_numpy(zero_copy_only=False), 4)
    merged = ColumnStatistics(bins)
    edges = [0, *sorted(min(c, len(cells)) for c in cuts), len(cells)]
    for start, end in pairwise(edges):
        part, rows = ColumnStatistics(bins), array.slice(start, end - start)
        part.add(*column.values([rows]), len(rows))
        merged.merge(part)

    series = pd.Series(cells, dtype=float)
    present, finite = series.dropna(), series[np.isfinite(series)]
    assert (merged.rows, merged.missing, merged.values) == (len(cells), int(series.isna().sum()), len(present))
    assert merged.counts.tolist() == [
        sum(sum(e <= x for e in bins.edges) == i for x in present) for i in range(bins.size)
    ]
    assert merged.distinct == len({x + 0.0 for x in present})
    if not len(finite):
        assert merged.mean is None
        return
    assert (merged.low, merged.high) == (finite.min(), finite.max())
    with np.errstate(over="ignore"):
        scale = max(float(finite.abs().max()), 1e-300)
        assert merged.mean == pytest.approx(math.fsum(finite) / len(finite), rel=1e-9, abs=1e-12 * scale)
    if len(finite) > 1 and finite.abs().max() < 1e100:
        assert merged.std == pytest.approx(float(finite.std()), rel=1e-6, abs=1e-9 * scale)


@given(
    st.sampled_from([("category", pa.string()), ("category", pa.int64()), ("number", pa.int64())]),
    st.lists(st.none() | st.integers(-3, 3), max_size=30),
    st.data(),
)
def test_values_that_are_kept_once_each(kind: Any, cells: list[int | None], data: st.DataObject) -> None:
    """A dictionary and how often its values are there: the same as value by value, for any of the rows."""
    name, type_ = kind
    column = MeasuredColumn("input", "x", name)
    array = pa.array(cells, pa.int64()).cast(type_)
    encoded = array.dictionary_encode(null_encoding="encode")
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(cells), max_size=len(cells))), bool)
    sample, _ = column.values([array])
    bins = (
        NumberBins.from_sample(sample.to_numpy(False).astype(float), 3)
        if name == "number"
        else ValueBins.from_sample(sample, 2)
    )
    for rows in (None, mask):
        selected = array if rows is None else array.filter(pa.array(rows))
        plain, once = ColumnStatistics(bins), ColumnStatistics(bins)
        plain.add(*column.values([selected]), len(selected))
        values, missing, times = column.weighed(
            DictionaryColumn(encoded.dictionary, encoded.indices.to_numpy(False)), rows
        )
        once.add(values, missing, len(selected), times)
        again = ColumnStatistics.unpacked(bins, json.loads(json.dumps(once.packed())))
        assert plain.packed() == once.packed() == again.packed()


def test_moments_are_seconds() -> None:
    column = MeasuredColumn("input", "at", "time")
    times = pa.array([None, datetime(2026, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    values, missing = column.values([times])
    assert (values.to_pylist(), missing) == ([1_767_225_601.5], 1)
    days, missing = column.values([pa.array([date(1970, 1, 3), None], pa.date32())])
    assert (days.to_pylist(), missing) == ([2 * 86_400.0], 1)


def test_spread_beside_a_large_mean() -> None:
    x = 1e9 + np.random.default_rng(0).normal(0, 1e-3, 5000)
    tally = ColumnStatistics(NumberBins.from_sample(x, 10))
    tally.add(pa.array(x), 0, len(x))
    assert tally.std == pytest.approx(np.std(x - 1e9, ddof=1), rel=1e-6)


def test_values_of_columns() -> None:
    """Null, NaN and empty lists are missing; so is code 0 of a coded column."""
    lists = MeasuredColumn("input", "l", "category", is_list=True)
    values, missing = lists.values([pa.array([["a", None], [], None, ["b", "a"]], pa.list_(pa.string()))])
    assert (values.to_pylist(), missing) == (["a", "b", "a"], 2)
    numbers = MeasuredColumn("input", "n", "number", is_list=True)
    values, missing = numbers.values([pa.array([[1.0, math.nan], [], None], pa.list_(pa.float64()))])
    assert (values.to_pylist(), missing) == ([1.0], 2)
    codes = MeasuredColumn("feature", "t", "category", True, 2, True, "t")
    columns = [pa.array([2, 0, 1, 0], pa.int32()), pa.array([0, 0, 3, 0], pa.int32())]
    values, missing = codes.values(columns)
    assert (sorted(values.to_pylist()), missing) == ([1, 2, 3], 2)
    buckets = MeasuredColumn("feature", "t", "category", True, 2, True, "t", unknown=2)
    values, missing = buckets.values(columns)
    assert (sorted(values.to_pylist()), missing) == ([1, 1, 3], 2)
    sliced, missing = codes.values([c.slice(2, 1) for c in columns])
    assert (sorted(sliced.to_pylist()), missing) == ([1, 3], 0)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([100, 2047, 2048, 60_000]), st.booleans())
def test_distinct_values(seed: int, many: int, text: bool) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.choice(2**62, many, replace=False)
    drawn = np.concatenate([ids, rng.choice(ids, 1000)])
    parts = [ColumnStatistics(ValueBins(())) for _ in range(3)]
    for part, values in zip(parts, np.array_split(drawn, 3), strict=True):
        array = pa.array(values.astype(np.int64))
        part.add(array.cast(pa.string()) if text else array, 0, len(values))
    parts[2].merge(parts[0])
    parts[2].merge(parts[1])
    # Five standard errors of the estimate.
    assert parts[2].distinct == (many if many < 2048 else pytest.approx(many, rel=5 / math.sqrt(2046)))


def test_which_columns_are_numbers() -> None:
    types = {
        "id": ValueType("bigint"),
        "hour": ValueType("int"),
        "age": ValueType("int"),
        "price": ValueType("double"),
        "at": ValueType("timestamp"),
        "flag": ValueType("boolean"),
        "tags": ValueType("string", is_list=True),
    }

    def feature(name: str, kind: Kind, *sources: str, **more: Any) -> Feature:
        return Feature(name=name, kind=kind, dtype="int32", sources=sources, **more)

    features = [
        feature("id", Kind.CATEGORICAL, "id", vocabulary="v"),
        feature("hour", Kind.CATEGORICAL, "hour"),
        feature("hour_sin", Kind.CONTINUOUS, "hour"),
        feature("age", Kind.CONTINUOUS, "age", "at"),
        feature("price_bin", Kind.CATEGORICAL, "price"),
        feature("flag", Kind.CONTINUOUS, "flag"),
        feature("tags", Kind.CATEGORICAL, "tags", is_list=True, length=2, vocabulary="w"),
    ]
    assert {m.name: m.kind for m in input_columns(types, features)} == {
        "id": "category",
        "hour": "number",
        "age": "number",
        "at": "time",
        "price": "number",
        "flag": "category",
        "tags": "category",
    }
    by_name = {m.name: m for m in feature_columns(features)}
    assert (by_name["tags"].is_list, by_name["tags"].length, by_name["flag"].length) == (True, 2, 1)
    assert (by_name["tags"].vocabulary, by_name["hour"].vocabulary, by_name["hour_sin"].coded) == ("w", None, False)


# --- limits and the stage -------------------------------------------------------------------------------------------


def record(
    split: str,
    column: str,
    counts: list[int],
    *,
    side: str = "input",
    kind: str = "number",
    rows: int | None = None,
    oov: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    values = sum(counts)
    rows = values if rows is None else rows
    row = dict.fromkeys(SCHEMA.names) | {
        "ds": DS,
        "split": split,
        "side": side,
        "column": column,
        "kind": kind,
        "rows": rows,
        "missing": rows - values,
        "values": values,
        "oov": oov,
        "distinct": len(counts),
        **more,
        "histogram": [{"low": None, "high": None, "value": None, "count": c, "share": None} for c in counts],
    }
    return row


def made_rows() -> list[dict[str, Any]]:
    """Return rows: price has moved, age has nulls today, item is half unknown, few has few rows, at moves by itself."""
    return [
        record("train", "price", [5000, 5000], mean=1.0),
        record("valid", "price", [500, 1500], mean=2.0),
        record("train", "age", [900, 900], rows=2000),
        record("valid", "age", [400, 400], rows=2000),
        record("train", "item", [5000, 0], side="feature", kind="category", oov=0),
        record("valid", "item", [1000, 900], side="feature", kind="category", oov=900),
        record("train", "few", [5000, 0]),
        record("valid", "few", [0, 999]),
        record("train", "at", [5000], kind="time"),
        record("valid", "at", [5000], kind="time"),
        record("train", "gone", [700, 700]),
        record("valid", "gone", [0, 0], rows=1400),
        record("rank", "price", [1, 1]),
    ]


def breached(drift: Drift) -> dict[tuple[str, str], tuple[float, str, str]]:
    return {(c.column, b.what): (b.limit, b.action, b.key) for c in judge(made_rows(), drift) for b in c.breaches}


def test_limits() -> None:
    comparisons = judge(made_rows(), Drift())
    assert [c.column for c in comparisons] == ["few", "item", "price", "age", "at", "gone"]
    by_column = {c.column: c for c in comparisons}
    price = psi([5000, 5000], [500, 1500])
    assert by_column["price"].psi == pytest.approx(price)
    assert by_column["price"].ks == pytest.approx(0.25)
    assert by_column["price"].mean == (1.0, 2.0)
    assert by_column["age"].missing == (0.1, 0.6)
    assert by_column["item"].oov == (0.0, 900 / 1900)
    assert by_column["few"].max_psi is None
    assert by_column["gone"].psi is None
    expected = {
        ("price", "psi"): (0.25, "warn", "drift.max_psi"),
        ("item", "psi"): (0.25, "warn", "drift.max_psi"),
        ("item", "oov"): (0.3, "warn", "drift.max_oov_rate"),
        ("age", "missing"): (0.1, "warn", "drift.max_missing_change"),
        ("gone", "missing"): (0.1, "warn", "drift.max_missing_change"),
    }
    assert (price or 0) > 0.25
    assert breached(Drift()) == expected
    assert breached(Drift(min_values=999)).keys() == {*expected, ("few", "psi")}
    assert breached(Drift(max_psi=None, max_oov_rate=None, max_missing_change=None)) == {}
    columns = {
        "price": {"max_psi": 0.9},
        "item": {"action": "ignore"},
        "age": {"action": "stop", "max_missing_change": 0.4},
    }
    assert breached(Drift.model_validate({"columns": columns, "action": "warn"})) == {
        ("age", "missing"): (0.4, "stop", "drift.columns.age.max_missing_change"),
        ("gone", "missing"): (0.1, "warn", "drift.max_missing_change"),
    }
    with pytest.raises(UserError, match=r"drift.columns: 'prize' is neither .*did you mean 'price'\?"):
        judge(made_rows(), Drift.model_validate({"columns": {"prize": {}}}))


def test_the_section_says_what_is_wrong_in_it() -> None:
    for section, message in [
        ({"max_psy": 1}, "unknown key 'drift.max_psy'; did you mean 'max_psi'"),
        ({"columns": {"price": {"acton": "stop"}}}, "unknown key 'drift.columns.price.acton'"),
        ({"action": "explode"}, "drift.action"),
        ({"max_oov_rate": 30}, "drift.max_oov_rate"),
    ]:
        with pytest.raises(UserError, match=message):
            clicks(section)


def clicks(drift: Any) -> Spec:
    return build_spec(load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True) | {"drift": drift})


def made_statistics(ws: Workspace, rows: list[dict[str, Any]], name: str = "lake/clicks/statistics") -> None:
    """Write a Delta table of one commit by hand, and the manifest of the features stage that names it."""
    folder = ws.home / "lake" / "clicks" / "statistics"
    (folder / "_delta_log").mkdir(parents=True, exist_ok=True)
    (folder / f"ds={DS}").mkdir(exist_ok=True)
    schema = SCHEMA.remove(SCHEMA.get_field_index("ds"))
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / f"ds={DS}" / "part-0.parquet")
    add = {"path": f"ds={DS}/part-0.parquet", "partitionValues": {"ds": DS}, "size": 1}
    (folder / "_delta_log" / f"{0:020d}.json").write_text(json.dumps({"add": add}) + "\n")
    Manifest(
        stage="features",
        pipeline="clicks",
        ds=DS,
        key="f" * 16,
        spec_hash="test",
        outputs=(Output(kind="delta", name=name, version="0"),),
        facts={"train_range": ["2026-01-01", "2026-01-07"], "valid_range": [DS, DS]},
    ).save(ws.manifest("clicks", DS, "features"))


def test_the_stage_warns_stops_and_heals(ws: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    made_statistics(ws, made_rows())
    stop = clicks({"action": "stop"})
    with pytest.raises(UserError) as stopped:
        run_stage(JudgeDrift(), stop, ws, DS)
    message = str(stopped.value)
    assert f"drift of 'clicks' stops {DS} ({DS} beside 2026-01-01 to 2026-01-07)" in message
    assert f"input price: PSI is {psi([5000, 5000], [500, 1500]):.3f}, the limit 0.25 (drift.max_psi)" in message
    assert "input age: rows without a value went from 10 % to 60 %, by more than 10 %" in message
    assert "feature item: 47.4 % of the values are not in the vocabulary, the limit is 30 %" in message
    assert "--set drift.action=warn" in message
    assert not ws.manifest("clicks", DS, "drift").exists()

    warned = run_stage(JudgeDrift(), clicks({"action": "warn"}), ws, DS).manifest
    assert warned.rows == {"columns": 6, "over_limit": 4}
    assert "drift: input price: PSI is" in caplog.text
    assert {c["column"]: len(c["breaches"]) for c in warned.facts["columns"]}["item"] == 2
    json.dumps(warned.facts)
    assert run_stage(JudgeDrift(), clicks({"action": "warn"}), ws, DS).skipped
    runs = load_runs(ws, "clicks")
    assert find(runs, "clicks_statistics", DS)[0].stage == "features"
    assert [n.title for n in trace(runs, warned).children] == [f"features {DS}"]
    # Another limit is another judgement; what is counted is none of its business.
    assert check_stage(JudgeDrift(), clicks({"max_psi": 0.2}), ws, DS) is not None
    assert check_stage(JudgeDrift(), clicks({"quantiles": 5}), ws, DS) is None
    # A single column can stop the day.
    with pytest.raises(UserError, match=r"--set drift.columns.age.action=warn") as raised:
        run_stage(JudgeDrift(), clicks({"columns": {"age": {"action": "stop"}}}), ws, DS)
    assert "price" not in str(raised.value)


def test_a_stop_is_exit_code_2(ws: Workspace) -> None:
    made_statistics(ws, made_rows())
    sets = ["--set", "drift.columns={}", "--set", "drift.action=stop"]
    line = [sys.executable, str(PROGRAM), "drift", "clicks", "--ds", DS, "--home", str(ws.home), *sets]
    stopped = subprocess.run(line, capture_output=True, text=True, check=False)
    assert stopped.returncode == EXIT_USER_ERROR
    assert "input price: PSI is" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    healed = subprocess.run([*line[:-1], "drift.action=warn"], capture_output=True, text=True, check=False)
    assert (healed.returncode, healed.stdout.startswith("drift: done in")) == (0, True)


def test_statistics_that_are_gone(ws: Workspace) -> None:
    made_statistics(ws, made_rows())
    part = ws.table("clicks", "statistics").local_path() / f"ds={DS}" / "part-0.parquet"
    part.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="lake/clicks/statistics cannot be read"):
        run_stage(JudgeDrift(), clicks({}), ws, DS)
    (ws.table("clicks", "statistics").local_path() / "_delta_log" / f"{0:020d}.json").unlink()
    with pytest.raises(UserError, match="no version 0 with 2026-01-08 any more; make it again: headrace run clicks"):
        run_stage(JudgeDrift(), clicks({}), ws, DS)
    made_statistics(ws, made_rows(), name="lake/clicks/another")
    with pytest.raises(UserError, match="were made without statistics"):
        run_stage(JudgeDrift(), clicks({}), ws, DS)
