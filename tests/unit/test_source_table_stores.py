"""Source tables in a store of objects: files, days and places as of the same table on a disk, and what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import TableSource
from headrace.config.source import SourceDay
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.arrow.decode import LakeFile
from headrace.lake.delta.log import DeltaLog, commit_times
from headrace.lake.landing.files import day_folders
from headrace.lake.tables.opened import find_table, open_table, table_name
from headrace.lake.tables.parquet import arrow_reads
from headrace.lake.tables.snapshot import Snapshot, TablePlace
from headrace.storage import Location, local, missing
from headrace.storage.objects import calls
from tests.source_table_support import make_spec
from tests.storage_support import memory_home

START = datetime(2026, 3, 1, tzinfo=UTC)
DAYS = ["2026-03-01", "2026-03-02", "2026-03-03"]
#: The calls that look into a store.
CALLS = ("get_small", "get_range", "head", "download", "list_below", "list_level")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    """A bucket by its s3:// URIs."""
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3",))
    return Location(PurePosixPath("/bucket"), "s3")


@pytest.fixture
def store_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, key) of all that a store is asked for."""
    noted_calls: list[tuple[str, str]] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: Any, key: str, *args: Any) -> Any:
            noted_calls.append((name, key))
            return real(store, key, *args)

        return call

    for name in CALLS:
        monkeypatch.setattr(calls, name, noted(name, getattr(calls, name)))
    return noted_calls


def rows_of(day: int, rows: int = 3) -> pa.Table:
    times = [START + timedelta(days=day, hours=k) for k in range(rows)]
    return pa.table({"id": list(range(rows)), "ts": pa.array(times, pa.timestamp("us", "UTC"))})


def write(folder: Path, form: str) -> None:
    """Three days, each a version and a file; a name of a partition that a URI spells otherwise."""
    for day, ds in enumerate(DAYS):
        rows = rows_of(day).append_column("what kind", pa.array(["a b"] * 3))
        if form == "delta":
            deltalake.write_deltalake(str(folder), rows, mode="append", partition_by=["what kind"])
        else:
            path = folder / f"dt={ds}" / "what kind=a b" / "part.parquet"
            path.parent.mkdir(parents=True)
            pq.write_table(rows.drop(["what kind"]), path)


def opened(folder: Location, form: str, **day: Any) -> Snapshot:
    spec = make_spec({"format": form, "path": str(folder), "day": day})
    assert isinstance(spec.source, TableSource)
    place = find_table(spec.source, Workspace(Path("/nowhere")), None)
    assert place == TablePlace(form, str(folder))
    return open_table(spec.source, spec.table, place, {})


@pytest.mark.parametrize("form", ["delta", "parquet"])
def test_files_and_days_are_those_of_the_table_on_a_disk(bucket: Location, tmp_path: Path, form: str) -> None:
    write(tmp_path / "events", form)
    remote = bucket / "lake of others" / "events"
    remote.copy_from(local(tmp_path / "events"))
    local_table, remote_table = (opened(folder, form, time="ts") for folder in (local(tmp_path / "events"), remote))
    assert [(f.name, f.size, f.first, f.last, f.partition, f.may_lack_days) for f in remote_table.files] == [
        (f.name, f.size, f.first, f.last, f.partition, f.may_lack_days) for f in local_table.files
    ]
    assert [f.first for f in sorted(remote_table.files, key=lambda f: f.first)] == DAYS
    assert [f.path.read_bytes() for f in remote_table.files] == [f.path.read_bytes() for f in local_table.files]
    assert remote_table.day_versions(DAYS).keys() == local_table.day_versions(DAYS).keys() == set(DAYS)
    assert arrow_reads(remote_table.files)
    removed = remote_table.files[-1]
    assert remote_table.lost(removed.first) is None
    (remote / removed.path.below(remote)).remove()
    assert remote_table.lost(removed.first) == f"{removed.path} is gone"


def test_objects_that_stand_for_folders_are_no_files(bucket: Location, tmp_path: Path) -> None:
    """Consoles and many writers put `events/day=1/`, which comes without its slash from a listing."""
    write(tmp_path / "events", "parquet")
    remote = bucket / "events"
    remote.copy_from(local(tmp_path / "events"))
    expected = [f.name for f in opened(remote, "parquet", time="ts").files]
    (remote / f"dt={DAYS[0]}").put_text("")
    assert remote.infos()[f"dt={DAYS[0]}"].size == 0
    assert [f.name for f in opened(remote, "parquet", time="ts").files] == expected
    assert len(expected) == 3


@pytest.mark.parametrize("form", ["delta", "parquet"])
def test_nothing_beside_the_table_is_asked_for(
    bucket: Location, tmp_path: Path, form: str, store_calls: list[tuple[str, str]]
) -> None:
    """Somebody who may read the table need not be allowed to look beside it."""
    write(tmp_path / "events", form)
    (bucket / "a" / "events").copy_from(local(tmp_path / "events"))
    store_calls.clear()
    table = opened(bucket / "a" / "events", form, time="ts")
    assert table.day_versions(DAYS)
    assert arrow_reads(table.files)
    assert table.lost(DAYS[0]) is None
    assert all(f.path.local_path().stat().st_size == f.size for f in table.files)
    assert store_calls
    assert [key for _, key in store_calls if not key.startswith("a/events")] == []
    # headrace's own lists of files.
    assert [key for _, key in store_calls if ".headrace" in key] == []


def test_of_parquet_files_the_footers_are_fetched(
    bucket: Location, tmp_path: Path, store_calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is listed once, however many files it has."""
    rows = pa.table({"ts": rows_of(0, 100_000)["ts"]})
    (tmp_path / "events").mkdir()
    for name in ("a", "b", "c"):
        pq.write_table(rows, tmp_path / "events" / f"{name}.parquet", compression="none", use_dictionary=False)
    (bucket / "events").copy_from(local(tmp_path / "events"))
    sizes = []
    ranged = calls.get_range

    def counted(store: Any, key: str, start: int, size: int) -> bytes:
        sizes.append(size)
        return ranged(store, key, start, size)

    monkeypatch.setattr(calls, "get_range", counted)
    store_calls.clear()
    files = opened(bucket / "events", "parquet", time="ts").files
    assert [f.size > 500_000 for f in files] == [True] * 3
    assert [(f.first, f.may_lack_days) for f in files] == [(DAYS[0], False)] * 3
    assert [name for name, _ in store_calls if name.startswith("list")] == ["list_below"]
    assert not [name for name, _ in store_calls if name in ("get_small", "download")]
    assert sum(sizes) <= 3 * (64 << 10)


def test_a_file_is_another_one_where_its_content_is(bucket: Location, tmp_path: Path) -> None:
    """Both files have the same size, and the time of the same second."""
    folder = bucket / "events"
    (folder / "a.parquet").put_bytes(b"PAR1 one PAR1")
    first = opened(folder, "parquet", time="ts").day_versions(DAYS)
    (folder / "b.parquet").put_bytes(b"PAR1 two PAR1")
    (folder / "b.parquet").remove()
    assert opened(folder, "parquet", time="ts").day_versions(DAYS) == first
    (folder / "a.parquet").put_bytes(b"PAR1 two PAR1")
    assert opened(folder, "parquet", time="ts").day_versions(DAYS) != first


def test_a_relative_path_is_below_the_lake(bucket: Location, tmp_path: Path) -> None:
    write(tmp_path / "events", "delta")
    (bucket / "lake" / "theirs" / "events").copy_from(local(tmp_path / "events"))
    ws = Workspace(tmp_path / "home", lake_uri="s3a://bucket/lake")
    source = TableSource(format="delta", path="theirs/events", day=SourceDay(time="ts"))
    place = find_table(source, ws, None)
    assert place == TablePlace("delta", "s3://bucket/lake/theirs/events")
    assert table_name(source, ws, place) == "theirs/events"
    elsewhere = TableSource(format="delta", path="s3a://bucket/lake2/events")
    place = find_table(elsewhere, ws, None)
    assert place == TablePlace("delta", "s3://bucket/lake2/events")
    assert table_name(elsewhere, ws, place) == "s3://bucket/lake2/events"
    assert ws.locate("s3://bucket/lake2/events") == bucket / "lake2" / "events"
    # On a disk it is below the home, as before.
    home_ws = Workspace(tmp_path)
    place = find_table(TableSource(format="delta", path="events"), home_ws, None)
    assert place == TablePlace("delta", str(tmp_path / "events"))
    assert table_name(source, home_ws, place) == "events"


def test_success_files_of_a_folder_in_a_store(bucket: Location, ws: Workspace) -> None:
    source = TableSource(format="parquet", path="s3a://bucket/t", day=SourceDay(partition="dt"))
    folders = day_folders(source, ws, "2026-03-01")
    assert [str(f) for f in folders] == ["s3://bucket/t/dt=2026-03-01", "s3://bucket/t/dt=20260301"]


def test_versions_by_their_times(bucket: Location, tmp_path: Path, store_calls: list[tuple[str, str]]) -> None:
    write(tmp_path / "events", "delta")
    remote = bucket / "events"
    for name in sorted((tmp_path / "events" / "_delta_log").glob("*.json")):
        (remote / "_delta_log" / name.name).put_bytes(name.read_bytes())
    log = DeltaLog(remote.as_plain())
    store_calls.clear()
    times = commit_times(log)
    assert list(times) == [0, 1, 2]
    assert [k for k, _ in store_calls if k == "head"] == []
    newest = datetime.fromtimestamp(times[1] / 1000, UTC).isoformat()
    source = TableSource(format="delta", path=str(remote), as_of=newest)
    table = open_table(
        source, make_spec({"format": "delta", "path": str(remote)}).table, TablePlace("delta", str(remote)), {}
    )
    assert table.pin({}) == "1"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("delta", "there is no Delta table at s3://bucket/none; change source.path"),
        ("parquet", "there is no folder s3://bucket/none; change source.path"),
        ("iceberg", "there is no Iceberg table at s3://bucket/none; change source.path"),
    ],
)
def test_a_table_that_is_not_there(bucket: Location, form: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _ = opened(bucket / "none", form, time="ts").files


def test_a_file_that_is_not_there(bucket: Location) -> None:
    places = [bucket / f"{n}" for n in range(40)]
    for place in places:
        place.put_text("")
    assert missing(places) is None
    assert missing([]) is None
    places[7].remove()
    places[9].remove()
    assert missing(places) == places[7]


def test_row_groups_of_a_file_that_was_replaced_are_decoded_again(tmp_path: Path) -> None:
    """Another file of the same size stands under its name."""
    file = LakeFile(local(tmp_path / "a.parquet"), 7, "a.parquet", "7@1")
    assert file.key != LakeFile(file.path, 7, "a.parquet", "7@2").key
    assert file.key != LakeFile(file.path, 7, "a.parquet").key
