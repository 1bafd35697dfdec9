"""Check of the documentation's pages: what they name exists.

    python scripts/check_pages.py                   # all pages of the repository; exit status 1 with a list of refusals
    python scripts/check_pages.py docs/training.md  # some

Seven rules:

  file       a path of the repository in backticks, such as `train/loop/run.py` or `tests/unit/test_cli.py`, has no file
  command    `headrace NAME`, in backticks or in a block of code, is no command
  option     an option of such a line is none of that command
  make       `make TARGET` is no target of the Makefile
  module     `python -m MODULE` is no module of the repository
  key        a dotted key such as `train.dense.schedule`, or a key of a block of YAML, is none of a pipeline's keys
  name       another name in backticks is nowhere in the code

Commands and keys are those of docs/reference/, which `headrace reference --write` makes and
tests/unit/test_reference.py compares with the code. So this needs no import of headrace.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.check_words import Refusal, exists  # noqa: E402

#: Names of other programs, in no code of headrace.
FOREIGN = frozenset(
    re.findall(
        r"\S+",
        "ArrayIntersect ConcurrentTransactionException DominantResourceCalculator DynamicEmb_APIs.md EX_TEMPFAIL "
        "FrequencyAdmissionStrategy GCSLogStore HADOOP_TOKEN_FILE_LOCATION HOROVOD_GLOO_IFACE HOROVOD_LOCAL_RANK "
        "HashTable MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_USERNAME MULTI NCCL_SOCKET_IFNAME OPENLINEAGE_ENDPOINT "
        "READ_COMMITTED_SNAPSHOT SparkKubernetesOperator TableOperations.commit TreeLauncherSubreaper all_reduce_perf "
        "alltoall alltoall_perf "
        "conda.yaml python_env.yaml expire_snapshots hsync hvd.alltoall hw_counters ib_write_bw improvedFloatOps "
        "incompatibleOps incremental_dump killed_task_cleanup_time link_downed local_lock nolock np_cnp_sent "
        "options.http_path out_of_sequence pkg_resources port_rcv_errors port_xmit_data remove_orphan_files "
        "rnr_nak_retry_err rp_cnp_handled rx_prio3_pause show_gids sok.incremental_dump source_fish source_zsh "
        "symbol_error terminationGracePeriodSeconds threshold_filtering_func variableFloatAgg ",
    )
)
#: Names that headrace makes of several words: metrics, columns, series.
COMPOSED = re.compile(r"headrace_serve_\w+|step_\w+|item_id_\w+|user_id_\w+|purchases_\w+|spark\.[a-z]\w*\.[\w.]+")
#: Words that stand for a name of the reader's, within a name.
_PLACEHOLDER = re.compile(r"(?:^|[_.])(?:PIPELINE|TABLE|LABEL|LEASE|NAME)(?:$|[_.])")
#: Pages that name what has been: their names may be gone.
HISTORY = ("CHANGELOG.md", "docs/faults.md")
#: Endings of files of the repository. Other paths are those of a workspace or of a user.
_SOURCE = r"(?:py|cpp|hpp|cu|h|java|sh|lock|in|conf|toml|gradle|yaml|yml|ipynb)"
_PATH = re.compile(rf"(?<![\w/.:*{{-])(?:[\w-]+/)+[\w.-]+\.{_SOURCE}\b(?![\w*])")
#: Commands for submitters, which `headrace --help` leaves out.
HIDDEN_COMMANDS = frozenset({"spark-properties"})
#: Keys below which a mapping has names of operators.
_OPERATORS = frozenset({"ops", "prepare"})
#: First folders of a path that names a file of a user, of a workspace or of an installation.
_ELSEWHERE = frozenset(
    re.findall(r"\w+", "landing lake var home data my_package acme build mnt opt usr etc locks sbin torchrec")
)
_FENCE = re.compile(r"^( *)(`{3,})(\w*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^\n|\A)((?: {4}.*\n| *\n)+)", re.MULTILINE)
_BACKTICKS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_IDENTIFIER = re.compile(r"[A-Za-z]\w*(?:\.[A-Za-z]\w*)*(?:\(\))?")
_COMMAND = re.compile(
    r"(?<![\w./-])(?:\.venv/bin/)?headrace(?! (?:as|import)\b)"
    r"((?: (?:-[\w-]+(?:[= ](?![a-z]+\b)\S+)?|[a-z_][a-z_-]*))+)"
)
_MAKE = re.compile(r"(?<![\w./-])make((?: [\w-]+(?![\w=]))+)")
_MODULE = re.compile(r"python3? -m ((?:bench|scripts|headrace|tests)[\w.]*)")


def pages() -> list[Path]:
    """Return the repository's pages but for those that commands write."""
    folders = ("docs", "airflow_dags", "examples", "plugins")
    markdown = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    return sorted(page for page in markdown if page.parent != ROOT / "docs" / "reference")


def refusals(page: Path) -> Iterator[Refusal]:
    """Yield what a page names and the repository does not have."""
    text = page.read_text(encoding="utf-8")
    place = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name

    def refusal(offset: int, rule: str, name: str) -> Refusal:
        return Refusal(place, text.count("\n", 0, offset) + 1, rule, name)

    prose = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for offset, code in _code(text):
        for rule, name in [*_commands(code), *_targets(code), *_modules(code)]:
            yield refusal(offset, rule, name)
    for offset, block in yaml_blocks(text):
        for name in unknown_keys(block):
            yield refusal(offset, "key", name)
    if place in HISTORY:
        return
    for match in _PATH.finditer(text):
        if match[0].split("/")[0] not in _ELSEWHERE and not _is_file(match[0]):
            yield refusal(match.start(), "file", match[0])
    lines = prose.split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("    ") and not line.lstrip().startswith(("-", "*", "|")):
            continue
        for name in _BACKTICKS.findall(line):
            known = name in FOREIGN or name in _other_words() or COMPOSED.fullmatch(name) or _PLACEHOLDER.search(name)
            if not _IDENTIFIER.fullmatch(name) or known or _is_file(name):
                continue
            if exists(name) and not re.search(rf"\.{_SOURCE}$", name):
                continue
            yield Refusal(place, number, "name", name)
        for name in _BACKTICKS.findall(line):
            dotted = re.fullmatch(r"([a-z_]+)(?:\.\w+|\[\])+", name)
            if dotted and dotted[1] in _sections()["Spec"] and not (is_key(name) or is_other_dotted(name)):
                yield Refusal(place, number, "key", name)


def is_other_dotted(name: str) -> bool:
    """Return whether a dotted name is a property of Spark's, a file, or in a module of headrace's."""
    parts = name.split(".")
    is_property = parts[0] == "spark" and parts[1] not in _sections()["Spark"]
    is_file = parts[-1] in ("onnx", "pt2", "json") or _is_file(name)
    return (
        is_property or is_file or any((ROOT / "python" / Path(*parts[:k])).with_suffix(".py").is_file() for k in (2, 3))
    )


def _code(text: str) -> Iterator[tuple[int, str]]:
    """Yield (offset, text) of each line of a block of code, and of what stands in backticks."""
    for block in [*_FENCE.finditer(text)]:
        yield from _lines(block.start(4), block[4])
    prose = _FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    for block in _INDENTED.finditer(prose):
        yield from _lines(block.start(1), block[1])
    for match in _BACKTICKS.finditer(prose):
        yield match.start(), match[1]


def _lines(offset: int, block: str) -> Iterator[tuple[int, str]]:
    for line in block.split("\n"):
        yield offset, re.split(r"(?:^|\s{2,})#", line)[0]
        offset += len(line) + 1


def yaml_blocks(text: str) -> Iterator[tuple[int, Any]]:
    """Yield (offset, value) of each block of YAML whose keys are those of a pipeline."""
    blocks = [(b.start(4), b[4]) for b in _FENCE.finditer(text) if b[3] == "yaml"]
    prose = _FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    blocks += [(b.start(1), b[1]) for b in _INDENTED.finditer(prose) if re.match(r"\s*[a-z_]+:(?:\s|$)", b[1])]
    for offset, block in blocks:
        try:
            value = yaml.safe_load(re.sub(r"^\s*\.\.\.\s*$|, \.\.\.(?=})", "", block, flags=re.MULTILINE))
        except yaml.YAMLError:
            continue
        if isinstance(value, dict) and set(value) <= set(_sections()["Spec"]):
            yield offset, value


def _commands(code: str) -> Iterator[tuple[str, str]]:
    for match in _COMMAND.finditer(code):
        words = match[1].split()
        while words and words[0].startswith("-"):
            words = words[1 if words[0] in ("--version", "--install-completion", "--show-completion") else 2 :]
        if not words:
            continue
        known = _options()
        name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        if name in HIDDEN_COMMANDS:
            continue
        if name not in known:
            yield "command", f"headrace {words[0]}"
            continue
        options = frozenset().union(*(known[n] for n in known if n == name or n.startswith(f"{name} ")), known[""])
        rest = re.split(r"\s[|&;>]\s?", code[match.start() :])[0]
        for option in re.findall(r"(?<=\s)--[a-z][\w-]*", rest):
            if option not in options and option != "--help":
                yield "option", f"headrace {name} {option}"


def _targets(code: str) -> Iterator[tuple[str, str]]:
    for match in _MAKE.finditer(code):
        for target in match[1].split():
            if target not in _make_targets() and not target.startswith("bench-"):
                yield "make", f"make {target}"


def _modules(code: str) -> Iterator[tuple[str, str]]:
    for name in _MODULE.findall(code):
        path = ROOT / name.rstrip(".").replace("headrace", "python", 1).replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file() and not path.is_dir():
            yield "module", name


def unknown_keys(value: Any, section: str = "Spec", path: str = "") -> Iterator[str]:
    """Yield the dotted keys of a mapping that a section of a pipeline does not have."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == "...":
            continue
        if key not in _sections()[section]:
            yield f"{path}{key}"
            continue
        if key in _OPERATORS:
            entries = inner if isinstance(inner, list) else [inner]
            named = {name for entry in entries for name in (entry if isinstance(entry, dict) else [entry])}
            yield from (f"{path}{key}.{name}" for name in named if ":" not in str(name) and name not in _operators())
            continue
        kinds, form = _sections()[section][key]
        entries = [inner]
        if form == "mapping":
            entries = list(inner.values()) if isinstance(inner, dict) else []
        if isinstance(inner, list):
            entries = inner
        for entry in entries:
            unknown = [list(unknown_keys(entry, kind, f"{path}{key}.")) for kind in kinds]
            if unknown and all(unknown) and isinstance(entry, dict):
                yield from min(unknown, key=len)


def is_key(name: str) -> bool:
    """Return whether a dotted name leads to a key of a pipeline; the names of a mapping may be any."""
    sections = {"Spec"}
    parts = name.replace("[]", "").split(".")
    while parts:
        part = parts.pop(0)
        entries = [_sections()[s][part] for s in sections if part in _sections()[s]]
        if not entries:
            return False
        sections = {kind for kinds, _ in entries for kind in kinds}
        in_mapping = any(form == "mapping" for _, form in entries)
        if in_mapping and parts and parts[0] not in {key for s in sections for key in _sections()[s]}:
            parts.pop(0)
        if not sections:
            return True
    return True


@cache
def _sections() -> dict[str, dict[str, tuple[tuple[str, ...], str]]]:
    """Return (sections, form) of each key by section, from docs/reference/keys.md. The form is "mapping" or ""."""
    text = (ROOT / "docs" / "reference" / "keys.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (\w[\w ]*)$", text, flags=re.MULTILINE)
    tables = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = set(tables)
    return {
        section: {
            key: (
                tuple(kind for kind in re.findall(r"\[(\w+)\]\(#", type_) if kind in names),
                "mapping" if "mapping" in type_ else "",
            )
            for key, type_ in re.findall(r"^\| `(\w+)` \| ((?:\\\||[^|])*) \|", table, flags=re.MULTILINE)
        }
        for section, table in tables.items()
    }


@cache
def _operators() -> frozenset[str]:
    text = (ROOT / "docs" / "reference" / "operators.md").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^### `(\w+)`", text, flags=re.MULTILINE))


@cache
def _options() -> dict[str, frozenset[str]]:
    """Return the options of each command, from docs/reference/commands.md; those of all commands under ""."""
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    parts = re.split(r"^## `headrace(?: ([a-z_ -]+))?`$", text, flags=re.MULTILINE)
    return {
        (name or ""): frozenset(re.findall(r"--[a-z][\w-]*", body))
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@cache
def _make_targets() -> frozenset[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"^([\w-]+(?: [\w-]+)*):(?!=)", text, flags=re.MULTILINE)
    phony = re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    return frozenset(word for words in [*named, *phony] for word in words.split())


@cache
def _files() -> frozenset[str]:
    folders = ("python", "native", "tests", "bench", "scripts", "conf", "examples", "plugins", "airflow_dags", "docs")
    inside = [p for folder in (*folders, "requirements", ".github") for p in (ROOT / folder).rglob("*")]
    return frozenset(str(p.relative_to(ROOT)) for p in [*inside, *ROOT.glob("*")] if "__pycache__" not in p.parts)


def _is_file(path: str) -> bool:
    """Return whether a file of the repository has the path, or ends with it from a whole folder's name on."""
    return path in _files() or any(file.endswith(f"/{path}") for file in _files())


@cache
def _other_words() -> frozenset[str]:
    """Return the keys, operators and options of the reference: words that pages may have in backticks."""
    reference = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md")]
    return frozenset(re.findall(r"[\w.]+", " ".join(reference)))


def main() -> int:
    """Print refusals, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages; without any, all")
    args = parser.parse_args()
    checked = [page.resolve() for page in args.pages] or pages()
    refused = sorted({refusal for page in checked for refusal in refusals(page)})
    for refusal in refused:
        print(refusal)
    print(f"{len(checked)} pages, {len(refused)} refusals")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
