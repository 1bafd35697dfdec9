"""`headrace new`: the folder that it writes runs, is read by Airflow's DAG parser, and is in order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner, Result

from headrace import __version__
from headrace.cli import app, json_schema
from headrace.jobs.check_specs import answer_of


def headrace(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    result = headrace("new", "shop")
    assert result.exit_code == 0, result.output
    return tmp_path / "shop"


def commands_in(text: str) -> list[list[str]]:
    """Return the words of `headrace ...` on lines of a README or a workflow."""
    return [line.split() for line in re.findall(r"(?:^    |- run: )headrace (.+)$", text, re.M)]


def test_the_pipeline_of_a_new_folder_runs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    readme = (project / "README.md").read_text()
    generate, dry_run, run, _ = commands_in(readme)
    generated = headrace(*generate, "--days", 1, "--rows-per-day", 300)
    assert generated.exit_code == 0, generated.output
    planned = headrace(*dry_run)
    assert planned.exit_code == 0, planned.output
    assert "9 of 9 stages would run" in planned.output
    assert run == dry_run[:-1]
    assert answer_of("pipelines/shop.yaml")["fault"] is None
    ignored = (project / ".gitignore").read_text().splitlines()
    assert sorted(p.name for p in project.iterdir()) == [
        ".github",
        ".gitignore",
        "Dockerfile",
        "README.md",
        "dags",
        "pipelines",
        "var",
    ]
    assert "/var/" in ignored


def test_no_word_of_a_template_is_left(project: Path) -> None:
    files = [p for p in project.rglob("*") if p.is_file()]
    assert len(files) == 6
    assert [p for p in files if re.search(r"@[A-Z]+@|\bclicks/", p.read_text())] == []
    assert f"headrace:{__version__}" in (project / "Dockerfile").read_text()
    text = (project / "pipelines" / "shop.yaml").read_text()
    assert yaml.safe_load(text)["pipeline"] == "shop"
    # The first line is for editors.
    assert Path(text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")) == json_schema.SCHEMA_FILE


def test_linters_find_nothing_in_it(project: Path) -> None:
    style = ("--isolated", "--line-length", "120")
    for program, *words in (
        ("hadolint", "Dockerfile"),
        ("ruff", "check", *style, "--select", "ALL", "--ignore", "CPY001,INP001,D203,D213", "dags"),
        ("ruff", "format", *style, "--check", "dags"),
    ):
        command = [Path(sys.executable).with_name(program), *words]
        completed = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stdout + completed.stderr


def test_its_commands_exist_with_their_options(project: Path) -> None:
    workflow = (project / ".github" / "workflows" / "check.yaml").read_text()
    commands = commands_in((project / "README.md").read_text()) + commands_in(workflow)
    assert len(commands) == 7
    for name, *words in commands:
        known = {option for p in get_command(app).commands[name].params for option in p.opts}  # type: ignore[attr-defined]
        assert {word for word in words if word.startswith("-")} <= known
        files = [word for word in words if word.startswith("pipelines/")]
        assert all((project / file).is_file() for file in files)
    steps = yaml.safe_load(workflow)["jobs"]["day"]["steps"]
    assert all(set(step) <= {"uses", "run"} for step in steps)


def test_a_folder_with_files_and_a_bad_name_are_refused(project: Path) -> None:
    again = headrace("new", "shop")
    assert (again.exit_code, "shop is there already" in again.stderr) == (2, True)
    wrong = headrace("new", "My-Shop")
    assert (wrong.exit_code, "a pipeline's name must match" in wrong.stderr) == (2, True)
    elsewhere = headrace("new", "shop", "--out", project.parent / "other")
    assert (elsewhere.exit_code, (project.parent / "other" / "pipelines" / "shop.yaml").is_file()) == (0, True)
