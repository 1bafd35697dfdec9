"""The C interface of native/include/headrace_columns.h: plain addresses in, results in memory that the caller gives.

    lib = host()                       # build/native/libheadrace_columns.so, addresses of host memory
    lib = cuda()                       # build/native/libheadrace_columns_cuda.so, addresses of device memory
    lib.ngrams_offsets(NativeColumn(offsets=..., values=..., length=...), rows, 3, 0, out, None)

Addresses are integers: `array.ctypes.data` of NumPy, `tensor.data_ptr()` of torch, `buffer.address` of Arrow. What they
point at must live until the call returns, and on a GPU until the stream has come to its end.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from headrace.config.installation import installation
from headrace.errors import UserError

_VERSION = 1
#: Limits of the interface.
MOST_N, MOST_COLUMNS, MOST_HASHES = 8, 8, 1024

_FATBIN = b"\x50\xed\x55\xba"

_BAD_ARGUMENT, _TOO_MANY, _DEVICE = 1, 2, 3

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class NativeColumn(ctypes.Structure):
    """`headrace_column`: text (bytes) or ids (int64), with offsets or a value a row; None is NULL."""

    _fields_ = (
        ("offsets", _P),
        ("values", _P),
        ("length", _I64),
        ("validity", _P),
        ("validity_offset", _I64),
        ("value_validity", _P),
        ("value_validity_offset", _I64),
    )


class ColumnLibrary:
    """One of the two libraries: what both have."""

    def __init__(self, path: Path) -> None:
        """Load it.

        Raises:
            OSError: it is not there or does not load.
            UserError: it was built from other sources.
        """
        lib = ctypes.CDLL(str(path))
        if lib.headrace_columns_version() != _VERSION:
            raise UserError(f"{path} was built from other sources: run `make native`")
        column, i64, i32 = ctypes.POINTER(NativeColumn), _I64, _I32
        lib.headrace_columns_reason.restype = ctypes.c_char_p
        lib.headrace_offsets_workspace.argtypes = [i64]
        lib.headrace_offsets_workspace.restype = i64
        lib.headrace_ngrams_offsets.argtypes = [column, i64, i32, i32, _P, _P, _P, _P]
        lib.headrace_ngrams.argtypes = [column, i64, i32, i32, i32, _P, _P, _P]
        lib.headrace_cross_offsets.argtypes = [column, i32, i64, i32, _P, _P, _P, _P]
        lib.headrace_cross.argtypes = [column, i32, i64, i32, i32, _P, _P, _P]
        lib.headrace_minhash.argtypes = [column, i64, i32, _P, _P, _P]
        self._lib = lib

    def workspace(self, rows: int) -> int:
        """Bytes of scratch memory for the functions of offsets; 0 on the host."""
        return int(self._lib.headrace_offsets_workspace(rows))

    def ngrams_offsets(
        self,
        text: NativeColumn,
        rows: int,
        n: int,
        most: int,
        out: int,
        validity: int | None,
        workspace: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Write the offsets of each row's n-grams: int32 [rows + 1] to `out`; bits [rows] to `validity`."""
        self._check(self._lib.headrace_ngrams_offsets(text, rows, n, most, out, validity, workspace, stream))

    def ngrams(
        self,
        text: NativeColumn,
        rows: int,
        n: int,
        most: int,
        buckets: int,
        offsets: int,
        out: int,
        stream: int | None = None,
    ) -> None:
        """Write the n-grams' codes: int32 [offsets[rows]] to `out`."""
        self._check(self._lib.headrace_ngrams(text, rows, n, most, buckets, offsets, out, stream))

    def cross_offsets(
        self,
        columns: Sequence[NativeColumn],
        rows: int,
        most: int,
        out: int,
        validity: int | None,
        workspace: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Write the offsets of each row's combinations: int32 [rows + 1] to `out`; bits [rows] to `validity`."""
        array = (NativeColumn * len(columns))(*columns)
        self._check(self._lib.headrace_cross_offsets(array, len(columns), rows, most, out, validity, workspace, stream))

    def cross(
        self,
        columns: Sequence[NativeColumn],
        rows: int,
        most: int,
        buckets: int,
        offsets: int,
        out: int,
        stream: int | None = None,
    ) -> None:
        """Write the combinations' codes: int32 [offsets[rows]] to `out`."""
        array = (NativeColumn * len(columns))(*columns)
        self._check(self._lib.headrace_cross(array, len(columns), rows, most, buckets, offsets, out, stream))

    def minhash(
        self, ids: NativeColumn, rows: int, hashes: int, out: int, validity: int | None, stream: int | None = None
    ) -> None:
        """Signatures: int64 [rows, hashes] to `out`; bits [rows] to `validity`."""
        self._check(self._lib.headrace_minhash(ids, rows, hashes, out, validity, stream))

    def _check(self, code: int) -> None:
        if code == _BAD_ARGUMENT:
            raise ValueError(
                "a parameter is outside its range, or an array is missing: native/include/headrace_columns.h"
            )
        if code == _TOO_MANY:
            raise OverflowError("rows x results do not fit 32-bit offsets: give fewer rows, or a smaller limit")
        if code == _DEVICE:
            raise RuntimeError(f"the CUDA runtime says: {self._lib.headrace_columns_reason().decode()}")
        assert code == 0, code


class HostLibrary(ColumnLibrary):
    """The library over host memory, which hashes, too."""

    def __init__(self, path: Path) -> None:
        """Load it.

        Raises:
            OSError: it is not there or does not load.
            UserError: it was built from other sources.
        """
        super().__init__(path)
        try:
            text, integers = self._lib.headrace_xxhash64_text, self._lib.headrace_xxhash64_integers
        except AttributeError:
            raise UserError(f"{path} was built from other sources: run `make native`") from None
        text.argtypes = [ctypes.POINTER(NativeColumn), _I64, _P, _P]
        integers.argtypes = [_P, _I64, _P, _P]

    def xxhash64_text(self, text: NativeColumn, rows: int, seeds: int | None, out: int) -> None:
        """Spark's xxhash64 of texts: int64 [rows] to `out`; `seeds`: int64 [rows], None: all 42."""
        self._check(self._lib.headrace_xxhash64_text(text, rows, seeds, out))

    def xxhash64_integers(self, values: int, rows: int, seeds: int | None, out: int) -> None:
        """Spark's xxhash64 of int64 [rows], as `xxhash64_text`."""
        self._check(self._lib.headrace_xxhash64_integers(values, rows, seeds, out))


_Library = TypeVar("_Library", bound=ColumnLibrary)


def host_path() -> Path:
    """Return where the build puts the library over host memory."""
    return installation() / "build" / "native" / "libheadrace_columns.so"


def cuda_path() -> Path:
    """Return where the build puts the library over device memory."""
    return installation() / "build" / "native" / "libheadrace_columns_cuda.so"


def udf_jars(rapids: bool) -> list[Path]:
    """Return the UDFs' jar where it was built; without the plugin also the jar that declares the plugin's interface."""
    folder = installation() / "build" / "udfs"
    names = ["headrace-udfs.jar"] if rapids else ["headrace-udfs.jar", "headrace-udfs-api.jar"]
    jars = [folder / name for name in names]
    return jars if all(p.is_file() for p in jars) else []


def cuda_targets(path: Path) -> list[str]:
    """Return the targets of a library's device code: `sm_80`, or `compute_90` for PTX, which the driver compiles.

    Read from the fat binaries in the file, whose layout nvcc's fatbinary_section.h begins and LLVM's NVPTX tools tell:
    a header of magic, version, header's size (2 bytes) and size (8); in it, entries of kind (2), version (2), header's
    size (4), size (8) and, 28 bytes in, the architecture (4).
    """
    data, targets, offset = path.read_bytes(), set(), 0
    while (offset := data.find(_FATBIN, offset)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, offset)
        place, offset = offset + header, offset + header + size
        while place < offset:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, place)
            (architecture,) = struct.unpack_from("<I", data, place + 28)
            targets.add(f"{'compute' if kind == 1 else 'sm'}_{architecture}")
            place += head + payload
    return sorted(targets, key=lambda name: (name.startswith("compute"), name))


@cache
def host() -> HostLibrary:
    """Load the library over host memory.

    Raises:
        UserError: it was not built.
    """
    return _load(HostLibrary, host_path(), "make native")


@cache
def cuda() -> ColumnLibrary:
    """Load the library over device memory. It loads without a GPU; calls then raise RuntimeError.

    Raises:
        UserError: it was not built.
    """
    return _load(ColumnLibrary, cuda_path(), "make native-cuda")


def _load(kind: type[_Library], path: Path, command: str) -> _Library:
    try:
        return kind(path)
    except OSError as e:
        raise UserError(f"{path} does not load ({e}): run `{command}`") from None
