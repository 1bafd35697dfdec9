"""The Makefile's graph: whoever reads an installation has it among what is made before."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from headrace.config.installation import checkout

STAMPS = "no-stamps"
#: What `headrace` and all that imports it runs with. CUDA's native build is one as well.
ENVIRONMENT = {"horovod.gloo", "package", "native", "jars", "classes"}
#: Packages of the checkout. Distributions may bring folders of the same names.
OWN_PACKAGES = {"headrace", "bench", "tests", "scripts"}
#: The locks whose packages go into .venv, by the stamp of their installation, the first one first.
LOCKS = {"venv": "headrace", "onnx": "onnx", "serve": "serve", "clickhouse": "clickhouse"}


@dataclass
class Graph:
    """Rules and variables of the Makefile.

    Attributes:
        prerequisites: of each target; of stamps the name alone.
        recipes: of each target, as they are written.
        variables: values, where make has expanded them.
    """

    prerequisites: dict[str, list[str]] = field(default_factory=dict)
    recipes: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def expanded(self, text: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda m: self.variables.get(m[1], m[0]), text)

    def made_before(self, target: str) -> set[str]:
        """Return all that is made before a recipe ends: its prerequisites, and what it calls make for, and so on."""
        targets: set[str] = set()
        ahead = [target]
        while ahead:
            name = ahead.pop()
            if name in targets:
                continue
            targets.add(name)
            pattern = ["bench-%"] if name.startswith("bench-") and name not in self.recipes else []
            ahead += [*pattern, *self.prerequisites.get(name, ())]
            for line in self.recipes.get(name, "").splitlines():
                goals = line.partition("$(MAKE)")[2]
                ahead += [stamp(word) for word in self.expanded(goals).split() if not word.startswith("-")]
        return targets | ({"native"} if "native-cuda" in targets else set())


def stamp(path: str) -> str:
    return path.removeprefix(f"{STAMPS}/")


def make(*words: str) -> str:
    """Return what make says in a clone in which nothing is installed, whichever make runs this test."""
    chosen = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "HOROVOD", "DEFAULT_FLAVOUR")
    return subprocess.run(
        ["make", f"STAMPS={STAMPS}", "CUDA=no-cuda", *words],
        cwd=checkout(),
        env={k: v for k, v in os.environ.items() if k not in chosen},
        capture_output=True,
        text=True,
        check=False,  # -q says by its exit code that there is something to do
    ).stdout


@cache
def graph() -> Graph:
    """Ask make for its rules, as a clone has them in which nothing is installed."""
    listed = make("-npq", "HOROVOD=gloo")
    parsed, target = Graph(), ""
    for line in listed.splitlines():
        if not line or ("$" in line.partition(":")[0] and not line.startswith("\t")):
            target = ""  # the end of a rule, or a line of a template of rules
        elif line.startswith("\t") and target:
            parsed.recipes[target] = parsed.recipes.get(target, "") + line + "\n"
        elif variable := re.match(r"(\w+) :?= (.*)", line):
            parsed.variables[variable[1]] = variable[2]
        elif rule := re.match(r"([^#\s.:=][^:=]*):(?!=)(.*)", line):
            target = stamp(rule[1])
            parsed.prerequisites.setdefault(target, []).extend(map(stamp, rule[2].replace("|", " ").split()))
    assert {"test", "lint", "package"} <= parsed.prerequisites.keys(), listed[-2000:]
    return parsed


def imported(files: Iterable[Path]) -> set[str]:
    """Return the first names of all that files import, inside functions and by importorskip, too."""

    def names(tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            match node:
                case ast.Import():
                    yield from (a.name for a in node.names)
                case ast.ImportFrom(level=0, module=str(module)):
                    yield module
                case ast.Call(func=ast.Attribute(attr="importorskip"), args=[ast.Constant(value=str(module)), *_]):
                    yield module

    return {name.split(".")[0] for file in files for name in names(ast.parse(file.read_text()))}


def installations(names: Iterable[str]) -> set[str]:
    """Return the stamps of the locks that have the packages which are imported by these names."""
    stamps: set[str] = set()
    distributions = packages_distributions()
    for name in set(names) - OWN_PACKAGES:
        imported_from = set(map(normal, distributions.get(name, ())))
        stamps |= set([stamp for stamp in LOCKS if imported_from & locked(stamp)][:1])
    return stamps


@cache
def locked(stamp: str) -> set[str]:
    """Return the distributions of an installation's lock."""
    lock = (checkout() / "requirements" / f"{LOCKS[stamp]}.lock").read_text()
    return {normal(name) for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)}


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@cache
def checked_by_mypy() -> frozenset[str]:
    """Return the packages that headrace's modules import and whose types mypy reads."""
    settings = tomllib.loads((checkout() / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    passed_over = {m.split(".")[0] for o in settings if o.get("ignore_missing_imports") for m in o["module"]}
    names = imported(checkout().joinpath("python").rglob("*.py"))
    return frozenset(names - passed_over - set(sys.stdlib_module_names))


def read_by(recipe: str) -> set[str]:
    """Return the installations that a recipe reads."""
    stamps: set[str] = set()
    if ".venv/bin/mypy" in recipe:
        stamps |= {"package"} | installations(checked_by_mypy())
    if "lint-imports" in recipe:
        stamps.add("package")
    if re.search(r"\$\(PYTEST\)|-m pytest", recipe):
        stamps |= ENVIRONMENT
    if re.search(r"\$\(HEADRACE\)|\$\(VENV_PYTHON\) (-m bench\.|scripts/(?!archive_classes)|bench/)", recipe):
        stamps |= ENVIRONMENT
    if "scripts/archive_classes.py" in recipe:
        stamps |= {"package", "jars"}
    if re.search(r"\$\((VENV_PYTHON|HEADRACE)\)|\.venv/bin/", recipe) and "$(UV) venv -q" not in recipe:
        stamps.add("venv")
    if re.search(r"\$\(UV\)|\bgradle -q", recipe):
        stamps.add("tools")
    if "-Pcuda=$(CUDA) -Psanitizers" in recipe and "$(if" not in recipe:
        stamps |= {"cuda", "rapids"}
    return stamps


@pytest.mark.parametrize("target", sorted(graph().recipes))
def test_no_target_reads_what_was_not_installed(target: str) -> None:
    assert read_by(graph().recipes[target]) - graph().made_before(target) == set()


def test_mypy_reads_the_server_s_libraries() -> None:
    assert "httptools" in checked_by_mypy()
    assert installations(["httptools"]) == {"serve"}


@pytest.mark.parametrize("name", sorted(p.stem for p in checkout().glob("bench/bench_*.py")))
def test_what_a_benchmark_imports_is_installed(name: str) -> None:
    needed = installations(imported([checkout() / "bench" / f"{name}.py"]))
    assert needed - graph().made_before(f"bench-{name.removeprefix('bench_')}") == set()


def test_everything_that_tests_import_is_installed_for_them() -> None:
    needed = installations(imported(checkout().joinpath("tests").rglob("*.py")))
    assert {"venv", "onnx", "serve"} <= needed
    assert needed - graph().made_before("test-all") == set()
    # ClickHouse's tests are in no other lane.
    assert needed - graph().made_before("test") <= {"clickhouse"}


def test_a_recipe_that_calls_make_does_nothing_else() -> None:
    """Because of .ONESHELL `make -n` runs all lines of such a recipe: the day of a demo, or hours of tests."""
    calls = {target: [line for line in recipe.splitlines() if line] for target, recipe in graph().recipes.items()}
    assert {"setup-demo", "setup-test-all"} <= {t for t, lines in calls.items() if any("$(MAKE)" in x for x in lines)}
    mixed = [t for t, lines in calls.items() if len({"$(MAKE)" in x for x in lines if not x.startswith("\t#")}) > 1]
    assert mixed == []


def test_what_a_contributor_waits_for_fetches_nothing_large() -> None:
    large = {"rapids", "cuda", "native-cuda", "hadoop", "s3", "s3proxy", "iceberg", "clickhouse"}
    assert graph().made_before("test") & large == set()
    assert large <= graph().made_before("test-all")
    assert {"lint", "airflow", "docs"} <= graph().made_before("test") & graph().made_before("test-all")
    demo = "nccl" if Path("/dev/nvidiactl").exists() else "gloo"
    for target, flavour in (("setup-test", "gloo"), ("demo", demo), ("setup-test-all", "nccl")):
        # Horovod with NCCL is what fetches the compilers of CUDA where no flavour was chosen.
        assert f"install Horovod, flavour {flavour} " in make("-n", target)
