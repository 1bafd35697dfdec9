"""The environment as one .tar.gz that Spark unpacks for each executor."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.jobs.pack import contents
from headrace.jobs.pack.distributions import DEVELOPMENT, choose, installed
from headrace.storage import Location
from headrace.workspace import installation

#: Little is gained by more, and it takes several times as long.
_COMPRESSION = 1
_REQUIREMENTS = "share/requirements/headrace.in"


@dataclass(frozen=True)
class Packed:
    """Result of packing: the archive's place and size.

    Attributes:
        packages: how many.
        files: how many.
        unpacked: bytes of the files.
        missed: (package, what it needs and was left out).
    """

    packages: int
    files: int
    unpacked: int
    missed: tuple[tuple[str, str], ...]


def pack(out: Location, left_out: Collection[str] = ()) -> Packed:
    """Write the archive, in one step.

    Args:
        out: a .tar.gz.
        left_out: packages that executors do without; what nothing else needs is left out with them.

    Raises:
        UserError: a package is not installed, or its files are not known.
    """
    packages = installed()
    headrace = packages.pop("headrace", None)
    requirement_lines = (installation() / "requirements" / "headrace.in").read_text(encoding="utf-8").splitlines()
    lines = [line.split("#")[0] for line in requirement_lines]
    chosen = choose(packages, filter(str.strip, lines), {*left_out, *DEVELOPMENT.intersection(packages)})
    with tempfile.TemporaryDirectory() as scratch:
        entries: dict[str, str | Path] = {}
        in_place = {name for name, package in chosen.packages.items() if contents.is_in_place(package)}
        if headrace is None or contents.is_in_place(headrace):
            in_place.add("headrace")
        else:
            entries |= contents.package_files(headrace)
        if in_place:
            entries |= contents.checkout_files(Path(scratch), sorted(in_place))
        for name, distribution in chosen.packages.items():
            if name not in in_place:
                entries |= contents.package_files(distribution)
        own_requirements = [name for name in entries if name.endswith(f"/{_REQUIREMENTS}")]
        texts = dict(contents.programs()) | dict.fromkeys(own_requirements, contents.requirements(chosen.packages))
        entries |= texts
        unpacked = write(out, entries)
    missed = tuple((who, requirement) for who, requirement in chosen.missed if requirement not in DEVELOPMENT)
    return Packed(len(chosen.packages) + 1, len(entries), unpacked, missed)


def write(out: Location, entries: Mapping[str, str | Path]) -> int:
    """Write texts and files by their paths, and the links of `bin/`, in one step. The same entries give the same bytes.

    Returns:
        The bytes of the texts and files.
    """
    with (
        out.new_file() as file,
        open(file, "wb") as raw,
        gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for link in contents.LINKS:
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, "python"
            archive.addfile(entry)
        return sum(_add(archive, name, entries[name]) for name in sorted(entries))


def _add(archive: tarfile.TarFile, name: str, source: str | Path) -> int:
    """Add a text or a file; its bytes. Compiled Python goes by its source's time of change, which stays."""
    entry = tarfile.TarInfo(name)
    if isinstance(source, str):
        data = source.encode()
        entry.size, entry.mode = len(data), 0o755 if name.startswith("bin/") else 0o644
        archive.addfile(entry, io.BytesIO(data))
        return entry.size
    with open(source, "rb") as content:
        status = os.fstat(content.fileno())
        entry.size, entry.mtime = status.st_size, int(status.st_mtime)
        entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
        archive.addfile(entry, content)
    return entry.size
