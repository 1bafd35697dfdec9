"""The C++ loops over lines of text (native/cpp: json_lines, text_lines, times), where `make native` has built them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.compute import native

#: Raise it with that of native/cpp/json_lines.cpp when a function's name, arguments or meaning change.
_VERSION = 1
_I64, _I32, _P = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
LINES = native.Interface(
    "libheadrace_lines.so",
    "headrace_lines_version",
    {
        "headrace_json_lines": (_P, (ctypes.c_char_p, _P, _P, _I64)),
        "headrace_json_lines_free": (None, (_P,)),
        "headrace_json_lines_column": (None, (_P, _I64, _P, _P, _P)),
        "headrace_json_lines_parse": (_I64, (_P, _P, _P, _I64, _I32, _P)),
        "headrace_json_lines_other": (_P, (_P, _I64, _P)),
        "headrace_newlines": (None, (_P, _I64, _I64, _P)),
        "headrace_control_characters": (None, (_P, _I64, _P)),
        "headrace_instants": (None, (_P, _P, _I64, _P, _P, _P)),
    },
)


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None where it was not built (or from other sources, which is logged)."""
    return LINES.load(LINES.path(), _VERSION)


class ControlCharacters(NamedTuple):
    """Numbers of control characters: bytes below 32, and some of them."""

    all: int
    tabs: int
    newlines: int


def control_characters(data: npt.NDArray[np.uint8]) -> ControlCharacters:
    """Count the control characters of a text."""
    lib = library()
    if lib is None:
        return ControlCharacters(*(int(np.count_nonzero(x)) for x in (data < 32, data == 9, data == 10)))
    counts = np.empty(3, np.int64)
    lib.headrace_control_characters(data.ctypes.data, len(data), counts.ctypes.data)
    return ControlCharacters(*counts.tolist())


def places_of_newlines(data: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
    """Return the places of a text's newlines, whose number is known. int64 [count]."""
    lib = library()
    if lib is None:
        return np.flatnonzero(data == 10)
    places = np.empty(count, np.int64)
    lib.headrace_newlines(data.ctypes.data, len(data), count, places.ctypes.data)
    return places
