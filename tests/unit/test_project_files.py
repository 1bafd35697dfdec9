"""Files of the project: images, hooks, workflows, pages that name code, and what pytest collects."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.installation import checkout
from headrace.export.serve.options import Metrics
from headrace.logs import is_secret
from tests.lanes import markers_of

DASHBOARD = checkout() / "examples" / "grafana" / "headrace.json"
#: Suffixes that Prometheus' text has behind a family's name.
SUFFIXES = ("_total", "_bucket", "_sum", "_count", "")


def panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels that have queries."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def exported() -> set[str]:
    """Return the names of all families of metrics: of pipelines, and of the server."""
    source = (checkout() / "python" / "jobs" / "observe" / "prometheus.py").read_text()
    of_pipelines = set(re.findall(r'"(headrace_\w+)"', source))
    of_server = {family.name for family in Metrics().registry.collect()}
    assert len(of_pipelines) > 20
    assert len(of_server) > 5
    return of_pipelines | of_server


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_queries_metrics_that_are_exported(panel: dict[str, Any]) -> None:
    names = exported()
    for target in panel["targets"]:
        queried = re.findall(r"\bheadrace_\w+", target["expr"])
        assert queried
        for name in queried:
            assert any(name.removesuffix(suffix) in names for suffix in SUFFIXES if name.endswith(suffix)), name


def test_panels_do_not_overlap() -> None:
    cells = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def make_targets() -> set[str]:
    makefile = (checkout() / "Makefile").read_text()
    phony = {word for line in re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE) for word in line.split()}
    return phony | set(re.findall(r"^\$\(STAMPS\)/([\w-]+):", makefile, re.MULTILINE))


def test_the_workflow_and_the_image_call_targets_that_exist() -> None:
    workflow = yaml.safe_load((checkout() / ".github" / "workflows" / "test.yml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    called = {target for run in runs for target in re.findall(r"'(test[\w-]*)'", run)}
    assert called == {"test", "test-all"}
    dockerfile = (checkout() / "Dockerfile").read_text()
    for line in re.findall(r"RUN make ([^&\n]*)", dockerfile):
        words = [word.removeprefix("build/stamps/") for word in line.split() if "=" not in word]
        assert {word.partition(".")[0] for word in words} <= make_targets() | {"horovod"}
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE):
        for source in line.split():
            assert (checkout() / source).exists(), source


def test_the_image_file_is_clean() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    completed = subprocess.run([linter, checkout() / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (0, "")


#: Airflow's environment has jsonschema.
VALIDATE = """
import json, sys
from jsonschema import Draft7Validator
schema, document = (json.load(open(path)) for path in sys.argv[1:])
for error in Draft7Validator(schema).iter_errors(document):
    print("/".join(map(str, error.absolute_path)), error.message)
"""


def compose_faults(document: Any, folder: Path) -> str:
    """Return what Compose's schema refuses of a document."""
    file = folder / "compose.json"
    file.write_text(json.dumps(document))
    schema = checkout() / "tests" / "data" / "compose-spec.json"
    python = checkout() / ".venv-airflow" / "bin" / "python"
    return subprocess.run([python, "-c", VALIDATE, schema, file], capture_output=True, text=True, check=True).stdout


def test_the_compose_file_is_what_its_schema_says(tmp_path: Path) -> None:
    document = yaml.safe_load((checkout() / "compose.yaml").read_text())
    assert compose_faults(document, tmp_path) == ""
    assert set(document["services"]) == {"postgres", "mlflow", "airflow", "headrace"}
    misspelt = {**document, "services": {"postgres": {**document["services"]["postgres"], "port": ["5432"]}}}
    assert "services/postgres 'port' does not match" in compose_faults(misspelt, tmp_path)


def test_the_compose_file_has_no_secrets_and_names_files_that_exist() -> None:
    text = (checkout() / "compose.yaml").read_text()
    document = yaml.safe_load(text)
    required = set(re.findall(r"\$\{(\w+):\?set it in \.env\}", text))
    example = (checkout() / ".env.example").read_text()
    assert set(re.findall(r"^(\w+)=$", example, re.M)) == required
    assert re.findall(r"^\w+=.+$", example, re.M) == []
    environment = [entry for s in document["services"].values() for entry in s.get("environment", {}).items()]
    secrets = [(name, value) for name, value in environment if is_secret(name) or name.endswith("_KEY")]
    assert len(secrets) >= 6
    assert [name for name, value in secrets if not re.fullmatch(r"\$\{\w+:\?set it in \.env\}", value)] == []
    # Addresses and connections with a password take it from a variable, too.
    for name, value in environment:
        assert all(match.startswith("${") for match in re.findall(r"://\w+:(..)[^@]*@", value)), name
        assert all(match.startswith("${") for match in re.findall(r'"password": "(.{2})', value)), name
    for service in document["services"].values():
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", volume).partition(":")[0]
            assert source in document["volumes"] or (checkout() / source).is_dir(), volume
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "nobody else's network"
    for path in re.findall(r"/opt/headrace/(airflow_dags[\w/.]*)", text):
        assert (checkout() / path).exists(), path
    assert "/.env" in (checkout() / ".gitignore").read_text().splitlines()
    assert ".env" in (checkout() / ".dockerignore").read_text().splitlines()


def test_hooks_call_programs_of_the_environment() -> None:
    hooks = yaml.safe_load((checkout() / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        program, *words = hook["entry"].split()
        assert Path(sys.executable).with_name(Path(program).name).is_file(), program
        assert all((checkout() / word).is_file() for word in words if word.endswith(".py"))


ROWS = re.findall(
    r"^\| ([^|]+) \| [^|]+ \| `([\w/.]+)`((?:,? `\w+`)*) \|$", (checkout() / "docs" / "glossary.md").read_text(), re.M
)


def test_each_line_is_read() -> None:
    lines = (checkout() / "docs" / "glossary.md").read_text().splitlines()
    assert len(ROWS) == sum(line.startswith("| ") and not line.startswith("| term") for line in lines)


@pytest.mark.parametrize(("term", "place", "classes"), ROWS)
def test_what_a_term_names_exists(term: str, place: str, classes: str) -> None:
    path = checkout() / "python" / place
    files = [path] if path.is_file() else sorted(Path(path).rglob("*.py"))
    assert files, f"{term}: there is no {place}"
    code = "\n".join(file.read_text() for file in files)
    assert [name for name in re.findall(r"\w+", classes) if f"class {name}" not in code] == []


ARCHITECTURE = (checkout() / "docs" / "architecture.md").read_text()
#: (what is added, its places) of each row of "Where do I add ...".
ADDITIONS = re.findall(
    r"^\| ([^|]+) \| ([^|]+) \|$", ARCHITECTURE.partition("## Where do I add")[2].partition("\n## ")[0], re.M
)
CODE_ROOTS = (checkout() / "python", checkout(), checkout() / "bench" / "quality", checkout() / "python/cli/scaffold")


@cache
def words_of_the_code() -> frozenset[str]:
    sources = [p for folder in ("python", "bench") for p in (checkout() / folder).rglob("*.py")]
    return frozenset(word for source in sources for word in re.findall(r"\w+", source.read_text()))


@pytest.mark.parametrize(("addition", "places"), ADDITIONS)
def test_what_a_row_of_additions_names_exists(addition: str, places: str) -> None:
    names = re.findall(r"`([^`]+)`", places)
    paths = [name for name in names if re.fullmatch(r"[\w/.{},]+(\.py|\.yml|/)", name)]
    expanded = [
        re.sub(r"\{[^}]*\}", choice, path)
        for path in paths
        for choice in (re.search(r"\{([^}]*)\}", path) or ["", ""])[1].split(",")
    ]
    folder = next((path for path in expanded if path.endswith(".py")), "")
    roots = (*CODE_ROOTS, (checkout() / "python" / folder).parent)
    assert [path for path in expanded if not any((root / path).exists() for root in roots)] == []
    words = [name for name in names if re.fullmatch(r"[A-Za-z_]\w*", name)]
    assert [word for word in words if word not in words_of_the_code()] == []


def test_the_page_shows_each_entry_of_the_package() -> None:
    layers = ARCHITECTURE.partition("## Packages")[2].partition("import-linter")[0]
    on_page = {name for line in re.findall(r"^    ([a-z_| ]+?)  ", layers, re.M) for name in re.findall(r"\w+", line)}
    entries = {p.stem for p in (checkout() / "python").iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert on_page == entries - {"__init__"}
    assert len(entries) <= 24, "a newcomer reads the order of a day from the top of the package"


PAGE = (checkout() / "docs" / "faults.md").read_text()
#: (line of the report, the last cell) of each row.
TABLE_ROWS = re.findall(r"^\| ([A-G]\d) \|.*\| ([^|]+) \|$", PAGE, re.M)
#: Lines of the report.
LINES = [
    f"{part}{n}" for part, count in zip("ABCDEFG", (2, 2, 2, 7, 6, 4, 4), strict=True) for n in range(1, count + 1)
]
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@cache
def functions_of(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    module = ast.parse((checkout() / file).read_text())
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@cache
def decorators(file: str) -> dict[str, str]:
    """Return the markers of a file's tests: by the function's name, with those of the whole file."""
    module = ast.parse((checkout() / file).read_text())
    of_file = [
        ast.unparse(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    functions = functions_of(file)
    return {name: " ".join([*of_file, *map(ast.unparse, node.decorator_list)]) for name, node in functions.items()}


def is_drawn(test: str) -> bool:
    """Return whether a run of lane `all` may leave out a test, by its file, its own markers and its arguments."""
    file, _, name = test.partition("::")
    fixtures = [argument.arg for argument in functions_of(file)[name].args.args]
    return "drawn" in markers_of(test, fixtures, re.findall(r"pytest\.mark\.(\w+)", decorators(file)[name]))


def test_each_line_of_the_report_has_rows_and_each_row_a_test() -> None:
    assert list(dict.fromkeys(line for line, _ in TABLE_ROWS)) == LINES
    assert len(TABLE_ROWS) == len(re.findall(r"^\| [A-G]\d ", PAGE, re.M))
    assert [
        (line, cell) for line, cell in TABLE_ROWS if not re.fullmatch(r"`tests/[^`]+`(, `tests/[^`]+`)*", cell)
    ] == []
    in_each_run = [not all(map(is_drawn, re.findall(r"`([^`]+)`", cell))) for _, cell in TABLE_ROWS]
    assert [row for row, is_in in zip(TABLE_ROWS, in_each_run, strict=True) if not is_in] == []


@pytest.mark.parametrize("file", sorted({file for file, _ in TESTS}))
def test_the_named_tests_are_in_the_lane(file: str) -> None:
    names = [name for named_file, name in TESTS if named_file == file]
    assert [name for name in names if name not in decorators(file)] == []
    assert [name for name in names if "mark.long" in decorators(file)[name]] == []


PAGES = [
    *checkout().glob("*.md"),
    *(
        page
        for folder in ("docs", "airflow_dags", "examples", "plugins")
        for page in checkout().joinpath(folder).rglob("*.md")
    ),
]


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as repository browsers make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h) for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(checkout())))
def test_links_lead_somewhere_where_the_repository_is_browsed(page: Path) -> None:
    """`make docs` checks those of the site."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    broken = []
    for path, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)", text):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def test_the_front_page_is_short() -> None:
    text = (checkout() / "README.md").read_text()
    assert len(text.split()) <= 600
    (output,) = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(output.splitlines()) <= 12
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 1


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """pytest looks into no folder with a name of `norecursedirs`: by default "dist" is one."""
    folders = {p.relative_to(checkout()).parent for p in checkout().joinpath("tests").rglob("test_*.py")}
    assert len(folders) > 5
    patterns = pytestconfig.getini("norecursedirs")
    assert [str(f) for f in folders if any(fnmatch(part, p) for part in f.parts for p in patterns)] == []
