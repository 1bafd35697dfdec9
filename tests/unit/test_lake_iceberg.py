"""Iceberg's metadata files and manifests, read without Spark."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Spark, build_spec
from headrace.config.formats import ICEBERG_BY_PATH
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.spark import session
from headrace.lake.tables.iceberg_metadata import (
    TableMetadata,
    metadata_with,
    named_place,
    newest_metadata,
    primitives,
    snapshot_files,
)
from headrace.storage import local
from tests.source_table_support import make_spec


def put(folder: Path, name: str, *snapshots: int, **more: Any) -> None:
    content: dict[str, Any] = {"format-version": 2, "location": str(folder), "snapshots": []}
    content["snapshots"] = [{"snapshot-id": s, "timestamp-ms": 1000 * s} for s in snapshots]
    content["snapshot-log"] = [{"snapshot-id": s, "timestamp-ms": 1000 * s} for s in snapshots]
    data = json.dumps(content | {"current-snapshot-id": snapshots[-1] if snapshots else -1} | more).encode()
    (folder / name).write_bytes(gzip.compress(data) if ".gz" in name else data)


def test_the_newest_metadata_file(tmp_path: Path) -> None:
    folder = local(tmp_path)
    with pytest.raises(UserError, match="there is no Iceberg table at"):
        newest_metadata(folder / "none")
    put(tmp_path, "v9.metadata.json", 1)
    put(tmp_path, "v10.gz.metadata.json", 1, 2)
    put(tmp_path, "v11.metadata.json", 1, 2, 3)
    put(tmp_path, "v13.metadata.json", 7)  # of a writer that died
    assert newest_metadata(folder).current == 7  # no hint: the greatest
    (tmp_path / "version-hint.text").write_text("9")
    assert newest_metadata(folder).current == 3  # the hint may be behind
    assert metadata_with(folder, 2) is not None
    assert metadata_with(folder, 4) is None
    (tmp_path / "v13.metadata.json").unlink()
    put(tmp_path, "v12.metadata.json", 3, **{"format-version": 4})
    with pytest.raises(UserError, match="version 4 of Iceberg's format"):
        newest_metadata(folder)
    (tmp_path / "v12.metadata.json").write_text("{")
    with pytest.raises(UserError, match=r"v12.metadata.json is no metadata file"):
        newest_metadata(folder)


def test_metadata_files_of_a_catalog_are_not_guessed(tmp_path: Path) -> None:
    put(tmp_path, "00001-aaaa.metadata.json", 1)
    put(tmp_path, "00002-bbbb.gz.metadata.json", 1, 2)
    put(tmp_path, "00002-cccc.metadata.json", 1, 3)  # lost the race for the commit
    with pytest.raises(UserError, match="known to its catalog alone"):
        newest_metadata(local(tmp_path))
    metadata = metadata_with(local(tmp_path), 2)
    assert metadata is not None
    assert metadata.file.name == "00002-bbbb.gz.metadata.json"


def test_snapshots_by_time(tmp_path: Path) -> None:
    put(tmp_path, "v1.metadata.json", 5, 9)
    metadata = newest_metadata(local(tmp_path))
    assert [metadata.as_of(ms) for ms in (4999, 5000, 8999, 9000, 1e9)] == [None, 5, 5, 9, 9]
    put(tmp_path, "v2.metadata.json")
    assert newest_metadata(local(tmp_path)).current is None


def test_types_at_any_depth() -> None:
    inner = {"type": "struct", "fields": [{"type": "uuid"}, {"type": {"type": "list", "element": "int"}}]}
    schema = {
        "type": "struct",
        "fields": [{"type": "long"}, {"type": {"type": "map", "key": "string", "value": inner}}],
    }
    assert primitives(schema) == {"long", "string", "uuid", "int"}


def test_places_that_metadata_names() -> None:
    for uri in ("/lake/a b/x:y", "file:/lake/a b/x:y", "file:///lake/a b/x:y"):
        assert str(named_place(uri)) == "/lake/a b/x:y"
    for uri in ("s3://bucket/a b/x", "s3a://bucket/a b/x"):
        assert str(named_place(uri)) == "s3://bucket/a b/x"
        assert named_place(uri).plain
    # Nothing is encoded, and what ends a URI's path is a character as others.
    assert str(named_place("s3://bucket/c=a#b/d?e/f%20g")) == "s3://bucket/c=a#b/d?e/f%20g"
    for uri, fault in [
        ("wasb://container@host/x", "headrace knows no store of wasb:"),
        ("s3a://bucket//w//f", "has a folder without a name"),
        ("s3a://bucket/w/../f", "has a folder without a name, '.' or '..' in it"),
        ("hdfs:///warehouse/t", "names no NameNode"),
    ]:
        with pytest.raises(UserError, match=f"^source: .*{fault}"):
            named_place(uri)


def test_sessions_have_the_jar_where_a_source_needs_it(
    ws: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "iceberg_dir", lambda: tmp_path)
    by_path = make_spec({"format": "iceberg", "path": "/lake/events"}).spark
    by_name = Spark(properties={"spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog"})
    packaged = Spark(
        properties={**by_name.properties, "spark.jars.packages": "org.apache.iceberg:iceberg-spark-runtime:1"}
    )
    assert by_path.properties == ICEBERG_BY_PATH
    for conf in (by_path, by_name):
        with pytest.raises(UserError, match="run `make iceberg`"):
            session.properties(conf, ws)
    assert "iceberg-spark" not in session.properties(packaged, ws)["spark.jars"]
    (tmp_path / "iceberg-spark-runtime-4.0_2.13-1.10.0.jar").write_bytes(b"")
    for conf in (by_path, by_name):
        settings = session.properties(conf, ws)
        assert settings["spark.jars"].endswith("iceberg-spark-runtime-4.0_2.13-1.10.0.jar")
        assert "iceberg-spark" not in settings["spark.driver.extraClassPath"]
    assert "iceberg-spark" not in session.properties(Spark(), ws)["spark.jars"]
    named = {"source": {"format": "iceberg", "path": "/x"}, "table": {"columns": [{"name": "id"}]}}
    spec = make_spec({"format": "delta", "path": "/x"})
    assert not spec.spark.properties
    data = spec.model_dump(mode="json", exclude_unset=True) | {"sources": {"users": named}}
    assert build_spec(data).spark.properties == ICEBERG_BY_PATH


_BOUND = [{"name": "key", "type": "int"}, {"name": "value", "type": "bytes"}]
_BOUNDS = {"type": "array", "items": {"type": "record", "name": "bound", "fields": _BOUND}}
#: What is read of a manifest's entries, and of a manifest list's.
_FILE = [
    {"name": "content", "type": "int"},
    {"name": "file_path", "type": "string"},
    {"name": "file_size_in_bytes", "type": "long"},
    {"name": "file_format", "type": "string"},
    {
        "name": "partition",
        "type": {"type": "record", "name": "r102", "fields": [{"name": "dt", "type": ["null", "string"]}]},
    },
    {"name": "lower_bounds", "type": ["null", _BOUNDS]},
    {"name": "upper_bounds", "type": ["null", {"type": "array", "items": "bound"}]},
    {"name": "referenced_data_file", "type": ["null", "string"]},
]
_ENTRY = {
    "type": "record",
    "name": "manifest_entry",
    "fields": [
        {"name": "status", "type": "int"},
        {"name": "data_file", "type": {"type": "record", "name": "r2", "fields": _FILE}},
    ],
}
_MANIFEST = {
    "type": "record",
    "name": "manifest_file",
    "fields": [{"name": "manifest_path", "type": "string"}, {"name": "partition_spec_id", "type": "int"}],
}

_partitions = st.sampled_from([None, "a", "b"])
_data = st.tuples(_partitions, st.booleans())
#: A partition, which of the data files it is about (-1: any of the partition), how that is said, whether it is live.
_deletes = st.tuples(_partitions, st.integers(-1, 3), st.sampled_from(["reference", "bounds"]), st.booleans())


@given(st.lists(_data, min_size=4, max_size=4), st.lists(_deletes, max_size=6))
def test_which_delete_files_touch_which_data_files(
    tmp_path_factory: pytest.TempPathFactory, data: list[Any], deletes: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("table")

    def entry(
        content: int, name: str, partition: str | None, live: bool, referenced: str | None, how: str
    ) -> dict[str, Any]:
        bounds = [{"key": 1, "value": b"x"}]
        if referenced is not None and how == "bounds":
            bounds.append({"key": 2147483546, "value": referenced.encode()})
        file = {
            "content": content,
            "file_path": name,
            "file_size_in_bytes": 7,
            "file_format": "PARQUET",
            "partition": {"dt": partition},
            "lower_bounds": bounds,
            "upper_bounds": bounds,
            "referenced_data_file": referenced if how == "reference" else None,
        }
        return {"status": 1 if live else 2, "data_file": file}

    names = [f"{folder}/{i}.parquet" for i in range(4)]
    of_data = [entry(0, n, p, live, None, "") for n, (p, live) in zip(names, data, strict=True)]
    of_deletes = [
        entry(1, f"{folder}/d{i}.parquet", p, live, None if referenced < 0 else names[referenced], how)
        for i, (p, referenced, how, live) in enumerate(deletes)
    ]
    manifests = []
    for i, entries in enumerate((of_data, of_deletes)):
        with open(folder / f"m{i}.avro", "wb") as f:
            fastavro.writer(f, _ENTRY, entries, codec="deflate")
        manifests.append({"manifest_path": f"file:{folder}/m{i}.avro", "partition_spec_id": 0})
    with open(folder / "list.avro", "wb") as f:
        fastavro.writer(f, _MANIFEST, manifests)
    metadata = TableMetadata(
        local(folder / "v1.metadata.json"),
        {
            "location": str(folder),
            "snapshots": [{"snapshot-id": 1, "manifest-list": f"{folder}/list.avro"}],
            "partition-specs": [{"spec-id": 0, "fields": [{"source-id": 9, "name": "dt", "transform": "identity"}]}],
        },
    )
    files_by_name = {f.name: f for f in snapshot_files(metadata, 1)}
    assert set(files_by_name) == {n for n, (_, live) in zip(names, data, strict=True) if live}
    for number, (partition, live) in enumerate(data):
        if live:
            matching = [
                i
                for i, (p, referenced, _, is_live) in enumerate(deletes)
                if is_live and (referenced == number or (referenced < 0 and p == partition))
            ]
            assert list(files_by_name[names[number]].deletes) == sorted(f"{folder}/d{i}.parquet@0" for i in matching)
            assert files_by_name[names[number]].partition == {9: partition}
            assert files_by_name[names[number]].lower == {1: b"x"}
            assert files_by_name[names[number]].nulls == {}
    (folder / "m1.avro").unlink()
    with pytest.raises(UserError, match=r"snapshot 1 of .* has expired: .*m1\.avro is gone"):
        snapshot_files(metadata, 1)
