"""`headrace pack`: which packages go along, the archive's bytes, and the host's Python that it finds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli import submitters
from headrace.config.installation import checkout, installation
from headrace.errors import UserError
from headrace.jobs import pack as archive
from headrace.jobs.pack import Packed, choose, installed
from headrace.storage import Location, local, location_of
from tests.storage_support import memory_home

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_NAMES = [f"p{n}" for n in range(6)]


class _Package(Distribution):
    """A package of which nothing but the metadata is there."""

    def __init__(self, name: str, needs: list[str]) -> None:
        self._text = f"Name: {name}\nVersion: 1\n" + "".join(f"Requires-Dist: {need}\n" for need in needs)

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:  # type: ignore[override]
        raise AssertionError(path)


def packages(needs: Mapping[str, list[str]]) -> dict[str, Distribution]:
    return {name: _Package(name, requirements) for name, requirements in needs.items()}


@given(
    st.fixed_dictionaries({name: st.sets(st.sampled_from(_NAMES)) for name in _NAMES}),
    st.sets(st.sampled_from(_NAMES)),
    st.sets(st.sampled_from(_NAMES), max_size=3),
)
def test_what_is_left_out_takes_with_it_what_only_it_needs(
    needs: dict[str, set[str]], requested: set[str], left_out: set[str]
) -> None:
    """The reference walks every path of the graph: kept is each end of a path from a root without what is left out."""
    chosen = choose(packages({n: sorted(r) for n, r in needs.items()}), requested, left_out)

    def ends(start: str, blocked: set[str], way: tuple[str, ...] = ()) -> set[str]:
        if start in blocked or start in way:
            return set()
        return {start}.union(*(ends(n, blocked, (*way, start)) for n in needs[start]))

    reached = set().union(*(ends(r, set()) for r in requested))
    unreached = set(_NAMES) - reached
    roots = requested | {n for n in unreached if not any(n in needs[o] for o in unreached)}
    roots |= set(_NAMES) - set().union(*(ends(r, set()) for r in roots))
    assert set(chosen.packages) == set().union(*(ends(r, left_out) for r in roots))
    assert set(chosen.missed) == {(n, r) for n in chosen.packages for r in needs[n] if r in left_out}


def test_extras_and_markers_are_followed_where_they_are_asked_for() -> None:
    installed_packages = packages(
        {
            "app": ["driver[fast]", "old; python_version < '3'"],
            "driver": ["speed; extra == 'fast'", "docs; extra == 'docs'"],
            "speed": [],
            "docs": ["theme"],
            "theme": [],
            "old": ["older"],
            "older": [],
        }
    )
    assert set(choose(installed_packages, ["app"], ["docs", "old"]).packages) == {"app", "driver", "speed"}
    with pytest.raises(UserError, match="unknown-name is not installed"):
        choose(installed_packages, ["app"], ["Unknown_Name"])


def test_torch_takes_its_own_libraries_with_it() -> None:
    """The environment is the one that runs this test."""
    environment = installed()
    chosen = choose(environment, ["pyarrow", "torch"], ["torch"]).packages
    assert not {"torch", "triton"} & chosen.keys()
    assert {"pyarrow", "numpy"} <= chosen.keys()


def test_the_requirements_of_an_archive_name_what_it_has() -> None:
    lines = archive.requirements({"numpy": _Package("numpy", []), "psycopg": _Package("psycopg", [])})
    requirements = (installation() / "requirements" / "headrace.in").read_text().splitlines()
    assert lines.splitlines() == [line for line in requirements if line.startswith(("numpy=", "psycopg["))]


def test_a_package_brings_its_files_and_what_is_compiled_of_them(tmp_path: Path) -> None:
    """The package brings neither its console scripts nor the paths where its wheel lay when it was installed."""
    info = tmp_path / "one-1.dist-info"
    (tmp_path / "one" / "__pycache__").mkdir(parents=True)
    info.mkdir()
    (tmp_path / "one" / "__init__.py").write_text("")
    compiled = f"one/__pycache__/__init__.cpython-{_VERSION.replace('.', '')}.pyc"
    (tmp_path / compiled).write_bytes(b"")
    (info / "METADATA").write_text("Name: one\nVersion: 1\n")
    (info / "direct_url.json").write_text('{"url": "file:///secret", "dir_info": {"editable": true}}')
    names = ["one/__init__.py", compiled, "../../../bin/one", "one-1.dist-info/METADATA", "one-1.dist-info/RECORD"]
    (info / "RECORD").write_text("".join(f"{n},,\n" for n in [*names, "one-1.dist-info/direct_url.json"]))
    package = PathDistribution(info)
    packed = {name.split("site-packages/")[1]: file for name, file in archive.package_files(package)}
    assert packed == {n: tmp_path / n for n in names if not n.startswith("..")}
    assert archive.is_in_place(package)
    (info / "RECORD").unlink()
    with pytest.raises(UserError, match="no list of its files"):
        list(archive.package_files(package))


def test_an_archive_has_what_it_is_given_and_the_same_gives_the_same_bytes(tmp_path: Path) -> None:
    from headrace.jobs.pack import write

    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    os.utime(tmp_path / "run.sh", (1e9, 1e9 + 0.75))
    entries: dict[str, str | Path] = {"b/run.sh": tmp_path / "run.sh", "bin/python": "text\n", "pyvenv.cfg": "x"}
    for name in ("1.tar.gz", "2.tar.gz"):
        assert write(local(tmp_path / name), entries) == 10 + 5 + 1
    assert (tmp_path / "1.tar.gz").read_bytes() == (tmp_path / "2.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "1.tar.gz") as archive:
        by_name = {m.name: m for m in archive.getmembers()}
        assert {n: oct(m.mode) for n, m in by_name.items() if m.isfile()} == {
            "b/run.sh": "0o755",
            "bin/python": "0o755",
            "pyvenv.cfg": "0o644",
        }
        assert by_name["b/run.sh"].mtime == 1e9
        assert {m.linkname for m in by_name.values() if m.issym()} == {"python"}


@pytest.mark.parametrize("folder", ["s3://bucket/envs", None])
def test_the_command_says_how_spark_is_told_of_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str | None
) -> None:
    """The command prints the settings of the page from which people copy them."""
    memory_home(monkeypatch, tmp_path / "cache", ("s3",))

    def write(out: Location, left_out: Sequence[str]) -> Packed:
        out.put_text("")
        return Packed(packages=1, files=1, unpacked=0, missed=())

    monkeypatch.setattr("headrace.jobs.pack.pack", write)
    archive = f"{folder or tmp_path}/environment.tar.gz"
    submitters.pack(archive, [])
    assert location_of(archive).exists()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("spark.properties: ")
    properties = yaml.safe_load(last.removeprefix("spark.properties: "))
    page = (checkout() / "docs" / "pack.md").read_text(encoding="utf-8")
    assert properties["spark.archives"] == f"{archive}#environment"
    assert f"    spark.pyspark.python: {properties['spark.pyspark.python']}\n" in page


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """An archive without packages but one module, and without a Python that it remembers."""
    folder = tmp_path / "some where"
    for name, text in archive.programs():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for place in (str(Path(sys.base_exec_prefix)), "/usr/local/bin/python", "/usr/bin/python"):
            text = text.replace(place, "/nowhere")
        path.write_text(text)
        path.chmod(0o755)
    (folder / "bin" / "python3").symlink_to("python")
    packages = folder / "lib" / f"python{_VERSION}" / "site-packages"
    (packages / "of_archive.py").write_text("")
    return folder


_ASK = "import os, sys, of_archive; print(sys.prefix, sys.base_prefix, sys.executable, os.environ.get('PYTHONHOME'))"


def ask(folder: Path, *first: str, name: str = "python3", path: str = "/usr/bin:/bin", **env: str) -> Any:
    """Return what the archive's Python says of itself, with a PATH and nothing else in the environment."""
    env = {"PATH": ":".join((*first, path)), **env}
    line = [str(folder / "bin" / name), "-c", _ASK]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False, cwd="/")


def test_the_hosts_python_is_found_on_path_or_by_its_variable(unpacked: Path, tmp_path: Path) -> None:
    base = Path(sys.base_exec_prefix) / "bin"
    expected = [f"{unpacked} {sys.base_prefix} {unpacked}/bin/python None"]
    assert ask(unpacked, str(base)).stdout.splitlines() == expected
    assert ask(unpacked, HEADRACE_BASE_PYTHON=str(base / f"python{_VERSION}")).stdout.splitlines() == expected
    # Its own folder may come first on PATH; a program by the name of one may be a script, as pyenv's are, and a venv's.
    scripts = tmp_path / "shims"
    scripts.mkdir()
    (scripts / f"python{_VERSION}").write_text(f'#!/bin/sh\nexec "{base}/python{_VERSION}" "$@"\n')
    (scripts / f"python{_VERSION}").chmod(0o755)
    assert ask(unpacked, str(unpacked / "bin"), str(scripts)).stdout.splitlines() == expected
    assert ask(unpacked, str(Path(sys.executable).parent), name="python").stdout.splitlines() == expected


def test_without_a_python_of_its_version_it_says_so(unpacked: Path, tmp_path: Path) -> None:
    other_bin = tmp_path / "other"
    other_bin.mkdir()
    (other_bin / "python3").write_text("#!/bin/sh\necho\n")  # says that it is of another version: an empty line
    (other_bin / "python3").chmod(0o755)
    for program in ("readlink", "uname"):
        (other_bin / program).symlink_to(shutil.which(program) or program)
    result = ask(unpacked, path=str(other_bin))
    assert (result.returncode, result.stdout) == (127, "")
    assert f"needs Python {_VERSION}" in result.stderr
    assert "HEADRACE_BASE_PYTHON" in result.stderr
