"""Fit and write from lake files: against pandas, against statistics of rows, and again after harm. No Spark."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.config import Chain, build_spec, load_spec
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.features.arrow import write_lake as module
from headrace.features.arrow.aggregate import TrainRows, aggregate, aggregate_batch
from headrace.features.arrow.decode import FILE, LINE, LakeFile
from headrace.features.arrow.fit import LakeFit
from headrace.features.arrow.kernels import DictionaryColumn
from headrace.features.arrow.scan import DROPPED, LakeRows, Splitter, lake_rows, split_codes
from headrace.features.arrow.transform import row_order
from headrace.features.arrow.write_lake import load_part, save_arrays, write_lake_rows
from headrace.features.build import lake_files
from headrace.features.build.lake_files import of_day
from headrace.features.layout.files import ColumnRule, PositionRule, Rule, TimeRule, WrittenDataset, plan_files
from headrace.features.learn.statistics import Number, Statistic, canonical
from headrace.features.types import ValueType, declared
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.features.vocabulary.lookup import Lookup, MappedLookup
from headrace.features.workflow.fitted import MAPPED_VALUES, FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.delta.log import DataFile
from headrace.lake.spark.tasks import grouped
from headrace.storage import Location, local
from tests.storage_support import memory_home
from tests.train_support import read_padded

COLUMNS = [
    TableColumn(name="id", type="bigint"),
    TableColumn(name="y", type="int"),
    TableColumn(name="t", type="timestamp"),
    TableColumn(name="user", type="bigint"),
    TableColumn(name="a.b", type="string"),
    TableColumn(name="flag", type="boolean"),
    TableColumn(name="tags", type="array<string>"),
    TableColumn(name="n", type="int"),
    TableColumn(name="x", type="double"),
]
TYPES = {c.name: declared(c) for c in COLUMNS}
CHAINS = [
    Chain(columns=("user", "a.b", "flag"), ops=({"op": "categorify", "params": {"min_count": 2}},)),
    Chain(columns=("tags",), ops=({"op": "categorify"}, {"op": "pad", "params": {"length": 2}})),
    Chain(
        columns=("n", "x"),
        ops=(
            {"op": "fill_missing"},
            {"op": "clip", "params": {"min": 0, "max": 50}},
            {"op": "log"},
            {"op": "normalize"},
        ),
    ),
]
WORKFLOW = Workflow(CHAINS, COLUMNS, "y", ("id", "a.b"))
DAY = date(2026, 1, 1)
FIRST = (DAY - date(1970, 1, 1)).days


class Codes:
    """Vocabularies that remember nothing."""

    def update(self, counts: pa.Table, rules: Mapping[str, VocabularyRule]) -> dict[str, pa.Table]:
        out = {}
        for name in rules:
            counts_of_name = [r for r in counts.to_pylist() if r["name"] == name]
            values = [
                r["value"] for r in sorted(counts_of_name, key=lambda r: (r["day"], -r["count"], r["value"].encode()))
            ]
            codes = pa.array(range(2, len(values) + 2), pa.int64())
            out[name] = pa.table({"value": pa.array(values, pa.string()), "code": codes})
        return out


def make(rows: int, seed: int) -> pd.DataFrame:
    """Return rows of days 0..4 with nulls, empty texts and lists, and extreme numbers."""
    rng = np.random.default_rng(seed)
    pick = rng.random
    first_moment = datetime(2026, 1, 1, tzinfo=UTC)
    return pd.DataFrame(
        {
            "id": np.arange(rows),
            "y": rng.integers(0, 2, rows),
            "t": [first_moment + timedelta(seconds=int(s)) for s in rng.integers(0, 5 * 86_400, rows)],
            "user": pd.Series([None if p < 0.1 else 2**53 + int(p * 30) for p in pick(rows)], dtype=object),
            "a.b": [None if p < 0.1 else "" if p < 0.2 else f"ü{int(p * 12)}" for p in pick(rows)],
            "flag": pd.Series([None if p < 0.1 else bool(p < 0.6) for p in pick(rows)], dtype=object),
            "tags": [
                None if p < 0.1 else [None if p < 0.3 else f"t{j}" for j in range(int(p * 4))] for p in pick(rows)
            ],
            "n": pd.Series([None if p < 0.2 else int(p * 60) - 15 for p in pick(rows)], dtype=object),
            "x": pd.Series(
                [
                    None
                    if p < 0.1
                    else float("nan")
                    if p < 0.2
                    else float("inf")
                    if p < 0.25
                    else -0.0
                    if p < 0.3
                    else 60 * p
                    for p in pick(rows)
                ],
                dtype=object,
            ),
            "_source_file": [f"in/{'ab'[i % 2]}.csv" for i in range(rows)],
            "_source_line": np.arange(rows) // 2,
        }
    )


def land(events: pd.DataFrame, folder: Path, files: int, group: int = 40) -> list[DataFile]:
    """Write Parquet files as Spark leaves them: INT96 times, row groups; one without rows, one older than `n`."""
    folder.mkdir(parents=True)
    out = []
    for i in range(files + 1):
        part = events.iloc[i::files] if i < files else events.iloc[:0]
        arrays = {c: pa.array(list(part[c]), TYPES[c].arrow) for c in TYPES if i or c != "n"}
        arrays["_source_file"] = pa.array(list(part["_source_file"]), pa.string())
        arrays["_source_line"] = pa.array(list(part["_source_line"]), pa.int64())
        path = folder / f"part-{i}.parquet"
        pq.write_table(pa.table(arrays), path, row_group_size=group, use_deprecated_int96_timestamps=True)
        out.append(DataFile(local(path), {"ds": "2026-01-01"}, len(part), path.stat().st_size))
    return out


@contextmanager
def opened(files: list[DataFile], home: Path, rule: Rule) -> Iterator[LakeRows]:
    splitter = Splitter(rule, ("train", "valid"), "y")
    with lake_rows(
        WORKFLOW, [LakeFile(f.path, f.size) for f in files], splitter, local(home), {"t": ValueType("timestamp")}
    ) as rows:
        yield rows


def run(rows: LakeRows, folder: Path) -> tuple[FittedWorkflow, WrittenDataset]:
    fit = LakeFit(WORKFLOW, rows)
    while (task := fit.next_task()) is not None:
        fit.merge(rows.scan(None, task))
    fitted = fit.finish(Codes())
    shutil.rmtree(folder, ignore_errors=True)
    fitted.save(local(folder / "workflow"))
    plans = plan_files(rows.counts.rows, 50, 3)
    return fitted, write_lake_rows(fitted, rows, plans, local(folder), local(folder / "workflow"), None)


def read(folder: Path, split: str) -> pd.DataFrame:
    schema = FittedWorkflow.load(local(folder / "workflow")).schema
    return read_padded(sorted((folder / split).glob("*.parquet")), schema).set_index("id")


def digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def codes(train: pd.DataFrame, rows: pd.Series, column: str, least: int) -> list[Any]:
    """Return codes in the order of (first day, frequency, value), counted by pandas."""
    cells = pd.DataFrame({"v": train[column], "day": [t.date() for t in train["t"]]}).explode("v").dropna(subset=["v"])
    cells["v"] = [str(v).lower() if isinstance(v, bool) else str(v) for v in cells["v"]]
    counted = cells.groupby("v")["day"].agg(["min", "size"])
    counted = counted[counted["size"] >= least]
    order = sorted(counted.index, key=lambda v: (counted.loc[v, "min"], -counted.loc[v, "size"], v.encode()))
    assigned_codes = {v: i + 2 for i, v in enumerate(order)}

    def code(v: Any) -> int:
        return 0 if v is None else assigned_codes.get(str(v).lower() if isinstance(v, bool) else str(v), 1)

    return [[code(e) for e in v] if isinstance(v, list) else [] if column == "tags" else code(v) for v in rows]


def test_a_day_of_files_is_what_pandas_makes_of_the_rows(tmp_path: Path) -> None:
    events = make(700, 3)
    files = land(events, tmp_path / "lake", files=4)
    rule = TimeRule("t", FIRST + 1, FIRST + 3, FIRST + 3)
    with opened(files, tmp_path / "home", rule) as rows:
        fitted, written = run(rows, tmp_path / "out")
        counts = rows.counts
    day = np.array([(t.date() - DAY).days for t in events["t"]])
    events["n"] = events["n"].where(events["id"] % 4 != 0, None)  # the older file has no such column
    parts = {"train": events[(day >= 1) & (day < 3)], "valid": events[day == 3]}
    assert counts.rows == {s: len(p) for s, p in parts.items()}
    assert (counts.null_labels, counts.bad_labels) == (0, 0)
    train = parts["train"]
    for split, part in parts.items():
        dataset = read(tmp_path / "out", split).loc[part["id"]]
        for column in ("user", "a.b", "flag"):
            assert dataset[column].tolist() == codes(train, part[column], column, 2), column
        tags = codes(train, part["tags"], "tags", 1)
        for k in range(2):
            assert dataset[f"tags__{k}"].tolist() == [v[k] if len(v) > k else 0 for v in tags]
        for column in ("n", "x"):

            def chain(frame: pd.DataFrame, column: str = column) -> Any:
                return np.log1p(pd.to_numeric(frame[column]).astype(float).fillna(0.0).clip(0, 50))

            expected = (chain(part) - chain(train).mean()) / chain(train).std()
            np.testing.assert_allclose(dataset[column], expected.to_numpy(np.float32), rtol=2e-6, atol=2e-6)
        assert dataset["y"].tolist() == part["y"].tolist()
        assert dataset["a.b__carried"].where(dataset["a.b__carried"].notna(), None).tolist() == part["a.b"].tolist()
        column_counts = written.counts[split]
        assert column_counts["x"].missing == part["x"].isna().sum()
        assert column_counts["n"].missing == part["n"].isna().sum()
        assert column_counts["tags"].missing == sum(not v for v in part["tags"])
        assert column_counts["a.b"].oov == (dataset["a.b"] == 1).sum()
        assert column_counts["a.b"].coded == (dataset["a.b"] != 0).sum()
    # Beside every row what the serving transform makes of it, bit for bit.
    raw = {n: pa.array(list(events[n]), TYPES[n].arrow) for n in fitted.input_columns}
    served = fitted.transform_batch(pa.RecordBatch.from_pydict(raw)).to_pandas()
    for split, part in parts.items():
        stored = read(tmp_path / "out", split).loc[part["id"]]
        for column in served.columns:
            assert served.loc[part["id"], column].to_numpy().tobytes() == stored[column].to_numpy().tobytes(), column


def test_neither_an_earlier_run_nor_harm_changes_a_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headrace")
    events = make(300, 5)
    files = land(events, tmp_path / "lake", files=3)
    rule = TimeRule("t", FIRST, FIRST + 3, FIRST + 4)
    home = tmp_path / "home"
    with opened(files, home, rule) as rows:
        run(rows, tmp_path / "out")
        folder = rows.folder.local_path()
    first = digests(tmp_path / "out")
    assert "4 lake files, 0 of them decoded by an earlier run" in caplog.text
    assert not list(home.glob("scratch*"))

    # The next run finds all row groups; a torn one, a folder without its list and one of another size are made again.
    row_groups = sorted(p for p in folder.iterdir() if (p / "0.arrow").exists())
    (row_groups[0] / "0.arrow").write_bytes((row_groups[0] / "0.arrow").read_bytes()[:-8])
    (row_groups[1] / "pieces.json").unlink()
    (folder / ".killed.partial").mkdir()
    with opened(files, home, rule) as rows:
        run(rows, tmp_path / "out")
    assert "4 lake files, 2 of them decoded by an earlier run" in caplog.text
    assert digests(tmp_path / "out") == first

    # Row groups of files that the day does not see are removed.
    with opened(files[:2], home, rule) as rows:
        run(rows, tmp_path / "out")
    assert sorted(p.name for p in folder.iterdir()) == sorted(f.key for f in rows.files)
    assert len(rows.files) == 2


@pytest.mark.parametrize("files", [1, 5])
def test_the_dataset_does_not_depend_on_how_the_lake_is_cut(tmp_path: Path, files: int) -> None:
    events = make(200, 7)
    events["n"] = None  # then the file without it has the same rows
    rule = PositionRule("in/b.csv", 20)
    out = []
    for name, cut in (("one", 2), ("two", files)):
        landed = land(events, tmp_path / name / "lake", cut, group=30 if cut == 2 else 500)
        with opened(landed, tmp_path / name / "home", rule) as rows:
            run(rows, tmp_path / name / "out")
            assert rows.counts.rows == {"train": 120, "valid": 80}
        out.append(digests(tmp_path / name / "out"))
    assert out[0] == out[1]


STATISTICS = [
    Statistic(key=("c",), day=True),
    Statistic(key=("c",), kind="number", bits=4),
    Statistic(day=True),
    Statistic(numbers=(Number("c", sum=True, squares=True, minmax=True),)),
    Statistic(key=("c",), folds=3),
]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(-(2**62), 2**62), st.integers(-3, 3)), st.booleans(), st.integers(0, 3)
        ),
        max_size=40,
    ),
    merged=st.booleans(),
)
def test_statistics_of_values_are_those_of_rows(rows: list[tuple[int | None, bool, int]], merged: bool) -> None:
    column = pa.array([v for v, _, _ in rows], pa.int64())
    train = np.array([m for _, m, _ in rows], np.bool_)
    encoded = column.dictionary_encode(null_encoding="encode")
    values = encoded.dictionary
    if merged:  # as an operator before this one may leave them: several positions with one value
        values = pa.array([None if v is None else v % 3 for v in values.to_pylist()], pa.int64())
        column = values.take(encoded.indices)
    cells = {"c": DictionaryColumn(values, encoded.indices.to_numpy().astype(np.int32))}
    day = np.array([d for _, _, d in rows], np.int64)
    identity = np.arange(len(rows)) << 20
    label = pa.array([1.0] * len(rows))
    train_rows = TrainRows(train, label, identity, day)
    types = {"c": ValueType("bigint")}
    for statistic in STATISTICS:
        statistics = aggregate(statistic, cells, types, train_rows)
        expected = aggregate_batch(statistic, {"c": column.filter(pa.array(train))}, types, train_rows.rows)
        assert canonical(statistics).equals(canonical(expected)), statistic


def test_vocabularies_larger_than_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = land(make(300, 9), tmp_path / "lake", files=2)
    out = []
    mapped, kinds = module.mapped, []

    def noted(workflow: Location, maps: Location) -> FittedWorkflow:
        mapped_workflow = mapped(workflow, maps)
        kinds.append({type(v) for v in mapped_workflow.vocabularies.values()})
        return mapped_workflow

    monkeypatch.setattr(module, "mapped", noted)
    for most in (MAPPED_VALUES, 3):
        monkeypatch.setattr("headrace.features.workflow.fitted.MAPPED_VALUES", most)
        with opened(files, tmp_path / "home", TimeRule("t", FIRST, FIRST + 3, FIRST + 4)) as rows:
            fitted, _ = run(rows, tmp_path / "out")
        out.append(digests(tmp_path / "out"))
        mapped.cache_clear()
    assert {len(v) > 3 for v in fitted.vocabularies.values()} == {True, False}
    assert [*map(set, kinds[:1]), *map(set, kinds[-1:])] == [{Lookup}, {Lookup, MappedLookup}]
    assert out[0] == out[1]


def test_split_rules() -> None:
    midnight = datetime(2026, 1, 2, tzinfo=UTC)
    times = [
        midnight - timedelta(microseconds=1),
        midnight,
        midnight + timedelta(days=1),
        midnight + timedelta(days=2),
        None,
    ]
    t = DictionaryColumn(pa.array(times, pa.timestamp("us", tz="UTC")))
    both = ("train", "valid")
    split_of_rows = split_codes(TimeRule("t", FIRST + 1, FIRST + 2, FIRST + 2), both, {"t": t})
    assert split_of_rows.tolist() == [DROPPED, 0, 1, DROPPED, DROPPED]
    tested = TimeRule("t", FIRST, FIRST + 1, FIRST + 2, FIRST + 2)
    assert tested.splits == ("train", "valid", "test")
    assert [tested.split_of(FIRST + i) for i in range(3)] == ["train", "valid", "test"]
    assert split_codes(tested, tested.splits, {"t": t}).tolist() == [0, 1, 2, DROPPED, DROPPED]
    dates = DictionaryColumn(pa.array([date(1969, 12, 31), date(1970, 1, 1), None], pa.date32()))
    assert split_codes(TimeRule("t", -1, 0, 0), both, {"t": dates}).tolist() == [0, 1, DROPPED]
    named = DictionaryColumn(pa.array(["valid", "train"]), np.array([1, 0, 0], np.int32))
    assert split_codes(ColumnRule("s"), ("train", "valid"), {"s": named}).tolist() == [0, 1, 1]
    source = {
        "_source_file": DictionaryColumn(pa.array(["a", "ä", "b"]), np.array([0, 2, 2, 1], np.int32)),
        "_source_line": DictionaryColumn(pa.array([9, 4, 5, 0])),
    }
    assert split_codes(PositionRule("b", 5), both, source).tolist() == [0, 0, 1, 1]
    assert split_codes(PositionRule(None, 0), both, source).tolist() == [0, 0, 0, 0]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.sampled_from(["i1", "<u2", "<i8"]), max_size=3))
@example([3, 0, 2], ["i1", "<u2"])
def test_arrays_of_parts(rows: list[int], kinds: list[str]) -> None:
    shared = {"a": np.arange(5, dtype=np.int32), "b": np.array([], np.float64), "ü": np.array([True, False])}
    edges = np.cumsum([0, *rows])
    cut_arrays = {f"c{i}": np.arange(i, i + edges[-1]).astype(kind) for i, kind in enumerate(kinds)}
    with TemporaryDirectory() as folder:
        path = local(Path(folder) / "x")
        save_arrays(path, shared, cut_arrays, edges)
        for part, (start, end) in enumerate(pairwise(edges.tolist())):
            loaded = load_part(path, part)
            if start == end:
                assert loaded is None
                continue
            expected = shared | {name: array[start:end] for name, array in cut_arrays.items()}
            assert loaded is not None
            assert list(loaded) == list(expected)
            for name, array in expected.items():
                assert loaded[name].dtype == array.dtype
                assert loaded[name].tolist() == array.tolist()


def test_groups_of_even_size() -> None:
    assert grouped([3, 1, 1, 1, 9], lambda n: n, cores=1) == [[9], [3], [1, 1, 1]]
    assert grouped([1] * 4, lambda n: n << 30, cores=1) == [[1]] * 4


def test_sizes_of_files_are_those_of_the_log(ws: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No store is asked for each of them: none of these is there."""
    events = memory_home(monkeypatch, tmp_path / "cache")
    schema = json.dumps({"type": "struct", "fields": []})
    adds = [{"path": f"{k}.parquet", "partitionValues": {"ds": "2026-01-01"}, "size": k} for k in (7, 8)]
    actions: list[dict[str, Any]] = [{"protocol": {"minReaderVersion": 1}}, {"metaData": {"schemaString": schema}}]
    lines = (json.dumps(action) + "\n" for action in (*actions, *({"add": add} for add in adds)))
    (events / "_delta_log" / f"{0:020d}.json").put_text("".join(lines))
    requested: list[LakeFile] = []

    @contextmanager
    def rows_of(spec: object, ws: object, files: list[LakeFile], *more: object) -> Iterator[None]:
        requested.extend(files)
        yield

    monkeypatch.setattr(lake_files, "rows_of_files", rows_of)
    rows: Any = None
    with lake_files.files_of_day(load_spec("clicks"), ws, "2026-01-01", events, 0, WORKFLOW, rows):
        assert requested == [LakeFile(events / f"{k}.parquet", k) for k in (7, 8)]


def test_the_files_of_a_day(tmp_path: Path) -> None:
    days = ("2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04")
    files = [DataFile(local(tmp_path / ds), {"ds": ds}, 1, 1) for ds in days]

    def seen(ds: str, **changes: Any) -> list[str]:
        data = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
        data["features"] |= {"window_days": 1}
        data["source"] |= changes
        return [f.path.name for f in of_day(build_spec(data), ds, files)]

    # One day of train, one of valid; a snapshot is all of the newest day up to ds.
    assert seen("2026-01-03") == ["2026-01-02", "2026-01-03"]
    assert seen("2026-01-03", path="all/*.jsonl") == ["2026-01-03"]
    assert seen("2026-01-09", path="all/*.jsonl") == ["2026-01-04"]
    assert seen("2025-12-31") == []


class FakeRowGroup:
    """Source files (numbered values) and lines of rows."""

    def __init__(self, files: list[str | None], lines: list[int | None]) -> None:
        encoded = pa.array(files, pa.string()).dictionary_encode(null_encoding="encode")
        self._file = DictionaryColumn(encoded.dictionary, encoded.indices.to_numpy())
        self._line = DictionaryColumn(pa.array(lines, pa.int64()))

    def column(self, name: str) -> DictionaryColumn:
        return {FILE: self._file, LINE: self._line}[name]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_rows_of_one_hash_are_in_the_order_of_file_and_line(data: st.DataObject) -> None:
    row = st.tuples(
        st.integers(-2, 2), st.sampled_from(["a", "b", "ä", "Z", "", None]), st.sampled_from([None, 0, 1, 7, 2**40])
    )
    sources, flat = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.lists(row, max_size=12))
        some = [i for i in range(len(rows)) if data.draw(st.booleans())]
        sources.append((FakeRowGroup([r[1] for r in rows], [r[2] for r in rows]), np.array(some, np.int64)))
        flat += [rows[i] for i in some]
    hashes = np.array([r[0] for r in flat], np.int64)
    expected = sorted(
        range(len(flat)),
        key=lambda i: (flat[i][0], (flat[i][1] or "").encode(), -1 if flat[i][2] is None else flat[i][2]),
    )
    assert row_order(hashes, sources).rows.tolist() == expected


def test_many_rows_of_one_identity_are_ordered_at_once() -> None:
    # Negatives that are drawn for a line have its identity: half a million ties in MovieLens.
    row_group = FakeRowGroup(["f"] * 200_000, [i // 100 for i in range(200_000)])
    hashes = np.repeat(np.arange(2_000)[::-1], 100)
    taken = row_order(hashes, [(row_group, np.arange(200_000))]).rows
    assert taken.tolist() == [100 * (1_999 - h) + i for h in range(2_000) for i in range(100)]
