"""Landing files of a day, each as it was when it was listed."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import posixpath
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePosixPath

from headrace.config import AnySource, LandingSource, TableSource
from headrace.config.installation import installation
from headrace.config.section import path_of_day
from headrace.config.source import SourceDay
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.stores import ChangedInPlace
from headrace.storage import Location, StoreError, is_uri, local, location_of

#: Files that a writer has not finished, or that no reader of a lake takes for data.
_NOT_DATA_PREFIXES = (".", "_")
_NOT_DATA_SUFFIXES = (".partial", ".tmp", ".crc")
#: Folder of a landing area that holds the generator's ground truth.
_TRUTH = "truth"


@dataclass(frozen=True)
class LandingFile:
    """One file as it was when it was listed."""

    #: Relative to the workspace's lake where it lies below it, else its absolute path or its URI.
    name: str
    path: Location
    #: Bytes.
    size: int
    #: Modification time, nanoseconds since the epoch.
    mtime_ns: int
    #: The store's name of its content, where it gives one; see `headrace.storage.store.Info`.
    tag: str = ""

    def sha256(self) -> str:
        """Return the SHA-256 of the content, hexadecimal. Reads the file, once a process.

        Raises:
            UserError: it cannot be read.
        """
        try:
            return _sha256(self.path, self.size, self.mtime_ns, self.tag)
        except StoreError:  # nothing is known of the file
            raise
        except OSError as e:
            raise self._unreadable(e) from None

    def unchanged(self) -> bool:
        """Return whether nobody has written to the file since it was listed.

        Raises:
            UserError: it may not be looked at any more.
        """
        try:
            now = self.path.info()
        except (FileNotFoundError, ChangedInPlace):
            return False
        except PermissionError as e:
            raise self._unreadable(e) from None
        if self.tag:  # a listing may tell the time more exactly than a look at the file
            return (now.size, now.tag) == (self.size, self.tag)
        return (now.size, now.modified_ns) == (self.size, self.mtime_ns)

    def _unreadable(self, e: OSError) -> UserError:
        return UserError(f"landing file {self.name} cannot be read: {e.strerror or e}")


@dataclass(frozen=True)
class LandingDay:
    """The landing files that become one partition, by name."""

    ds: str
    files: tuple[LandingFile, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(f.size for f in self.files)


def file_patterns(source: LandingSource, ws: Workspace, ds: str) -> tuple[Location, ...]:
    """Return the absolute globs that are tried for `ds`, in order; the first that matches anything wins.

    A relative path is meant below the workspace's lake; a shipped pipeline's may also be relative to the installation.
    """
    path = path_of_day(source.path, ds)
    if _is_absolute(path):
        return (_readable(location_of(path, "source.path", glob=True), ws),)
    return tuple(_escaped(base).following(path) for base in _bases(ws))


def marker_places(path: str, ws: Workspace, ds: str) -> tuple[Location, ...]:
    """Return the absolute places where a single file of the spec (a marker) may lie, in `file_patterns`' order."""
    path = path_of_day(path, ds)
    if _is_absolute(path):
        return (_readable(location_of(path, "source.complete"), ws),)
    return tuple(base.following(path) for base in _bases(ws))


def day_folders(source: AnySource, ws: Workspace, ds: str) -> tuple[Location, ...]:
    """Return the folders in which a day's success file may lie.

    They are those of `source.path` before its first wildcard; of a table of files the day's partition, or all of the
    table where it is one snapshot.
    """
    if isinstance(source, LandingSource):
        return tuple(_static_base(pattern) for pattern in file_patterns(source, ws, ds))
    assert isinstance(source, TableSource)
    assert source.path is not None, "checked by the spec"
    folders = ws.read_places(source.path)
    if source.day is None or not (source.day.partitions or source.day.path):
        return folders
    return tuple(f / below for f in folders for below in _partition_folders(source.day, ds))


def _partition_folders(day: SourceDay, ds: str) -> list[str]:
    """Return the folders that a day's partition may be, below the table's."""
    if day.path is not None:
        inside = path_of_day(day.path, ds).split("/")
        return ["/".join(itertools.takewhile(lambda part: not glob.has_magic(part), inside))]
    if len(day.partitions) == 1:
        return [f"{day.partitions[0]}={value}" for value in (ds, ds.replace("-", ""))]
    year, month, number = ds.split("-")
    padded = zip(day.partitions, (year, month, number), strict=True)
    plain = zip(day.partitions, (year, month.lstrip("0"), number.lstrip("0")), strict=True)
    return ["/".join(f"{name}={value}" for name, value in values) for values in (padded, plain)]


def find_files(source: LandingSource, ws: Workspace, ds: str) -> LandingDay:
    """Return the landing files of one day (or of the snapshot), sorted by name; none where there are none."""
    complete = source.complete
    named = [complete.marker, complete.control.path if complete.control else None] if complete else []
    # Beside the files, perhaps: what says that they are complete is no data.
    not_data = {place for path in named if path for place in marker_places(path, ws, ds)}
    for pattern in file_patterns(source, ws, ds):
        files = tuple(f for f in _matches(pattern, ws) if f.path not in not_data)
        if files:
            return LandingDay(ds, files)
    return LandingDay(ds, ())


def _bases(ws: Workspace) -> tuple[Location, ...]:
    return (ws.lake, local(installation()))


def _is_absolute(path: str) -> bool:
    return is_uri(path) or posixpath.isabs(path)


def _readable(place: Location, ws: Workspace) -> Location:
    """Return a place that a URI or an absolute path names: somebody else's, but for those in the workspace."""
    return place if place.is_below(ws.lake) or place.is_below(ws.store) else place.as_plain()


def _escaped(base: Location) -> Location:
    """Return the pattern that matches a place alone."""
    return replace(base, path=PurePosixPath(glob.escape(str(base.path))))


@lru_cache(maxsize=1 << 16)
def _sha256(path: Location, size: int, mtime_ns: int, tag: str) -> str:
    """Return the SHA-256 of a file as it was with this size, time and tag."""
    digest = hashlib.sha256()
    with path.open() as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _matches(pattern: Location, ws: Workspace) -> tuple[LandingFile, ...]:
    base = _static_base(pattern)
    files = []
    for path, info in pattern.glob_files().items():
        inside = path.path.relative_to(base.path).parts
        if _TRUTH in inside[:-1] or any(part.startswith(_NOT_DATA_PREFIXES) for part in inside):
            continue
        if not path.name.endswith(_NOT_DATA_SUFFIXES):
            _check_name(path)
            files.append(LandingFile(ws.name_of(path), path, info.size, info.modified_ns, info.tag))
    return tuple(sorted(files, key=lambda f: f.name))


def _check_name(path: Location) -> None:
    """Raise UserError where a file's name is not UTF-8: neither a table nor a manifest could name it."""
    try:
        str(path.path).encode()
    except UnicodeEncodeError:
        readable = os.fsencode(str(path.path)).decode("utf-8", "backslashreplace")
        raise UserError(f"landing file {readable}: its name is not UTF-8 text; rename it") from None


def _static_base(pattern: Location) -> Location:
    """Return the folders of a glob before its first wildcard."""
    base = pattern.path.parents[-1]
    for part in pattern.path.parts[1:-1]:
        # `[[]` is how glob.escape spells a bracket.
        plain = part.replace("[[]", "[").replace("[?]", "?").replace("[*]", "*")
        if glob.has_magic(part) and glob.escape(plain) != part:
            break
        base /= plain
    return replace(pattern, path=base)
