"""The C++ loop over users and items (native/cpp/top_k.cpp), where `make native` has built it; elsewhere NumPy works."""

from __future__ import annotations

import ctypes
from functools import cache

from headrace import native

#: Raise it with that of native/cpp/top_k.cpp when a function's name, arguments or meaning change.
_VERSION = 1
_I64, _I32, _P = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
RETRIEVAL = native.Interface(
    "libheadrace_retrieval.so",
    "headrace_retrieval_version",
    {
        "headrace_top_k_add": (None, (_P, _I64, _I64, _P, _I64, _I64, _I64, _I64, *(_P,) * 5, _I32)),
        "headrace_top_k_take": (None, (_I64, _I64, _I64, *(_P,) * 4, _I32)),
    },
)


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built (or from other sources, which is logged)."""
    return RETRIEVAL.load(RETRIEVAL.path(), _VERSION)
