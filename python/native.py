"""The C++ library of embedding tables and of messages between ranks (native/cpp), where `make native` has built it.

Its functions are called by headrace.embeddings.kernels, headrace.comm.futex and models.feature_interaction_cpu.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from headrace.workspace import checkout

_VERSION = 7
_EMBEDDINGS = "libheadrace_embeddings.so"
#: Levels of the x86-64 psABI that libraries are built for, best first, and what of each /proc/cpuinfo names.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}


def levels(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The levels that this machine's processors run, best first; none: older ones, or another architecture.

    Args:
        cpuinfo: as Linux describes processors; of one that is not there nothing is known.
    """
    try:
        lines = [line.split(":", 1)[1] for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
    except OSError:
        return []
    flags = set.intersection(*(set(line.split()) for line in lines)) if lines else set()
    needed = {level: set().union(*(_LEVELS[lower] for lower in list(_LEVELS)[at:])) for at, level in enumerate(_LEVELS)}
    return [level for level in _LEVELS if needed[level] <= flags]


def built(name: str) -> Path:
    """A library's file, as it was built for the best level that runs here; else for any processor."""
    folder = checkout() / "build" / "native"
    return next((file for level in levels() if (file := folder / level / name).is_file()), folder / name)


def library_path() -> Path:
    """Where the library is, or would be."""
    return built(_EMBEDDINGS)


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built (or by another version of its source)."""
    return load(library_path())


def load(path: Path) -> ctypes.CDLL | None:
    """A library's file, its functions declared; None: there is none, or one of another version."""
    try:
        found = ctypes.CDLL(str(path))
        if found.headrace_embeddings_version() != _VERSION:
            return None
    except (OSError, AttributeError):
        return None
    i64, i32, f32, p = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    found.headrace_pool_sum.argtypes = [p, i64, p, i32, i64, p, i64, p, p, i32]
    found.headrace_pool_sum.restype = None
    found.headrace_update.argtypes = [
        p,
        p,
        p,
        i64,
        p,
        i32,
        p,
        i64,
        p,
        i64,
        p,
        p,
        p,
        p,
        i32,
        f32,
        f32,
        f32,
        f32,
        f32,
        i32,
    ]
    found.headrace_update.restype = None
    found.headrace_occurrences.argtypes = [p, i64, i64, p, i64, p, i64, p, i32, p, p]
    found.headrace_occurrences.restype = i64
    found.headrace_cut_bags.argtypes = [p, i32, p, p, i64, p, i64, p, p, p, p, p, p]
    found.headrace_cut_bags.restype = i64
    found.headrace_group.argtypes = [p, p, i64, i64, p, p]
    found.headrace_group.restype = None
    found.headrace_announce.argtypes = [p, ctypes.c_uint32]
    found.headrace_announce.restype = None
    found.headrace_await.argtypes = [p, ctypes.c_uint32, i64]
    found.headrace_await.restype = i32
    found.headrace_interact.argtypes = [p, p, p, i64, i64, i64, p, i32]
    found.headrace_interact.restype = None
    found.headrace_interact_gradient.argtypes = [p, p, p, p, i64, i64, i64, p, p, p, i32]
    found.headrace_interact_gradient.restype = None
    found.headrace_duplicates.argtypes = [p, i64, p, p, p, p]
    found.headrace_duplicates.restype = i64
    found.headrace_distinct.argtypes = [p, i64, p, i64, p, p]
    found.headrace_distinct.restype = i64
    found.headrace_addresses.argtypes = [p, i64, p, i32, i64, p]
    found.headrace_addresses.restype = None
    found.headrace_places.argtypes = [p, i64, p, i64, i32, p]
    found.headrace_places.restype = None
    found.headrace_numbers.argtypes = [p, i32, p, p, i64, p, p, i32]
    found.headrace_numbers.restype = None
    found.headrace_parts.argtypes = [p, i32, i64, p, p, p]
    found.headrace_parts.restype = i64
    return found
