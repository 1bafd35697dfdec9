"""Column functions by their C interface over host memory, against plain Python; sanitizers; the CUDA library's code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.udfs import arrow, library
from headrace.udfs.library import ColumnLibrary, NativeColumn
from tests.native import reference, sanitized

BIGS = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)
LISTS = st.none() | st.lists(st.none() | BIGS, max_size=6)
ODD = [b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80", b"\xf0\x9f\x98", b"a", b"\xc3", "é".encode()]


def cut(text: str, first: int, length: int) -> bytes:
    return text.encode("utf-8", "surrogatepass")[first:][:length]


#: Well-formed text, text cut anywhere, and any bytes.
TEXTS = (
    st.none()
    | st.text(max_size=12).map(str.encode)
    | st.builds(cut, st.text(max_size=8), st.integers(0, 3), st.integers(0, 20))
    | st.binary(max_size=12)
    | st.lists(st.sampled_from(ODD), max_size=6).map(b"".join)
)


def sliced(values: list[Any], type_: pa.DataType, offset: int) -> pa.Array:
    """The values as a slice of a longer array, so that offsets and bits begin somewhere."""
    return pa.array([*values[:1] * offset, *values, *values[:2]], type_)[offset if values else 0 :][: len(values)]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(TEXTS, max_size=12),
    st.integers(1, 8),
    st.integers(1, 2**31 - 1),
    st.none() | st.integers(1, 5),
    st.integers(0, 9),
    st.sampled_from([pa.binary(), pa.string()]),
)
@example([None] * 9, 3, 7, None, 5, pa.binary())
@example(["😀😁😂😃😄😅😆😇😈".encode()], 8, 1000, None, 0, pa.binary())
def test_ngrams(
    texts: list[bytes | None], n: int, buckets: int, most: int | None, offset: int, as_: pa.DataType
) -> None:
    text_array = sliced(texts, pa.binary(), offset)
    result = arrow.ngrams(text_array.view(as_), n, buckets, most)
    result.validate(full=True)
    assert result.to_pylist() == [reference.ngrams(t, n, buckets, most) for t in texts]


def test_a_huge_text() -> None:
    text = ("naïve 😀 " * 150_000).encode()[:-1]
    result = arrow.ngrams(pa.array([text, b"x"], pa.binary()), 5, 10**6)
    assert result[1].as_py() == reference.ngrams(b"x", 5, 10**6, None)
    codes = result[0].values.to_numpy()
    assert len(codes) == len(text.decode("utf-8", "replace")) - 4
    # It repeats itself every 8 characters.
    assert codes[:16].tolist() == reference.ngrams(text[:400], 5, 10**6, 16)
    assert (codes[8:-8] == codes[:-16]).all()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(LISTS, st.none() | BIGS, LISTS), max_size=9),
    st.integers(1, 20),
    st.integers(0, 9),
    st.integers(1, 2**31 - 1),
)
def test_cross(rows: list[tuple[Any, ...]], most: int, offset: int, buckets: int) -> None:
    types = [pa.list_(pa.int64()), pa.int64(), pa.list_(pa.int64())]
    columns = [sliced([r[i] for r in rows], t, offset + i) for i, t in enumerate(types)]
    result = arrow.cross(columns, buckets, most)
    result.validate(full=True)
    assert result.to_pylist() == [reference.cross(r, buckets, most) for r in rows]


@settings(max_examples=100, deadline=None)
@given(st.lists(LISTS, max_size=9), st.integers(1, 9), st.integers(0, 9))
def test_minhash(rows: list[Any], hashes: int, offset: int) -> None:
    ids = sliced(rows, pa.list_(pa.int64()), offset)
    if len(rows) > 1:
        # The values of a slice's slice begin in the middle, too.
        ids = (
            pa.ListArray.from_arrays(pa.array(np.asarray(ids.offsets) - ids.offsets[0].as_py()), ids.flatten())
            if not ids.null_count
            else ids
        )
    result = arrow.minhash(ids, hashes)
    result.validate(full=True)
    assert result.to_pylist() == [reference.minhash(r, hashes) for r in rows]


def test_signatures_estimate_jaccard_similarity() -> None:
    a, b = list(range(0, 300)), list(range(100, 400))  # 200 of 400 in common
    left, right = arrow.minhash(pa.array([a, b], pa.list_(pa.int64())), 1024).to_pylist()
    share = sum(x == y for x, y in zip(left, right, strict=True)) / 1024
    assert abs(share - 0.5) < 4 * (0.25 / 1024) ** 0.5


def test_faults_are_told() -> None:
    text = pa.array(["a"])
    with pytest.raises(ValueError, match="outside its range"):
        arrow.ngrams(text, 9, 10)
    with pytest.raises(ValueError, match="outside its range"):
        arrow.ngrams(text, 3, 0)
    ids = pa.array([[1]], pa.list_(pa.int64()))
    with pytest.raises(ValueError, match="outside its range"):
        arrow.cross([ids] * 9, 10, 1)
    with pytest.raises(ValueError, match="lengths"):
        arrow.cross([ids, ids[:0]], 10, 1)
    with pytest.raises(TypeError, match="list<int64>"):
        arrow.minhash(pa.array([[1]], pa.list_(pa.int32())), 1)
    with pytest.raises(OverflowError, match="fewer rows"):
        arrow.cross([pa.nulls(2**12, pa.int64())], 10, 2**19 + 1)


@pytest.mark.extra
def test_nothing_outside_is_read() -> None:
    ran = sanitized.run("tests.native.fuzz", "libheadrace_columns_asan.so", "4000")
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr[-3000:]


@pytest.mark.extra
def test_the_sanitizer_would_see_it() -> None:
    ran = sanitized.run("tests.native.fuzz", "libheadrace_columns_asan.so", "break")
    assert ran.returncode != 0
    assert "heap-buffer-overflow" in ran.stderr


@pytest.fixture(scope="module")
def cuda() -> ColumnLibrary:
    if not library.cuda_path().is_file():
        pytest.skip("the CUDA library is not here: make native-cuda")
    return library.cuda()


@pytest.mark.extra
def test_the_cuda_library_has_code_for_both_generations(cuda: ColumnLibrary) -> None:
    assert library.cuda_targets(library.cuda_path()) == ["sm_80", "sm_90", "compute_90"]
    assert library.cuda_targets(library.host_path()) == []


@pytest.mark.extra
def test_without_a_gpu_the_cuda_library_says_so(cuda: ColumnLibrary) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    out = np.zeros(2, np.int32)
    with pytest.raises(RuntimeError, match=r"CUDA runtime says: .+"):
        cuda.ngrams_offsets(NativeColumn(out.ctypes.data, None, 0), 0, 3, 0, out.ctypes.data, None)


@pytest.mark.extra
def test_the_gpu_gives_the_same_bits(cuda: ColumnLibrary) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    rng = np.random.default_rng(7)
    rows = 10_007
    texts = pa.array([None if rng.random() < 0.1 else rng.bytes(int(rng.integers(0, 40))) for _ in range(rows)])
    lists = pa.array(
        [None if rng.random() < 0.1 else rng.integers(-5, 5, int(rng.integers(0, 9))).tolist() for _ in range(rows)],
        pa.list_(pa.int64()),
    )[3:]

    tensors: list[torch.Tensor] = []

    def on_gpu(buffer: pa.Buffer | None) -> int | None:
        if buffer is None:
            return None
        tensors.append(torch.frombuffer(bytearray(buffer.to_pybytes()) or bytearray(1), dtype=torch.uint8).cuda())
        return tensors[-1].data_ptr()

    def room(size: int, dtype: torch.dtype) -> torch.Tensor:
        tensors.append(torch.zeros(max(size, 1), dtype=dtype, device="cuda"))
        return tensors[-1]

    validity, offsets, data = texts.buffers()
    text = NativeColumn(on_gpu(offsets), on_gpu(data), data.size, on_gpu(validity), 0)
    starts, bits = room(rows + 1, torch.int32), room((rows + 7) // 8, torch.uint8)
    scratch = room(cuda.workspace(rows), torch.uint8)
    cuda.ngrams_offsets(text, rows, 3, 0, starts.data_ptr(), bits.data_ptr(), scratch.data_ptr())
    torch.cuda.synchronize()
    out = room(int(starts[-1]), torch.int32)
    cuda.ngrams(text, rows, 3, 0, 1000, starts.data_ptr(), out.data_ptr())
    torch.cuda.synchronize()
    expected = arrow.ngrams(texts, 3, 1000)
    assert out.tolist() == expected.values.to_pylist()
    assert starts.cpu().numpy().tolist() == expected.offsets.to_pylist()
    assert bits.cpu().numpy().tobytes() == expected.buffers()[0].to_pybytes()

    rows = len(lists)
    values = lists.values
    list_validity, list_offsets = lists.buffers()[:2]
    base = on_gpu(list_offsets)
    assert base is not None
    ids = NativeColumn(
        base + 4 * lists.offset, on_gpu(values.buffers()[1]), len(values), on_gpu(list_validity), lists.offset
    )
    signature, bits = room(rows * 16, torch.int64), room((rows + 7) // 8, torch.uint8)
    cuda.minhash(ids, rows, 16, signature.data_ptr(), bits.data_ptr())
    starts = room(rows + 1, torch.int32)
    cuda.cross_offsets([ids, ids], rows, 7, starts.data_ptr(), bits.data_ptr(), scratch.data_ptr())
    torch.cuda.synchronize()
    out = room(int(starts[-1]), torch.int32)
    cuda.cross([ids, ids], rows, 7, 500, starts.data_ptr(), out.data_ptr())
    torch.cuda.synchronize()
    assert signature.tolist() == arrow.minhash(lists, 16).values.to_pylist()
    assert out.tolist() == arrow.cross([lists, lists], 500, 7).values.to_pylist()
