"""A store that is away is told as that where what is damaged, gone or changed is told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from headrace.dataset import layout
from headrace.embeddings.checkpoint import saved_rows
from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError
from headrace.errors.translate import exit_message
from headrace.export.triton.two_stage import Catalogue
from headrace.features.arrow import decode
from headrace.features.build import append
from headrace.features.build.stage import BuildFeatures
from headrace.features.workflow import fitted
from headrace.lake.landing import check_days
from headrace.lake.landing.blocks import Part, UnreadableError, blocks, opened
from headrace.lake.landing.delimited import QuotedFields
from headrace.lake.landing.files import LandingFile
from headrace.lake.landing.formats import header_of
from headrace.lake.landing.table_days import net_change
from headrace.lake.tables import folder as table_folder
from headrace.lake.tables import parquet as parquet_files
from headrace.lake.tables.iceberg_metadata import read_metadata
from headrace.models import mapped, predictor
from headrace.publish.tables.iceberg import SnapshotExpiry
from headrace.quality.drift import stage as drift
from headrace.storage import Location, StoreAway, StoreRefused, local
from headrace.storage.objects import calls
from headrace.train.loop import run
from tests.storage_support import memory_home


def away(*args: object, **named: object) -> Any:
    raise StoreAway("s3://b/a: the store is away")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A place whose store does not answer."""
    objects_home = memory_home(monkeypatch, tmp_path / "cache")
    for name in ("get_small", "head", "download", "list_below", "list_level"):
        monkeypatch.setattr(calls, name, away)
    return objects_home


def context(home: Any) -> Any:
    return SimpleNamespace(ws=SimpleNamespace(locate=lambda name: home))


@pytest.mark.parametrize(
    "ask",
    [
        lambda home: LandingFile("a", home / "a", 1, 0).unchanged(),
        lambda home: fitted._metadata(home / "a.parquet"),
        lambda home: fitted._read(home / "a.parquet"),
        lambda home: append.open_base(context(home), SimpleNamespace(name="x")),  # type: ignore[arg-type]
        lambda home: BuildFeatures().verify(
            context(home),
            SimpleNamespace(output=lambda name: SimpleNamespace(name=name)),  # type: ignore[arg-type]
        ),
        lambda home: layout._listed(home, "train", ()),
        lambda home: parquet_files.arrow_reads([SimpleNamespace(path=home / "a.parquet")]),  # type: ignore[list-item]
        lambda home: read_metadata(home / "v1.metadata.json"),
        lambda home: Catalogue.read(home / "items.parquet", "item_id"),
        lambda home: saved_rows._Tensors(home / "a.safetensors"),
        lambda home: LandingFile("a", home / "a", 1, 0).sha256(),
        lambda home: header_of(LandingFile("a.csv", home / "a.csv", 1, 0), QuotedFields(",")),
    ],
    ids=[
        "landing", "metadata", "table", "base", "verify", "listing", "arrow", "iceberg", "catalogue", "rows",
        "digest", "header",
    ],
)  # fmt: skip
def test_what_is_asked_of_a_store_that_is_away(home: Any, ask: Callable[[Any], object]) -> None:
    with pytest.raises(StoreAway):
        ask(home)


def test_the_size_of_a_saved_model(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "needed_models", lambda folder: (folder,))
    with pytest.raises(StoreAway):
        predictor.saved_rows_bytes(home)


def test_the_types_of_a_saved_model(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = SimpleNamespace(state=mapped.WEIGHT, table="t", file="a.safetensors", key="k")
    monkeypatch.setattr(mapped, "read_chain", lambda folder: [(folder, SimpleNamespace(chunks=[chunk]))])
    with pytest.raises(StoreAway):
        mapped.storages(home)


def test_the_times_in_a_file_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark may read times that Arrow does not know; of a file whose store was away for a moment they are unknown."""
    (tmp_path / "a").write_bytes(b"PAR1 of a newer writer PAR1")
    unknown = table_folder._footer(local(tmp_path / "a"), "before", "ts")
    assert (unknown.schema, unknown.bounds) == (None, None)
    monkeypatch.setattr(table_folder, "footer", away)
    with pytest.raises(StoreAway):
        table_folder._footer(local(tmp_path / "a"), "after", "ts")


def test_the_statistics_of_a_day(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SimpleNamespace(path=home / "a.parquet", partition={"ds": "2026-01-01"})
    monkeypatch.setattr(drift, "_statistics", lambda ctx: SimpleNamespace(name="s", version="1"))
    monkeypatch.setattr(drift, "DeltaLog", lambda table: SimpleNamespace(plain_files=lambda version: [file]))
    ctx: Any = SimpleNamespace(**vars(context(home)), spec=SimpleNamespace(pipeline="p", argument="p"), ds="2026-01-01")
    with pytest.raises(StoreAway):
        drift.read_statistics(ctx)


S3A = "java.net.ConnectException: getFileStatus on s3a://b/a: Connection refused"
S3A_REFUSES = (
    "java.nio.file.AccessDeniedException: s3a://b/a: getFileStatus on s3a://b/a: "
    "software.amazon.awssdk.services.s3.model.S3Exception: null (Service: S3, Status Code: 403, Request ID: 1):null"
)
S3A_UNTRUSTED = (
    "org.apache.hadoop.fs.s3a.AWSClientIOException: getFileStatus on s3a://b/a: SdkClientException: Unable to execute "
    "HTTP request: PKIX path building failed"
)


def test_an_older_version_of_a_table_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that VACUUM has taken the files of is passed over; where a store is away or refuses, nothing is known."""
    taken = SimpleNamespace(files="1", table_version="1", rows={"read": 5})
    seen = SimpleNamespace(taken=SimpleNamespace(days={"d": taken}), versions={"d": "2"}, place=None)
    versioned = SimpleNamespace(versioned=True)
    days: Any = SimpleNamespace(snapshot=versioned, days=["d"], seen=seen, source=None, table=None, _rows=None)

    def compare(error: str | Exception) -> dict[str, dict[str, int]]:
        def fail(*args: object) -> None:
            raise PySparkException(error) if isinstance(error, str) else error

        monkeypatch.setattr(check_days, "open_table", fail)
        return check_days.DaysCheck._changes(days, None, {})  # type: ignore[arg-type]

    assert compare("java.io.FileNotFoundException: a.parquet") == {"d": net_change(5, 0)}
    assert compare(UserError("the table has no version 1 any more")) == {"d": net_change(5, 0)}
    for error, beginning, code in (
        (S3A, "s3://b/a: the store is away", EXIT_INCOMPLETE),
        (S3A_REFUSES, "the store refuses Spark s3://b/a: 403", EXIT_USER_ERROR),
        (StoreRefused("s3://b: there is no such bucket"), "s3://b: there is no such bucket", EXIT_USER_ERROR),
        (S3A_UNTRUSTED, "s3://b/a: ", EXIT_FAILURE),
    ):
        with pytest.raises((PySparkException, StoreRefused)) as raised:
            compare(error)
        message, exit_code = exit_message(raised.value) or ("", 0)
        assert (message[: len(beginning)], exit_code) == (beginning, code)


def test_files_of_snapshots_that_went(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files that may not be deleted are named for people; where their store is away, nobody has anything to do."""

    class Failed(Py4JJavaError):
        def __init__(self, message: str) -> None:
            self.message, self.java_exception = message, SimpleNamespace(getMessage=lambda: message)

        def __str__(self) -> str:
            return self.message

    table: Any = SimpleNamespace(currentSnapshot=lambda: None, io=lambda: None)
    monkeypatch.setattr("headrace.publish.tables.iceberg.load_table", lambda spark, name: table)

    class Expiry(SnapshotExpiry):
        def __init__(self, message: str) -> None:
            super().__init__(None, "t", local(tmp_path / "record"))  # type: ignore[arg-type]
            self.message = message

        def _delete(self, io: Any, paths: Any) -> None:
            raise Failed(self.message)

    assert "t cannot be deleted (no permission): see that this host may" in Expiry("no permission").run()
    with pytest.raises(Failed) as raised:
        Expiry(S3A).run()
    assert (exit_message(raised.value) or ("", 0))[1] == EXIT_INCOMPLETE


def test_a_landing_file_that_may_not_be_looked_at_any_more() -> None:
    def refused() -> None:
        raise PermissionError(13, "Permission denied", "/mnt/a")

    file: Any = SimpleNamespace(info=refused)
    with pytest.raises(UserError, match=r"^landing file a cannot be read: Permission denied$"):
        LandingFile("a", file, 1, 0).unchanged()


def test_decoded_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing or torn files are made again; a disk that gives no answer is not passed over."""
    file: Any = SimpleNamespace(size=1)
    assert decode._complete(local(tmp_path), file) is None
    (tmp_path / decode._META).write_text('{"size": ')
    assert decode._complete(local(tmp_path), file) is None
    monkeypatch.setattr(Location, "read_text", lambda self: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        decode._complete(local(tmp_path), file)


def test_a_split_without_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "valid").mkdir()
    (tmp_path / "valid/a.parquet").touch()
    monkeypatch.setattr(layout, "stored_columns", lambda schema, carried: ())
    with pytest.raises(UserError, match="is not a whole Parquet file"):
        layout.open_split(local(tmp_path), "valid", None)  # type: ignore[arg-type]
    monkeypatch.setattr(layout.pq, "read_metadata", away)
    with pytest.raises(StoreAway):
        layout.open_split(local(tmp_path), "valid", None)  # type: ignore[arg-type]


def test_rows_that_a_model_is_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = SimpleNamespace(_collective=SimpleNamespace(world=None), _model=SimpleNamespace(schema=None))
    monkeypatch.setattr(run, "open_split", away)
    with pytest.raises(StoreAway):
        run.Evaluations._unreadable(rank, local(tmp_path))


@pytest.mark.parametrize(
    ("ending", "error", "cause", "is_of_content"),
    [
        (".gz", EOFError("cut"), "it ends in the middle (truncated)", True),
        (".gz", pa.ArrowInvalid("zlib inflate failed"), "its gzip data are damaged", True),
        (".gz", OSError(5, "Input/output error"), "Input/output error", False),
        ("", OSError(5, "Input/output error"), "Input/output error", False),
    ],
)
def test_a_landing_file_that_a_task_reads(
    home: Any, tmp_path: Path, ending: str, error: Exception, cause: str, is_of_content: bool
) -> None:
    with pytest.raises(StoreAway):
        list(blocks(Part(0, home / f"a.csv{ending}"), 1 << 20))
    (tmp_path / f"a.csv{ending}").write_bytes(b"")
    with pytest.raises(UnreadableError) as raised, opened(Part(0, local(tmp_path / f"a.csv{ending}"))):
        raise error
    assert (str(raised.value), raised.value.is_of_content) == (cause, is_of_content)


def test_a_fault_of_the_program_while_a_store_is_away_is_shown_with_its_trace() -> None:
    def while_away(error: Exception) -> Exception:
        try:
            try:
                away()
            except StoreAway:
                raise error  # noqa: B904
        except Exception as e:
            return e

    assert exit_message(while_away(TypeError("of ours"))) is None
    for error in (UserError("damaged"), OSError("torn"), PySparkException("wrapped")):
        assert (exit_message(while_away(error)) or ("", 0))[1] == EXIT_INCOMPLETE
