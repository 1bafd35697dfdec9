"""`headrace doctor` tells what of native/ is built."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import doctor
from headrace.compute import native
from headrace.udfs import library


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty build folder in the place of the checkout's."""
    monkeypatch.setattr(library, "installation", lambda: tmp_path)
    monkeypatch.setattr(native, "library", lambda: None)
    for load in (library.host, library.cuda):
        load.cache_clear()
    yield tmp_path / "build"
    for load in (library.host, library.cuda):
        load.cache_clear()


def native_findings() -> dict[str, doctor.Finding]:
    return {f.what: f for f in doctor.native()}


def test_nothing_is_built(elsewhere: Path) -> None:
    findings = native_findings()
    native_libraries = findings.pop("native libraries")
    assert native_libraries.state == "missing"
    assert {f.state for f in findings.values()} == {"optional"}
    assert native_libraries.todo == "`make native` (columns, embeddings)"
    assert "make native-cuda" in findings["CUDA objects"].todo
    assert "minhash" in findings["UDF jar"].todo


def test_a_jar_without_a_gpu_side_and_a_library_that_does_not_load(elsewhere: Path) -> None:
    (elsewhere / "udfs").mkdir(parents=True)
    (elsewhere / "native").mkdir()
    (elsewhere / "native" / "libheadrace_columns_cuda.so").write_bytes(b"\x7fELF")
    for name in ("headrace-udfs.jar", "headrace-udfs-api.jar"):
        with zipfile.ZipFile(elsewhere / "udfs" / name, "w") as jar:
            jar.writestr("native/linux-amd64/libheadrace_columns.so", b"")
    findings = native_findings()
    assert findings["CUDA objects"].state == "warning"
    assert (findings["UDF jar"].state, findings["UDF jar"].found) == ("ok", "headrace-udfs.jar with CPU")
    assert "make native-cuda" in findings["UDF jar"].todo


@pytest.mark.extra
def test_what_is_here_is_told() -> None:
    if not library.cuda_path().is_file():
        pytest.skip("the CUDA library is not here: make native-cuda")
    findings = native_findings()
    assert findings["CUDA objects"].found == "sm_80, sm_90, compute_90"
    assert findings["UDF jar"].found == "headrace-udfs.jar with CPU, CUDA, RAPIDS"


def test_the_version_of_nccl_is_told() -> None:
    assert doctor.nccl_version("22907") == "2.29.7"
    assert doctor.nccl_version("False") == "0.0.0"
