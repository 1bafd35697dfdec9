"""Locks by version of Python, and the script that finds an interpreter for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from headrace.cli import doctor
from headrace.config.installation import checkout

REQUIREMENTS = checkout() / "requirements"
VERSIONS = re.findall(
    r"3\.\d+", re.findall(r"^PYTHON_VERSIONS := (.*)$", (checkout() / "Makefile").read_text(), re.M)[0]
)
#: Of the environment that has headrace.
NAMES = ("headrace", "onnx", "serve", "hdfs", "clickhouse")


def lock(version: str, name: str) -> str:
    folder = REQUIREMENTS if version == VERSIONS[0] else REQUIREMENTS / version
    return (folder / f"{name}.lock").read_text()


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.M))


def test_each_python_is_named_where_it_is_asked_for() -> None:
    assert len(VERSIONS) > 1
    assert sorted(VERSIONS[1:]) == sorted(p.name for p in REQUIREMENTS.glob("3.*"))
    assert [f"{major}.{minor}" for major, minor in doctor._PYTHONS] == VERSIONS
    for file in (checkout() / "pyproject.toml", *checkout().glob("plugins/*/pyproject.toml")):
        allowed = SpecifierSet(tomllib.loads(file.read_text())["project"]["requires-python"])
        assert [v for v in ("3.10", *VERSIONS, "3.14") if f"{v}.0" in allowed] == VERSIONS, file


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_lock_has_hashes_and_what_was_asked_for(version: str, name: str) -> None:
    text = lock(version, name)
    assert "://" not in text
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.M)[1:]
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    locked = pins(text)
    for line in (REQUIREMENTS / f"{name}.in").read_text().splitlines():
        if not (line := line.partition("#")[0].strip()):
            continue
        pinned = Requirement(line)
        if pinned.marker is None or pinned.marker.evaluate({"python_version": version}):
            assert locked[pinned.name.lower()] in pinned.specifier, line


@pytest.mark.parametrize("version", VERSIONS)
def test_locks_of_one_environment_agree(version: str) -> None:
    pinned: dict[str, str] = {}
    for name in NAMES:
        locked = pins(lock(version, name))
        assert {p: (pinned[p], locked[p]) for p in pinned.keys() & locked.keys() if pinned[p] != locked[p]} == {}
        pinned |= locked


@pytest.mark.parametrize("version", VERSIONS)
def test_a_package_s_bounds_allow_what_was_locked(version: str) -> None:
    project = tomllib.loads((checkout() / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked = pins(lock(version, "headrace"))
    for line in (*project["dependencies"], *extras["spark"], *extras["train"]):
        bound = Requirement(line)
        if bound.name != "headrace" and (bound.marker is None or bound.marker.evaluate({"python_version": version})):
            assert locked[bound.name.lower()] in bound.specifier, line


def prerequisites(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout() / "scripts" / "prerequisites.sh", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_an_interpreter_is_found_by_its_path() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert prerequisites("--version", sys.executable).stdout == f"{version}\n"
    path = prerequisites("--python", sys.executable).stdout.strip()
    assert Path(path).samefile(sys.executable)


def test_an_interpreter_is_found_by_its_name_behind_a_shim_that_does_not_run(tmp_path: Path) -> None:
    programs = {
        tmp_path / "bin" / "python3.13": "exit 127",
        tmp_path / "pyenv" / "versions" / "3.13.9" / "bin" / "python": f"echo 3.13 {tmp_path}/python",
    }
    for file, command in programs.items():
        file.parent.mkdir(parents=True)
        file.write_text(f"#!/bin/sh\n{command}\n")
        file.chmod(0o755)
    paths = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYENV_ROOT": f"{tmp_path}/pyenv"}
    result = prerequisites("--version", "python3.13", **paths)
    assert (result.returncode, result.stdout) == (0, "3.13\n")


@pytest.mark.parametrize("option", [["--python"], ["--version"], []])
@pytest.mark.parametrize(
    ("interpreter", "message"),
    [
        ("python3.99", "no python3.99 that runs: looked for it on PATH ("),
        ("/nowhere/bin/python", "/nowhere/bin/python is no CPython that runs"),
        ("bash", "no bash that runs"),
    ],
)
def test_no_interpreter_is_one_line(option: list[str], interpreter: str, message: str) -> None:
    refused = prerequisites(*option, interpreter)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"prerequisites: {message}")
    assert refused.stderr.count("\n") == 1


def test_an_interpreter_without_a_lock_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3.9 /opt/python3.9\n")
    old.chmod(0o755)
    refused = prerequisites("--python", str(old))
    assert refused.returncode == 2
    assert (
        refused.stderr
        == f"prerequisites: {old} is Python 3.9 (/opt/python3.9), and headrace has locks for {' '.join(VERSIONS)}\n"
    )
    make = subprocess.run(["make", "-n", "env", f"PYTHON={old}"], cwd=checkout(), capture_output=True, text=True)
    assert make.returncode == 2
    assert refused.stderr in make.stderr
