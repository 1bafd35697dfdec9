"""Loading of the C++ libraries of native/cpp, which `make native` builds; without them torch and NumPy do their work.

The library of embedding tables and of messages between ranks is declared here. Its functions are called by
headrace.embeddings.kernels, headrace.comm.shared_messages and models.dlrm. The loader's is in
headrace.dataset.native.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zipimport import zipimporter

import headrace
from headrace.config.installation import installation

log = logging.getLogger("headrace.native")

#: Raise it together with the version in native/cpp/embeddings.cpp when a function's name, arguments or meaning change.
_VERSION = 9
#: Levels of the x86-64 psABI that libraries are built for, best first, with their flags in /proc/cpuinfo.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}


def levels(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the levels that this machine's processors run, best first; empty: older processors, another architecture.

    Args:
        cpuinfo: Linux's description of the processors; without the file no level is known.
    """
    try:
        lines = [line.split(":", 1)[1] for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
    except OSError:
        return []
    flags = set.intersection(*(set(line.split()) for line in lines)) if lines else set()
    needed = {level: set().union(*(_LEVELS[lower] for lower in list(_LEVELS)[i:])) for i, level in enumerate(_LEVELS)}
    return [level for level in _LEVELS if needed[level] <= flags]


def built(name: str) -> Path:
    """Return a library's file: the build for the best level that this machine runs, else the one for any processor."""
    folder = installation() / "build" / "native"
    return next((file for level in levels() if _exists(file := folder / level / name)), folder / name)


def _exists(file: Path) -> bool:
    return file.is_file() or _in_archive(file) is not None


def _in_archive(file: Path) -> bytes | None:
    """Read a file of the archive that this package is imported from, or None: logged models contain such an archive."""
    loader = getattr(headrace.__spec__, "loader", None)
    if not isinstance(loader, zipimporter):
        return None
    try:
        return loader.get_data(str(file.relative_to(installation())))
    except (OSError, ValueError):  # no file of that name, or a path outside the archive
        return None


def _open(file: Path) -> ctypes.CDLL | None:
    """Load a library; None where there is none. One in an archive is unpacked first: the system loads only files.

    Raises:
        OSError: it does not load.
    """
    if file.is_file():
        return ctypes.CDLL(str(file))
    content = _in_archive(file)
    if content is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=file.suffix) as unpacked:
        unpacked.write(content)
        unpacked.flush()
        return ctypes.CDLL(unpacked.name)


@dataclass(frozen=True)
class Interface:
    """The exported functions of a C++ library.

    Attributes:
        file: name of the library's file.
        version_function: the function that returns the interface version of the build.
        functions: by name, the C types of the result and of the arguments.
    """

    file: str
    version_function: str
    functions: Mapping[str, tuple[Any, Sequence[Any]]]

    def path(self) -> Path:
        """Return the library's file, which need not exist."""
        return built(self.file)

    def load(self, path: Path, version: int) -> ctypes.CDLL | None:
        """Load a library and declare its functions; None without a file, or, with a warning, for another version."""
        try:
            loaded = _open(path)
        except OSError as e:
            log.warning("%s does not load (%s): torch and NumPy do its work, slower. Run: make native", path, e)
            return None
        if loaded is None:
            return None
        built_version = getattr(loaded, self.version_function, lambda: 0)()
        if built_version != version:
            log.warning(
                "%s was built from other sources (version %d of its interface, %d is needed): torch and NumPy do its "
                "work, slower. Run: make native",
                path,
                built_version,
                version,
            )
            return None
        for name, (result, arguments) in self.functions.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, list(arguments)
        return loaded


_I64, _I32, _U32, _F32, _P = ctypes.c_int64, ctypes.c_int, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p
EMBEDDINGS = Interface(
    "libheadrace_embeddings.so",
    "headrace_embeddings_version",
    {
        "headrace_pool_sum": (None, (_P, _I64, _P, _I32, _I64, _P, _I64, _P, _P, _I32)),
        "headrace_update": (
            None,
            (*(_P,) * 3, _I64, _P, _I32, _P, _I64, _P, _I64, *(_P,) * 4, _I32, *(_F32,) * 5, _I32),
        ),
        "headrace_jagged_indices": (_I64, (_I64, _P, _P, _I64, _P, _P, _I32, _P, _P, _P)),
        "headrace_bucketize_bags": (_I64, (_P, _I32, _P, _P, _I64, _P, _I64, _P, _P, _P, _P, _P, _P)),
        "headrace_encode_requests": (None, (_P, _I32, _P, _P, _I64, _P, _P, _I32)),
        "headrace_decode_requests": (_I64, (_P, _I32, _I64, _P, _P, _P)),
        "headrace_group": (None, (_P, _P, _I64, _I64, _P, _P)),
        "headrace_duplicates": (_I64, (_P, _I64, _P, _P, _P, _P)),
        "headrace_distinct": (_I64, (_P, _I64, _P, _I64, _P, _P)),
        "headrace_row_pointers": (None, (_P, _I64, _P, _I32, _I64, _P)),
        "headrace_gather_pointers": (None, (_P, _I64, _P, _I64, _I32, _P)),
        "headrace_id_map_find": (None, (_P, _P, _I64, _P, _I64, _P)),
        "headrace_id_map_insert": (None, (_P, _P, _I64, _P, _P, _I64)),
        "headrace_set_and_wake": (None, (_P, _U32)),
        "headrace_wait_until": (_I32, (_P, _U32, _I64)),
        "headrace_dot_interaction": (None, (_P, _P, _P, _I64, _I64, _I64, _P, _I32)),
        "headrace_dot_interaction_backward": (None, (_P, _P, _P, _P, _I64, _I64, _I64, _P, _P, _P, _I32)),
    },
)


@cache
def library() -> ctypes.CDLL | None:
    """Return the library of embedding tables; None where it was not built, or from other sources (logged)."""
    return EMBEDDINGS.load(EMBEDDINGS.path(), _VERSION)
