"""Errors of object stores and file systems: one that is away, one that refuses, a full disk.

An answer of a store that is neither "no such object" nor "the condition does not hold" becomes an error: StoreRefused
for permissions or the bucket, StoreAway for no answer or "try later", StoreError for all others. Messages quote the
first line of the store's answer at most.

File systems report their errors by the numbers of errno(3). The JVM, SQLite, PostgreSQL, LMDB and safetensors keep no
number: theirs are recognised by the system's message.
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
#: The library's texts, after its last try, for no answer and for the answer of a busy or broken server. Of the codes
#: 5xx, a later try changes all but 501 and 505.
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
    """A call of a store failed, also when its client tried again."""


class StoreAway(StoreError):
    """The store cannot be reached: there is nothing to mend, try later; exit code 75."""


class StoreRefused(UserError):
    """The store does not permit this process the call, or has no such bucket."""


class ChangedInPlace(OSError):
    """An object is another one than its folder's list, or a call just before, named."""


def error_of_store(
    error: Exception, place: str, s3_bucket: str | None, environ: Mapping[str, str], writes: bool
) -> StoreError | StoreRefused | None:
    """Return the error of headrace for one of obstore; None: there is no such object, which the caller expects.

    Args:
        error: an `obstore.exceptions.BaseError`, or a FileNotFoundError.
        place: the object, for the message.
        s3_bucket: its bucket's name in S3; None: another store's.
        environ: the process's environment.
        writes: whether the call writes. What does not exist is then the bucket, not the object.
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
        return StoreRefused(other_region_message(f"s3://{s3_bucket}", s3_bucket, region, environ))
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


def other_region_message(place: str, name: str | None, region: str | None, environ: Mapping[str, str]) -> str:
    """Return the message for an S3 bucket that is not in the requested region.

    Args:
        place: the bucket or object, for the message.
        name: the bucket's name; None: unknown.
        region: the bucket's region; None: unknown.
        environ: the process's environment.
    """
    own_region = region_of(environ)
    variable = next((v for v in _REGIONS if environ.get(v)), _REGIONS[0])
    requested = f"'{own_region or DEFAULT_REGION}' ({variable}{'' if own_region else ' is not set'})"
    if region is not None:
        return f"{place} is in the region '{region}' and was asked for in {requested}: set {variable}={region}"
    tells = f", which `aws s3api get-bucket-location --bucket {name}` tells" if name else ""
    return f"{place} is in another region than {requested}: set {variable} to the bucket's own{tells}"


_NOT_PERMITTED = {errno.EACCES, errno.EPERM}
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
_ARROW_PREFIX = "local file '"
#: Messages of a full disk by libraries that give no `errno`, and the path in those of Java.
_FULL_TEXT = re.compile(r"No space left on device|Disk quota exceeded|database or disk is full|\bStorageFull\b")
_PATH_IN_TEXT = re.compile(r"(?:file:)?(/[^\s:'\"()]+)(?:: | \()(?:No space left on device|Disk quota exceeded)")
#: Builtin errors that C and Rust libraries raise with a system's message; others come from Python code.
_LIBRARY_ERRORS = (OSError, RuntimeError)


class DiskFull(UserError):
    """A disk has no room for a write. A later run may find some; exit code 75."""

    exit_code = EXIT_INCOMPLETE


def is_full(error: OSError) -> bool:
    """Return whether an error means no room: a full file system, or a quota or limit of file sizes that is reached."""
    return error.errno in _FULL


def disk_full(error: BaseException, folders: Sequence[Path] = ()) -> DiskFull | None:
    """Return the error of a full disk, whose message is one line; None: `error` means something else.

    Args:
        error: an error of Python, of a library or of the JVM (its text has the stack trace).
        folders: folders that the process writes to. Where the error has no path, the message names the one of them with
            the least room.
    """
    if isinstance(error, OSError) and error.errno is not None:
        if not is_full(error):
            return None
        path = _PATH_IN_TEXT.search(str(error))
        name = _path_of(error) or ("" if path is None else path[1])
        return DiskFull(disk_full_message(os.strerror(error.errno), name, folders))
    of_builtins = type(error).__module__ == "builtins" and not isinstance(error, _LIBRARY_ERRORS)
    return None if of_builtins or isinstance(error, UserError) else full_disk_in(str(error), folders)


def full_disk_in(text: str, folders: Sequence[Path] = ()) -> DiskFull | None:
    """Return the error of a full disk that a program's output reports; None: it reports none. See `disk_full`."""
    if (match := _FULL_TEXT.search(text)) is None:
        return None
    system_message = os.strerror(errno.EDQUOT if "quota" in match[0] else errno.ENOSPC)
    path = _PATH_IN_TEXT.search(text)
    return DiskFull(disk_full_message(system_message, "" if path is None else path[1], folders))


def require_room(folder: Path, needed: int, user: str) -> None:
    """Raise DiskFull if fewer than `needed` bytes are free in a folder. The message says that `user` needs them."""
    place = _existing(folder)
    if _room(place)[0] < needed:
        raise DiskFull(
            f"{place}: {os.strerror(errno.ENOSPC)}: {user} needs {needed:,} bytes, and {free_in(place)}. Make room "
            f"there, then run this again"
        )


def disk_full_message(system_message: str, name: str = "", folders: Sequence[Path] = ()) -> str:
    """Return the message about a full disk: the path, the system's message, the folder to make room in, its free bytes.

    Args:
        system_message: the system's message.
        name: the path that could not be written; empty: unknown.
        folders: see `disk_full`.
    """
    places = [_existing(Path(name))] if name else [_existing(folder) for folder in folders]
    room = {place: _room(place) for place in places}
    fault = f"{name}: {system_message}" if name else system_message
    if not room:
        return f"{fault}. Make room below --home and TMPDIR, then run this again"
    folder = min(room, key=lambda place: room[place][0])
    return f"{fault}: {free_in(folder)}. Make room there, then run this again"


def free_in(folder: Path) -> str:
    """Return the free space of a folder's file system for users, as `12,288 bytes are free in /mnt/a`."""
    place = _existing(folder)
    free, inodes = _room(place)
    return f"{free:,} bytes{' and no inodes' if inodes == 0 else ''} are free in {place}"


def _existing(path: Path) -> Path:
    """Return the nearest existing folder of a path: itself or one above it."""
    folder = Path(os.path.abspath(path))
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _room(folder: Path) -> tuple[int, int | None]:
    """Return the free bytes and inodes for users; inodes are None where the file system does not count them."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else None


def _path_of(error: OSError) -> str:
    if isinstance(error.filename, str):
        return error.filename
    return str(error).partition(_ARROW_PREFIX)[2].partition("'")[0]


def file_error_message(error: OSError) -> tuple[str, int] | None:
    """Return the message and the exit code of a file's error; None for other errors and faults of the program."""
    name = _path_of(error)
    if (full := disk_full(error)) is not None:
        return str(full), full.exit_code
    if not name:
        return None
    fault = f"{name}: {os.strerror(error.errno) if error.errno else ''}"
    if error.errno in _NOT_PERMITTED:
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
