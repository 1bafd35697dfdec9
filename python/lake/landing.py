"""Landing files: which there are for a day, and what identifies one."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from headrace.config import Source
from headrace.errors import UserError
from headrace.manifest import fingerprint
from headrace.storage import Location, local
from headrace.workspace import Workspace, checkout

#: Files that a writer has not finished, or that no reader of a lake takes for data.
_NOT_DATA_PREFIXES = (".", "_")
_NOT_DATA_SUFFIXES = (".partial", ".tmp", ".crc")
#: Folder of a landing area that holds the generator's ground truth.
_TRUTH = "truth"


@dataclass(frozen=True)
class LandingFile:
    """One file as it was when it was listed. Two files with equal `identity` hold the same bytes, as far as we look."""

    #: Relative to the workspace's home where it lies below it, else absolute.
    name: str
    path: Location
    #: Bytes.
    size: int
    #: Modification time, nanoseconds since the epoch.
    mtime_ns: int

    @property
    def identity(self) -> tuple[str, int, int]:
        """What the ledger keeps."""
        return (self.name, self.size, self.mtime_ns)

    def unchanged(self) -> bool:
        """Whether the file on disk is still the one that was listed."""
        try:
            now = self.path.info()
        except OSError:
            return False
        return (now.size, now.modified_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class LandingDay:
    """The landing files that become one partition, by name."""

    ds: str
    files: tuple[LandingFile, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(f.size for f in self.files)

    @property
    def version(self) -> str:
        """A fingerprint of all identities: another one as soon as a file comes, goes or changes."""
        return fingerprint({"files": [f.identity for f in self.files]})


def patterns(source: Source, ws: Workspace, ds: str) -> tuple[str, ...]:
    """The absolute globs that are tried for `ds`, in order; the first that matches anything wins.

    A relative path is meant below the workspace's home; a shipped pipeline's may also be relative to the checkout.
    """
    path = source.path.replace("{ds}", ds)
    if Path(path).is_absolute():
        return (path,)
    bases = (ws.lake, checkout())
    return tuple(os.path.normpath(f"{glob.escape(str(base))}/{path}") for base in bases)


def find(source: Source, ws: Workspace, ds: str) -> LandingDay:
    """The landing files of one day (or of the snapshot), sorted by name; none where there are none."""
    for pattern in patterns(source, ws, ds):
        files = _matches(pattern, ws)
        if files:
            return LandingDay(ds, files)
    return LandingDay(ds, ())


def days(source: Source, ws: Workspace, ds: str) -> tuple[LandingDay, ...]:
    """The days that a run for `ds` covers, oldest first: of the `catch_up_days` before it those with files, and it.

    Raises:
        UserError: there are no files for `ds` itself; names the glob.
    """
    today = find(source, ws, ds)
    if not today.files:
        tried = " nor ".join(patterns(source, ws, ds))
        what = f"for {ds} " if source.daily else ""
        raise UserError(
            f"no landing files {what}match {tried}; put them there, or change source.path "
            f"(for example --set source.path=/data/*.gz)"
        )
    if not source.daily:
        return (today,)
    last = date.fromisoformat(ds)
    earlier = (
        find(source, ws, (last - timedelta(days=back)).isoformat()) for back in range(source.catch_up_days, 0, -1)
    )
    return (*(day for day in earlier if day.files), today)


def same_files(files: Sequence[LandingFile], ledger: Mapping[str, object]) -> bool:
    """Whether a ledger entry lists exactly these files."""
    return [list(f.identity) for f in files] == ledger.get("files")


def _matches(pattern: str, ws: Workspace) -> tuple[LandingFile, ...]:
    base = _static_base(pattern)
    found = []
    for path in local(pattern).glob():
        inside = path.path.relative_to(base).parts
        if _TRUTH in inside[:-1] or any(part.startswith(_NOT_DATA_PREFIXES) for part in inside):
            continue
        if path.name.endswith(_NOT_DATA_SUFFIXES) or not path.is_file():
            continue
        info = path.info()
        found.append(LandingFile(ws.name_of(path), path, info.size, info.modified_ns))
    return tuple(sorted(found, key=lambda f: f.name))


def _static_base(pattern: str) -> Path:
    """The folders of a glob before its first wildcard: what is left is what the glob chose."""
    base = Path("/")
    for part in Path(pattern).parts[1:-1]:
        # `[[]` is how glob.escape spells a bracket.
        plain = part.replace("[[]", "[").replace("[?]", "?").replace("[*]", "*")
        if glob.has_magic(part) and glob.escape(plain) != part:
            break
        base /= plain
    return base
