"""Landing files in a store that is not the lake's: which there are, what they are known by, how they are read."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config import LandingSource, build_spec
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_INCOMPLETE, UserError
from headrace.errors.stores import StoreRefused
from headrace.errors.translate import exit_message
from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing.blocks import Part, blocks, count_lines
from headrace.lake.landing.delimited import QuotedFields
from headrace.lake.landing.files import LandingDay, _sha256, file_patterns, find_files, marker_places
from headrace.lake.landing.formats import header_of
from headrace.lake.landing.load_history import LoadHistory, LoadRecord
from headrace.lake.landing.plan import covered_days, day_files
from headrace.lake.landing.source_context import SourceContext, declared_rows, missing_markers, source_contexts
from headrace.stage import Context
from headrace.storage import Location, StoreAway, location, location_of
from headrace.storage.objects import calls
from headrace.storage.objects import store as objects
from headrace.storage.objects.store import ObjectStore
from tests.ingest_support import D1, D2, make_spec
from tests.storage_support import memory_home


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    """A folder of a bucket in memory, which URIs of S3 name."""
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3",))
    return location_of("s3://bucket/drops")


def source(path: str, **more: object) -> LandingSource:
    return LandingSource.model_validate({"format": "csv", "path": path, **more})


def context(ws: Workspace, path: str, ds: str = D2, **more: Any) -> SourceContext:
    (source_context,) = source_contexts(Context(make_spec({"path": path, **more}), ws, ds))
    return source_context


def put(drops: Location, *names: str, data: bytes = b"x") -> None:
    for name in names:
        (drops / name).put_bytes(data)


def forbidden(operation: str) -> Callable[..., Any]:
    def call(*args: object, **named: object) -> Any:
        raise AssertionError(f"{operation} was asked for")

    return call


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("s3://bucket/drops/{ds}/*.csv.gz", ["a.csv.gz", "b?.csv.gz"]),
        ("s3a://bucket/drops/{ds}/a.csv.gz", ["a.csv.gz"]),
        ("s3://bucket/drops/{ds}/b?.csv.gz", ["b?.csv.gz"]),
        ("s3://bucket/drops/{ds}/[a-b]*", ["a.csv.gz", "b?.csv.gz"]),
        ("s3://bucket/*/{ds}/**/*.csv.gz", ["a.csv.gz", "b?.csv.gz", "deep/c#1.csv.gz"]),
        ("s3://bucket/drops/{ds}/deep/c#1.csv.gz", ["deep/c#1.csv.gz"]),
        ("s3://bucket/drops/{ds}/none.csv.gz", []),
    ],
)
def test_files_of_a_day_are_named_by_their_uris(drops: Location, ws: Workspace, path: str, names: list[str]) -> None:
    day = drops / D1
    put(day, "a.csv.gz", "b?.csv.gz", "deep/c#1.csv.gz", ".a.csv.gz", "_a.csv.gz", "a.csv.gz.tmp", "truth/x.csv.gz")
    put(drops / D2, "a.csv.gz")
    listing = find_files(source(path), ws, D1)
    assert [f.name for f in listing.files] == [f"s3://bucket/drops/{D1}/{name}" for name in names]
    assert [f.path for f in listing.files] == [day / name for name in names]
    assert all(f.unchanged() for f in listing.files)


def test_files_of_a_lake_in_a_store(drops: Location, tmp_path: Path) -> None:
    ws = Workspace(tmp_path, lake_uri=str(drops))
    put(drops, "in/a?.csv", "in/ab.csv", "in/ac.csv")
    assert [f.name for f in find_files(source("in/a?.csv"), ws, D1).files] == ["in/a?.csv", "in/ab.csv", "in/ac.csv"]
    assert list(map(str, file_patterns(source("in/*"), ws, D1)[:1])) == ["s3://bucket/drops/in/*"]
    assert marker_places("../done/{ds}", ws, D1)[0] == location_of(f"s3://bucket/done/{D1}")


def test_a_path_may_be_a_file_uri(ws: Workspace, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "x1.csv").write_text("x")
    listing = find_files(source(f"file://{tmp_path}/a%20b/x?.csv"), ws, D1)
    assert [f.name for f in listing.files] == [f"{tmp_path}/a b/x1.csv"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://me:secret@bucket/{ds}/*.csv", "does not belong in a URI"),
        ("s3://buck*/{ds}/x.csv", r"write s3://BUCKET/FOLDER"),
        ("s3://bucket/../x.csv", r"write s3://BUCKET/FOLDER"),
        ("ftp://host/x.csv", "knows no store of ftp:"),
        ("", "is empty"),
    ],
)
def test_what_is_no_place(path: str, message: str) -> None:
    for keys in ({"path": path}, {"path": "in/*", "complete": {"marker": path}}):
        with pytest.raises(ValidationError, match=message) as raised:
            source(**keys)  # type: ignore[arg-type]
        assert "secret@" not in str(raised.value.errors(include_input=False))


def test_a_day_is_listed_by_questions_that_do_not_grow_with_its_files(
    drops: Location, ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(drops / D1, *(f"{k}.csv" for k in range(100)), data=b"12")
    for name in ("head", "list_level", "download"):
        monkeypatch.setattr(calls, name, forbidden(name))
    listing = find_files(source("s3://bucket/drops/{ds}/*"), ws, D1)
    assert (len(listing.files), listing.size) == (100, 200)


def record(day: LandingDay) -> LoadRecord:
    return LoadRecord(
        **{"ds": day.ds, "key": "k", "declared": "d", "judged": "j", "rows": {}},
        files=[[f.name, f.size, f.sha256()] for f in day.files],
        modified={f.name: f.mtime_ns for f in day.files},
        tags={f.name: f.tag for f in day.files if f.tag},
    )


def test_a_file_is_read_again_where_its_tag_is_another(
    drops: Location, ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(drops / D1, "a.csv", "b.csv")

    def listed() -> LandingDay:
        return find_files(source("s3://bucket/drops/{ds}/*"), ws, D1)

    loaded = record(listed())
    assert LoadRecord(**{k: v for k, v in vars(loaded).items() if k != "version"}) == loaded
    with monkeypatch.context() as patch:
        for name in ("get_small", "get_range", "download"):
            patch.setattr(calls, name, forbidden(name))
        _sha256.cache_clear()
        relisted = day_files(listed(), loaded)
        assert not relisted.is_new
        # A listing and a look may tell the time differently: the tag is what counts.
        assert not day_files(listed(), replace(loaded, modified=dict.fromkeys(loaded.modified, 1))).is_new
    first_listed = listed().files[0]
    put(drops / D1, "a.csv")  # the same content, written anew
    again_listed = listed().files[0]
    assert not replace(first_listed, mtime_ns=again_listed.mtime_ns).unchanged()
    assert replace(again_listed, mtime_ns=1).unchanged()
    assert not day_files(listed(), loaded).is_new
    put(drops / D1, "a.csv", data=b"y")
    changed = day_files(listed(), loaded)
    assert changed.unchanged == {f"s3://bucket/drops/{D1}/b.csv"}
    (drops / D1 / "a.csv").remove()
    assert day_files(listed(), loaded).purged == (f"s3://bucket/drops/{D1}/a.csv",)


def test_a_record_of_an_older_release_knows_the_time_alone(drops: Location, ws: Workspace) -> None:
    put(drops / D1, "a.csv")
    day = find_files(source("s3://bucket/drops/{ds}/*"), ws, D1)
    assert not day_files(day, replace(record(day), files=[[day.files[0].name, 1, "-"]], tags={})).is_new


def test_a_file_that_is_gone_is_named(drops: Location, ws: Workspace) -> None:
    put(drops / D1, "a.csv")
    (file,) = find_files(source("s3://bucket/drops/{ds}/*"), ws, D1).files
    file.path.remove()
    assert not file.unchanged()
    message = rf"^landing file s3://bucket/drops/{D1}/a\.csv cannot be read: there is no file"
    for read in (file.sha256, lambda: header_of(file, QuotedFields(","))):
        with pytest.raises(UserError, match=message):
            read()


@pytest.mark.parametrize(("ending", "columns", "most"), [("", 3, 1), ("", 9_000, 2), (".gz", 3, 1)])
def test_a_header_costs_the_beginning_of_a_file(
    drops: Location, ws: Workspace, monkeypatch: pytest.MonkeyPatch, ending: str, columns: int, most: int
) -> None:
    names = [f"column {k}" for k in range(columns)]
    data = f"{','.join(names)}\n".encode() + b"".join(hashlib.sha256(b"%d" % k).digest() for k in range(10_000))
    put(drops / D1, f"a.csv{ending}", data=gzip.compress(data) if ending else data)
    (file,) = find_files(source("s3://bucket/drops/{ds}/*"), ws, D1).files
    sizes, get_range = list[int](), calls.get_range

    def ranged(bucket: Any, key: str, start: int, size: int) -> bytes:
        sizes.append(size)
        return get_range(bucket, key, start, size)

    monkeypatch.setattr(calls, "get_range", ranged)
    for name in ("get_small", "download"):
        monkeypatch.setattr(calls, name, forbidden(name))
    assert list(header_of(file, QuotedFields(","))) == names
    assert sizes == [64 << 10] * len(sizes)
    assert len(sizes) <= most


def test_a_header_must_be_utf_8_and_lines_behind_it_need_not(drops: Location, ws: Workspace) -> None:
    latin, utf8 = "é,b\n".encode("latin-1"), "é,b\n".encode()
    put(drops / D1, "a.csv", data=utf8 + latin)
    put(drops / D1, "b.csv", data=latin + utf8)
    good, bad = find_files(source("s3://bucket/drops/{ds}/*"), ws, D1).files
    assert header_of(good, QuotedFields(",")) == ("é", "b")
    with pytest.raises(UserError, match=r"b\.csv: its first line, the header, is not UTF-8 text$"):
        header_of(bad, QuotedFields(","))


def test_markers_and_control_files(drops: Location, ws: Workspace) -> None:
    complete = {
        "success_file": "_SUCCESS",
        "marker": "s3://bucket/drops/done/{ds}",
        "control": {"path": "s3://bucket/drops/{ds}/rows.json", "key": "rows"},
    }
    landing_source = source("s3://bucket/drops/{ds}/*", complete=complete)
    assert missing_markers(landing_source, ws, D1) == [
        f"_SUCCESS is not in s3://bucket/drops/{D1}",
        f"the marker s3://bucket/drops/done/{D1} is not there",
        f"the control file s3://bucket/drops/{D1}/rows.json is not there",
    ]
    put(drops, f"{D1}/_SUCCESS", f"done/{D1}", f"{D1}/a.csv")
    put(drops, f"{D1}/rows.json", data=b'{"rows": 7}')
    assert missing_markers(landing_source, ws, D1) == []
    assert declared_rows(landing_source, ws, D1) == 7
    assert [f.path.name for f in find_files(landing_source, ws, D1).files] == ["a.csv"]
    # A marker may be elsewhere than the files.
    marked_source = source("in/{ds}/*", complete={"marker": "s3://bucket/drops/done/{ds}"})
    assert missing_markers(marked_source, ws, D1) == []


def test_inputs_are_named_by_the_uri(drops: Location, ws: Workspace) -> None:
    assert context(ws, "s3://bucket/drops/{ds}/*.gz").input_name(D1) == f"s3://bucket/drops/{D1}/*.gz"
    assert context(ws, "in/{ds}/*.gz").input_name(D1) == f"landing/shop/{D1}"
    assert context(ws, "/in/{ds}/*.gz").input_name(D1) == f"landing/shop/{D1}"


def test_what_is_read_is_reached_by_the_workspace_of_the_pipeline(tmp_path: Path) -> None:
    spec = make_spec({"path": "s3://bucket/{ds}/?.gz", "complete": {"marker": "hdfs://host:1/{ds}"}})
    users = {"source": {"format": "csv", "path": "users.csv"}, "table": spec.table.model_dump()}
    shops = {"source": {"format": "csv", "path": "gs://bucket/shops.csv"}, "table": spec.table.model_dump()}
    sources = {"users": users, "shops": shops}
    ws = Workspace(tmp_path).of(build_spec({**spec.model_dump(exclude_unset=True), "sources": sources}))
    assert ws.reads == ("s3://bucket/{ds}/?.gz", "hdfs://host:1/{ds}", "gs://bucket/shops.csv")
    assert [p.scheme for p in ws.external_places] == ["s3", "hdfs", "gs"]


def no_files(ws: Workspace, path: str) -> str:
    ctx = context(ws, path)
    with pytest.raises(UserError) as raised:
        covered_days(ctx, LoadHistory(DeltaLog(ctx.events)))
    return str(raised.value)


def test_no_files_names_the_pattern_and_the_key(drops: Location, ws: Workspace) -> None:
    assert no_files(ws, "s3://bucket/drops/{ds}/*").startswith(
        f"no landing files for {D2} match s3://bucket/drops/{D2}/*; put them there, or change source.path"
    )


def test_what_the_store_refuses_names_the_key(drops: Location, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(bucket: Any, prefix: str) -> Any:
        raise StoreRefused(f"the store refuses s3://bucket/{prefix}: denied")

    monkeypatch.setattr(calls, "list_below", refused)
    assert no_files(ws, "s3://bucket/drops/{ds}/*") == (
        "source.path or source.complete: the store refuses s3://bucket/drops/2026-01-31: denied"
    )


def test_a_store_that_is_away_is_no_users_mistake(
    drops: Location, ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*args: object) -> Any:
        raise StoreAway("s3://bucket/drops: the store is away")

    put(drops / D2, "a.csv")
    ctx = context(ws, "s3://bucket/drops/{ds}/*")
    for name in ("get_small", "list_below"):  # where a file's checksum is asked for, and where there is no listing
        monkeypatch.setattr(calls, name, away)
        with pytest.raises((UserError, StoreAway)) as raised:
            covered_days(ctx, LoadHistory(DeltaLog(ctx.events)))
        assert exit_message(raised.value) == ("s3://bucket/drops: the store is away", EXIT_INCOMPLETE)


def test_credentials_for_a_part_of_a_bucket(drops: Location, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of published folders, which are looked for above the files, too, need not be readable."""
    put(drops / D1, "a.csv", "_SUCCESS")

    def only_drops(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(bucket: Any, key: str, *args: Any) -> Any:
            if not f"{key}/".startswith("drops/"):
                raise StoreRefused(f"the store refuses {key}")
            return call(bucket, key, *args)

        return checked

    for name in ("get_small", "head", "list_below", "list_level"):
        monkeypatch.setattr(calls, name, only_drops(getattr(calls, name)))
    monkeypatch.setitem(location.STORES, "s3", ObjectStore("s3", location.STORES["s3"]._open_bucket))  # type: ignore[attr-defined]
    landing_source = source(
        "s3://bucket/drops/*/*", complete={"success_file": "_SUCCESS", "marker": "s3://bucket/drops/done"}
    )
    assert missing_markers(landing_source, ws, D1) == [
        "_SUCCESS is not in s3://bucket/drops",
        "the marker s3://bucket/drops/done is not there",
    ]
    assert [f.path for f in find_files(landing_source, ws, D1).files] == [drops / D1 / "a.csv"]
    with pytest.raises(StoreRefused):
        find_files(source("s3://bucket/*/*"), ws, D1)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("small", [True, False], ids=["one-request", "ranges"])
def test_lines_are_read_without_a_copy_on_the_host(
    drops: Location, monkeypatch: pytest.MonkeyPatch, ending: str, small: bool
) -> None:
    lines = [f"{k},{hashlib.sha256(b'%d' % k).hexdigest()}\n".encode() for k in range(3000)]
    data = b"".join(lines)
    put(drops, f"a.csv{ending}", data=gzip.compress(data) if ending else data)
    file, size = drops / f"a.csv{ending}", len(data)
    if not small:
        monkeypatch.setattr(objects, "_SMALL", 1)
        monkeypatch.setattr(objects, "BLOCK", 10_000)
        monkeypatch.setattr(calls, "get", forbidden("a whole file"))
    monkeypatch.setattr(calls, "download", forbidden("a copy"))
    edges = [0, size // 3, size] if not ending else [0, None]
    texts, first = [], 1
    for start, end in pairwise(edges):
        part = Part(0, file, start or 0, end, first)
        of_part = list(blocks(part, 1 << 14))
        assert of_part[0].first_line == first
        texts += [line.as_py() for block in of_part for line in block.lines]
        first += sum(map(len, of_part))
        if end is not None:
            assert count_lines(part) == sum(map(len, of_part))
    assert texts == lines
