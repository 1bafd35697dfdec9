"""headrace itself beside a logged model: one file that Python imports from, with the native libraries in it.

No index of packages has headrace, so a model that is opened elsewhere brings it along. As one file, since MLflow sends
files to a server one by one. It is laid out as a checkout (headrace.native finds the libraries so):

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
#: Of build/native those that are for tests, and those that Spark loads from a jar.
_NOT_OF_PYTHON = ("*_asan.so", "libheadrace_columns*.so")
#: The earliest time that an archive knows: the same files give the same bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


def write_code(file: Path) -> None:
    """Write a new archive of this package."""
    with zipfile.ZipFile(file, "x") as archive:
        for name, path in sorted(_files()):
            entry = zipfile.ZipInfo(name, _NO_TIME)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, path.read_bytes())


def _files() -> Iterator[tuple[str, Path]]:
    package, native = Path(headrace.__file__).parent, installation() / "build" / "native"
    for path in package.rglob("*"):
        # What a wheel has in it besides is below `share`.
        if path.suffix in _SUFFIXES and not path.is_relative_to(package / "share"):
            yield f"headrace/{path.relative_to(package)}", path
    for path in native.rglob("libheadrace_*.so"):
        if not any(path.match(pattern) for pattern in _NOT_OF_PYTHON):
            yield f"build/native/{path.relative_to(native)}", path
