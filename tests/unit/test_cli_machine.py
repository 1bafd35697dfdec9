"""A machine that lacks what headrace needs, and a home that is none: one line and exit code 2, whatever the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.errors import EXIT_USER_ERROR
from headrace.jobs.process import PROGRAM
from headrace.lake.spark.requirements import java_program
from tests.support import Run, command

DAY = "2026-01-01"
FEW = {"generate.rows_per_day": 50, "generate.users": 10, "generate.items": 5}


def run(line: list[str], **environ: str) -> Run:
    """Run a program whose environment has neither JAVA_HOME nor a workspace's variables but those given."""
    inherited = {k: v for k, v in os.environ.items() if k != "JAVA_HOME" and not k.startswith("HEADRACE_")}
    done = subprocess.run(line, env=inherited | environ, capture_output=True, text=True, check=False, timeout=300)
    return Run(done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with the landing files of a day."""
    folder = tmp_path_factory.mktemp("machine") / "home"
    generated = run(command(folder, "generate", "clicks", "--until", DAY, settings=FEW))
    assert generated.code == 0, generated.output
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Mapping[str, dict[str, str]]:
    """Return environments by the program that they lack."""
    (tmp_path / "bin").mkdir()
    old = tmp_path / "jdk8"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "java").write_text("#!/bin/sh\n")
    (old / "bin" / "java").chmod(0o755)
    (old / "release").write_text('IMPLEMENTOR="Any"\nJAVA_VERSION="1.8.0_392"\n')
    return {
        "no java": {"PATH": str(tmp_path / "bin")},
        "wrong JAVA_HOME": {"JAVA_HOME": str(tmp_path / "nowhere")},
        "Java 8": {"JAVA_HOME": str(old)},
        "no bash": {"PATH": str(tmp_path / "bin"), "JAVA_HOME": str(java_program().resolve().parent.parent)},
    }


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no java", "error: Spark needs Java: JAVA_HOME is not set, and PATH has no java. Install a JDK 17 or 21"),
        ("wrong JAVA_HOME", "nowhere, which has no bin/java. Install a JDK 17 or 21"),
        ("Java 8", "jdk8/bin/java is Java 8: set JAVA_HOME to another one"),
        ("no bash", "error: Spark's scripts need bash, and PATH has none"),
    ],
)
@pytest.mark.parametrize("program", ["run", pytest.param("job", marks=pytest.mark.slow)])
def test_what_spark_cannot_start_on(
    home: Path, machine: Mapping[str, dict[str, str]], program: str, fault: str, message: str
) -> None:
    """The command refuses, and so does the program that it starts, which clusters start as well."""
    lines = {
        "run": command(home, "run", "clicks", "--ds", DAY, settings={}),
        "job": [sys.executable, str(PROGRAM), "ingest", "clicks", "--ds", DAY, "--home", str(home)],
    }
    refused = run(lines[program], **machine[fault])
    assert refused.code == EXIT_USER_ERROR, refused.output
    assert message in refused.output
    assert len(refused.output.splitlines()) == 1


@pytest.mark.parametrize("below", ["", pytest.param("deep/er", marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [("run", "clicks", "--ds", DAY), ("generate", "clicks"), ("status", "clicks")])
def test_a_home_that_is_a_file(tmp_path: Path, words: tuple[str, ...], below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    refused = run(command(file / below, *words, settings={}))
    assert (refused.code, refused.output.splitlines()) == (
        EXIT_USER_ERROR,
        [f"error: --home {file / below}: {file} is a file. Name a folder, or move the file away"],
    )
    assert file.read_text() == "mine"


@pytest.mark.parametrize("folder", ["/sys/headrace", "/proc/headrace"])
def test_a_home_that_cannot_be_written_to(home: Path, folder: str) -> None:
    """Nobody, root neither, makes folders there."""
    refused = run(command(Path(folder), "run", "clicks", "--ds", DAY, settings={}), HEADRACE_LAKE=str(home))
    assert refused.code == EXIT_USER_ERROR, refused.output
    (line,) = refused.output.splitlines()
    assert line.startswith(f"error: --home {folder}: no file can be written there (")


@pytest.mark.parametrize("key", ["lake", "store"])
def test_a_root_that_is_a_file(home: Path, tmp_path: Path, key: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    lines = [command(tmp_path / "home", "generate", "clicks", "--until", DAY, settings=FEW)]
    if key == "store":
        lines = [command(home, "run", "clicks", "--ds", DAY, settings={})]
    refused = run(lines[0], **{f"HEADRACE_{key.upper()}": str(file)})
    assert refused.code == EXIT_USER_ERROR, refused.output
    assert refused.output.splitlines()[-1].startswith(f"error: {file}")
