"""Large text columns and tables by key: as small ones, within the memory of a spec, shared by workers of a host."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import Chain, TableSource, build_spec
from headrace.config.schema import TableColumn
from headrace.features.arrow import collect, decode, kernels
from headrace.features.arrow.decode import FILE, LINE, HostFolder, LakeFile, RowGroupLayout, row_groups
from headrace.features.arrow.fit import LakeFit
from headrace.features.arrow.kernels import DictionaryColumn
from headrace.features.arrow.scan import FileScan, LakeRows, ScanTask, Splitter, lake_rows
from headrace.features.arrow.write import PartWriter
from headrace.features.arrow.write_lake import SendRows, TransformFiles, WriteReceived, write_lake_rows
from headrace.features.build.lake_files import fit_files
from headrace.features.layout.files import PositionRule, plan_files
from headrace.features.layout.split import SplitRows
from headrace.features.learn.statistics import canonical
from headrace.features.ops.base import FittedState
from headrace.features.spark.transform import Joins, Side
from headrace.features.spark.write import _block_bytes, _most_text
from headrace.features.table_ops.preparation import row_preparation
from headrace.features.types import declared
from headrace.features.vocabulary import keyed_tables, lookup
from headrace.features.vocabulary.codes import VocabulariesInMemory
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.vocabulary.keyed_tables import KEY, FileKeyedTable, keyed_of, write_table
from headrace.features.vocabulary.lookup import FileLookup, Lookup, MappedLookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.tables import parquet as parquet_files
from headrace.lake.tables.folder import FolderSnapshot
from headrace.lake.tables.parquet import shorten_batches
from headrace.storage import local
from headrace.storage.host_scratch import HostScratch

ROWS, TRAIN, TEXTS = 600, 500, 9
#: Bytes that stand for what an array holds; a text has about 300 of them.
MOST = 5_000
TYPES = {"y": "int", "id": "bigint", "body": "string", "k": "int", "x": "double"}
NGRAMS = {"n": 3, "buckets": 50, "most": 4}
COLUMNS = [TableColumn(name=name, type=type_) for name, type_ in TYPES.items()]


def chain(*columns: str, ops: tuple[object, ...]) -> Chain:
    return Chain.model_validate({"columns": columns, "ops": ops})


WORKFLOW = Workflow(
    [
        chain("body", ops=("categorify",)),
        chain("body", "k", ops=({"hashed_cross": {"buckets": 1_000, "to": "crossed"}},)),
        chain("body", "k", "x", ops=({"join_groupby": {"by": ["body", "k"], "stats": ["count", "mean"]}},)),
        chain("body", "k", ops=({"target_encoding": {"together": True}},)),
        chain("body", ops=({"rename": {"to": {"body": "often"}}}, "value_count", "normalize")),
        chain("body", ops=({"rename": {"to": {"body": "grams"}}}, {"text_ngrams": NGRAMS}, {"pad": {"length": 4}})),
    ],
    COLUMNS,
    "y",
    ("id", "body"),
)


def make(seed: int = 0) -> pd.DataFrame:
    """Return rows with few texts: a row group has far more text than its dictionary."""
    rng = np.random.default_rng(seed)
    texts = [f"{i} " + chr(97 + i) * int(rng.integers(200, 400)) + "ü" for i in range(TEXTS)]
    body = [None if p < 0.05 else texts[int(p * TEXTS)] for p in rng.random(ROWS)]
    return pd.DataFrame(
        {
            "y": rng.integers(0, 2, ROWS).astype(np.int32),
            "id": np.arange(ROWS),
            "body": body,
            "k": rng.integers(0, 4, ROWS).astype(np.int32),
            "x": np.where(rng.random(ROWS) < 0.1, np.nan, rng.random(ROWS)),
            FILE: "f",
            LINE: np.arange(ROWS),
        }
    )


def write(rows: pd.DataFrame, path: Path, text: pa.DataType) -> LakeFile:
    """Write one row group."""
    table = pa.table({**{c: pa.array(rows[c]) for c in rows if c != "body"}, "body": pa.array(rows["body"], text)})
    pq.write_table(table, path, row_group_size=len(rows))
    return LakeFile(local(path), path.stat().st_size)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lower the limits of text; yield the bytes of text of each decoding."""
    monkeypatch.setattr(kernels, "DECODED_TEXT", MOST)
    decode, decoded_bytes = DictionaryColumn.decode, list[int]()

    def watched(self: DictionaryColumn) -> pa.Array:
        if pa.types.is_string(self.values.type) and self.indices is not None:
            decoded_bytes.append(int(self.text_bytes().sum()))
        return decode(self)

    monkeypatch.setattr(DictionaryColumn, "decode", watched)
    yield decoded_bytes
    assert max(decoded_bytes, default=0) <= MOST


def built(rows: LakeRows, folder: Path) -> dict[str, str]:
    """Build the dataset and return digests of its files."""
    splits = SplitRows(None, ("train", "valid"), rows.splitter.rule)  # type: ignore[arg-type]  # no frame is looked at
    shutil.rmtree(folder, ignore_errors=True)
    counts, fitted = fit_files(WORKFLOW, rows, splits, VocabulariesInMemory(), None, "text")
    out = local(folder)
    fitted.save(out / "workflow")
    write_lake_rows(fitted, rows, plan_files(counts, 200, 3), out, out / "workflow", None)
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.parquet")}


def splitter() -> Splitter:
    return Splitter(PositionRule("f", TRAIN), ("train", "valid"), "y")


def test_texts_that_rows_repeat_are_decoded_in_parts(tmp_path: Path, lowered: list[int]) -> None:
    """The fit, the transform and carried columns give the same whatever the limit, and equal pandas."""
    rows = make()
    file = write(rows, tmp_path / "rows.parquet", pa.string())
    with lake_rows(WORKFLOW, [file], splitter(), local(tmp_path / "home"), {}) as lake:
        in_parts = built(lake, tmp_path / "mine")
        assert len(lowered) > 100
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "DECODED_TEXT", 1 << 30)
            under_limit = len(lowered)
            at_once = built(lake, tmp_path / "whole")
            assert max(lowered[under_limit:]) > MOST
        del lowered[under_limit:]
    assert in_parts == at_once
    stored = pq.read_table(sorted((tmp_path / "mine").glob("*/*.parquet"))).to_pandas().set_index("id").sort_index()
    assert [None if pd.isna(t) else t for t in stored["body__carried"]] == rows["body"].tolist()
    train = rows[:TRAIN]
    statistics = train.groupby(["body", "k"]).agg(n=("id", "size"), mean=("x", "mean")).reset_index()
    joined = rows[["body", "k"]].merge(statistics, "left", ["body", "k"])
    assert stored["body_k_count"].tolist() == joined["n"].fillna(0).tolist()
    np.testing.assert_allclose(stored["body_k_x_mean"], joined["mean"].fillna(0), rtol=1e-6)
    n = rows["body"].map(train["body"].value_counts())
    scaled = ((n - n[:TRAIN].mean()) / n[:TRAIN].std()).fillna(0)
    np.testing.assert_allclose(stored["often_count"], scaled, rtol=1e-5, atol=1e-6)


def test_statistics_of_long_keys_are_merged_while_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group's statistics may nearly fill an array: they are not merged with those that wait."""
    rows = make()
    rows["body"] = [f"{i // 2}" + "x" * (900 if 200 <= i < 400 else 10) for i in range(ROWS)]
    table = pa.table({c: pa.array(rows[c]) for c in rows})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=50)
    file = LakeFile(local(tmp_path / "rows.parquet"), (tmp_path / "rows.parquet").stat().st_size)
    merge, most, merged_bytes = collect.merge, 40_000, list[int]()

    def watched(parts: Sequence[pa.Table]) -> pa.Table:
        if len(parts) > 1:
            merged_bytes.append(sum(part.nbytes for part in parts))
        return merge(parts)

    with lake_rows(WORKFLOW, [file], splitter(), local(tmp_path / "home"), {}) as lake:
        expected = built(lake, tmp_path / "whole")
        monkeypatch.setattr(collect, "_MERGED_BYTES", most)
        monkeypatch.setattr(collect, "merge", watched)
        task = LakeFit(WORKFLOW, lake).next_task()
        assert task is not None
        scan = ScanTask((tuple(enumerate(lake.files)),), lake.folder, lake.layout, lake.splitter, None)
        (parts,) = [[part.nbytes for _, part in task.partials(s.rows())] for s in scan.files(0)]
        assert max(parts) > most
        assert merged_bytes
        assert max(merged_bytes) <= most
        assert built(lake, tmp_path / "mine") == expected


def test_repeated_texts_are_sent_in_parts(tmp_path: Path, lowered: list[int]) -> None:
    """Through the shuffle: the files that tasks write who share a folder."""
    file = write(make(), tmp_path / "rows.parquet", pa.string())
    with lake_rows(WORKFLOW, [file], splitter(), local(tmp_path / "home"), {}) as lake:
        expected = built(lake, tmp_path / "here")
        plans = plan_files(lake.counts.rows, 200, 3)
    shutil.copytree(tmp_path / "here" / "workflow", tmp_path / "there" / "workflow")
    out, host_scratch = local(tmp_path / "there"), HostScratch("encoded", local(tmp_path / "host"))
    with lake_rows(WORKFLOW, [file], splitter(), local(tmp_path / "none"), {}, host_scratch=host_scratch) as lake:
        assert isinstance(lake.folder, HostFolder)
        tasks, workflow = (((0, file),),), out / "workflow"
        send = SendRows(
            TransformFiles(tasks, lake.folder, lake.layout, splitter(), workflow, lake.folder, tuple(plans))
        )
        receive = WriteReceived(PartWriter(tuple(plans), out, workflow))
        for split in ("train", "valid"):
            (out / split).make_dir()
        blocks = list(send(0))
        for part in range(len(plans)):
            list(receive([b for b in blocks if b.partition == part]))
    assert digests(tmp_path / "there") == expected


@pytest.mark.parametrize("text", [pa.string(), pa.large_string()], ids=str)
def test_long_texts_side_by_side_are_decoded_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: pa.DataType
) -> None:
    """A row group whose long texts stand one behind the other: no part has many more than the others."""
    monkeypatch.setattr(decode, "_LONG_TEXTS", 10_000)
    monkeypatch.setattr(decode, "_DECODED_BYTES", 40_000)
    rows = make()
    rows["body"] = [f"{i}" + "x" * (1_000 if 200 <= i < 300 else 0) if i % 7 else None for i in range(ROWS)]
    file = write(rows, tmp_path / "rows.parquet", text)
    layout = RowGroupLayout({c.name: declared(c) for c in COLUMNS})
    pieces, dictionaries = row_groups(file, local(tmp_path / "encoded"), layout)
    assert not dictionaries
    assert len(pieces) > 2
    bodies = [piece.column("body") for piece in pieces]
    assert max(int(column.text_bytes().sum()) for column in bodies) < 40_000
    assert [t for column in bodies for t in column.decode().to_pylist()] == rows["body"].tolist()
    assert all(column.indices is not None and column.distinct for column in bodies)
    for name in ("id", "k", "y"):
        assert [v for piece in pieces for v in piece.column(name).decode().to_pylist()] == rows[name].tolist()


def test_rows_that_are_dropped_cost_no_text(tmp_path: Path) -> None:
    """The rows that a filter keeps stay a dictionary of their values; no text is stored once a row."""
    rows = make()
    file = write(rows, tmp_path / "rows.parquet", pa.string())
    spec = build_spec(
        {
            "pipeline": "texts",
            "source": {"format": "csv", "path": "{ds}/*.csv"},
            "table": {"columns": [{"name": n, "type": t} for n, t in TYPES.items()]},
            "features": {
                "label": "y",
                "prepare": [{"filter": {"where": "k <> 3"}}],
                "workflow": [{"columns": ["body"], "ops": ["categorify"]}],
                "split": {"by": "position"},
            },
        }
    )
    layout = RowGroupLayout({c.name: declared(c) for c in COLUMNS}, row_preparation(spec))
    dictionary_bytes: list[int] = []
    cast = decode.kernels.used

    def watched(column: pa.DictionaryArray) -> pa.DictionaryArray:
        used = cast(column)
        dictionary_bytes.append(used.dictionary.nbytes)
        return used

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.kernels, "used", watched)
        ((piece,), _) = row_groups(file, local(tmp_path / "encoded"), layout)
    passing = rows[rows["k"] != 3]
    assert piece.column("body").decode().to_pylist() == passing["body"].tolist()
    assert dictionary_bytes
    assert max(dictionary_bytes) < sum(len(t) for t in passing["body"].dropna()) / 10


def test_long_keys_are_not_broadcast() -> None:
    short, long, few = (Side(None, "k", (), rows, size) for rows, size in ((1_000, 20_000), (9, 1 << 30), (9, 900)))  # type: ignore[arg-type]
    assert Joins(None, 5_000_000)._small([short, long, few]) == {id(short), id(few)}  # type: ignore[arg-type]
    # As many of ordinary length as before.
    assert Joins(None, 1_009)._small([short, few]) == {id(short), id(few)}  # type: ignore[arg-type]
    assert Joins(None, 1_008)._small([short, few]) == {id(few)}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Lookup, FileLookup, MappedLookup])
def test_bytes_of_a_vocabularys_values(tmp_path: Path, kind: type[Lookup]) -> None:
    table = pa.table({"value": [str(i) * 100 for i in range(200)], "code": pa.array(range(2, 202))}, lookup.SCHEMA)
    write_table(table, tmp_path / "v.parquet", "value")
    if kind is MappedLookup:
        MappedLookup.write_file(tmp_path / "v.parquet", local(tmp_path))
    source = {Lookup: table, FileLookup: tmp_path / "v.parquet", MappedLookup: local(tmp_path)}[kind]
    size = sum(len(t) for t in table["value"].to_pylist())
    assert size <= kind(source).text_bytes <= size + 201 * 8


def test_counts_for_spark_have_small_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's reader puts up to 4,096 values of a row group into one array of 2 GiB at most."""
    monkeypatch.setattr(keyed_tables, "_GROUP_BYTES", 1_000)
    spark = SimpleNamespace(read=SimpleNamespace(parquet=Path))
    vocabularies = VocabularyTable(spark, local(tmp_path / "v"), "2026-01-01", scratch=local(tmp_path))  # type: ignore[arg-type]
    counts = pa.table({"name": ["v"] * 20, "value": ["x" * 300 + str(i) for i in range(20)], "count": [1] * 20})
    file = vocabularies._frame_of(counts)
    assert pq.read_table(file).equals(counts)
    footer = pq.read_metadata(file)  # type: ignore[arg-type]
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [3] * 6 + [2]


class _Conf(dict[str, Any]):
    """A session's, of which only the properties are looked at."""

    set = dict.__setitem__


def test_spark_reads_few_rows_at_once_of_long_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader puts 4,096 values into one array of 2 GiB at most."""
    key = "spark.sql.parquet.columnarReaderBatchSize"

    def settings_for(texts: Sequence[str], **set_before: str) -> dict[str, Any]:
        path = tmp_path / "table"
        path.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": range(len(texts)), "body": texts}), path / "f.parquet", compression="none")
        conf, source = _Conf(set_before), TableSource(format="parquet", path=str(path))
        spark = SimpleNamespace(conf=conf)
        shorten_batches(spark, FolderSnapshot(source, local(path), "parquet").files)  # type: ignore[arg-type]
        return dict(conf)

    monkeypatch.setattr(parquet_files, "_LARGE_COLUMN", 100_000)
    long = [f"{i:02}" * 1_000 for i in range(60)]
    assert settings_for(long) == {}  # the file is small
    monkeypatch.setattr(parquet_files, "_LARGE_FILE", 0)
    assert settings_for(long) == {key: 64}
    assert settings_for(long, **{key: "512"}) == {key: "512"}
    assert settings_for(long[:40]) == {}
    assert settings_for(long[:9] * 100) == {}  # the file has each once
    assert settings_for([f"{i:05}" * 20 for i in range(3_000)]) == {}


def test_a_file_of_carried_text_is_one_row_group_of_sparks(tmp_path: Path) -> None:
    rows = make()
    with lake_rows(
        WORKFLOW, [write(rows, tmp_path / "f", pa.string())], splitter(), local(tmp_path / "home"), {}
    ) as lake:
        built(lake, tmp_path / "out")
    fitted = FittedWorkflow.load(local(tmp_path / "out" / "workflow"))
    plans = plan_files({"train": 2_400}, 131_072, 12)
    assert len(plans) == 1
    # 12 files of about 200 MiB of text each.
    mib = 1 << 20
    assert 200 * mib < _block_bytes(fitted, plans, [2_400], [2_400 * mib], [mib]) < 800 * mib
    assert _block_bytes(fitted, plans, [2_400], [0], [0]) < 200 * mib
    # Any of them may have all that is long, and none has more than there is.
    assert 600 * mib <= _block_bytes(fitted, plans, [100_000], [300 * mib], [100 * mib]) < 800 * mib


def test_files_have_less_text_than_is_reckoned_with() -> None:
    """Rows are dealt out to files as their hashes are, which know nothing of lengths."""
    rng = np.random.default_rng(3)
    for rows, long in ((20_000, 0), (20_000, 3), (20_000, 60), (400, 400), (5, 5)):
        lengths = rng.integers(0, 50, rows)
        lengths[:long] = rng.integers(1_000_000, 1_100_000, long)
        limit = _most_text(int(lengths.sum()), int(lengths.max()), 4)
        for _ in range(50):
            assert max(part.sum() for part in np.array_split(rng.permutation(lengths), 4)) <= limit
        assert limit <= lengths.sum()
    # Even rows: a tenth above the even share.
    assert _most_text(100_000 << 10, 1 << 10, 4) < 1.1 * (25_000 << 10)


@pytest.mark.parametrize("shared", [False, True])
def test_a_table_that_the_driver_does_not_hold_is_mapped_by_hosts(tmp_path: Path, shared: bool) -> None:
    """The next turn learns the same as from a table in memory, and no task is sent the table.

    It may be of the dataset that another one is built upon: not where tasks hand each other files.
    """
    rows = make()
    rows["body"] = [f"{i // 2}" + "x" * 500 for i in range(ROWS)]
    file = write(rows, tmp_path / "rows.parquet", pa.string())
    estimator, name = (4, 1), "often"
    with lake_rows(WORKFLOW, [file], splitter(), local(tmp_path / "home"), {}) as lake:
        fit = LakeFit(WORKFLOW, lake)
        task = fit.next_task()
        assert task is not None
        fit.merge(fit.scan(None, task))
        expected = fit.next_task()
        assert expected is not None
        learned = fit._learned[estimator[0]][estimator[1]].tables[name]
        (partials,) = [dict(expected.partials(s.rows())) for s in scans(lake)]
    write_table(keyed_of(learned).table, tmp_path / "table.parquet", KEY)
    host_scratch = None if shared else HostScratch("encoded", local(tmp_path / "host"))
    with lake_rows(WORKFLOW, [file], splitter(), local(tmp_path / "none"), {}, host_scratch=host_scratch) as lake:
        fit = LakeFit(WORKFLOW, lake, shared_folder=local(tmp_path / "handed"))
        assert fit.next_task() is not None
        in_file = FittedState({}, {name: FileKeyedTable(tmp_path / "table.parquet")})
        fit._learn({a: in_file if a == estimator else FittedState({}) for a in fit._learning})
        task = fit.next_task()
        assert task is not None
        (tmp_path / "table.parquet").unlink()  # no task sees it
        assert list(task.shared_tables) == [(*estimator, name)]
        assert len(pickle.dumps(task)) < len(pickle.dumps(expected)) - TRAIN // 2 * 500
        (mapped_partials,) = [dict(pickle.loads(pickle.dumps(task)).partials(s.rows())) for s in scans(lake)]
    assert mapped_partials.keys() == partials.keys()
    for key, partial in mapped_partials.items():
        assert canonical(partial).equals(canonical(partials[key]))


def test_tables_of_several_turns_keep_apart(tmp_path: Path) -> None:
    """Tasks that share a folder number their files from 0 in each turn."""
    counts = ({"rename": {"to": {"k": "n"}}}, "value_count", "value_count", "normalize")
    workflow = Workflow([chain("k", ops=counts)], COLUMNS, "y", ())
    file = write(make(), tmp_path / "rows.parquet", pa.string())
    learned = []
    for in_files in (False, True):
        with lake_rows(workflow, [file], splitter(), local(tmp_path / "home"), {}) as lake:
            fit = LakeFit(workflow, lake)
            turns = 0
            while (task := fit.next_task()) is not None:
                assert len(task.shared_tables) == (turns if in_files else 0)
                fit.merge(fit.scan(None, task))
                turns += 1
                step = fit._learned[0][-1]
                if in_files and step.tables:
                    ((name, table),) = step.tables.items()
                    folder = lake.scratch / f"tables-{turns}"
                    folder.make_dir()
                    write_table(keyed_of(table).table, folder.local_path() / "0.parquet", KEY)
                    in_file = FileKeyedTable(folder.local_path() / "0.parquet")
                    fit._learned[0][-1] = FittedState(step.states, {name: in_file})
            assert turns == 3
            learned.append(fit._learned[0][-1].states)
    assert learned[0]
    assert learned[0] == learned[1]


def scans(rows: LakeRows) -> Iterator[FileScan]:
    """Return the scans of the files, in one task."""
    tasks = (tuple(enumerate(rows.files)),)
    yield from ScanTask(tasks, rows.folder, rows.layout, rows.splitter, None).files(0)
