"""Messages of errors of file systems: one line, and an exit code by who can mend it."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError, stores
from headrace.errors.translate import exit_message
from headrace.lake.delta import data_files as data_file
from headrace.lake.delta.data_files import DataFileWriter
from headrace.lake.spark import session as spark_session
from headrace.storage import local


def os_error(number: int, name: str | None = "/mnt/a") -> OSError:
    return OSError(number, os.strerror(number), name)


@pytest.mark.parametrize(
    ("error", "beginning", "code"),
    [
        (
            os_error(errno.EACCES),
            "/mnt/a: Permission denied. The user of this process must be allowed",
            EXIT_USER_ERROR,
        ),
        (os_error(errno.EROFS), "/mnt/a: Read-only file system. Mount it for writing", EXIT_USER_ERROR),
        (os_error(errno.ESTALE), "/mnt/a: Stale file handle. Its file system is away. Run this again", EXIT_INCOMPLETE),
        (os_error(errno.ETIMEDOUT), "/mnt/a: Connection timed out. Its file system is away. Run", EXIT_INCOMPLETE),
        (os_error(errno.EIO), "/mnt/a: Input/output error. Its disk, or the server of its file system,", EXIT_FAILURE),
        (
            PySparkException(
                "Job aborted due to stage failure: PythonException: Traceback (most recent call last):\n"
                "  File x, line 1, in f\nOSError: [Errno 116] Stale file handle: '/mnt/a'\n\n\tat org.apache.spark.api"
            ),
            "/mnt/a: Stale file handle. Its file system is away. Run this again",
            EXIT_INCOMPLETE,
        ),
    ],
)
def test_what_is_told_of_a_file(error: Exception, beginning: str, code: int) -> None:
    message, exit_code = exit_message(error) or ("", 0)
    assert (message[: len(beginning)], exit_code) == (beginning, code)
    assert "\n" not in message


FULL = "No space left on device"


@pytest.mark.parametrize(
    ("error", "reason", "has_name"),
    [
        (os_error(errno.ENOSPC, "{folder}/a"), FULL, True),
        (os_error(errno.ENOSPC, None), FULL, False),
        (os_error(errno.EDQUOT, None), "Disk quota exceeded", False),
        (os_error(errno.EFBIG, "{folder}/a"), "File too large", True),
        (sqlite3.OperationalError("database or disk is full"), FULL, False),
        (psycopg.errors.DiskFull('could not extend file "base/5/1": No space left on device'), FULL, False),
        (RuntimeError('IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })'), FULL, False),
        # As the JVM says it where a session starts, a task writes, a file is opened, a shuffle is merged.
        (
            PySparkException(
                "An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.\n: "
                "java.nio.file.FileSystemException: {folder}/a: No space left on device\n\tat java.base/sun.nio.fs"
            ),
            FULL,
            True,
        ),
        (
            PySparkException(
                "Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times: java.io.IOException: No space "
                "left on device\n\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)"
            ),
            FULL,
            False,
        ),
        (PySparkException("java.io.FileNotFoundException: {folder}/a (No space left on device)\n\tat x"), FULL, True),
        (
            PySparkException(
                "Job aborted due to stage failure: PythonException: Traceback (most recent call last):\n  File x, line "
                "1, in f\nOSError: [Errno 28] No space left on device: '{folder}/a'\n\n\tat org.apache.spark.api"
            ),
            FULL,
            True,
        ),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}" if isinstance(value, Exception) else None,
)
def test_a_full_disk_is_one_line_with_the_folder_and_what_is_free(
    error: Exception, reason: str, has_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever met it: Python, a library, the JVM."""
    free = {tmp_path: 4096 * 3, Path("/"): 10**12}
    monkeypatch.setattr(stores, "_room", lambda folder: (free[folder], 17))
    error.args = tuple(str(a).replace("{folder}", str(tmp_path)) if isinstance(a, str) else a for a in error.args)
    if isinstance(error, OSError) and error.filename:
        error.filename = error.filename.replace("{folder}", str(tmp_path))
    if isinstance(error, PySparkException):
        error = PySparkException(str(error).replace("{folder}", str(tmp_path)))
    prefix = f"{tmp_path}/a: " if has_name else ""
    expected = f"{prefix}{reason}: 12,288 bytes are free in {tmp_path}. Make room there, then run this again"
    assert exit_message(error, [Path("/"), tmp_path / "not made yet"]) == (expected, EXIT_INCOMPLETE)


def test_a_full_disk_is_told_whatever_an_error_says_that_comes_of_it(tmp_path: Path) -> None:
    try:
        try:
            raise os_error(errno.ENOSPC, str(tmp_path / "a"))
        except OSError as e:
            raise UserError("a is damaged: make it anew") from e
    except UserError as e:
        message, code = exit_message(e) or ("", 0)
    assert message.startswith(f"{tmp_path}/a: {FULL}: ")
    assert code == EXIT_INCOMPLETE


def test_a_full_disk_is_told_where_its_handling_fails_in_other_words(tmp_path: Path) -> None:
    try:
        try:
            raise os_error(errno.ENOSPC, str(tmp_path / "a"))
        finally:
            raise RuntimeError("file metadata is only available after writer close")
    except RuntimeError as e:
        message, code = exit_message(e) or ("", 0)
    assert message.startswith(f"{tmp_path}/a: {FULL}: ")
    assert code == EXIT_INCOMPLETE


def test_what_needs_room_asks_for_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark copies its jars below home as it starts, and a JVM says in traces that it found no room."""
    monkeypatch.setattr(stores, "_room", lambda folder: (12_288, 17))
    stores.require_room(tmp_path / "spark" / "local", 12_288, "Spark's start")
    with pytest.raises(stores.DiskFull) as raised:
        stores.require_room(tmp_path / "spark" / "local", 12_289, "Spark's start")
    assert str(raised.value) == (
        f"{tmp_path}: {FULL}: Spark's start needs 12,289 bytes, and 12,288 bytes are free in {tmp_path}. Make room "
        f"there, then run this again"
    )
    assert raised.value.exit_code == EXIT_INCOMPLETE


def test_spark_does_not_start_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any JVM: a session that began all the same would end this test by its own error."""
    monkeypatch.setattr(stores, "_room", lambda folder: (4096, 17))
    monkeypatch.setattr(spark_session, "require_java", lambda: None)
    monkeypatch.setattr(spark_session.SparkSession, "builder", None)
    with pytest.raises(stores.DiskFull, match=r"Spark's start needs [0-9,]+ bytes, and 4,096 bytes are free in"):
        spark_session._start(Spark(), Workspace(tmp_path), "test")


def test_no_inodes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_room", lambda folder: (4096, 0))
    assert stores.free_in(tmp_path) == f"4,096 bytes and no inodes are free in {tmp_path}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize(
    "write",
    [
        lambda file: file.write_bytes(b"1"),
        lambda file: pq.write_table(pa.table({"a": [1]}), file),
        lambda file: pa.OSFile(str(file), "wb").write(b"1"),
    ],
    ids=["python", "parquet", "arrow"],
)
def test_a_full_device_as_python_and_arrow_meet_it(write: Callable[[Path], object], tmp_path: Path) -> None:
    file = tmp_path / "full"
    file.symlink_to("/dev/full")  # Arrow removes what it could not write
    with pytest.raises(OSError, match=FULL) as raised:
        write(file)
    message, code = exit_message(raised.value, [tmp_path]) or ("", 0)
    assert code == EXIT_INCOMPLETE
    assert FULL in message
    assert " bytes are free in /" in message


def test_a_data_file_that_finds_no_room_ends_by_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's writer fails in other words when it is closed: the first error is what the user hears of."""
    schema = pa.schema([("a", pa.int64())])
    writer = DataFileWriter(local(tmp_path), "2026-03-01", schema, "snappy")
    monkeypatch.setattr(data_file, "ROW_GROUP_ROWS", 1)
    rows = pa.table({"a": np.random.default_rng(0).integers(0, 2**60, 10_000)}, schema)
    previous_limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write() -> None:
        try:
            for _ in range(10):
                writer.add(rows)
            writer.close()
        except BaseException:
            writer.abandon()
            raise

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, previous_limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous_limits)
    assert (exit_message(raised.value) or ("", 0))[1] == EXIT_INCOMPLETE
    assert list((tmp_path / "ds=2026-03-01").iterdir()) == []


@pytest.mark.parametrize(
    "read", [lambda f: f.read_bytes(), lambda f: pa.memory_map(str(f)), lambda f: pq.ParquetFile(f)]
)
def test_of_python_and_of_arrow(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """The error keeps its type. A loop of links stands for an unreadable file: root may read everything."""
    file = tmp_path / "a.parquet"
    file.touch()
    link = tmp_path / "b.parquet"
    link.symlink_to(link)
    with pytest.raises(OSError, match="b\\.parquet") as raised:
        read(link)
    error = raised.value
    assert error.errno == errno.ELOOP
    assert exit_message(error) is None
    # The same error, with the number that another file system would have given.
    error.errno = errno.ESTALE
    assert exit_message(error) == (
        f"{link}: Stale file handle. Its file system is away. Run this again later",
        EXIT_INCOMPLETE,
    )


@pytest.mark.parametrize("is_named", [True, False], ids=["from e", "from None"])
def test_what_cannot_be_read_while_its_file_system_is_away_is_told_as_that(is_named: bool) -> None:
    """Whoever cannot read a file says mostly that it is damaged, and that the user is to make it anew."""
    try:
        try:
            raise os_error(errno.ESTALE)
        except OSError as e:
            raise UserError("a is damaged: make it anew") from e if is_named else None
    except UserError as e:
        message = exit_message(e)
    assert message == ("/mnt/a: Stale file handle. Its file system is away. Run this again later", EXIT_INCOMPLETE)


def test_what_is_damaged_on_a_disk_is_the_users_to_mend() -> None:
    try:
        try:
            raise os_error(errno.EIO)
        except OSError as e:
            raise UserError("a is damaged: make it anew") from e
    except UserError as e:
        message = exit_message(e)
    assert message == ("a is damaged: make it anew", EXIT_USER_ERROR)


@pytest.mark.parametrize(
    "error",
    [
        os_error(errno.ETIMEDOUT, None),  # of a socket
        os_error(errno.EACCES, None),
        os_error(errno.ENOENT),
        OSError("torn"),
        PySparkException(
            "OSError: [Errno 116] Stale file handle: '/mnt/a'\n\nDuring handling of the above exception, another "
            "exception occurred:\n\nTraceback (most recent call last):\nTypeError: of ours\n\n\tat org.apache.spark"
        ),
        TypeError("[Errno 116] Stale file handle: '/mnt/a'"),
    ],
)
def test_what_is_shown_with_its_trace(error: Exception) -> None:
    assert exit_message(error) is None
