"""Contents of an archive of the environment, by path in it."""

from __future__ import annotations

import compileall
import json
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import Distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.utils import canonicalize_name

from headrace.errors import UserError
from headrace.workspace import checkout, installation

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
    python = Path(__file__).with_name("python.sh").read_text(encoding="utf-8")
    recorded = shlex.quote(str(Path(sys.base_exec_prefix) / "bin" / f"python{_VERSION}"))
    yield "bin/python", python.replace("@VERSION@", _VERSION).replace("@RECORDED@", recorded)
    yield "bin/headrace", _PROGRAM
    # No `home`: the interpreter is told by python.sh.
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
        # What lies outside are console scripts; of a package's own programs none is called by name.
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
