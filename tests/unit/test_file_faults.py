"""What errors of file systems are told as: one line, and an exit code by who can do something about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError
from headrace.lake.told_errors import told


def of(number: int, name: str | None = "/mnt/a") -> OSError:
    return OSError(number, os.strerror(number), name)


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (of(errno.EACCES), "/mnt/a: Permission denied. The user of this process must be allowed", EXIT_USER_ERROR),
        (of(errno.EROFS), "/mnt/a: Read-only file system. Mount it for writing", EXIT_USER_ERROR),
        (of(errno.ENOSPC), "/mnt/a: No space left on device. Make room there", EXIT_USER_ERROR),
        (of(errno.EDQUOT, None), "Disk quota exceeded. Make room below --home and TMPDIR", EXIT_USER_ERROR),
        (of(errno.ESTALE), "/mnt/a: Stale file handle. Its file system is away. Run this again", EXIT_INCOMPLETE),
        (of(errno.ETIMEDOUT), "/mnt/a: Connection timed out. Its file system is away. Run", EXIT_INCOMPLETE),
        (of(errno.EIO), "/mnt/a: Input/output error. Its disk, or the server of its file system,", EXIT_FAILURE),
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
def test_what_is_told_of_a_file(error: Exception, said: str, code: int) -> None:
    message, found = told(error) or ("", 0)
    assert (message[: len(said)], found) == (said, code)
    assert "\n" not in message


@pytest.mark.parametrize(
    "read", [lambda f: f.read_bytes(), lambda f: pa.memory_map(str(f)), lambda f: pq.ParquetFile(f)]
)
def test_of_python_and_of_arrow(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """As they come. A loop of links stands for what may not be read: root may read everything."""
    file = tmp_path / "a.parquet"
    file.touch()
    other = tmp_path / "b.parquet"
    other.symlink_to(other)
    with pytest.raises(OSError, match="b\\.parquet") as raised:
        read(other)
    found = raised.value
    assert found.errno == errno.ELOOP
    assert told(found) is None
    # The same error, with the number that another file system would have given.
    found.errno = errno.ESTALE
    assert told(found) == (
        f"{other}: Stale file handle. Its file system is away. Run this again later",
        EXIT_INCOMPLETE,
    )


@pytest.mark.parametrize("is_named", [True, False], ids=["from e", "from None"])
def test_what_cannot_be_read_while_its_file_system_is_away_is_told_as_that(is_named: bool) -> None:
    """Whoever cannot read a file says mostly that it is damaged, and that the user is to make it anew."""
    try:
        try:
            raise of(errno.ESTALE)
        except OSError as e:
            raise UserError("a is damaged: make it anew") from e if is_named else None
    except UserError as e:
        found = told(e)
    assert found == ("/mnt/a: Stale file handle. Its file system is away. Run this again later", EXIT_INCOMPLETE)


def test_what_is_damaged_on_a_disk_is_the_users_to_mend() -> None:
    try:
        try:
            raise of(errno.EIO)
        except OSError as e:
            raise UserError("a is damaged: make it anew") from e
    except UserError as e:
        found = told(e)
    assert found == ("a is damaged: make it anew", EXIT_USER_ERROR)


@pytest.mark.parametrize(
    "error",
    [
        of(errno.ETIMEDOUT, None),  # of a socket
        of(errno.EACCES, None),
        of(errno.ENOENT),
        OSError("torn"),
        PySparkException(
            "OSError: [Errno 116] Stale file handle: '/mnt/a'\n\nDuring handling of the above exception, another "
            "exception occurred:\n\nTraceback (most recent call last):\nTypeError: of ours\n\n\tat org.apache.spark"
        ),
        TypeError("[Errno 116] Stale file handle: '/mnt/a'"),
    ],
)
def test_what_is_shown_with_its_trace(error: Exception) -> None:
    assert told(error) is None
