"""Files and folders are changed by headrace.storage alone, and their faults are raised by name."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.config.installation import checkout
from headrace.storage import Location, local, system
from tests.storage_support import Killed, faulty, fill_by_two, put_file, put_folder, seen


@pytest.mark.parametrize("kills", [False, True], ids=["fails", "killed"])
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "renames"])
@pytest.mark.parametrize("act", [put_file, put_folder, fill_by_two])
def test_the_nth_call(
    act: Callable[[Location, str], None], exchanges: bool, kills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(system, "exchange", lambda a, b: False)
    completed = 0
    for old in (False, True):
        for n in range(1, 1000):
            home = local(tmp_path / f"{old}-{n}")
            for version in ["old"] if old else []:
                act(home, version)
            old_state = seen(home / "thing")
            home.make_dir()
            with faulty(n, kills) as fault:
                try:
                    act(home, "new")
                    is_done = True
                except (OSError, Killed):
                    is_done = False
            state = seen(home / "thing")
            act(home, "new")
            new = seen(home / "thing")
            # Where two folders cannot exchange their names there is a moment without either; a failure mends it.
            between = [None] if kills and old and not exchanges else []
            assert state in [old_state, new, *between], (old, n)
            if is_done:
                assert state == new
            assert [e.name for e in home.local_path().iterdir() if not kills] in ([], ["thing"]), (old, n)
            if act is not put_file:
                assert [e.name for e in home.local_path().iterdir()] == ["thing"], (old, n)
            completed += 1
            if fault.calls_made < n:
                break
        else:
            raise AssertionError("no end")
    assert completed > 10


@pytest.mark.parametrize("kills", [False, True], ids=["fails", "killed"])
def test_a_new_file_is_whole_or_not_there(tmp_path: Path, kills: bool) -> None:
    for n in range(1, 100):
        home = local(tmp_path / str(n))
        with faulty(n, kills) as fault:
            try:
                written = (home / "log" / "1").put_new_text("new" * 100)
            except (Killed, OSError):
                written = False
        assert seen(home / "log" / "1") in (["new" * 100] if written else [None, "new" * 100])
        if fault.calls_made < n:
            assert written
            return
        # Once more: it is there, or now it is.
        (home / "log" / "1").put_new_text("new" * 100)
        assert seen(home / "log" / "1") == "new" * 100
    raise AssertionError("it never ends")


#: pathlib.Path's methods that change a file system.
METHODS = {"chmod", "hardlink_to", "mkdir", "rename", "replace", "rmdir", "symlink_to", "touch", "unlink"}
METHODS |= {"write_bytes", "write_text"}
#: storage/ itself, and the data folder of a PostgreSQL server of this host, as pyproject.toml exempts them from TID251.
EXEMPT = ("python/storage/", "python/publish/postgres/embedded.py", "python/publish/postgres/processes.py")
#: What is no file: methods of classes of ours that are called as pathlib's are, and the kernel's switches in /proc.
NO_FILES = {
    ("python/embeddings/dynamic/rows_cpu.py", "self._map.replace"),
    ("python/publish/online.py", "self._client.unlink"),
    ("python/stage/resources.py", "Path(f'/proc/{pid}/clear_refs').write_text"),
}


def writes(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is called) of a module's calls of METHODS.

    `text.replace(old, new)`, `moment.replace(hour=3)` and `frame.rename(columns=...)` are others' methods of the same
    name: pathlib's take one positional argument.
    """
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
            continue
        has_one_argument = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        if has_one_argument or node.func.attr not in ("rename", "replace"):
            yield node.lineno, ast.unparse(node.func)


def test_no_module_beside_storage_changes_a_file_system() -> None:
    files = sorted((checkout() / "python").rglob("*.py"))
    assert len(files) > 100
    violations = [
        f"{name}:{line}: {called}(...): write, publish and remove by headrace.storage's Location"
        for file in files
        if not (name := file.relative_to(checkout()).as_posix()).startswith(EXEMPT)
        for line, called in writes(file.read_text(encoding="utf-8"))
        if (name, called) not in NO_FILES
    ]
    assert violations == []


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("(a / 'b').unlink()", ["(a / 'b').unlink"]),
        ("path.parent.mkdir(parents=True)", ["path.parent.mkdir"]),
        ("a.rename(b)", ["a.rename"]),
        ("a.replace(b)", ["a.replace"]),
        ("a.write_text('x')", ["a.write_text"]),
        ("text.replace('a', 'b'); moment.replace(hour=3); frame.rename(columns={}); rename(a, b)", []),
    ],
)
def test_what_counts_as_a_change(source: str, called: list[str]) -> None:
    assert [c for _, c in writes(source)] == called


def test_every_exemption_is_needed() -> None:
    for name in EXEMPT:
        place = checkout() / name
        files = [place] if place.is_file() else [*place.rglob("*.py")]
        assert any(True for file in files for _ in writes(file.read_text(encoding="utf-8")))
    for name, called in NO_FILES:
        assert called in {c for _, c in writes((checkout() / name).read_text(encoding="utf-8"))}
