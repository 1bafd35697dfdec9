"""Archive of headrace for logged models: one file that Python imports from, with the native libraries in it.

headrace is in no package index, so each logged model contains it. It is one file because MLflow uploads files one by
one. Its layout is that of a checkout, in which headrace.machine.native looks for the libraries:

    headrace/...                  the package
    build/native/[LEVEL/]*.so     the libraries that Python loads
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import headrace
from headrace.workspace import installation

_SUFFIXES = (".py", ".j2", ".sh")
#: Libraries of build/native that are for tests, and those that Spark loads from a jar.
_EXCLUDED_LIBRARIES = ("*_asan.so", "libheadrace_columns*.so")
#: The earliest time that the format has, for all entries: the same files give the same bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_code(file: Path) -> None:
    """Write a new archive of this package."""
    with zipfile.ZipFile(file, "x") as archive:
        for name, path in sorted(_files()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, path.read_bytes())


def _files() -> Iterator[tuple[str, Path]]:
    package, native = Path(headrace.__file__).parent, installation() / "build" / "native"
    for path in package.rglob("*"):
        # Other files of a wheel are below `share`.
        if path.suffix in _SUFFIXES and not path.is_relative_to(package / "share"):
            yield f"headrace/{path.relative_to(package)}", path
    for path in native.rglob("libheadrace_*.so"):
        if not any(path.match(pattern) for pattern in _EXCLUDED_LIBRARIES):
            yield f"build/native/{path.relative_to(native)}", path
