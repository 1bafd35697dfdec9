"""`headrace doctor`: what it reads of an installation, and what is missing, a warning or fine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import doctor
from headrace.config import load_spec
from headrace.config.installation import installation
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.spark import requirements as object_stores
from tests.cli_support import Yard, make_yard


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    return make_yard(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.13" 2024-10-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "11.0.2" 2019', 11),
        ("no such thing", None),
    ],
)
def test_the_major_version_of_java(text: str, major: int | None) -> None:
    assert doctor.java_major(text) == major


def test_what_build_gradle_and_the_requirements_ask_for(tmp_path: Path) -> None:
    gradle = tmp_path / "build.gradle"
    gradle.write_text("dependencies {\n    sparkJars 'io.delta:delta-spark_2.13:4.0.1'\n    rapidsJars 'a:b:1'\n}\n")
    assert doctor.jars(gradle, "sparkJars") == ["delta-spark_2.13-4.0.1.jar"]
    assert doctor.jars(tmp_path / "none", "sparkJars") == []
    requirements = tmp_path / "x.in"
    requirements.write_text(
        "# why\nnumpy==1.26.4\npsycopg[binary]==3.3.9  # driver\n\nsetuptools<81\nrich\n"
        "pandas==2.3.3 ; python_version < '3'\npandas==3.1.1 ; python_version >= '3'\nsix ; python_version < '3'\n"
    )
    assert doctor.requirements(requirements) == {
        "numpy": "==1.26.4",
        "psycopg": "==3.3.9",
        "setuptools": "<81",
        "rich": "",
        "pandas": "==3.1.1",
    }
    assert doctor.requirements(tmp_path / "none") is None


def test_pins_and_jars_of_this_installation_hold() -> None:
    findings = [*doctor.pins(), *doctor.spark(), *doctor.python()]
    assert [f for f in findings if f.state != "ok"] == []
    assert {"numpy", "pyarrow", "torch", "petastorm", "jars", "spark-submit"} <= {f.what for f in findings}


def test_a_broken_pin_a_missing_jar_and_a_missing_java_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "headrace.in").write_text("numpy==1.0\nno-such-package-here==1\nrich\n")
    (tmp_path / "build.gradle").write_text("    sparkJars 'a:b:1'\n")
    monkeypatch.setattr(doctor, "installation", lambda: tmp_path)
    monkeypatch.setattr(doctor, "jars_dir", lambda: tmp_path / "jars")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    findings = {f.what: f for f in [*doctor.pins(), *doctor.spark(), *doctor.java()]}
    for name, text in (
        ("numpy", "1.26"),
        ("other pins", "no-such-package-here not installed"),
        ("jars", "b-1.jar"),
        ("Java", "does not run"),
    ):
        assert findings[name].state == "missing"
        assert text in findings[name].found
        assert findings[name].todo


@pytest.mark.parametrize(("state", "code"), [("missing", 1), ("warning", 0), ("optional", 0), ("ok", 0)])
def test_doctor_fails_only_for_what_is_needed(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, state: Any, code: int
) -> None:
    findings = [doctor.Finding("Python", "ok", "3.11"), doctor.Finding("this", state, "was found", "do that")]
    monkeypatch.setattr(doctor, "examine", lambda ws, pipeline: iter(findings))
    result = yard("doctor")
    assert result.exit_code == code
    assert "do that" in result.output
    assert ("missing: this" in result.output) == (code == 1)


def test_the_file_system_for_s3_is_needed_where_lake_or_store_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment or the pipeline may name the store; where a wheel is installed, the remedy is another one."""
    for module in (doctor, object_stores):
        monkeypatch.setattr(module, "s3_dir", lambda: tmp_path / "s3")
    for check in ("python", "java", "pins", "spark", "iceberg", "native", "horovod", "shared_memory", "gpu"):
        monkeypatch.setattr(doctor, check, lambda: iter(()))
    for check in ("disk", "warehouse"):
        monkeypatch.setattr(doctor, check, lambda *_: iter(()))
    pipeline_file = tmp_path / "own.yaml"
    clicks = (installation() / "conf" / "pipelines" / "clicks.yaml").read_text()
    pipeline_file.write_text(f"store: s3://bucket/store\n{clicks}")
    workspace = Workspace(tmp_path / "home")

    def state(ws: Workspace, pipeline: str | None = None) -> tuple[str, str]:
        (finding,) = doctor.examine(ws, pipeline)
        return finding.state, finding.todo

    assert state(workspace) == state(workspace, "clicks") == ("optional", "run `make s3` (9 MB), for lakes in S3")
    assert state(Workspace.from_environment(tmp_path, {"HEADRACE_LAKE": "s3://bucket/lake"})) == (
        "missing",
        "run `make s3`",
    )
    assert state(workspace, str(pipeline_file)) == ("missing", "run `make s3`")
    monkeypatch.setattr(object_stores, "installation", lambda: tmp_path / "site-packages" / "headrace" / "share")
    wheel = "this wheel was made without it; install one that `make wheel` makes of a checkout"
    assert state(workspace, str(pipeline_file)) == ("missing", wheel)
    with pytest.raises(UserError, match=f"{re.escape(wheel)}$"):
        object_stores.store_jars(workspace.of(load_spec(str(pipeline_file))), {})
    (tmp_path / "s3").mkdir()
    (tmp_path / "s3" / "hadoop-aws-3.4.1.jar").touch()
    assert state(workspace, str(pipeline_file)) == ("ok", "")


def test_doctor_tries_the_warehouse_of_a_pipeline(ws: Workspace, tmp_path: Path) -> None:
    text = (installation() / "conf" / "pipelines" / "clicks.yaml").read_text()
    path = tmp_path / "own.yaml"
    path.write_text(text.replace("publish: {}", "publish: {warehouse: {kind: postgres, host: 127.0.0.1, port: 1}}"))
    (finding,) = doctor.warehouse(ws, str(path))
    assert finding.state == "missing"
    assert "127.0.0.1:1" in finding.found
