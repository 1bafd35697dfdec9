"""Words check of `make lint`: names and docstrings that do not say what a thing is.

    python scripts/check_words.py                    # what HELD names; exit status 1 with a list of refusals
    python scripts/check_words.py python/score       # any files or folders, held or not
    python scripts/check_words.py --count            # refusals of each package of python/ and each folder beside it

Six rules, the first five for each file below HELD (docs/glossary.md has the terms to use):

  name       an assigned name, parameter, attribute, function or class is one of VAGUE: it says nothing of what it holds
  docstring  a docstring begins with one of FRAGMENTS: it goes on where the name stopped, instead of saying what a thing
             is (a noun phrase) or what a function does (an imperative)
  argument   a docstring's list of arguments names one that the function does not have: a rename has left it behind
  backticks  a name in backticks, in a docstring or a comment, is nowhere in the code: a rename has left it behind
  class      two classes outside tests/ have one name, so that a reader of one finds the other
  scatter    a folder of GATHERED has more than MOST_FILES files in 1,000 lines: its concepts lie in pieces

Packages move to HELD when they are renamed; none moves back.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import io
import keyword
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Files, folders and patterns that `make lint` checks.
HELD: tuple[str, ...] = (
    "airflow_dags",
    "bench",
    "conftest.py",
    "examples",
    "plugins",
    "python/cli",
    "python/comm",
    "python/compute",
    "python/config",
    "python/dataset",
    "python/embeddings",
    "python/errors",
    "python/export",
    "python/features/__init__.py",
    "python/features/arrow",
    "python/features/build",
    "python/features/functions",
    "python/features/layout",
    "python/features/learn",
    "python/features/ops",
    "python/features/spark",
    "python/features/table_ops",
    "python/features/transport.py",
    "python/features/types.py",
    "python/features/vocabulary",
    "python/features/workflow",
    "python/jobs",
    "python/lake/delta",
    "python/lake/forgotten.py",
    "python/lake/generate",
    "python/lake/landing",
    "python/lake/scratch.py",
    "python/lake/spark",
    "python/lake/tables",
    "python/lake/values.py",
    "python/library",
    "python/logs.py",
    "python/models",
    "python/plugins.py",
    "python/publish",
    "python/quality",
    "python/score",
    "python/stage",
    "python/storage",
    "python/testing.py",
    "python/train",
    "python/udfs",
    "scripts",
    "tests",
)

#: Folders whose modules are a concept each, and the most files that 1,000 lines of one may lie in.
GATHERED: tuple[str, ...] = ("airflow_dags", "bench", "plugins", "scripts")
MOST_FILES = 5.0

#: Participles, pronouns, adverbs and prepositions. Alone they say nothing of a value.
VAGUE = frozenset(
    re.findall(
        r"\w+",
        "found mine ours theirs there wanted made gone said told asked kept given of at before whole own shown what "
        "why where one came goes comes brought handed stands began ended lacking here there_is told_again turn other "
        "others them those which than without within beside behind beyond along nothing nobody",
    )
)

#: First words of a docstring that continues its name.
FRAGMENTS = frozenset(
    re.findall(
        r"\w+",
        "of by what whether where which who whose how that those it when why as from in within than without beside "
        "behind",
    )
)

#: Vague names that stay, by file: they are keys of files or of a protocol.
SERIALIZED = {
    ("python/score/assignment.py", "at"),  # a field of the record of a stopped arm
    # Fields of `headrace doctor --json`.
    ("python/cli/doctor.py", "found"),
    ("python/cli/doctor.py", "what"),
    ("python/lake/generate/site.py", "shown"),  # a field of site/<ds>.json
    ("python/config/schema.py", "of"),  # a method of the datasets' public schema
    ("python/library/workflow.py", "before"),  # an argument of `Workflow.fit`
    ("python/jobs/observe/application.py", "began"),  # a field of the status file
    ("python/models/inputs.py", "of"),  # an argument of models' inputs, part of their contract
    ("python/models/multitask.py", "own"),  # a key of saved weights
    ("python/embeddings/dynamic/rows.py", "asked"),  # a field of the report of tables of raw ids
    ("python/quality/drift/stage.py", "what"),  # a field of drift's facts
    ("python/embeddings/jagged.py", "without"),  # a method of the public `JaggedTensor`
    ("python/embeddings/lookup/handle.py", "found"),  # a property of prepared inputs, which loops of users read
    ("python/config/workspace.py", "of"),  # a method of the public `Workspace`
    ("python/stage/manifest.py", "at"),  # a field of manifests
    # Keys of pipelines in YAML.
    ("python/config/candidates.py", "where"),
    ("python/config/experiments.py", "shown"),
    ("python/config/gate.py", "of"),
    ("python/config/train.py", "behind"),
    ("python/config/train.py", "where"),
    # Keys of operators in YAML.
    ("python/features/ops/times.py", "of"),
    ("python/features/table_ops/attribution.py", "where"),
    ("python/features/table_ops/attribution.py", "within"),
    ("python/features/table_ops/earlier_events.py", "where"),
    ("python/features/table_ops/joins.py", "at"),
    ("python/features/table_ops/rows.py", "where"),
}

#: Names that several classes have, by reason.
SHARED_CLASS_NAMES = {
    "Stage": "each package has one step of the day",
    "Workflow": "the Python API's, around that of the engines",
    "FittedWorkflow": "the Python API's, around that of the engines",
    "Predictor": "the Python API's, around that of the models",
    "Lookup": "of values in a vocabulary, and of rows in an embedding table",
    "Model": "the two examples of one training loop, to be compared by diff",
    "TritonPythonModel": "Triton's name of the class in each model of its Python back end",
}

#: Names in backticks that are those of other programs and stand nowhere in the code.
FOREIGN = frozenset(dir(builtins)) | frozenset(dir(object)) | frozenset(keyword.kwlist)

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
_BACKTICKS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
#: Files whose words count as names that exist: keys of YAML and SQL, targets of make, symbols of C++ and Java.
_NAMED_IN = ("*.py", "*.yaml", "*.yml", "*.toml", "*.cpp", "*.h", "*.cu", "*.java", "*.sh", "*.gradle", "Makefile")
_FOLDERS = (
    "python",
    "tests",
    "bench",
    "scripts",
    "airflow_dags",
    "conf",
    "examples",
    "native",
    "plugins",
    "requirements",
)


#: Folders of Python beside python/.
_FOLDERS_BESIDE_PYTHON = ("airflow_dags", "bench", "examples", "plugins", "scripts", "tests")


@dataclass(frozen=True, order=True)
class Refusal:
    """A place that breaks a rule."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def place_of(path: Path) -> str:
    """Return a file's path as messages show it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def python_files(folder: Path) -> list[Path]:
    """Return a file itself, or the Python files below a folder, in order."""
    if folder.is_file():
        return [folder]
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def refusals(path: Path) -> Iterator[Refusal]:
    """Yield what all rules but the last refuse in a file."""
    source = path.read_text()
    tree = ast.parse(source)
    place = place_of(path)
    for line, name in names(tree):
        if name.strip("_").lower() in VAGUE and (place, name) not in SERIALIZED:
            yield Refusal(place, line, "name", f"'{name}' does not say what it holds (docs/glossary.md)")
    for line, text in docstrings(tree):
        first = re.match(r"\w*", text)
        if first and first[0].lower() in FRAGMENTS:
            yield Refusal(place, line, "docstring", f"begins with a fragment: {text.splitlines()[0][:60]}")
    for line, name in unknown_arguments(tree):
        yield Refusal(place, line, "argument", f"'{name}' is described, and is no argument of the function")
    texts = [*docstrings(tree), *comments(source)]
    for line, text in texts:
        for name in _BACKTICKS.findall(text):
            if _IDENTIFIER.fullmatch(name) and not exists(name):
                yield Refusal(place, line, "backticks", f"`{name}` is nowhere in the code")


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what a module assigns, takes as a parameter or defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
                # The language names the second parameter of `__eq__` and its like.
                if not name.startswith("__"):
                    yield from ((arg.lineno, arg.arg) for arg in parameters(node.args))
            case ast.Lambda():
                yield from ((arg.lineno, arg.arg) for arg in parameters(node.args))


def parameters(args: ast.arguments) -> list[ast.arg]:
    """Return all parameters of a function, in order."""
    rest = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *rest]


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a module's docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def unknown_arguments(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what a function's docstring describes below `Args:` and the function does not take."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _, _, described = (ast.get_docstring(node) or "").partition("\nArgs:\n")
            taken = {arg.arg for arg in parameters(node.args)}
            for group in re.findall(
                r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", described.partition("\n\n")[0], re.MULTILINE
            ):
                for name in re.findall(r"\w+", group):
                    if name not in taken:
                        yield node.lineno, name


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a file's comments."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def exists(name: str) -> bool:
    """Return whether each part of a dotted name stands somewhere in code, or is a word of Python's own."""
    parts = name.removesuffix("()").split(".")
    return all(part in FOREIGN or part in known_names() for part in parts)


@cache
def known_names() -> frozenset[str]:
    """Return all words of the repository's code: identifiers and strings, without docstrings and comments."""
    words: set[str] = set()
    for folder in _FOLDERS:
        for pattern in _NAMED_IN:
            for path in (ROOT / folder).rglob(pattern):
                text = path.read_text(errors="replace")
                words.update(re.findall(r"\w+", _code_of(text) if path.suffix == ".py" else text))
    for path in (*ROOT.glob("*.py"), *ROOT.glob("*.toml"), ROOT / "Makefile", ROOT / "build.gradle"):
        words.update(re.findall(r"\w+", path.read_text()))
    return frozenset(words)


def _code_of(source: str) -> str:
    """Return a file without comments and texts of several lines. (Tokens would be exact, at ten times the cost.)"""
    return re.sub(r'"""(?s:.*?)"""|#.*', " ", source)


def class_refusals(files: Iterable[Path]) -> list[Refusal]:
    """Return the classes, public ones, that have a name which another one has.

    Classes of tests are left out: each serves its module alone, and a stand-in may have the name of what it replaces.
    Sections of the spec have the names of their keys, and so may the classes that work by them: sections are compared
    with each other alone.
    """
    places: defaultdict[tuple[str, bool], list[tuple[str, int]]] = defaultdict(list)
    for path in files:
        if path.is_relative_to(ROOT / "tests"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name, path.is_relative_to(ROOT / "python/config")].append((place_of(path), node.lineno))
    return [
        Refusal(path, line, "class", f"{name} is also {', '.join(f'{p}:{k}' for p, k in occurrences if p != path)}")
        for (name, _), occurrences in places.items()
        if len(occurrences) > 1 and name not in SHARED_CLASS_NAMES
        for path, line in occurrences
    ]


def scatter_refusals(folders: Iterable[Path]) -> list[Refusal]:
    """Return the folders, of those in GATHERED, whose lines lie in too many files."""
    refused = []
    for folder in (folder for folder in folders if place_of(folder) in GATHERED):
        sources = [path.read_text() for path in python_files(folder)]
        lines = sum(source.count("\n") for source in sources)
        if 1000 * len(sources) > MOST_FILES * lines:
            message = (
                f"{len(sources)} files of {lines:,} lines, {MOST_FILES:g} per 1,000 at most: fold what is one concept"
            )
            refused.append(Refusal(place_of(folder), 1, "scatter", message))
    return refused


def main() -> int:
    """Print refusals, or their counts, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; without any, those that are held")
    parser.add_argument("--count", action="store_true", help="count refusals by package of python/ and by folder")
    args = parser.parse_args()
    if args.count:
        packages = sorted(p for p in (ROOT / "python").iterdir() if p.name != "__pycache__")
        for package in [*packages, *(ROOT / folder for folder in _FOLDERS_BESIDE_PYTHON)]:
            rules = Counter(r.rule for path in python_files(package) for r in refusals(path))
            print(f"{package.relative_to(ROOT)!s:<24}{'held' if is_held(package) else '':<6}{dict(rules)}")
        return 0
    roots = [p.resolve() for p in args.paths] or [
        path for held in HELD for path in sorted(ROOT.glob(held)) or [ROOT / held]
    ]
    missing = [p for p in roots if not p.exists()]
    if missing:
        print(f"no such file or folder: {missing[0]}", file=sys.stderr)
        return 2
    files = [path for root in roots for path in python_files(root)]
    refused = sorted([r for path in files for r in refusals(path)] + class_refusals(files) + scatter_refusals(roots))
    for refusal in refused:
        print(refusal)
    print(f"{len(files)} files, {len(refused)} refusals")
    return int(bool(refused))


def is_held(path: Path) -> bool:
    """Return whether a file or folder is below HELD."""
    return any(path.is_relative_to(ROOT / held) for held in HELD)


if __name__ == "__main__":
    sys.exit(main())
