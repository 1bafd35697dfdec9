"""`headrace init` on small files of each kind: what it finds of known data, and that what it writes loads."""

from __future__ import annotations

import gzip
import json
from datetime import date
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

import deltalake
import fastavro
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyarrow import orc
from typer.testing import CliRunner

from headrace.cli import app, screen
from headrace.cli.init import write_pipeline
from headrace.cli.scaffold.columns import profile
from headrace.cli.scaffold.roles import Named
from headrace.config import Spec, load_spec
from headrace.config.source import LandingSource
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.workflow.workflow import Workflow
from headrace.lake.landing.files import find_files
from headrace.storage import Location, local
from headrace.storage.objects import calls, store
from tests.scaffold_support import clicks
from tests.storage_support import memory_home


def written(path: Path | str, target: Path, **named: str) -> Spec:
    """The pipeline of some data; its features bind, too."""
    write_pipeline(str(path), target, None, Named(**named), force=False)
    spec = load_spec(target)
    Workflow.from_spec(spec)
    return spec


def landing(spec: Spec) -> LandingSource:
    assert isinstance(spec.source, LandingSource)
    return spec.source


def types(spec: Spec) -> dict[str, str]:
    return {c.name: c.type for c in spec.table.columns}


def features(spec: Spec) -> dict[str, list[str]]:
    """Column -> its operators."""
    return {column: [op.op for op in chain.ops] for chain in spec.features.workflow for column in chain.columns}


def test_a_click_log(tmp_path: Path) -> None:
    data = clicks()
    path = tmp_path / "Click log.csv.gz"
    data.to_csv(path, index=False)
    spec = written(path, tmp_path / "p.yaml")
    assert (spec.pipeline, spec.ds, landing(spec).path) == ("click_log", "2026-03-04", str(path))
    assert types(spec) == {
        "impression_id": "string",
        "ts": "timestamp",
        "userId": "bigint",
        "item_id": "string",
        "user_age": "double",
        "country": "string",
        "item_price": "double",
        "slot": "int",
        "referrer_hash": "string",
        "query": "string",
        "clicked_at": "timestamp",
        "source": "string",
        "clicked": "int",
    }
    assert (spec.table.keys, spec.table.event_time) == (("impression_id",), "ts")
    assert (spec.features.label, spec.features.carried) == ("clicked", ("impression_id",))
    assert (spec.features.split.by, spec.features.window_days) == ("time", 3)
    assert features(spec) == {
        "ts": ["cyclic"],
        "userId": ["categorify"],
        "item_id": ["categorify"],
        "user_age": ["fill_missing", "normalize"],
        "country": ["categorify"],
        "item_price": ["fill_missing", "log", "normalize"],
        "slot": ["categorify"],
    }
    assert spec.score is not None
    # The country follows from the user and the price from the item, though neither name says so of the first.
    assert (spec.score.user.key, set(spec.score.user.columns)) == ("userId", {"user_age", "country"})
    assert (spec.score.item.key, spec.score.item.columns) == ("item_id", ("item_price",))
    assert spec.score.context.keys() == {"ts", "slot"}
    assert spec.publish is not None


def test_the_table_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.out, "_file", None)
    monkeypatch.setattr(screen.out, "_width", 220)
    monkeypatch.chdir(tmp_path)
    clicks().to_csv("log.csv", index=False)
    result = CliRunner().invoke(app, ["init", "log.csv"])
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: " ".join(line.split()) for line in result.output.splitlines() if line.strip()}
    assert "suspected leak: it has a value exactly where the label is 1" in lines["clicked_at"]
    assert "free text (7 words on average)" in lines["query"]
    assert "almost another value in each row" in lines["referrer_hash"]
    assert "one value alone: 'app'" in lines["source"]
    assert "label by its name and its two values; 20" in lines["clicked"]
    commands = [line.split("#")[0].strip() for line in result.output.splitlines() if line.startswith("  headrace")]
    assert commands == [
        "headrace run log.yaml --dry-run",
        "headrace run log.yaml",
        "headrace warehouse sample log.yaml",
    ]
    assert "wrote log.yaml: it makes a list of 10 'item_id' for each 'userId'. Read it, then:" in result.output
    # Each choice has its comment, the columns that are left out too.
    text = (tmp_path / "log.yaml").read_text()
    assert "#   clicked_at: suspected leak" in text
    assert "# the last day of its events" in text or "the last day of its events." in text
    result = CliRunner().invoke(app, ["init", "log.csv"])
    assert (result.exit_code, "log.yaml is there already" in result.output) == (2, True)
    assert CliRunner().invoke(app, ["init", "log.csv", "--force"]).exit_code == 0


def test_json_lines_by_day(tmp_path: Path) -> None:
    data = clicks().assign(ts=lambda d: pd.to_datetime(d["ts"]).astype("int64") // 10**6)
    rng = np.random.default_rng(1)
    for day, part in data.groupby(pd.to_datetime(data["ts"], unit="ms").dt.date):
        folder = tmp_path / "landing" / str(day)
        folder.mkdir(parents=True)
        with gzip.open(folder / "part-0.jsonl.gz", "wt") as f:
            for row in part.drop(columns="clicked_at").replace({np.nan: None}).to_dict("records"):
                tags = [f"t{k}" for k in rng.integers(0, 9, rng.integers(0, 5))]
                f.write(json.dumps(row | {"tags": tags, "page": {"url": "x"}}) + "\n")
    spec = written(tmp_path / "landing", tmp_path / "p.yaml")
    assert landing(spec).path == str(tmp_path / "landing" / "{ds}" / "part-0.jsonl.gz")
    assert (spec.source.daily, spec.ds) == (True, None)
    assert (spec.table.event_time, dict(spec.source.timestamps)) == ("ts", {"ts": "epoch_milliseconds"})
    assert types(spec)["tags"] == "array<string>"
    # Of an object, the fields.
    assert {c.name: c.path for c in spec.table.columns if c.path} == {"page_url": "page.url"}
    assert features(spec)["tags"] == ["categorify", "pad"]
    assert spec.features.window_days == 14


def as_arrow(data: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(data.assign(ts=pd.to_datetime(data["ts"])), preserve_index=False)


def test_parquet_with_partitions_by_day(tmp_path: Path) -> None:
    table = as_arrow(clicks())
    for k in range(4):
        folder = tmp_path / "events" / f"day=2026-03-0{k + 1}"
        folder.mkdir(parents=True)
        pq.write_table(table.slice(k * 1_000, 1_000), folder / "a.parquet")
    spec = written(tmp_path / "events", tmp_path / "p.yaml")
    assert spec.source.model_dump(exclude_defaults=True) == {
        "format": "parquet",
        "path": str(tmp_path / "events"),
        "day": {"partition": "day"},
    }
    assert types(spec)["clicked"] == "bigint", "as the files have it"
    assert "day" not in types(spec)


@pytest.mark.parametrize("form", ["delta", "parquet"])
def test_a_table_in_a_store_is_seen_as_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3",))
    table, folder = as_arrow(clicks()), tmp_path / "tables" / "events"
    for k in range(10):
        rows = table.slice(k * 400, 400).append_column("day", pa.array([f"2026-03-{k + 1:02d}"] * 400))
        if form == "delta":
            deltalake.write_deltalake(str(folder), rows, mode="append", partition_by=["day"])
        else:
            pq.write_to_dataset(rows, folder, partition_cols=["day"], basename_template="{i}.parquet")
    remote = Location(PurePosixPath("/bucket/events"), "s3")
    remote.copy_from(local(folder))
    read: set[str] = set()
    ranged = calls.get_range

    def noted(bucket: Any, key: str, start: int, size: int) -> bytes:
        read.add(key)
        return ranged(bucket, key, start, size)

    monkeypatch.setattr(calls, "get_range", noted)
    local_spec, store_spec = (
        written(folder, tmp_path / "mine.yaml"),
        written("s3a://bucket/events", tmp_path / "theirs.yaml"),
    )
    assert store_spec.source.model_dump() == local_spec.source.model_dump() | {"path": "s3://bucket/events"}
    assert store_spec.source.model_dump(include={"format", "day"})["format"] == form
    assert (store_spec.table, store_spec.features, store_spec.score) == (
        local_spec.table,
        local_spec.features,
        local_spec.score,
    )
    assert store_spec.pipeline == "events"
    assert len([key for key in read if key.endswith(".parquet")]) == 8
    (remote.parent / "others" / "notes.md").put_text("no data")
    # An object that stands for a folder, as consoles make them.
    (remote.parent / "others" / "day.parquet").put_text("")
    for path, message in (
        ("s3://bucket/none", "s3://bucket/none: no such file or folder"),
        ("s3://bucket/others", "s3://bucket/others: no Delta log, no metadata of Iceberg, and no files that end in"),
        ("s3://bucket/events/*/*.parquet", "files of parquet are a table with all others of their folder: give the"),
        ("s3://me:word@bucket/events", "PATH: a secret does not belong in a URI"),
    ):
        if form == "parquet" or "*" not in path:
            with pytest.raises(UserError, match=message):
                written(path, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("location", "pattern"),
    [
        ("", "{ds}/log [[]1].csv.gz"),
        ("2026-03-02/log [1].csv.gz", "2026-03-02/log [[]1].csv.gz"),
        ("*-02/*.gz", "*-02/*.gz"),
    ],
)
def test_text_in_a_store_is_seen_as_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str, pattern: str
) -> None:
    """The same pipeline; its path finds the files. A name's brackets are no pattern, and a bucket's date is no day."""
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3",))
    drops = local(tmp_path / "drops")
    for k, ds in enumerate(("2026-03-01", "2026-03-02")):
        data = clicks(400, 2, seed=k).to_csv(index=False).encode()
        (drops / ds / "log [1].csv.gz").put_bytes(gzip.compress(data))
    remote = Location(PurePosixPath("/logs-of-2026-01-01/drops"), "s3")
    remote.copy_from(drops)
    ws = Workspace(tmp_path / "home")
    specs = {}
    for root in (drops, remote):
        spec = written(f"{root}/{location}".rstrip("/"), tmp_path / f"{root.scheme}.yaml")
        assert landing(spec).path == f"{root}/{pattern}"
        files = find_files(landing(spec), ws, "2026-03-02").files
        assert [f.path for f in files] == [root / "2026-03-02/log [1].csv.gz"]
        specs[root] = spec.model_dump(exclude={"source": {"path"}})
    assert specs[remote] == specs[drops]


@pytest.mark.parametrize("form", ["csv", "parquet", "orc", "avro"])
def test_of_large_files_in_a_store_a_part_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The number of rows of text and Avro, which do not store it, is an estimate."""
    memory_home(monkeypatch, tmp_path / "cache", readers=("hdfs",))
    monkeypatch.setattr("headrace.cli.scaffold.text_chunks.SAMPLE_BYTES", 100_000)
    monkeypatch.setattr("headrace.cli.scaffold.table_sample.SAMPLE_ROWS", 1_000)
    # As if it were of gigabytes.
    monkeypatch.setattr(store, "_SMALL", 1)
    monkeypatch.setattr(store, "BLOCK", 32 << 10)
    rows, fetched = as_arrow(clicks(20_000, 9)), 0
    rows = rows.set_column(1, "ts", rows["ts"].cast(pa.timestamp("us", "UTC" if form == "avro" else None)))
    file = tmp_path / f"log.{form}"
    if form == "csv":
        clicks(20_000, 9).to_csv(file, index=False)
    elif form == "parquet":
        pq.write_table(rows, file, row_group_size=500)
    elif form == "orc":
        orc.write_table(rows, file, stripe_size=64 << 10, batch_size=500)
    else:
        write_avro(rows, file)
    remote = Location(PurePosixPath("/name:8020/log"), "hdfs")
    (remote / file.name).copy_from(local(file))
    ranged = calls.get_range

    def counted(bucket: Any, key: str, start: int, size: int) -> bytes:
        nonlocal fetched
        fetched += size
        return ranged(bucket, key, start, size)

    monkeypatch.setattr(calls, "get_range", counted)
    monkeypatch.setattr(calls, "download", lambda *args: pytest.fail("a whole file was asked for"))
    spec = written("hdfs://name:8020/log", tmp_path / "p.yaml")
    exact = form in ("parquet", "orc")
    assert spec.table.expectations.min_rows == (10_000 if exact else pytest.approx(10_000, rel=0.05))
    assert 0 < fetched < file.stat().st_size / 5


@pytest.mark.parametrize("form", ["orc", "avro"])
def test_orc_and_avro_are_seen_as_parquet_is(tmp_path: Path, form: str) -> None:
    """The same rows, with an object, a list, a decimal, a date and nulls; of large files the ends, or the beginning."""
    data = as_arrow(clicks(500, 2))
    price = pa.array([{"net": Decimal(i) / 4, "tags": [f"t{i % 5}"]} if i % 3 else None for i in range(500)])
    born = pa.array([date(2000, 1, 1 + i % 28) for i in range(500)])
    ts = data["ts"].cast(pa.timestamp("us", "UTC" if form == "avro" else None))
    data = data.set_column(1, "ts", ts).append_column("born", born)
    data = data.append_column(
        "price", price.cast(pa.struct({"net": pa.decimal128(12, 2), "tags": pa.list_(pa.string())}))
    )
    for kind in ("parquet", form):
        folder = tmp_path / kind / "events" / "day=2026-03-01"
        folder.mkdir(parents=True)
        if kind == "parquet":
            pq.write_table(data, folder / "a.parquet")
        elif kind == "orc":
            orc.write_table(data, folder / "a.orc")
        else:
            write_avro(data, folder / "a.snappy.avro")
    parquet_spec, spec = (written(tmp_path / kind / "events", tmp_path / f"{kind}.yaml") for kind in ("parquet", form))
    assert spec.source.model_dump(exclude_defaults=True) == {
        "format": form,
        "path": str(tmp_path / form / "events"),
        "day": {"partition": "day"},
    }
    assert {"price_net": "decimal(12,2)", "born": "date"}.items() <= types(spec).items()
    excluded = {"source"}
    assert spec.model_dump(exclude=excluded) == parquet_spec.model_dump(exclude=excluded)


def write_avro(rows: pa.Table, path: Path) -> None:
    """Write Avro as Spark does: each column may be null."""
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
    items = {"type": "array", "items": ["string", "null"]}
    fields = [{"name": "net", "type": [decimal, "null"]}, {"name": "tags", "type": [items, "null"]}]
    known: dict[str, Any] = {
        "string": "string",
        "int64": "long",
        "double": "double",
        "date32[day]": {"type": "int", "logicalType": "date"},
        "timestamp[us, tz=UTC]": {"type": "long", "logicalType": "timestamp-micros"},
    }
    struct = {"type": "record", "name": "price", "fields": fields}
    columns = [{"name": f.name, "type": [known.get(str(f.type), struct), "null"]} for f in rows.schema]
    with path.open("wb") as out:
        fastavro.writer(out, {"type": "record", "name": "top", "fields": columns}, rows.to_pylist(), sync_interval=999)


def test_a_delta_table_by_its_log(tmp_path: Path) -> None:
    """The newest version has one of two files; the other, which would break the label, is not read."""
    table = as_arrow(clicks(1_000, 1))
    folder = tmp_path / "lake" / "events"
    (folder / "_delta_log").mkdir(parents=True)
    pq.write_table(table, folder / "live.parquet")
    pq.write_table(table.set_column(12, "clicked", pa.array([7] * 1_000)), folder / "removed.parquet")
    schema = {
        "type": "struct",
        "fields": [{"name": n, "type": "string", "nullable": True, "metadata": {}} for n in "ab"],
    }
    meta = {"id": "x", "format": {"provider": "parquet", "options": {}}, "schemaString": json.dumps(schema)}
    commits: list[list[dict[str, Any]]] = [
        [
            {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
            {"metaData": meta | {"partitionColumns": [], "configuration": {}, "createdTime": 0}},
            *(
                {
                    "add": {
                        "path": f"{n}.parquet",
                        "partitionValues": {},
                        "size": 1,
                        "modificationTime": 0,
                        "dataChange": True,
                    }
                }
                for n in ("live", "removed")
            ),
        ],
        [{"remove": {"path": "removed.parquet", "deletionTimestamp": 1, "dataChange": True}}],
    ]
    for version, actions in enumerate(commits):
        (folder / "_delta_log" / f"{version:020d}.json").write_text("".join(json.dumps(a) + "\n" for a in actions))
    spec = written(folder, tmp_path / "p.yaml")
    assert spec.source.model_dump(exclude_defaults=True) == {"format": "delta", "path": str(folder)}
    # One day alone cannot be split by time.
    assert (spec.features.label, spec.features.split.by) == ("clicked", "position")


@pytest.mark.parametrize(
    ("values", "positive", "expression"),
    [
        (["no", "yes"], None, None),
        (["<=50K", ">50K"], None, "`income` = '>50K'"),
        (["<=50K", ">50K"], "<=50K", "`income` = '<=50K'"),
        (["it's", "ain't"], "ain't", r"`income` = 'ain\'t'"),
        (["1", "2"], None, "`income` = 1"),
    ],
)
def test_labels_that_are_not_0_and_1(
    tmp_path: Path, values: list[str], positive: str | None, expression: str | None
) -> None:
    """The census of the UCI: blanks behind commas, `?` for nothing, no users. The rarer value is the positive one,
    unless a word (1, yes, true) says it.
    """
    rng = np.random.default_rng(5)
    lines = ["age, zip, job, income"]
    for k in range(400):
        job = "?" if k % 9 == 0 else ["smith", "miller"][k % 2]
        lines.append(f"{rng.integers(18, 90)}, {k % 30:05d}, {job}, {values[int(rng.random() < 0.3)]}")
    (tmp_path / "census.data").write_text("\n".join(lines))
    named = {"label": "income", "positive": positive} if positive else {}
    spec = written(tmp_path / "census.data", tmp_path / "p.yaml", **named)
    source = landing(spec)
    assert (source.null_value, source.trim, source.header) == ("?", True, True)
    # A number with a leading zero is a name.
    assert types(spec)["age"], types(spec)["zip"] == ("int", "string")
    assert (spec.score, spec.publish) == (None, None)
    if expression is None:
        assert (types(spec)["income"], spec.features.label, spec.features.prepare) == ("boolean", "income", ())
        return
    assert spec.features.label == "label"
    assert spec.features.prepare[0].params["add"]["label"]["expression"] == expression


def test_no_users_but_what_describes_them(tmp_path: Path) -> None:
    """A combination of users' columns stands for a user; a nameless index numbers the lines."""
    data = clicks().drop(columns=["userId", "impression_id"]).assign(user_country=lambda d: d["country"])
    data.to_csv(tmp_path / "log.csv")
    spec = written(tmp_path / "log.csv", tmp_path / "p.yaml")
    assert spec.table.keys == ("column0",)
    assert spec.score is not None
    assert (spec.score.user.key, set(spec.score.user.columns)) == ("user_segment", {"user_age", "user_country"})
    assert spec.features.prepare[0].params["add"]["user_segment"]["expression"] == "concat_ws('|', `user_country`)"


def test_options_outrank_what_is_found(tmp_path: Path) -> None:
    data = clicks()
    data.to_csv(tmp_path / "log.csv", index=False)
    spec = written(
        tmp_path / "log.csv", tmp_path / "p.yaml", label="slot", positive="2", user="country", key="referrer_hash"
    )
    assert spec.features.prepare[0].params["add"]["label"] == {"expression": "`slot` = 2", "type": "int"}
    assert (spec.table.keys, spec.score and spec.score.user.key) == (("referrer_hash",), "country")


@pytest.mark.parametrize("separator", [",", "\t", ";", "|"])
def test_separators_and_files_without_names(tmp_path: Path, separator: str) -> None:
    rng = np.random.default_rng(2)
    rows = [[int(rng.random() < 0.5), rng.integers(0, 9), f"{rng.random():.3f}"] for _ in range(300)]
    (tmp_path / "x.tsv").write_text("".join(separator.join(map(str, row)) + "\n" for row in rows))
    spec = written(tmp_path / "x.tsv", tmp_path / "p.yaml")
    assert (landing(spec).separator, landing(spec).header) == (separator, False)
    assert types(spec) == {"column0": "int", "column1": "int", "column2": "double"}
    assert spec.features.label == "column0"


def test_a_column_that_says_the_label(tmp_path: Path) -> None:
    """A column says the label by values, by a threshold or by being present; chance does none of it."""
    rng = np.random.default_rng(8)
    y = (rng.random(1_000) < 0.3).astype(int)
    data = pd.DataFrame(
        {
            "status": np.where(y, np.where(rng.random(1_000) < 0.5, "paid", "shipped"), "open"),
            "amount": np.where(y, 100.0, 0.0) + rng.random(1_000),
            "paid_at": np.where(y, "2026-01-02 10:00:00", ""),
            "chance": rng.random(1_000),
            "almost": np.where(rng.random(1_000) < 0.05, 1 - y, y),
            "label": y,
        }
    )
    data.to_csv(tmp_path / "log.csv", index=False)
    assert set(features(written(tmp_path / "log.csv", tmp_path / "p.yaml"))) == {"chance", "almost"}


def test_large_files_are_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning, and the end for the last day; the number of rows is an estimate."""
    monkeypatch.setattr("headrace.cli.scaffold.text_chunks.SAMPLE_BYTES", 100_000)
    clicks(20_000, 9).to_csv(tmp_path / "log.csv", index=False)
    spec = written(tmp_path / "log.csv", tmp_path / "p.yaml")
    assert spec.ds == "2026-03-09"
    assert spec.table.expectations.min_rows == pytest.approx(10_000, rel=0.05)
    assert "in the rows looked at" in " ".join((tmp_path / "p.yaml").read_text().replace("#", " ").split())


@pytest.mark.parametrize(
    ("files", "named", "message"),
    [
        ({}, {}, "no such file or folder"),
        ({"a.csv": "", "b.csv": ""}, {}, "is empty"),
        ({"a.csv": "x,y\n1,2\n"}, {}, "no column looks like a label; no column has exactly two values"),
        ({"a.csv": "x,on\n1,2\n2,3\n1,3\n3,2\n"}, {}, "two values have: on. Say which one it is: --label COLUMN"),
        ({"a.csv": "x,on\n1,2\n"}, {"label": "onn"}, "--label onn: no such column; did you mean 'on'"),
        ({"a.csv": "x,y\na,1\nb,2\nc,3\n"}, {"label": "x"}, "say which of them means 1: --positive VALUE"),
        ({"a.csv": "x,y\na,1\nb,2\nc,3\n"}, {"label": "x", "positive": "d"}, "--positive d: no value of 'x'"),
        ({"a.csv": "x,x\n1,2\n"}, {}, "names column 'x' twice"),
        ({"a.csv": "x,y\n1,2\n", "b.jsonl": "{}\n"}, {}, "files of several kinds"),
        ({"a.jsonl": "[1]\n"}, {}, "not JSON lines"),
        ({"a.csv.gz": "no gzip"}, {}, "cannot be read"),
        ({"a.parquet": "no parquet"}, {}, "cannot be read as Parquet"),
        ({"a.csv": "label,x\n1,a\n0,a\n"}, {}, "no column is left to learn from: x: one value alone"),
        ({"a.csv": "label,x\n1,a\n0,b\n"}, {"time": "x"}, "--time x: it is string, neither a timestamp nor a date"),
    ],
)
def test_what_a_user_can_mend(tmp_path: Path, files: dict[str, str], named: dict[str, str], message: str) -> None:
    folder = tmp_path / "in"
    for name, text in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=message):
        written(folder, tmp_path / "p.yaml", **named)
    assert not (tmp_path / "p.yaml").exists()


def test_names_that_yaml_would_read_otherwise(tmp_path: Path) -> None:
    data = clicks(300, 2).rename(columns={"slot": "no", "country": "a: b # c"})
    data.to_csv(tmp_path / "log.csv", index=False)
    write_pipeline(str(tmp_path / "log.csv"), tmp_path / "p.yaml", None, Named(), force=False)
    text = (tmp_path / "p.yaml").read_text()
    spec = load_spec(tmp_path / "p.yaml")
    assert "no" in types(spec)
    # Delta takes no blank in a name: the column has another, and the path says what the file calls it.
    assert {c.name: c.steps for c in spec.table.columns if c.path} == {"a_b_c": ("a: b # c",)}
    assert yaml.safe_load(text)["pipeline"] == "log"


@pytest.mark.parametrize("compression", ["bz2", "zst", "gz"])
def test_compressed_files_and_line_breaks_within_quotes(tmp_path: Path, compression: str) -> None:
    data = clicks(500, 2)
    data["query"] = "a\n" + data["query"]
    path = tmp_path / f"log.csv.{compression}"
    with pa.output_stream(path, compression={"zst": "zstd", "gz": "gzip"}.get(compression, compression)) as out:
        out.write(data.to_csv(index=False).encode())
    spec = written(path, tmp_path / "p.yaml")
    assert (landing(spec).multiline, spec.table.expectations.min_rows) == (True, 250)
    assert types(spec)["clicked"] == "int"


def test_types_of_a_table(tmp_path: Path) -> None:
    table = as_arrow(clicks(1_000, 2))
    rng = np.random.default_rng(1)
    table = table.append_column("paid", pa.array(rng.random(1_000) * 100).cast(pa.decimal128(21, 2), safe=False))
    table = table.append_column("shelf", pa.array(rng.integers(0, 5, 1_000).astype("int8")))
    table = table.append_column("geo", pa.array([{"city": {"name": f"c{k % 3}"}, "a.b": k / 7} for k in range(1_000)]))
    (tmp_path / "t").mkdir()
    pq.write_table(table, tmp_path / "t" / "a.parquet")
    spec = written(tmp_path / "t", tmp_path / "p.yaml")
    # A file that is alone in its folder stands for it; beside another one it would be a part of a table.
    assert written(tmp_path / "t" / "a.parquet", tmp_path / "alone.yaml").model_dump() == spec.model_dump()
    pq.write_table(table, tmp_path / "t" / "b.parquet")
    with pytest.raises(UserError, match="a table with all others of their folder: give the folder"):
        written(tmp_path / "t" / "a.parquet", tmp_path / "part.yaml")
    columns = {c.name: (c.type, c.path) for c in spec.table.columns}
    assert columns["paid"] == ("decimal(21,2)", None)
    assert columns["shelf"] == ("tinyint", None)
    assert columns["geo_city_name"] == ("string", "geo.city.name")
    assert columns["geo_a_b"] == ("double", "geo['a.b']")
    assert {"paid", "shelf", "geo_city_name", "geo_a_b"} <= features(spec).keys()


def test_files_whose_columns_differ(tmp_path: Path) -> None:
    data, folder = clicks(1_000, 2), tmp_path / "in"
    folder.mkdir()
    data.iloc[:500].drop(columns="slot").to_csv(folder / "a.csv", index=False)
    data.iloc[500:][list(reversed(data.columns))].to_csv(folder / "b.csv", index=False)
    spec = written(folder, tmp_path / "p.yaml")
    assert landing(spec).path == str(folder / "*.csv")
    assert types(spec).keys() == set(data.columns)
    assert "{name: slot, type: int}  # 3 values, 50.0% null" in (tmp_path / "p.yaml").read_text()


def test_rows_without_a_label_are_dropped(tmp_path: Path) -> None:
    data = clicks(1_000, 2)
    data["clicked"] = data["clicked"].where(data.index % 50 != 0).astype("Int64")
    data.to_csv(tmp_path / "log.csv", index=False)
    spec = written(tmp_path / "log.csv", tmp_path / "p.yaml")
    assert [(op.op, dict(op.params)) for op in spec.features.prepare] == [("dropna", {"subset": ["clicked"]})]
    assert not next(c for c in spec.table.columns if c.name == "clicked").required


# --- what `init` could not look at, or wrote and then refused ---------------------------------------------------------


def parquet_log(folder: Path, **columns: pa.Array) -> Path:
    """A folder of one Parquet file with users, items, a label and the given columns, 60 rows each."""
    plain = {"user_id": [n % 7 for n in range(60)], "item_id": [n % 5 for n in range(60)]}
    label = {"clicked": [n % 3 == 0 for n in range(60)]}
    folder.mkdir()
    pq.write_table(pa.table(columns | plain | label), folder / "log.parquet")
    return folder


def test_times_beyond_the_years_of_a_calendar(tmp_path: Path) -> None:
    """One time of the year 57,988 is none, and the days of the others stand."""
    micros = [1_767_225_600_000_000 + n * 3_600_000_000 for n in range(60)]
    near = pa.array(micros, pa.timestamp("us", tz="UTC"))
    nanoseconds = pa.array([1_767_225_600_000_000_000, *micros[1:]]).cast(pa.timestamp("us", tz="UTC"))
    days = pa.array([5_000_000, *range(59)], pa.int32()).cast(pa.date32())
    target = tmp_path / "p.yaml"
    spec = written(parquet_log(tmp_path / "log", ts=nanoseconds, near=near, day=days), target, time="ts")
    assert spec.ds == "2026-01-03"
    assert target.read_text().count("1 times before year 1 or after year 9999") == 2


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_every_unit(tmp_path: Path, unit: str) -> None:
    per = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = pa.array([(1_767_225_600 + n * 3_600) * per for n in range(60)], pa.timestamp(unit))
    columns = profile(pa.table({"ts": times}), copied=False)
    assert [(c.type, c.far_times, c.days()) for c in columns] == [("timestamp", 0, ("2026-01-01", "2026-01-03"))]


def test_unsigned_integers_are_numbers(tmp_path: Path) -> None:
    rows = np.arange(60)
    folder = tmp_path / "log"
    folder.mkdir()
    table = {
        "user_id": (rows % 7).astype(np.uint64),
        "item_id": (rows % 5).astype(np.uint64) + 2**63,
        "a": rows.astype(np.uint8),
        "b": rows.astype(np.uint16),
        "c": rows.astype(np.uint32),
        "d": rows.astype(np.uint64) + 2**63,
        "clicked": (rows % 3 == 0).astype(np.uint8),
    }
    pq.write_table(pa.table(table), folder / "log.parquet")
    column_types = {c.name: c.type for c in profile(pq.read_table(folder), copied=False)}
    assert column_types == {
        "user_id": "bigint",
        "item_id": "string",
        "a": "smallint",
        "b": "int",
        "c": "bigint",
        "d": "decimal(20,0)",
        "clicked": "smallint",
    }
    spec = written(folder, tmp_path / "p.yaml")
    assert spec.features.label == "clicked"
    assert types(spec) == column_types


def test_a_label_that_cannot_be_declared_is_said_to_be_there(tmp_path: Path) -> None:
    folder = parquet_log(tmp_path / "log", odd=pa.array([b"x", b"y"] * 30))
    with pytest.raises(UserError, match=r"--label odd: such a column cannot be declared \(of type binary\)"):
        write_pipeline(str(folder), tmp_path / "p.yaml", None, Named(label="odd"), force=False)


def test_a_named_column_has_one_role(tmp_path: Path) -> None:
    folder = parquet_log(tmp_path / "log", empty=pa.nulls(60, pa.string()))
    for named, message in (
        (Named(label="clicked", user="clicked"), "--user clicked: it is the label already"),
        (Named(user="empty"), "--user empty: it has no value"),
        (Named(user="usr_id"), "--user usr_id: no such column; did you mean 'user_id'"),
    ):
        with pytest.raises(UserError, match=message):
            write_pipeline(str(folder), tmp_path / "p.yaml", None, named, force=False)


@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_a_partition_that_is_the_only_time(tmp_path: Path, form: str) -> None:
    data = clicks(300, 3)
    data["dt"] = [date.fromisoformat(t[:10]) for t in data.pop("ts")]
    data = data.drop(columns=["clicked_at"])
    folder = tmp_path / "log"
    if form == "delta":
        deltalake.write_deltalake(str(folder), pa.Table.from_pandas(data, preserve_index=False), partition_by=["dt"])
    else:
        data.to_parquet(folder, partition_cols=["dt"], index=False)
    spec = written(folder, tmp_path / "p.yaml")
    assert (spec.table.event_time, types(spec)["dt"]) == ("dt", "date")
    assert spec.source.model_dump(exclude_defaults=True)["day"] == {"partition": "dt"}


def test_the_day_to_run_is_the_newest_partition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = clicks(300, 3)
    data["dt"] = [t[:10] for t in data["ts"]]
    data.to_parquet(tmp_path / "log", partition_cols=["dt"], index=False)
    write_pipeline(str(tmp_path / "log"), tmp_path / "p.yaml", None, Named(), force=False)
    assert "--ds 2026-03-03 --dry-run" in capsys.readouterr().out


def test_nulls_in_the_partition_column(tmp_path: Path) -> None:
    data = clicks(300, 3)
    data["country"] = [None if n % 3 == 0 else c for n, c in enumerate(data["country"])]
    folder = str(tmp_path / "log")
    for half in (data[:150], data[150:]):
        table = pa.Table.from_pandas(half, preserve_index=False)
        deltalake.write_deltalake(folder, table, mode="append", partition_by=["country"])
    assert "country" not in types(written(folder, tmp_path / "p.yaml"))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_names_that_differ_by_case_alone(tmp_path: Path, form: str) -> None:
    rows = pd.DataFrame({"userId": np.arange(60) % 7, "userid": ["a", "b"] * 30, "clicked": np.arange(60) % 2})
    path = tmp_path / "log"
    path.mkdir()
    if form == "jsonl":
        rows.to_json(path / "log.jsonl", orient="records", lines=True)
    else:
        pq.write_table(pa.Table.from_pandas(rows, preserve_index=False), path / "log.parquet")
    spec = written(path, tmp_path / "p.yaml")
    declared = {c.name: c.path for c in spec.table.columns}
    # Of a table Spark reads one of them.
    second = {"userid_2": "userid"} if form == "jsonl" else {}
    assert declared == {"userId": None, "clicked": None} | second


def test_columns_are_named_as_the_file_names_them(tmp_path: Path) -> None:
    """Though Delta takes no blank, so that they are declared under other names."""
    path = tmp_path / "log.csv"
    path.write_text("Kunden-Nr.,Artikel Nr,ja nein\n" + "".join(f"{n % 7},A{n % 5},{n % 2}\n" for n in range(60)))
    spec = written(path, tmp_path / "p.yaml", label="ja nein", user="Kunden-Nr.", item="Artikel Nr")
    assert spec.score is not None
    assert (spec.score.user.key, spec.score.item.key) == ("Kunden-Nr.", "Artikel_Nr")
    assert spec.features.label == "ja_nein"


def test_half_a_surrogate_pair_in_json(tmp_path: Path) -> None:
    lines = [
        {"user_id": n % 7, "title": "half \ud83d" if n % 10 == 1 else "whole \U0001f600", "clicked": n % 2}
        for n in range(60)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = written(path, tmp_path / "p.yaml")
    assert types(spec)["title"] == "string"
    assert "6 of the lines looked at have half a surrogate pair" in (tmp_path / "p.yaml").read_text()


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_lines_that_are_no_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    good = [f"{n % 7},{n % 5},{n % 2}" for n in range(60)]
    if form == "jsonl":
        good = [json.dumps({"user_id": n % 7, "item_id": n % 5, "clicked": n % 2}) for n in range(60)]
    bad = ["1,2,3,4" if form == "csv" else "{no JSON"] * 25
    path = tmp_path / f"log.{form}"
    head = ["user_id,item_id,clicked"] if form == "csv" else []
    path.write_text("\n".join([*head, *good, *bad]) + "\n")
    write_pipeline(str(path), tmp_path / "p.yaml", None, Named(), force=False)
    printed = capsys.readouterr().out
    assert "60 rows, all looked at" in printed
    assert "25 further lines could not be read: they go to quarantine" in printed
    assert "25 of the lines looked at" in (tmp_path / "p.yaml").read_text()
