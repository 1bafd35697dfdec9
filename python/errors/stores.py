"""Errors of object stores and file systems: one that is away, one that refuses, a full disk.


What a store answers that is neither "not there" nor "the condition does not hold" is a StoreRefused where it is about
permissions or the bucket, a StoreAway where it is no answer or says to come later, else a StoreError; none quotes more
than the store's first line.

File systems say it by the numbers of errno(3). Libraries that keep no number say it in the system's words: the JVM,
SQLite, PostgreSQL, LMDB, safetensors.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError

#: Variables with S3's region, in order of precedence, and the default of the client library and of AWS.
_REGIONS, DEFAULT_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1"
#: The library's texts, after its last try, for no answer or that of a busy or broken server. Of the codes 5xx, 501 and
#: 505 are final.
_BUSY = r"Server returned error response|non-2xx status code: (?:408|429|5(?!01|05)\d\d)"
_AWAY = re.compile(rf"HTTP error: |{_BUSY}")
#: The library's texts for connections that no later try makes: an invalid URL, an untrusted certificate. No URL in its
#: messages matches, since spaces and brackets are quoted there.
_NEVER = re.compile(r"builder error|InvalidCertificate\(|invalid peer certificate", re.IGNORECASE)
#: Addresses of clouds' metadata services: the library asks them where it has found no other credentials.
_METADATA = re.compile(r"//(?:169\.254\.\d+\.\d+|\[?fd00:ec2::254\]?|metadata\.google\.internal)[/: ]")
#: The library's texts for a connection that was not made, and for a time-out. Only the second: no answer came.
_NOT_CONNECTED, _TIMEOUT = "ConnectError(", "kind: Timeout"
#: Texts of errors for which listings have no class of their own: not allowed, and no such bucket.
_REFUSED, _NO_BUCKET = re.compile(r"non-2xx status code: 40[13]\b"), re.compile(r"non-2xx status code: 404\b")
#: S3's answers for a bucket in another region: its own text (keys are quoted there), or a redirect without an
#: address; and the text that names the region.
_REGION = re.compile(
    r"- Received redirect without LOCATION\b|"
    r"<Code>(?:PermanentRedirect|IllegalLocationConstraintException)</Code>|"
    r"<Code>AuthorizationHeaderMalformed</Code>[^\n]*\bexpecting '"
)
_NAMED_REGION = re.compile(r"<Region>([a-z0-9-]+)</Region>|expecting '([a-z0-9-]+)'")
#: Noise in the first line of the library's messages: its settings for retries, a server's error page.
_NOISE = re.compile(r"Generic \S+ error: |, max_retries: \d+, retry_timeout: \S+ *|:(?: <.*)?$")
#: The reason of a missing answer, in the lines after the first.
_REASON = re.compile(r'(?:message|error): "([^"]+)"|kind: (Timeout|Interrupted)')
_CREDENTIALS = (
    "Credentials are those of the environment or of this machine (docs/storage.md); they must allow to read and list "
    "there, and in lake and store to write and delete, too"
)


class StoreError(OSError):
    """The store did not do as asked, after its client tried again."""


class StoreAway(StoreError):
    """The store cannot be reached: nothing to mend, try later; exit code 75."""


class StoreRefused(UserError):
    """The store does not let whoever this process is do this there, or has no such bucket."""


class ChangedInPlace(OSError):
    """An object is not the one that its folder's list, or a look just before, has named."""


def error_of_store(
    error: Exception, place: str, s3_bucket: str | None, environ: Mapping[str, str], writes: bool
) -> StoreError | StoreRefused | None:
    """Return what an error of obstore means; None: there is no such object, which its caller expects.

    Args:
        error: an `obstore.exceptions.BaseError`, or a FileNotFoundError.
        place: the object, for the message.
        s3_bucket: its bucket's name in S3; None: another store's.
        environ: of this process.
        writes: whether the call writes: it then misses a bucket, not an object.
    """
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    message = str(error).partition("\n")[0].strip()
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return StoreRefused(f"the store refuses {place}: {message}. {_CREDENTIALS}")
    if isinstance(error, FileNotFoundError):
        if not writes:
            return None
        return StoreRefused(f"{place} cannot be written: there is no such bucket, and headrace makes none")
    if _METADATA.search(message) and not _metadata_away(message, str(error)):
        return StoreRefused(
            f"there are no credentials for {place}: none are in the environment, and the machine has no account of "
            f"its own ({message}). {_CREDENTIALS}"
        )
    if s3_bucket is not None and _REGION.search(str(error)):
        named = _NAMED_REGION.search(str(error))
        region = None if named is None else named[1] or named[2]
        return StoreRefused(of_another_region(f"s3://{s3_bucket}", s3_bucket, region, environ))
    if _REFUSED.search(message):
        return StoreRefused(f"the store refuses {place}: {_NOISE.sub('', message)}. {_CREDENTIALS}")
    if _NO_BUCKET.search(message):
        return StoreRefused(f"{place}: there is no such bucket, and headrace makes none")
    if _AWAY.search(message) and not _NEVER.search(str(error)):
        return _away(place, message, str(error))
    return StoreError(f"{place}: {message}")


def _metadata_away(message: str, text: str) -> bool:
    """Return whether the machine's metadata service is busy: elsewhere nobody listens at its address."""
    return re.search(_BUSY, message) is not None or (_TIMEOUT in text and _NOT_CONNECTED not in text)


def _away(place: str, message: str, text: str) -> StoreAway:
    reason, advice = "", "Run this again later"
    if "HTTP error: " in message:
        match = _REASON.search(text)
        reason = f": {match[1] or match[2]}" if match else ""
        advice += "; or that is not its address: see `lake`, `store` and `source.path`, and AWS_ENDPOINT_URL for S3"
    return StoreAway(f"{place}: the store is away ({_NOISE.sub('', message)}{reason}). {advice}")


def region_of(environ: Mapping[str, str]) -> str | None:
    """Return the region that the environment names."""
    return next((environ[variable] for variable in _REGIONS if environ.get(variable)), None)


def of_another_region(place: str, name: str | None, region: str | None, environ: Mapping[str, str]) -> str:
    """Return the message for an S3 bucket that is not in the requested region.

    Args:
        place: the bucket or object, for the message.
        name: the bucket's; None: nobody knows it.
        region: its own; None: the store does not say it.
        environ: of this process.
    """
    own_region = region_of(environ)
    variable = next((v for v in _REGIONS if environ.get(v)), _REGIONS[0])
    requested = f"'{own_region or DEFAULT_REGION}' ({variable}{'' if own_region else ' is not set'})"
    if region is not None:
        return f"{place} is in the region '{region}' and was asked for in {requested}: set {variable}={region}"
    tells = f", which `aws s3api get-bucket-location --bucket {name}` tells" if name else ""
    return f"{place} is in another region than {requested}: set {variable} to the bucket's own{tells}"


_MAY_NOT = {errno.EACCES, errno.EPERM}
#: EFBIG: the largest size of a file that the process may write (`ulimit -f`).
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Errors of NFS and similar file systems whose server does not answer, or has lost the file; most also of sockets.
_AWAY_NUMBERS = {
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.EREMOTEIO,
}
#: Arrow's text before the name of a file that it cannot open or read: its errors have `errno`, but no `filename`.
_OF_ARROW = "local file '"
#: Messages of a full disk by libraries that give no `errno`, and the path in those of Java.
_FULL_TEXT = re.compile(r"No space left on device|Disk quota exceeded|database or disk is full|\bStorageFull\b")
_PATH_IN_TEXT = re.compile(r"(?:file:)?(/[^\s:'\"()]+)(?:: | \()(?:No space left on device|Disk quota exceeded)")
#: Builtin errors that C and Rust libraries raise with a system's message; others come from Python code.
_LIBRARY_ERRORS = (OSError, RuntimeError)


class DiskFull(UserError):
    """There is no room for what must be written. Another attempt may find some; exit code 75."""

    exit_code = EXIT_INCOMPLETE


def is_full(error: OSError) -> bool:
    """Return whether an error is for want of room: the file system is full, a quota or a limit of sizes is reached."""
    return error.errno in _FULL


def disk_full(error: BaseException, folders: Sequence[Path] = ()) -> DiskFull | None:
    """Return a full disk as an error of one line, or None where `error` says something else.

    Args:
        error: of Python, of a library, or of the JVM (whose stack trace is part of its text).
        folders: that the process writes to. Where the error names no path, the one with the least room is named.
    """
    if isinstance(error, OSError) and error.errno is not None:
        if not is_full(error):
            return None
        path = _PATH_IN_TEXT.search(str(error))
        name = _path_of(error) or ("" if path is None else path[1])
        return DiskFull(full_message(os.strerror(error.errno), name, folders))
    of_builtins = type(error).__module__ == "builtins" and not isinstance(error, _LIBRARY_ERRORS)
    return None if of_builtins or isinstance(error, UserError) else full_disk_in(str(error), folders)


def full_disk_in(text: str, folders: Sequence[Path] = ()) -> DiskFull | None:
    """Return the full disk that a program's output tells of, or None; `folders` as of `disk_full`."""
    if (match := _FULL_TEXT.search(text)) is None:
        return None
    words = os.strerror(errno.EDQUOT if "quota" in match[0] else errno.ENOSPC)
    path = _PATH_IN_TEXT.search(text)
    return DiskFull(full_message(words, "" if path is None else path[1], folders))


def require_room(folder: Path, needed: int, user: str) -> None:
    """Raise DiskFull where fewer than `needed` bytes are free in a folder; `user` needs them, for the message."""
    place = _existing(folder)
    if _room(place)[0] < needed:
        raise DiskFull(
            f"{place}: {os.strerror(errno.ENOSPC)}: {user} needs {needed:,} bytes, and {free_in(place)}. Make room "
            f"there, then run this again"
        )


def full_message(words: str, name: str = "", folders: Sequence[Path] = ()) -> str:
    """Return the line about a full disk: the path, what the system said, the folder to make room in, the bytes free.

    Args:
        words: the system's words.
        name: the path that could not be written; empty: not known.
        folders: see `disk_full`.
    """
    places = [_existing(Path(name))] if name else [_existing(folder) for folder in folders]
    room = {place: _room(place) for place in places}
    fault = f"{name}: {words}" if name else words
    if not room:
        return f"{fault}. Make room below --home and TMPDIR, then run this again"
    folder = min(room, key=lambda place: room[place][0])
    return f"{fault}: {free_in(folder)}. Make room there, then run this again"


def free_in(folder: Path) -> str:
    """Return what a folder's file system has left for a user, as `12,288 bytes are free in /mnt/a`."""
    place = _existing(folder)
    free, inodes = _room(place)
    return f"{free:,} bytes{' and no inodes' if inodes == 0 else ''} are free in {place}"


def _existing(path: Path) -> Path:
    """Return the folder of a path, or the nearest one above it that is there."""
    folder = Path(os.path.abspath(path))
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _room(folder: Path) -> tuple[int, int | None]:
    """Return bytes and inodes that a user may still take there; inodes None where the file system counts none."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else None


def _path_of(error: OSError) -> str:
    if isinstance(error.filename, str):
        return error.filename
    return str(error).partition(_OF_ARROW)[2].partition("'")[0]


def told_of_file(error: OSError) -> tuple[str, int] | None:
    """Return the message and exit code of a file's error; None for other errors and for faults of the program."""
    name = _path_of(error)
    if (full := disk_full(error)) is not None:
        return str(full), full.exit_code
    if not name:
        return None
    fault = f"{name}: {os.strerror(error.errno) if error.errno else ''}"
    if error.errno in _MAY_NOT:
        return f"{fault}. The user of this process must be allowed to read and write there", EXIT_USER_ERROR
    if error.errno == errno.EROFS:
        return f"{fault}. Mount it for writing, or choose another place", EXIT_USER_ERROR
    if error.errno == errno.ENOTDIR:
        return f"{fault}. A file is where a folder should be: move it away, or choose another place", EXIT_USER_ERROR
    if error.errno in _AWAY_NUMBERS:
        return f"{fault}. Its file system is away. Run this again later", EXIT_INCOMPLETE
    if error.errno == errno.EIO:
        return f"{fault}. Its disk, or the server of its file system, has failed: see the kernel's log", EXIT_FAILURE
    return None
