"""Source tables in S3, read by a pipeline whose own lake is on a disk: all it makes is as of the same tables there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.config.installation import checkout, s3_dir
from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.lake.spark.session import iceberg_jars
from headrace.lake.tables.snapshot import FILE, LINE
from headrace.stage.manifest import Manifest
from headrace.storage import Location, local, location
from headrace.storage.objects.store import ObjectStore
from tests.s3_server import BUCKET, S3Server, s3_server
from tests.source_table_support import COLUMNS, D3, DDL, dataset, expected, frame, ingest, make_rows, make_spec
from tests.spark.s3_source_side import CATALOG

ROWS = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if not any(s3_dir().glob("hadoop-aws-*.jar")):
        pytest.skip("no S3A in build/s3: run `make s3`")
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Location:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(location.STORES, "s3", ObjectStore("s3"))
    return Location(PurePosixPath(f"/{BUCKET}"), "s3")


def written(spark: SparkSession, folder: Path) -> dict[str, dict[str, Any]]:
    """Write tables, and return the keys of `make_spec` for each: Parquet, ORC, Avro, a Delta table, two joined ones.

    The Delta table has a row that breaks the declaration, one that repeats another, and rows that are deleted.
    """
    rows = make_rows(ROWS).astype({"user": object})
    frame(spark, rows).repartition(2).write.partitionBy("dt").parquet(str(folder / "parquet"))
    for form in ("orc", "avro"):
        frame(spark, rows).repartition(2).write.format(form).partitionBy("dt").save(str(folder / form))
    rows.loc[5, "click"] = 7
    rows.loc[14, "id"] = 13
    table = folder / "delta"
    properties = "'delta.columnMapping.mode' = 'name', 'delta.enableDeletionVectors' = 'true'"
    spark.sql(f"CREATE TABLE delta.`{table}` ({DDL}) USING delta TBLPROPERTIES ({properties})")
    frame(spark, rows).repartition(2).write.format("delta").mode("append").save(str(table))
    spark.sql(f"ALTER TABLE delta.`{table}` RENAME COLUMN price TO cost")
    spark.sql(f"DELETE FROM delta.`{table}` WHERE id % 11 = 0")
    numbers = range(29)
    items = pa.table({"item": numbers, "of": [k / 3 for k in numbers], "shop": [f"shop {k % 5}" for k in numbers]})
    (folder / "prices").mkdir()
    pq.write_table(items, folder / "prices" / "a b.parquet")
    deltalake.write_deltalake(str(folder / "shops"), items)
    prices = {"path": "ROOT/prices", "format": "parquet", "keys": ["item"], "add": {"of": "double"}}
    shops = {"path": "ROOT/shops", "keys": ["item"], "add": {"shop": "string"}}
    folders = {
        form: {"source": {"format": form, "path": f"ROOT/{form}", "day": {"partition": "dt"}}}
        for form in ("parquet", "orc", "avro")
    }
    return {
        **folders,
        "delta": {
            "source": {"format": "delta", "path": "ROOT/delta", "day": {"time": "ts"}},
            "table": {
                "columns": [c | {"name": "cost"} if c["name"] == "price" else c for c in COLUMNS],
                "late_days": 3,
            },
            "features": {
                "prepare": [{"join_external": prices}, {"join_external": shops}],
                "workflow": [
                    {"columns": ["cost", "of"], "ops": ["fill_missing", "normalize"]},
                    {"columns": ["user", "shop"], "ops": ["categorify"]},
                ],
            },
        },
    }


def case_at(case: dict[str, Any], root: Path | Location) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(case).replace("ROOT", str(root)))
    return fields


def results_of(ws: Workspace) -> dict[str, Any]:
    """Return the results of ingest and features: the rows that they left out, and each file of the dataset."""
    log = DeltaLog(ws.quarantine("shop"))
    assert log.version is not None
    files = log.files(log.version) or []
    bad = [row for f in files for row in pq.read_table(f.path, columns=[FILE, LINE, "_reason"]).to_pylist()]
    folder = ws.locate(Manifest.load(ws.manifest("shop", D3, "features")).output("dataset").name)
    contents: dict[str, Any] = {f.below(folder): pq.read_table(f) for f in folder.files() if f.suffix == ".parquet"}
    assert sum(t.num_rows for t in contents.values()) > ROWS * 0.8
    return contents | {"left out": sorted(map(str, bad))}


def test_tables_in_s3_are_those_on_a_disk(spark: SparkSession, bucket: Location, tmp_path: Path) -> None:
    cases = written(spark, tmp_path / "tables")
    (bucket / "others").copy_from(local(tmp_path / "tables"))
    store_cases: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        local_spec = make_spec(**case_at(case, tmp_path / "tables"))
        ws = Workspace(tmp_path / "disk" / name)
        ingest(local_spec, ws, D3)
        dataset(local_spec, ws, D3)
        store_cases[str(tmp_path / "s3" / name)] = case_at(case, bucket / "others")
    named = {"table": f"{CATALOG}.db.events", "day": {"partition": "dt"}}
    if iceberg_jars():
        store_cases[str(tmp_path / "s3" / "iceberg")] = {"source": named}
    command = [sys.executable, "-m", "tests.spark.s3_source_side", json.dumps(store_cases)]
    environ = {k: v for k, v in os.environ.items() if k != "HEADRACE_CACHE"}
    completed = subprocess.run(command, cwd=checkout(), env=environ, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-8000:]
    assert "MetricsConfig" not in completed.stderr  # of what S3A counts
    for name in cases:
        disk_ws, store_ws = Workspace(tmp_path / "disk" / name), Workspace(tmp_path / "s3" / name)
        assert results_of(store_ws) == results_of(disk_ws)
        assert len(results_of(disk_ws)["left out"]) == (2 if name == "delta" else 0)
        manifest = Manifest.load(store_ws.manifest("shop", D3, "ingest"))
        assert manifest.rows == Manifest.load(disk_ws.manifest("shop", D3, "ingest")).rows
        assert manifest.outputs[0].name == f"s3://{BUCKET}/others/{name}"
    # The Arrow engine read copies of the Parquet files, which are where the workspace keeps what may vanish.
    assert any((tmp_path / "s3" / "parquet" / "cache" / "files").iterdir())
    if iceberg_jars():
        ws = Workspace(tmp_path / "s3" / "iceberg")
        contents = results_of(ws)
        (bad,) = contents.pop("left out")
        assert "dt=2026-03-03" in bad
        assert "click: 7 is outside [0, 1]" in bad
        place = Manifest.load(ws.manifest("shop", D3, "ingest")).facts["table"]["place"]
        assert place["path"] == f"s3://{BUCKET}/catalog/db/events"
        for split, expected_ids in expected(make_rows(ROWS).drop([5])).items():
            id_lists = [t["id"].to_pylist() for name, t in contents.items() if name.startswith(split)]
            assert sorted(i for part in id_lists for i in part) == expected_ids
