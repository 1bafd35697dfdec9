"""Imports of short commands and of planned stages: what is heavy, or of other stages, is imported where it is used."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from headrace.config.stages import ORDER, STAGES

DS = "2026-01-02"
#: Prints the modules that a program has imported, behind its own output.
CODE = """
import json, sys
try:
    {}
except SystemExit:
    pass
print()
print(json.dumps(sorted(sys.modules)))
"""
#: Seconds of import, each.
HEAVY = {"fsspec", "mlflow", "pandas", "psycopg", "pyspark", "sqlalchemy", "torch"}
#: A tenth of a second of import each: what a command that computes nothing does without.
WRAPPERS = {"pyarrow.compute", "pyarrow.dataset"}
#: Their plans run Spark's or torch's own code.
SLOW_TO_PLAN = {"evaluate"}


def imported(statement: str, *words: str) -> set[str]:
    """Return the modules that a new interpreter has imported after a statement; `words`: its arguments."""
    run = [sys.executable, "-c", CODE.format(statement), *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(run, capture_output=True, text=True, env=env, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def by_command(*words: str) -> set[str]:
    """Return the modules that a command line has imported."""
    return imported("from headrace.cli import main; main()", *words)


def of_headrace(modules: set[str], *packages: str) -> list[str]:
    """Return those of some packages of headrace."""
    names = tuple(f"headrace.{package}" for package in packages)
    return sorted(m for m in modules if m in names or m.startswith(tuple(f"{name}." for name in names)))


def test_help_imports_neither_the_spec_nor_a_store() -> None:
    modules = by_command("--help")
    assert not modules & {"numpy", "pyarrow", "pydantic", "yaml", *HEAVY}
    assert of_headrace(modules, "config.spec", "config.workspace", "storage.location", "lake", "features", "jobs") == []


def test_a_misspelt_key_is_told_without_arrow(tmp_path: Path) -> None:
    modules = by_command("run", "clicks", "--ds", DS, "--home", str(tmp_path), "--set", "train.epocs=1")
    assert "headrace.config.spec" in modules
    assert not modules & {"numpy", "pyarrow", *HEAVY}
    assert of_headrace(modules, "features", "lake", "jobs") == []


def test_a_misspelt_column_is_told_without_arrows_functions(tmp_path: Path) -> None:
    fault = "features.workflow=[{columns: [usr], ops: [categorify]}]"
    modules = by_command("run", "clicks", "--ds", DS, "--home", str(tmp_path), "--set", fault)
    assert "headrace.features.table_ops.preparation" in modules
    assert not modules & {*WRAPPERS, *HEAVY}
    assert of_headrace(modules, "lake", "models", "jobs.stages") == []


def test_a_command_looks_for_garbage_rarely() -> None:
    run = [
        sys.executable,
        "-c",
        "import gc; from headrace.cli import main\ntry: main()\nexcept SystemExit: print(gc.get_threshold()[0])",
    ]
    done = subprocess.run([*run, "--version"], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) >= 50_000


def test_a_dry_run_imports_what_plans_and_nothing_that_works(tmp_path: Path) -> None:
    landing = tmp_path / "landing" / "clicks" / DS
    landing.mkdir(parents=True)
    (landing / "part-0.gz").write_bytes(gzip.compress(b"{}\n"))
    modules = by_command("run", "clicks", "--ds", DS, "--home", str(tmp_path), "--to", "ingest", "--dry-run")
    assert "headrace.lake.landing.plan" in modules
    assert not modules & {*WRAPPERS, *HEAVY}
    assert of_headrace(modules, "lake.landing.load", "lake.tables", "lake.spark", "features.arrow", "train.stage") == []
    assert of_headrace(modules, "errors.translate", "publish", "features.ops.bins") == []


def test_stages_are_planned_without_what_they_work_with() -> None:
    stages = [name for name in ORDER if name not in SLOW_TO_PLAN]
    modules = imported("from headrace.jobs.stages import load_stage; [load_stage(s) for s in sys.argv[1:]]", *stages)
    assert {STAGES[name].implementation.partition(":")[0] for name in stages} <= modules
    assert not modules & {*WRAPPERS, *HEAVY}
    assert of_headrace(modules, "lake.spark", "features.arrow", "features.spark", "train.loop", "score.run") == []


def test_tables_of_embeddings_import_no_workspace() -> None:
    modules = imported("import headrace.embeddings.collection")
    assert of_headrace(modules, "config.workspace", "storage.location", "plugins", "config.schema") == []


@pytest.mark.parametrize("package", ["config", "embeddings", "stage", "storage"])
def test_a_package_imports_the_module_of_a_name_that_is_read(package: str) -> None:
    module = import_module(f"headrace.{package}")
    for name in module.__all__:
        assert getattr(module, name) is vars(module)[name]
    with pytest.raises(AttributeError, match=f"module 'headrace.{package}' has no attribute 'nothing'"):
        _ = module.nothing
