"""The stage `features`, whole: from an events table to a dataset, against an independent pandas computation."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import Spec, build_spec, load_spec
from headrace.config.schema import Kind
from headrace.config.workspace import Workspace
from headrace.dataset.row_groups import BufferPool, StoredRowGroup
from headrace.errors import UserError
from headrace.features.build.stage import BuildFeatures
from headrace.features.functions.spark_expressions import col
from headrace.features.spark.write import _OPTIONS
from headrace.features.types import declared
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.delta.log import DeltaLog
from headrace.quality.drift.count_day import count_day
from headrace.stage import Outcome, run_stage
from headrace.stage.manifest import Manifest, Output
from headrace.storage import local
from tests.spark.test_features_stateless import crossed
from tests.train_support import read_padded

DS = "2026-01-05"
META = ["_source_file string", "_source_line bigint", "ds string"]


#: Chains besides the pipeline's own: names and number of columns change, columns are used again.
MORE = [
    {"columns": ["user_age", "user_country"], "ops": [{"hashed_cross": {"buckets": 40}}]},
    {
        "columns": ["item_price"],
        "ops": [
            {"fill_missing": {"value": 2.5, "indicator": True}},
            {"rename": {"to": {"item_price": "price", "item_price_missing": "unpriced"}}},
        ],
    },
]


def clicks(**features: Any) -> Spec:
    data = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
    data.pop("drift", None)  # statistics have tests of their own
    data["features"]["workflow"] += MORE
    data["features"] |= {"row_group_rows": 100, "min_row_groups": 4, "window_days": 3} | features
    return build_spec(data)


def make_clicks(rows: int = 1500, days: int = 5, seed: int = 0) -> pd.DataFrame:
    """Events of 2026-01-01 .. `days` days on, some landing a day late; users appear day by day."""
    rng = np.random.default_rng(seed)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    seconds = rng.integers(0, days * 86_400, rows)
    ts = [start + timedelta(seconds=int(s)) for s in seconds]
    landed = np.minimum(seconds // 86_400 + (rng.random(rows) < 0.05), days - 1)
    pick = rng.random
    users = rng.integers(0, 10 + 4 * (seconds // 86_400 + 1))
    return pd.DataFrame(
        {
            "event_id": [f"e{i}" for i in range(rows)],
            "ts": ts,
            "user_id": users + 2**53,
            "item_id": (rng.zipf(1.6, rows) % 60).astype(np.int64),
            "clicked": (pick(rows) < 0.3).astype(np.int32),
            "user_age": pd.Series([None if p < 0.1 else int(p * 80) for p in pick(rows)], dtype=object),
            "user_country": [None if p < 0.05 else f"ländle{int(p * 8)}" for p in pick(rows)],
            "user_activity": pick(rows),
            "item_category": [f"cat{int(p * 5)}" for p in pick(rows)],
            "item_price": pd.Series(
                [None if p < 0.1 else float("nan") if p < 0.2 else float(np.exp(9 * p)) for p in pick(rows)],
                dtype=object,
            ),
            "item_age_days": rng.integers(0, 50, rows).astype(float),
            "item_tags": [None if p < 0.1 else [f"t{j}" for j in range(int(p * 6))] for p in pick(rows)],
            "device": ["phone" if p < 0.5 else "web" for p in pick(rows)],
            "hour": (seconds // 3600 % 24).astype(np.int32),
            "_source_file": [f"landing/clicks/part-{i % 3}.json.gz" for i in range(rows)],
            "_source_line": np.arange(rows) // 3,
            "ds": [(start + timedelta(days=int(d))).strftime("%Y-%m-%d") for d in landed],
        }
    )


def land(
    spark: SparkSession, ws: Workspace, spec: Spec, events: pd.DataFrame, ds: str = DS, partitions: int = 3
) -> None:
    """Leave what ingest leaves: the events table at a new version, and a manifest that pins it."""
    types = {c.name: declared(c).arrow for c in spec.table.columns}
    types |= {"_source_file": pa.string(), "_source_line": pa.int64(), "ds": pa.string()}
    table = pa.table({n: pa.array(list(events[n]), t) for n, t in types.items()})
    ddl = ", ".join([*(f"`{c.name}` {declared(c)}" for c in spec.table.columns), *META])
    path = ws.table(spec.pipeline, "events").local_path()
    frame = spark.createDataFrame(table, ddl).repartition(partitions)
    frame = frame.withColumns({c.name: col(c.name).cast(c.stored_type) for c in spec.table.columns})
    frame.write.format("delta").mode("overwrite").partitionBy("ds").save(str(path))
    version = max(int(p.stem) for p in (path / "_delta_log").glob("*.json"))
    Manifest(
        stage="ingest",
        pipeline=spec.pipeline,
        ds=ds,
        key=f"ingest-{version}",
        spec_hash="test",
        outputs=(
            Output(kind="delta", name=f"lake/{spec.pipeline}/events", version=str(version), rows=len(events)),
            Output(kind="quarantine", name=f"lake/{spec.pipeline}/quarantine", version="0", rows=0),
        ),
    ).save(ws.manifest(spec.pipeline, ds, "ingest"))


def vocabulary_rows(ws: Workspace) -> list[dict[str, Any]]:
    files = DeltaTable(str(ws.table("clicks", "vocabulary"))).file_uris()
    rows = pa.concat_tables([pq.ParquetFile(file).read() for file in files]).to_pylist()
    return sorted(rows, key=lambda row: (row["name"], row["code"]))


def run(spec: Spec, ws: Workspace, ds: str = DS) -> Outcome:
    return run_stage(BuildFeatures(count_day), spec, ws, ds)


def dataset(ws: Workspace, manifest: Manifest) -> Path:
    return ws.home / manifest.output("dataset").name


def read(folder: Path, split: str) -> pd.DataFrame:
    schema = FittedWorkflow.load(local(folder / "workflow")).schema
    return read_padded(sorted((folder / split).glob("*.parquet")), schema)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def assert_same_dataset(actual: Path, expected: Path) -> None:
    """The same files with the same rows in the same order in the same row groups; the bits of every value."""
    names = [
        sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file() and p.name != "_files.json")
        for f in (actual, expected)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        if name.startswith("workflow/"):
            assert (actual / name).read_bytes() == (expected / name).read_bytes()
            continue
        left, right = pq.ParquetFile(actual / name), pq.ParquetFile(expected / name)
        assert left.schema_arrow.remove_metadata().equals(right.schema_arrow.remove_metadata()), name
        assert [left.metadata.row_group(g).num_rows for g in range(left.num_row_groups)] == [
            right.metadata.row_group(g).num_rows for g in range(right.num_row_groups)
        ]
        a, b = left.read(), right.read()
        for column in a.schema.names:
            x, y = (t.column(column).combine_chunks() for t in (a, b))
            if x.null_count or pa.types.is_string(x.type) or pa.types.is_list(x.type):
                assert x.equals(y), (name, column)
            else:
                assert x.to_numpy(False).tobytes() == y.to_numpy(False).tobytes(), (name, column)
        for file in (left, right):
            for c in range(file.metadata.num_columns):
                column = file.metadata.row_group(0).column(c)
                assert column.compression == "UNCOMPRESSED"
                assert not any("DICTIONARY" in e for e in column.encodings)


def expected_codes(train: pd.DataFrame, column: str, min_count: int) -> dict[Any, int]:
    """Codes by (first day, frequency, value), counted by pandas."""
    cells = train[[column]].assign(day=[t.date() for t in train["ts"]]).explode(column).dropna(subset=[column])
    counted = cells.groupby(column)["day"].agg(["min", "size"])
    counted = counted[counted["size"] >= min_count]
    order = sorted(counted.index, key=lambda v: (counted.loc[v, "min"], -counted.loc[v, "size"], str(v).encode()))
    return {v: i + 2 for i, v in enumerate(order)}


def expected_split(rows: pd.DataFrame, train: pd.DataFrame) -> pd.DataFrame:
    """The clicks pipeline's features in pandas."""
    out = pd.DataFrame({"event_id": rows["event_id"], "clicked": rows["clicked"].astype(np.float32)})
    for column in ("user_age", "user_activity", "item_age_days", "item_price"):

        def chain(frame: pd.DataFrame, column: str = column) -> Any:
            x = pd.to_numeric(frame[column]).astype(float).fillna(0.0)
            return np.log1p(x.clip(0, 10000)) if column == "item_price" else x

        out[column] = ((chain(rows) - chain(train).mean()) / chain(train).std()).astype(np.float32)
    for column in ("user_id", "item_id", "user_country", "item_category", "device", "hour"):
        codes = expected_codes(train, column, 2 if column.endswith("_id") else 1)
        out[column] = [0 if pd.isna(v) else codes.get(v, 1) for v in rows[column]]
    tags = expected_codes(train, "item_tags", 1)
    for i in range(4):
        out[f"item_tags__{i}"] = [tags.get(v[i], 1) if v and len(v) > i else 0 for v in rows["item_tags"]]
    cross = crossed(["age", "country"], 40)
    pairs = zip(rows["user_age"], rows["user_country"], strict=True)
    out["user_age_X_user_country"] = [
        cross({"age": None if pd.isna(a) else a, "country": None if pd.isna(c) else c}) for a, c in pairs
    ]
    prices = pd.to_numeric(rows["item_price"]).astype(float)
    out["price"], out["unpriced"] = prices.fillna(2.5).astype(np.float32), prices.isna().astype(np.float32)
    return out


def test_the_day(spark: SparkSession, ws: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace")
    spec, events = clicks(), make_clicks()
    land(spark, ws, spec, events)
    outcome = run(spec, ws)
    manifest, folder = outcome.manifest, dataset(ws, outcome.manifest)

    # Rows go by event time, whenever they landed; statistics and vocabularies come from train alone.
    day = np.array([t.day for t in events["ts"]])
    parts = {"train": events[(day >= 2) & (day <= 4)], "valid": events[day == 5]}
    assert manifest.rows == {split: len(part) for split, part in parts.items()}
    assert manifest.facts["train_range"] == ["2026-01-02", "2026-01-04"]
    assert manifest.facts["valid_range"] == ["2026-01-05", "2026-01-05"]
    for split, part in parts.items():
        actual = read(folder, split).set_index("event_id").sort_index()
        expected = expected_split(part, parts["train"]).set_index("event_id").sort_index()
        assert sorted(actual.columns) == sorted(expected.columns)
        for column in expected.columns:
            if actual[column].dtype == np.float32:
                np.testing.assert_allclose(actual[column], expected[column], rtol=2e-6, atol=2e-6, err_msg=column)
            else:
                assert actual[column].tolist() == expected[column].tolist(), column

    # The files: physical types, no nulls but in carried columns, plain pages, even row groups.
    schema = manifest.dataset_schema
    assert schema is not None
    assert schema == FittedWorkflow.load(local(folder / "workflow")).schema
    names = [f.name for f in schema.features]
    for split in ("train", "valid"):
        sizes = []
        for path in sorted((folder / split).iterdir()):
            file = pq.ParquetFile(path)
            assert file.schema_arrow.names == names
            for f in schema.features:
                field = file.schema_arrow.field(f.name)
                plain = pa.string() if f.kind is Kind.CARRIED else getattr(pa, f.dtype)()
                assert (field.type.value_type if f.is_list else field.type) == plain
                assert pa.types.is_list(field.type) == f.is_list
                assert field.nullable == (f.kind is Kind.CARRIED)
            for g in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(g)
                sizes.append(group.num_rows)
                for c in range(group.num_columns):
                    assert group.column(c).compression == "UNCOMPRESSED"
                    assert not any("DICTIONARY" in e for e in group.column(c).encodings)
        assert len(sizes) >= 4
        assert max(sizes) <= 100
        assert min(sizes) >= 0.5 * max(sizes)
        assert manifest.facts["splits"][split] == {
            "rows": sum(sizes),
            "row_groups": len(sizes),
            "files": len(list((folder / split).iterdir())),
        }

    # Order: neither the source's, nor by label, user or time.
    train = read(folder, "train")
    number = train["event_id"].str[1:].astype(int).to_numpy()
    for values in (number, train["clicked"], train["user_id"], train["hour"]):
        assert abs(np.corrcoef(np.arange(len(train)), values)[0, 1]) < 0.1

    facts = {c["name"]: c for c in manifest.facts["columns"]}
    all_rows = pd.concat(parts.values())
    assert facts["item_price"]["missing_rate"] == pytest.approx(all_rows["item_price"].isna().mean())
    assert facts["unpriced"]["missing_rate"] == facts["item_price"]["missing_rate"]
    assert facts["unpriced"]["sources"] == ["item_price"]
    either = (all_rows["user_age"].isna() | all_rows["user_country"].isna()).mean()
    assert facts["user_age_X_user_country"]["missing_rate"] == pytest.approx(either)
    assert either > all_rows["user_age"].isna().mean()
    tagless = np.mean([not isinstance(t, list) or not t for t in all_rows["item_tags"]])
    assert facts["item_tags"]["missing_rate"] == pytest.approx(tagless)
    valid_users = expected_split(parts["valid"], parts["train"])["user_id"]
    assert facts["user_id"]["splits"]["valid"]["oov_rate"] == pytest.approx((valid_users == 1).mean())
    assert facts["user_id"]["splits"]["valid"]["oov_rate"] > 0
    assert facts["user_age"]["oov_rate"] is None
    users = expected_codes(parts["train"], "user_id", 2)
    assert manifest.facts["vocabularies"]["user_id"] == {"size": len(users), "new": len(users)}
    assert {f.name: f.cardinality for f in schema.features}["user_id"] == len(users) + 2
    assert manifest.facts["vocabulary_version"] == 0
    assert "'train' (2026-01-02 to 2026-01-04)" in caplog.text
    json.dumps(manifest.facts)

    # What scoring will compute for these rows without Spark is what was written, bit for bit.
    loaded = FittedWorkflow.load(local(folder / "workflow"))
    raw = {n: pa.array(events[n].tolist(), loaded.workflow.input_type(n).arrow) for n in loaded.input_columns}
    scored = loaded.transform_batch(pa.RecordBatch.from_pydict(raw)).to_pandas().set_index(events["event_id"])
    stored = train.set_index("event_id")
    for column in scored.columns:
        assert scored.loc[stored.index, column].to_numpy().tobytes() == stored[column].to_numpy().tobytes()

    # Again: nothing to do. After a loss: the same bits, although an older day has been made since, which gave codes to
    # values that are out of vocabulary here.
    assert run(spec, ws).skipped
    unknown = sorted({str(u) for u in set(parts["valid"]["user_id"].dropna()) - users.keys()})
    assert unknown
    fields = {"name": "user_id", "count": 9, "day": 0}
    older = VocabularyTable(spark, ws.table("clicks", "vocabulary"), "2026-01-03")
    older.update(pa.Table.from_pylist([{"value": u} | fields for u in unknown]), Workflow.from_spec(spec).rules)
    assert older.version == 1
    digests_before = digests(folder)
    victim = folder / "train" / "part-00000-001.parquet"
    victim.write_bytes(victim.read_bytes()[:-1])
    rerun = run(spec, ws)
    assert "part-00000-001.parquet has" in rerun.reason
    assert digests(folder) == digests_before
    assert rerun.manifest.facts == manifest.facts
    assert rerun.manifest.key == manifest.key

    # So it is after a loss of codes, which the dataset and the models have: none is given anew.
    codes = vocabulary_rows(ws)
    damaged = next(c for c in DeltaLog(ws.table("clicks", "vocabulary")).commits() if c.version == 0).adds[0].path
    damaged.local_path().write_bytes(b"")
    rerun = run(spec, ws)
    assert rerun.reason.startswith(f"{damaged} has 0 bytes")
    assert digests(folder) == digests_before
    assert rerun.manifest.facts == manifest.facts
    assert vocabulary_rows(ws) == codes

    # The other engine writes the same rows into the same files, in the same order, from a table that is cut otherwise.
    shutil.rmtree(ws.table("clicks", "vocabulary"))
    ws.manifest("clicks", DS, "features").remove()  # else the table is made again from the dataset
    land(spark, ws, spec, events.sample(frac=1, random_state=1), partitions=1)
    values = run(clicks(engine="spark"), ws)
    assert values.manifest.key != manifest.key
    assert_same_dataset(dataset(ws, values.manifest), folder)
    assert values.manifest.facts == manifest.facts


def test_the_next_day_keeps_codes(spark: SparkSession, ws: Workspace) -> None:
    spec, events = clicks(), make_clicks(days=6)
    land(spark, ws, spec, events)
    land(spark, ws, spec, events, ds="2026-01-06")
    first, second = run(spec, ws).manifest, run(spec, ws, "2026-01-06").manifest
    old, new = (
        FittedWorkflow.load(local(dataset(ws, m) / "workflow")).vocabularies["user_id"] for m in (first, second)
    )
    assert new.table.slice(0, len(old)).equals(old.table)
    assert len(new) > len(old)
    assert second.facts["vocabularies"]["user_id"] == {"size": len(new), "new": len(new) - len(old)}
    assert second.facts["vocabulary_version"] == 1
    # Killed after the vocabulary's commit, before the manifest: the rerun finds its values there.
    ws.manifest("clicks", "2026-01-06", "features").local_path().unlink()
    digests_before = digests(dataset(ws, second))
    rerun = run(spec, ws, "2026-01-06").manifest
    assert digests(dataset(ws, rerun)) == digests_before
    assert rerun.facts == second.facts


SNAPSHOT: dict[str, Any] = {
    "pipeline": "snap",
    "source": {"format": "csv", "path": "in/*.csv"},
    "table": {
        "columns": [
            {"name": "user", "type": "bigint"},
            {"name": "a.b", "type": "double"},
            {"name": "y", "type": "boolean"},
            {"name": "part", "type": "string"},
        ]
    },
    "features": {
        "label": "y",
        "split": {"by": "position", "valid_fraction": 0.25},
        "carried": ["user"],
        "workflow": [{"columns": ["user"], "ops": ["categorify"]}, {"columns": ["a.b"], "ops": ["normalize"]}],
    },
}


def snapshot(**features: Any) -> Spec:
    return build_spec(SNAPSHOT | {"features": SNAPSHOT["features"] | features})


def make_snapshot(parts: tuple[str, ...] = ("train",), rows: int = 40) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "user": np.arange(rows) % 7,
            "a.b": np.arange(rows) / 3,
            "y": [i % 2 == 0 for i in range(rows)],
            "part": [parts[i % len(parts)] for i in range(rows)],
            "_source_file": [f"in/{'b' if i < 25 else 'a'}.csv" for i in range(rows)],
            "_source_line": np.arange(rows),
            "ds": ["2026-01-03"] * rows,
        }
    )


def test_split_by_position(spark: SparkSession, ws: Workspace) -> None:
    spec, events = snapshot(), make_snapshot()
    older = events.assign(ds="2026-01-02", user=99)  # an older snapshot is no part of the newest
    land(spark, ws, spec, pd.concat([older, events]))
    manifest = run(spec, ws).manifest
    folder = dataset(ws, manifest)
    assert manifest.rows == {"train": 30, "valid": 10}
    assert manifest.facts["train_range"] is None
    # Source order: a.csv (15 rows), then b.csv (25), whose last ten validate.
    valid = read(folder, "valid")
    assert sorted(valid["user__carried"]) == sorted(np.arange(15, 25) % 7)
    # Values in one day: by frequency, then text.
    counts = events[~events["_source_line"].between(15, 24)]["user"].value_counts()
    order = sorted(counts.index, key=lambda u: (-counts[u], str(u)))
    codes = {u: i + 2 for i, u in enumerate(order)}
    assert valid["user"].tolist() == [codes[u] for u in valid["user__carried"]]
    assert {"a.b", "y", "user__carried"} < set(valid.columns)
    files = [p for p in folder.glob("*/*.parquet") if p.parent.name != "workflow"]
    assert {pq.ParquetFile(p).metadata.num_row_groups for p in files} == {1}
    assert {split: sum(p.parent.name == split for p in files) for split in ("train", "valid")} == {
        "train": 12,
        "valid": 10,
    }


def test_split_by_column(spark: SparkSession, ws: Workspace) -> None:
    spec = snapshot(split={"by": "column", "column": "part"})
    land(spark, ws, spec, make_snapshot(("train", "valid", "test", "rank")))
    manifest = run(spec, ws).manifest
    assert manifest.rows == {"train": 10, "valid": 10, "test": 10, "rank": 10}
    assert len(read(dataset(ws, manifest), "rank")) == 10

    # Labels that are any numbers, by both engines.
    for engine in ("arrow", "spark"):
        features = {**SNAPSHOT["features"], "split": {"by": "column", "column": "part"}, "engine": engine}
        features |= {"label": "a.b", "label_type": "number", "workflow": [{"columns": ["user"], "ops": ["categorify"]}]}
        numbers = build_spec(SNAPSHOT | {"features": features, "model": {"loss": "squared_error"}})
        labels = read(dataset(ws, run(numbers, ws).manifest), "valid")["a.b"]
        np.testing.assert_allclose(np.sort(labels), np.arange(1, 40, 4) / 3, rtol=1e-6)
    with pytest.raises(UserError, match=r"neither 0 nor 1 in \d+ of 40 rows.* or set features\.label_type: number"):
        run(build_spec(SNAPSHOT | {"features": {**features, "label_type": "binary"}}), ws)

    land(spark, ws, spec, make_snapshot(("train", "valid", "tset")))
    with pytest.raises(UserError, match=r"'part' must hold train, valid, test or rank, not 'tset' \(13 rows\)"):
        run(spec, ws)


def test_what_the_user_can_mend_is_said(spark: SparkSession, ws: Workspace) -> None:
    spec, events = clicks(), make_clicks(60)
    bad = events.assign(clicked=[2 if i < 3 else c for i, c in enumerate(events["clicked"])])
    land(spark, ws, spec, bad[bad["ds"] >= "2026-01-01"])
    inside = sum(2 <= t.day <= 5 for t in bad["ts"][:3])
    with pytest.raises(UserError, match=rf"'clicked' is neither 0 nor 1 in {inside} of \d+ rows"):
        run(spec, ws)
    land(spark, ws, spec, events.assign(clicked=None))
    with pytest.raises(UserError, match=r"'clicked' is null in \d+ of"):
        run(spec, ws)
    land(spark, ws, spec, events[[t.day < 5 for t in events["ts"]]])
    with pytest.raises(UserError, match=r"split 'valid' \(2026-01-05 to 2026-01-05\) has no row"):
        run(spec, ws)
    land(spark, ws, spec, events[[t.day == 5 for t in events["ts"]]])
    with pytest.raises(UserError, match=r"split 'train' \(2026-01-02 to 2026-01-04\) has no row"):
        run(spec, ws)
    retyped = spec.table.model_dump(mode="json")
    retyped["columns"] = [c | ({"type": "string"} if c["name"] == "hour" else {}) for c in retyped["columns"]]
    retyped["expectations"]["ranges"].pop("hour")
    retyped_spec = build_spec(spec.model_dump(mode="json", by_alias=True, exclude_none=True) | {"table": retyped})
    with pytest.raises(UserError, match=r"column 'hour' is declared string, but lake/clicks/events .* has it as int"):
        run(retyped_spec, ws)
    assert not list(ws.home.glob("datasets/**/*.parquet"))


def test_a_split_has_no_leak(spark: SparkSession, ws: Workspace) -> None:
    """Changing what only valid holds changes nothing of train, nor of what was learned."""
    spec, events = clicks(), make_clicks(400)
    land(spark, ws, spec, events)
    first_run = run(spec, ws).manifest
    valid = np.array([t.day == 5 for t in events["ts"]])
    events.loc[valid, ["user_activity", "item_price"]] = 1e7
    events.loc[valid, "device"] = "never seen"
    land(spark, ws, spec, events)
    two = run(spec, ws).manifest
    a, b = digests(dataset(ws, first_run)), digests(dataset(ws, two))
    changed = {name.split("/")[0] for name in a if a[name] != b[name]}
    assert changed == {"valid"}
    assert (read(dataset(ws, two), "valid")["device"] == 1).all()
    assert (
        spark.read.format("delta")
        .load(str(ws.table("clicks", "vocabulary")))
        .where(F.col("value") == "never seen")
        .isEmpty()
    )


def test_what_spark_writes_is_read_without_arrows_decoder(spark: SparkSession, tmp_path: Path) -> None:
    """Pages of Spark's own writer, with the dataset's settings: several a column, with definition levels."""
    columns = ["cast(id % 997 AS int) a", "cast(id * 3 AS bigint) b", "cast(id AS float) c", "cast(id AS double) d"]
    rows = spark.range(0, 50_000, 1, 1).selectExpr(*columns, "if(id % 9 = 0, null, cast(id AS int)) e")
    rows.write.options(**_OPTIONS).parquet(str(tmp_path / "rows"))
    (path,) = (tmp_path / "rows").glob("*.parquet")
    expected = pq.read_table(path)
    with StoredRowGroup(str(path), 0, list("abcde"), BufferPool()) as stored:
        for name in "abcd":
            column = stored.column(name)
            assert isinstance(column, pa.Array), name  # else Arrow decoded it
            assert column.equals(expected.column(name).combine_chunks())
        assert stored.column("e").null_count == expected.column("e").null_count > 0
