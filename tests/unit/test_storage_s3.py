"""The store of objects against a server of S3: what a store in memory cannot show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import create_table
from headrace.lake.landing.files import find_files
from headrace.lake.landing.plan import covered_days
from headrace.lake.landing.source_context import source_contexts
from headrace.stage import Context
from headrace.stage.manifest import Manifest
from headrace.storage import Location, location
from headrace.storage.objects.store import ObjectStore
from tests.ingest_support import D1, make_spec
from tests.s3_server import BUCKET, SECRET, S3Server, s3_server
from tests.storage_support import left_over

pytestmark = [pytest.mark.jvm, pytest.mark.service, pytest.mark.extra]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("obstore")
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def home(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(location.STORES, "s3", ObjectStore("s3"))
    return Location(PurePosixPath(f"/{BUCKET}/{tmp_path.name}"), "s3")


def test_folders_files_and_copies(home: Location) -> None:
    large = os.urandom(12 << 20)  # more than one part of an upload
    for text in ("old", "new"):
        with (home / "model").new_folder() as folder:
            (folder / "ds=2026-01-01" / "a b%20c.json").put_text(text)
            with (folder / "large").new_file() as path:
                path.write_bytes(large)
            assert (home / "model").exists() == (text == "new")
        assert (home / "model" / "ds=2026-01-01" / "a b%20c.json").read_text() == text
    assert [f.below(home) for f in home.files()] == ["model/ds=2026-01-01/a b%20c.json", "model/large"]
    assert (home / "model" / "large").local_path().read_bytes() == large
    assert (home / "model" / "large").size() == len(large)
    assert [p.below(home) for p in (home / "model" / "*" / "a*").glob()] == ["model/ds=2026-01-01/a b%20c.json"]
    assert left_over(home) == []
    (home / "model").remove()
    assert home.entries() == []
    assert left_over(home) == []


def test_of_many_writers_of_a_new_file_one_wins(home: Location) -> None:
    for n in range(10):
        file = home / f"{n:020d}.json"
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(file.put_new_text, map(str, range(8)))) == 1


def test_what_the_store_refuses_is_told_without_secrets(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such bucket"):
        (Location(PurePosixPath("/elsewhere/home"), "s3") / "x").put_text("")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}-of-nobody")
    monkeypatch.setitem(location.STORES, "s3", ObjectStore("s3"))
    with pytest.raises(UserError, match="the store refuses") as refused:
        (home / "x").read_text()
    assert SECRET not in str(refused.value)


def test_keys_of_a_profile(home: Location, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (home / "x").put_text("1")
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    file = tmp_path / "credentials"
    file.write_text("[team]\n" + "".join(f"{name.lower()} = {value}\n" for name, value in keys.items()))
    for name in keys:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.setitem(location.STORES, "s3", ObjectStore("s3"))
    assert (home / "x").read_text() == "1"


def test_landing_files_of_a_bucket(home: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ws, drops = Workspace(tmp_path / "home"), home / "drops"
    for name in ("a b%20c.csv", "d#1.csv"):
        (drops / D1 / name).put_text("x")
    files = find_files(make_spec({"path": f"{drops}/{{ds}}/*"}).source, ws, D1).files  # type: ignore[arg-type]
    assert [f.name for f in files] == [f"{drops}/{D1}/a b%20c.csv", f"{drops}/{D1}/d#1.csv"]
    # A listing and a look at the file tell the same of it.
    assert all(f.unchanged() and f.tag for f in files)
    (drops / D1 / "d#1.csv").put_text("y")
    assert [f.unchanged() for f in files] == [True, False]

    def refused(path: str) -> str:
        (ctx,) = source_contexts(Context(make_spec({"path": path, "catch_up_days": 0}), ws, D1))
        with pytest.raises(UserError) as raised:
            covered_days(ctx, ctx.history())
        assert raised.value.exit_code == 2
        assert SECRET not in str(raised.value)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert refused(f"{drops}/{{ds}}/*.gz").startswith(f"no landing files for {D1} match {drops}/{D1}/*.gz; put them")
    assert refused("s3://elsewhere/{ds}/*") == (
        f"source.path or source.complete: s3://elsewhere/{D1}: there is no such bucket, and headrace makes none"
    )
    assert refused("s3://elsewhere/{ds}/a.csv") == (
        f"source.path or source.complete: s3://elsewhere/{D1}/a.csv: there is no such bucket, and headrace makes none"
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}-of-nobody")
    monkeypatch.setitem(location.STORES, "s3", ObjectStore("s3"))
    assert refused(f"{drops}/{{ds}}/*").startswith("source.path or source.complete: the store refuses s3://")


_HOLD = """
import sys
from pathlib import PurePosixPath
from headrace.lake.delta.transaction import Transaction
from headrace.stage.manifest import Manifest
from headrace.stage import Context
from headrace.storage import LeaseLost, Location
from headrace.storage.lease import Held
from headrace.storage.objects import lease as leases

leases.SECONDS, leases.SKEW_SECONDS = 1.0, 0.5
lock = Location(PurePosixPath(sys.argv[1]), "s3")
while True:
    try:
        with lock.lease() as lease:
            print(lease.holder.token, flush=True)
            lease.check()
            sys.stdin.readline()  # it is here that it stands still
            transaction = Transaction(lock.parent / "table", fence=lease.fence)
            manifest = Manifest(stage="train", pipeline="p", ds="d", key=sys.argv[2], spec_hash="s")
            for commit in (
                lease.check,
                lambda: transaction.replace("ds", ["d1"], [], sys.argv[2]),
                lambda: manifest.save(lock.parent / "train.json", [lease.fence]),
            ):
                try:
                    commit()
                    print("done", flush=True)
                except LeaseLost:
                    print("lost", flush=True)
        break
    except Held as e:
        print(f"waits for {e}", flush=True)
        sys.stdin.readline()
"""


def test_a_holder_that_is_paused_and_one_that_takes_over(home: Location) -> None:
    """Two processes, as on two hosts: one stands still between its look at the lease and its commits, and wakes up."""
    create_table(home / "table", [{"name": "ds", "type": "string", "nullable": True, "metadata": {}}], ["ds"])

    def start(name: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", _HOLD, str(home.path / "lock"), name]
        return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    def next_line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    first_process = start("one")
    first = int(next_line(first_process))
    second_process = start("other")
    try:
        assert next_line(second_process).startswith(f"waits for process {first_process.pid} on ")
        first_process.send_signal(signal.SIGSTOP)
        while True:
            ask(second_process)
            answer = next_line(second_process)
            if not answer.startswith("waits for"):
                break
        assert int(answer) == first + 1
        ask(second_process)
        assert [next_line(second_process) for _ in range(3)] == ["done"] * 3
        assert second_process.wait() == 0
        first_process.send_signal(signal.SIGCONT)
        ask(first_process)
        assert [next_line(first_process) for _ in range(3)] == ["lost"] * 3
        assert first_process.wait() == 0
        assert [text for _, text in DeltaLog(home / "table").user_metadata()] == ["other"]
        manifest = Manifest.load(home / "train.json")
        assert manifest is not None
        assert manifest.key == "other"
    finally:
        for process in (first_process, second_process):
            process.kill()
            process.wait()


def test_a_workspace_in_s3_reads_a_log_of_delta(home: Location, tmp_path: Path) -> None:
    """One commit stands of those that eight processes want to make under one number."""
    ws = Workspace(tmp_path / "home", lake_uri=str(home / "lake"), store_uri=str(home / "store"))
    table = ws.table("clicks", "events")
    assert str(table) == f"{home}/lake/lake/clicks/events"
    assert ws.locate(ws.name_of(table)) == table
    assert ws.scratch.scheme == "file"
    assert ws.spark_local.local_path() == tmp_path / "home" / "spark"
    metadata = '{"metaData":{"id":"x","format":{"provider":"parquet","options":{}},"schemaString":"{}",'
    metadata += '"partitionColumns":[],"configuration":{},"createdTime":0}}\n'
    (table / "_delta_log" / f"{0:020d}.json").put_new_text(
        '{"protocol":{"minReaderVersion":1,"minWriterVersion":2}}\n' + metadata
    )

    def add(n: int) -> bool:
        file = {"path": f"{n}.parquet", "partitionValues": {}, "size": 1, "modificationTime": 0, "dataChange": True}
        return (table / "_delta_log" / f"{1:020d}.json").put_new_text(json.dumps({"add": file}) + "\n")

    with ThreadPoolExecutor(8) as pool:
        won = [n for n, has_won in enumerate(pool.map(add, range(8))) if has_won]
    assert len(won) == 1
    state = DeltaLog(table).state(1)
    assert state is not None
    assert [str(f.path) for f in state.data_files(table)] == [f"{table}/{won[0]}.parquet"]
