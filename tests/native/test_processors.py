"""Libraries for processors of several kinds in one checkout: no instruction that one lacks, and the same results."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from headrace.cli import doctor
from headrace.compute import native
from headrace.config.installation import checkout
from headrace.dataset import native as dataset
from headrace.embeddings.kernels import cpu
from headrace.embeddings.update_rules import fused_step
from headrace.models.dlrm import dot_interaction

BUILD = checkout() / "build" / "native"
#: By level, what its code may not have: registers, and names of instructions.
FORBIDDEN = {
    "": r"%[yz]mm|\tv[a-z]|\tmulx|\tshlx|\tandn|\tlzcnt|\tmovbe|\tpopcnt",  # tzcnt is bsf to those that lack it
    "x86-64-v3": r"%zmm|%k[0-7]",
    # Of AVX-512 what comes after the first: half precision, dot products, bytes permuted and compressed, tiles.
    "x86-64-v4": r"\tv\w+ph\b|\tvpdp|\tvperm[it]?2?b\b|\tvpcompress[bw]|\tvpexpand[bw]|\tvpsh[lr]d|\tvpopcnt|\ttile",
}


def flags(*words: str) -> str:
    return f"processor\t: 0\nflags\t\t: {' '.join(sorted(words))}\nbugs\t\t:\n"


NEW = native._LEVELS["x86-64-v4"] | native._LEVELS["x86-64-v3"]
OLD = native._LEVELS["x86-64-v3"] | {"sse4_2"}


@pytest.mark.skipif(not native.levels(), reason="another architecture")
@pytest.mark.parametrize("level", ["", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("name", [f"libheadrace_{x}.so" for x in ("embeddings", "dataset", "lines", "retrieval")])
def test_no_instruction_is_beyond_the_level(name: str, level: str) -> None:
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    file = BUILD / level / name
    assert file.is_file(), "run make native"
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(file)], capture_output=True, text=True, check=True
    ).stdout
    assert code.count("\n") > 500
    assert sorted({line for line in code.splitlines() if re.search(FORBIDDEN[level], line)})[:5] == []


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (flags(*NEW), ["x86-64-v4", "x86-64-v3"]),
        (flags(*OLD), ["x86-64-v3"]),
        (flags(*NEW) + flags(*OLD), ["x86-64-v3"]),
        (flags(*NEW - {"fma"}), []),
        (flags("sse4_2"), []),
        ("Features\t: fp asimd\n", []),
        (None, []),
    ],
    ids=["new", "old", "mixed", "without fma", "oldest", "arm", "unknown"],
)
def test_levels_are_what_all_processors_run(tmp_path: Path, described: str | None, expected: list[str]) -> None:
    if described is not None:
        (tmp_path / "cpuinfo").write_text(described)
    assert native.levels(tmp_path / "cpuinfo") == expected


def test_the_best_library_that_was_built_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "installation", lambda: tmp_path)
    monkeypatch.setattr(native, "levels", lambda: ["x86-64-v4", "x86-64-v3"])
    folder = tmp_path / "build" / "native"
    for level in ("", "x86-64-v3", "x86-64-v4"):
        (folder / level).mkdir(parents=True, exist_ok=True)
        (folder / level / "libheadrace_dataset.so").touch()
        assert dataset.DATASET.path() == folder / level / "libheadrace_dataset.so"
    assert native.EMBEDDINGS.path() == folder / "libheadrace_embeddings.so"  # not built: said by its plain name


def results(file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Compute with the loops of a library."""
    loaded = native.EMBEDDINGS.load(file, native._VERSION)
    assert loaded is not None
    monkeypatch.setattr(native, "library", lambda: loaded)
    torch.manual_seed(3)
    out: dict[str, torch.Tensor] = {}
    for width in (5, 16, 64, 100):
        table, index = torch.randn(300, width), torch.randint(0, 300, (2_000,), dtype=torch.int32)
        starts = torch.arange(0, 2_000, 4)
        out[f"pool {width}"] = cpu.pool_sum(table, index, 500, starts, torch.rand(2_000))
        rows, order = torch.arange(300), torch.randint(0, 500, (2_000,))
        for kind in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
            weight, states = table.clone(), [torch.rand(300, 1 if kind == "rowwise_adagrad" else width) for _ in "ab"]
            step = fused_step(kind, weight)
            assert step is not None
            step(
                weight,
                states,
                rows,
                torch.arange(0, 1_800, 6),
                order,
                2_000,
                torch.randn(500, width),
                lr=0.1,
                decay=0.01,
                step=3,
            )
            out[f"{kind} {width}"] = torch.cat([weight, *states], 1)
        bottom, vectors = torch.randn(40, width, requires_grad=True), torch.randn(40, 9, width, requires_grad=True)
        pairs = dot_interaction(bottom, vectors)
        pairs.square().sum().backward()
        assert bottom.grad is not None
        assert vectors.grad is not None
        out[f"pairs {width}"] = torch.cat([pairs.detach().flatten(), bottom.grad.flatten(), vectors.grad.flatten()])
    return out


@pytest.mark.skipif("x86-64-v3" not in native.levels(), reason="one library runs here")
def test_all_levels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *other_levels = [
        results(BUILD / level / "libheadrace_embeddings.so", monkeypatch) for level in native.levels()
    ]
    for outputs in other_levels:
        assert {name for name in first if not torch.equal(first[name], outputs[name])} == set()
    plain = results(BUILD / "libheadrace_embeddings.so", monkeypatch)
    # Without FMA the interaction's sums are rounded twice.
    assert all(torch.equal(first[name], plain[name]) for name in first if not name.startswith("pairs"))
    for name in first:
        torch.testing.assert_close(plain[name], first[name], rtol=1e-4, atol=1e-4)


def test_the_doctor_says_for_which_processors() -> None:
    finding = {f.what: f for f in doctor.native()}["native libraries"]
    assert f"embeddings ({(native.levels() or ['any processor'])[0]})" in finding.found
