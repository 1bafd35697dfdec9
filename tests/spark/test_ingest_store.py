"""Landing files in a bucket of S3, of a lake and a store in folders: they become what files in a folder become."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.installation import s3_dir
from headrace.config.workspace import Workspace
from headrace.errors import IncompleteError, UserError
from headrace.lake.spark.requirements import store_properties
from headrace.lake.spark.session import spark_settings
from headrace.storage import Location, local, location, location_of
from headrace.storage.objects.store import ObjectStore
from tests.ingest_support import D1, D2, make_spec, run, table
from tests.s3_server import BUCKET, KEY, SECRET, s3_server

HEADER = "id,ts,user,price,hour,tags,sizes,note\n"
PEOPLE = {"columns": [{"name": "user", "type": "bigint", "required": True}, {"name": "note", "type": "string"}]}
EXPECTATIONS = {"expectations": {"max_bad_rate": 1}}


@pytest.fixture(scope="module")
def bucket(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Location]:
    """A folder of a bucket that this process, Spark and its tasks reach."""
    pytest.importorskip("obstore")
    if not any(s3_dir().glob("*.jar")):
        pytest.skip("no file system for S3 in build/s3: run `make s3`")
    folder = tmp_path_factory.mktemp("s3")
    assert spark._jvm is not None
    system = spark._jvm.java.lang.System
    account = {"aws.accessKeyId": KEY, "aws.secretAccessKey": SECRET}
    with s3_server(folder) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environ.items():
            patch.setenv(name, value)
            # Of tasks in Python; the JVM has its own since it was started.
            patch.setitem(spark.sparkContext.environment, name, value)
        for name, value in account.items():
            system.setProperty(name, value)
        patch.setenv("HEADRACE_CACHE", str(folder / "cache"))
        patch.setitem(location.STORES, "s3", ObjectStore("s3"))
        reads = Workspace(folder, reads=(f"s3://{BUCKET}/drops",))
        properties = store_properties(reads, server.environ, has_s3a=True)
        with spark_settings(
            spark, {k.removeprefix("spark.hadoop."): v for k, v in properties.items() if ".fs.s3" in k}
        ):
            yield location_of(f"s3://{BUCKET}/drops")
        for name in account:
            system.clearProperty(name)


def line(number: int, ds: str, price: str = "1.5", note: str = "n") -> str:
    return f"e{number},{ds}T{number % 24:02d}:30:00Z,{number},{price},{number % 24},a|b,1|2,{note}\n"


def deliver(root: Location) -> None:
    """Two days of events by Arrow, users by Spark's own reader, notes of several lines by tasks in Python."""
    first = [line(n, D1) for n in range(20)]
    second = [line(n, D2) for n in range(30, 50)]
    files: Mapping[str, bytes] = {
        # Odd values are for Spark's rules, bad ones for the quarantine; the last line ends without a line feed.
        f"{D1}/a b%20c.csv": (HEADER + "".join(first) + line(20, D1, "+2") + line(21, D1, "x") + "bad,").encode(),
        f"{D1}/b.csv.gz": gzip.compress((HEADER + first[0] + line(22, D1, note='"é, 1"')).encode()),
        f"{D2}/a.csv.bz2": bz2.compress((HEADER + "".join(second) + first[1]).encode()),
        f"{D2}/b.csv": b"",
        f"{D1}.done": b"",
        f"{D2}.done": b"",
        "people/users.csv": b"user , note\n 1 , one \n2, two\nx, three\n",
        "people/notes.csv": b'user,note\n1,"two\nlines"\n2,"one, line"\n3\n',
    }
    for name, body in files.items():
        (root / name).put_bytes(body)


def pipeline(root: str) -> Spec:
    events = make_spec(
        {"format": "csv", "path": f"{root}/{{ds}}/*.csv*", "complete": {"marker": f"{root}/{{ds}}.done"}}
    )
    fields = events.model_dump(exclude_unset=True) | {
        "sources": {
            name: {
                "source": {"format": "csv", "path": f"{root}/people/{name}.c?v", option: True},
                "table": PEOPLE | EXPECTATIONS,
            }
            for name, option in (("users", "trim"), ("notes", "multiline"))
        }
    }
    return build_spec(fields)


def loaded(spark: SparkSession, ws: Workspace, root: str) -> dict[str, Any]:
    """All rows, good and bad, and what the manifest says of them."""
    manifest = run(pipeline(root), ws, D2).manifest
    names = ("events", "quarantine", *(f"{name}{end}" for name in ("users", "notes") for end in ("", "_quarantine")))
    contents = {name: table(spark, ws, name) for name in names}
    contents |= {"rows": manifest.rows, "facts": manifest.facts}
    normal: dict[str, Any] = json.loads(json.dumps(contents, default=repr).replace(root, "ROOT"))
    return normal


def test_files_in_a_bucket_become_what_files_in_a_folder_become(
    spark: SparkSession, bucket: Location, tmp_path: Path
) -> None:
    folder = local(tmp_path / "drops")
    for root in (bucket, folder):
        deliver(root)
    ws = Workspace(tmp_path / "of-bucket")
    of_folder = loaded(spark, Workspace(tmp_path / "of-folder"), str(folder))
    of_bucket = loaded(spark, ws, str(bucket))
    assert of_bucket == of_folder
    assert {r["_source_file"] for r in of_bucket["events"]} == {
        f"ROOT/{name}" for name in (f"{D1}/a b%20c.csv", f"{D1}/b.csv.gz", f"{D2}/a.csv.bz2")
    }
    assert [len(of_bucket[name]) for name in ("quarantine", "users", "users_quarantine", "notes_quarantine")] == [
        2,
        2,
        1,
        1,
    ]
    assert [r["note"] for r in of_bucket["notes"]] == ["two\nlines", "one, line"]

    # Nothing is done again, also where the manifest is lost: what was loaded is known by its tags.
    spec = pipeline(str(bucket))
    rerun = run(spec, ws, D2)
    assert rerun.skipped
    assert [i.name for i in rerun.manifest.inputs] == [
        f"{bucket}/{name}" for name in (f"{D1}/*.csv*", f"{D2}/*.csv*", "people/users.c?v", "people/notes.c?v")
    ]
    ws.manifest("shop", D2, "ingest").remove()
    assert run(spec, ws, D2).manifest.outputs == rerun.manifest.outputs

    # A file that is another one is loaded again, with its day.
    (bucket / D1 / "b.csv.gz").put_bytes(gzip.compress((HEADER + line(23, D1)).encode()))
    manifest = run(spec, ws, D2).manifest
    assert manifest.facts["days"] == [D1, D2]
    event_ids = {r["id"] for r in table(spark, ws, "events")}
    assert "e23" in event_ids
    assert "e22" not in event_ids

    # What cannot be read is named by its URI, and nothing of it is loaded.
    (bucket / D1 / "b.csv.gz").put_bytes(gzip.compress(HEADER.encode() * 1000)[:-9])
    with pytest.raises(UserError, match=rf"landing file {bucket}/{D1}/b\.csv\.gz cannot be read: it ends in the"):
        run(spec, ws, D2)
    assert {r["id"] for r in table(spark, ws, "events")} == event_ids
    (bucket / f"{D2}.done").remove()
    with pytest.raises(IncompleteError, match=rf"the marker {bucket}/{D2}\.done is not there"):
        run(spec, Workspace(tmp_path / "other"), D2)
