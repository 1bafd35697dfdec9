"""Texts of others on a terminal, days at the ends of the calendar, folders of others, and commands that are advised."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Group
from rich.panel import Panel
from rich.text import Text
from rich.tree import Tree
from typer.main import get_command
from typer.testing import CliRunner

from headrace.cli import app, screen
from headrace.cli.screen import psql_table
from headrace.config import load_spec, parse_ds
from headrace.config.installation import checkout, pipeline_file
from headrace.errors import UserError
from headrace.jobs.output import copy_output
from headrace.logs import TextFormatter, print_error, visible
from headrace.storage.objects import copies

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mred\x7f\r\u202e"


def is_obeyed(text: str) -> bool:
    """Return whether a terminal obeys it: C0 but for lines and tabs, DEL, C1, bidirectional controls."""
    turned = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    return any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or ord(c) in turned for c in text)


@given(st.text())
def test_no_text_is_obeyed(text: str) -> None:
    assert not is_obeyed(visible(text))
    if not is_obeyed(text) and "\u200e" not in text and "\u200f" not in text:
        assert visible(text) == text


def test_rows_as_psql_shows_them() -> None:
    printed = psql_table([{"user_id": HOSTILE, "x\x1b[2J": 1}, {"user_id": "u2", "x\x1b[2J": 22}])
    assert not is_obeyed(printed)
    # Still aligned, and nothing of an id is lost.
    lines = printed.splitlines()
    assert lines[0].index("|") == lines[1].index("+") == lines[2].index("|") == lines[3].index("|")
    assert "\\x1b]0;owned\\x07\\x1b[2J\\x9b31mred\\x7f\\r\\u202e" in printed


def test_every_table_and_line_of_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    for console in (screen.out, screen.err):
        monkeypatch.setattr(console, "_file", file)
    table = screen.table("kind", HOSTILE, title=HOSTILE)
    table.add_row("x", HOSTILE)
    screen.out.print(table)
    screen.out.print(HOSTILE, markup=False)
    screen.out.print(f"a {HOSTILE}", soft_wrap=True)
    screen.err.print(HOSTILE, markup=False)
    assert not is_obeyed(file.getvalue())
    assert file.getvalue().count("owned") == 6
    assert "[bold]" not in file.getvalue()
    file.truncate(0)
    file.seek(0)
    tree = Tree(HOSTILE)
    tree.add(Text(HOSTILE))
    cells = screen.table("a", "b")
    cells.add_row(screen.plain(HOSTILE), "|")
    cells.add_row(Text(HOSTILE), "|")
    screen.out.print(tree, Group(Text(HOSTILE), Panel(HOSTILE)), cells, Text(HOSTILE))
    assert not is_obeyed(file.getvalue())
    assert file.getvalue().count("owned") == 7
    file.truncate(0)
    file.seek(0)
    screen.print_json({"id": HOSTILE, "n": "é"})
    assert not is_obeyed(file.getvalue())
    assert json.loads(file.getvalue()) == {"id": HOSTILE, "n": "é"}


def test_commands_print_by_the_console_alone() -> None:
    """Rich's own texts in cells pass by `visible` until they are drawn, and would break the columns."""
    for path in sorted((checkout() / "python" / "cli").glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        forbidden = {"print", "Text", "typer.echo", "sys.stdout.write", "sys.stderr.write", "Console"}
        # Texts of typer's own: the version, the word at Ctrl-C; a path for other programs.
        forbidden -= {"typer.echo"} if path.name in ("root.py", "submitters.py") else set()
        assert path.name == "screen.py" or not names & forbidden, (path, names & forbidden)


def test_what_an_application_prints_is_shown_and_not_obeyed() -> None:
    read, write = os.pipe()
    os.write(write, f"id {HOSTILE}\nnext".encode())
    os.close(write)
    log_file, screen_file = io.BytesIO(), io.StringIO()
    copy_output(read, log_file, screen_file, lambda event: None)
    os.close(read)
    assert not is_obeyed(screen_file.getvalue())
    assert log_file.getvalue() == f"id {HOSTILE}\nnext".encode()


def test_log_lines_and_errors() -> None:
    record = logging.LogRecord("x", logging.INFO, "x", 1, "id %s", (HOSTILE,), None)
    assert not is_obeyed(TextFormatter().format(record))
    stderr = io.StringIO()
    print_error(f"column {HOSTILE}\nnext line", stderr)
    assert not is_obeyed(stderr.getvalue())
    assert stderr.getvalue().count("\n") == 2


@pytest.mark.parametrize("ds", ["0001-01-01", "0999-12-31", "9000-01-01", "9999-12-31"])
def test_days_at_the_ends_of_the_calendar(ds: str, tmp_path: Path) -> None:
    for words in (["run", "clicks"], ["run", "clicks", "--dry-run"], ["status", "clicks"]):
        result = CliRunner().invoke(app, [*words, "--ds", ds, "--home", str(tmp_path)])
        assert result.exit_code == 2, (words, result.output, result.exception)
        assert f"'{ds}' is no day of the years 1000 to 8999" in result.output
        assert "Traceback" not in result.output
    assert parse_ds("1000-01-01") == "1000-01-01"
    assert parse_ds("8999-12-31") == "8999-12-31"


@pytest.mark.parametrize("ds", ["1000-01-01", "8999-12-31"])
def test_the_first_and_the_last_day_have_neighbours(ds: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "clicks", "--ds", ds, "--home", str(tmp_path), "--dry-run"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (copies.VARIABLE, copies.SCRATCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(copies, "_workspace_folder", [])
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path / f"headrace-cache-{os.getuid()}"


def test_the_cache_among_temporary_files_is_this_users_alone(temporary: Path) -> None:
    old = os.umask(0)
    try:
        assert copies.folder() == temporary
    finally:
        os.umask(old)
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    temporary.chmod(0o777)
    assert copies.folder() == temporary
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    path = copies.new_path("x")
    path.write_text("x")
    assert path.is_relative_to(temporary)


@pytest.mark.parametrize("kind", ["link", "file", "other user"])
def test_a_folder_that_somebody_else_has_made_is_refused(
    temporary: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "link":
        (temporary.parent / "elsewhere").mkdir()
        temporary.symlink_to(temporary.parent / "elsewhere")
    elif kind == "file":
        temporary.touch()
    else:
        temporary.mkdir()
        user_id = os.getuid()
        monkeypatch.setattr("os.getuid", lambda: user_id + 1)
        temporary.rename(temporary.with_name(f"headrace-cache-{user_id + 1}"))
    message = {"link": "is a symbolic link", "file": "is no folder", "other user": "belongs to another user"}[kind]
    with pytest.raises(UserError, match=f"{message}.*HEADRACE_SCRATCH"):
        copies.new_path("x")
    assert not list(temporary.parent.glob("elsewhere/*"))


def test_advised_commands_name_the_pipeline_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "my shop" / "shop.yaml"
    path.parent.mkdir()
    path.write_text(pipeline_file("clicks").read_text())
    assert load_spec("clicks").argument == "clicks"
    spec = load_spec(path, ["publish=null"])
    assert shlex.split(spec.argument) == [str(path)]
    assert load_spec(shlex.split(spec.argument)[0]).pipeline == "clicks"
    assert spec.model_copy(update={"description": "x"}).argument == spec.argument


def advised_pipelines(path: Path, commands: str) -> Iterator[str]:
    """Yield what f-strings of a module fill in right behind the words of a command."""
    module = path.read_text()
    advises = re.search(rf"headrace (?:{commands}) ", module) is not None
    for node in ast.walk(ast.parse(module)) if advises else ():
        values = node.values if isinstance(node, ast.JoinedStr) else []
        for text, filled_in in pairwise(values):
            is_text = isinstance(text, ast.Constant) and isinstance(filled_in, ast.FormattedValue)
            if is_text and re.search(rf"headrace (?:{commands}) $", str(text.value)):
                yield ast.unparse(filled_in.value)


def test_every_message_advises_commands_by_the_argument() -> None:
    """Messages advise by `spec.argument`; `headrace init`, which has no spec yet, quotes files."""
    root = get_command(app)
    groups = {name: list(getattr(command, "commands", ())) for name, command in root.commands.items()}  # type: ignore[attr-defined]
    # The first argument of `headrace experiment` is the experiment's name.
    del groups["experiment"]
    commands = "|".join(f"{name} {word}" if word else name for name, words in groups.items() for word in words or [""])
    assert "run" in groups
    assert "warehouse drop-kept" in commands
    advised = [
        (path.name, source)
        for path in checkout().joinpath("python").rglob("*.py")
        for source in advised_pipelines(path, commands)
    ]
    assert len(advised) > 20
    by_other_names = [x for x in advised if not x[1].endswith(".argument") and x != ("init.py", "quoted")]
    assert [x for x in by_other_names if not x[1].startswith("shlex.quote(")] == []


_CELLS = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=60)


@st.composite
def _tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; no cell begins or ends with a blank, which wrapping takes away."""
    columns = draw(st.integers(1, 8))
    texts = st.lists(_CELLS.map(str.strip), min_size=columns, max_size=columns)
    return draw(texts), draw(st.lists(texts, min_size=1, max_size=3))


def _printed(console: screen.Console, headings: list[str], rows: list[list[str]]) -> str:
    new_table = screen.table(*(f">{h}" if i % 2 else h.lstrip(">") for i, h in enumerate(headings)))
    for row in rows:
        new_table.add_row(*map(screen.plain, row))
    console.print(new_table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def _without_blanks(text: str) -> Counter[str]:
    return Counter("".join(text.split()))


@given(_tables(), st.integers(24, 200))
def test_tables_fit_any_terminal_and_lose_nothing(table: tuple[list[str], list[list[str]]], width: int) -> None:
    """Each character of each cell is printed, though perhaps on another line."""
    headings, rows = table
    terminal = screen._SafeConsole(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    printed = _printed(terminal, headings, rows)
    assert max(map(cell_len, printed.splitlines()), default=0) <= width
    expected = _without_blanks("".join(map("".join, rows)))
    assert not expected - _without_blanks(printed)
    records = [{f"{i}{h}": cell for i, (h, cell) in enumerate(zip(headings, row, strict=True))} for row in rows]
    as_psql = psql_table(records, width)
    assert max(map(cell_len, as_psql.splitlines())) <= width
    assert not expected - _without_blanks(as_psql)


@given(_tables())
def test_tables_in_pipes_are_not_wrapped(table: tuple[list[str], list[list[str]]]) -> None:
    headings, rows = table
    pipe = screen._SafeConsole(file=io.StringIO(), width=screen._UNLIMITED, force_terminal=False)
    lines = _printed(pipe, headings, rows).splitlines()
    assert len(lines) == 1 + len(rows)
    for line, row in zip(lines[1:], rows, strict=True):
        assert all(" ".join(cell.split()) in " ".join(line.split()) for cell in row)


def test_a_narrow_terminal_has_rows_as_lists() -> None:
    console = screen._SafeConsole(file=io.StringIO(), width=30, force_terminal=True, color_system=None)
    row = ["ingest", "60,000", "/data/headrace/logs/clicks/ingest.log"]
    printed = _printed(console, ["stage", "rows", "log"], [row])
    assert [line.rstrip() for line in printed.splitlines()] == [
        "stage  ingest",
        "rows   60,000",
        "log    /data/headrace/logs/c",
        "       licks/ingest.log",
    ]
    assert psql_table([{"user_id": 7, "model": "x" * 30}], 30).splitlines() == [
        "-[ RECORD 1 ]",
        "user_id | 7",
        "model   | xxxxxxxxxxxxxxxxxxxx",
        "        | xxxxxxxxxx",
        "(1 row)",
    ]
