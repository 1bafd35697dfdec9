"""Imports of later stages beside the first: what they are, and that they harm nobody."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from importlib import import_module

import pytest

from headrace.jobs import import_ahead as module
from headrace.jobs.import_ahead import import_ahead
from headrace.stages import STAGES


@pytest.mark.parametrize("name", STAGES)
def test_what_stages_name_can_be_imported(name: str) -> None:
    for imported in STAGES[name].imports:
        module_name, _, function = imported.partition(":")
        assert not function or callable(getattr(import_module(module_name), function))


def test_stages_are_imported_in_order_once_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    all_seen = threading.Event()

    def load(name: str) -> None:
        seen.append(name)
        if name == "four":
            all_seen.set()
        if name == "two":
            raise ImportError("not for long")

    stages = {
        n: replace(STAGES[n], imports=i) for n, i in {"train": ("one", "two", "three"), "score": ("four",)}.items()
    }
    monkeypatch.setattr(module, "STAGES", stages)
    monkeypatch.setattr(module, "_load", load)
    with import_ahead(["train", "score"]):
        pass
    assert seen == []
    with import_ahead(["train", "score"]) as begin:
        begin()
        begin()
        assert all_seen.wait(60)
    assert seen == ["one", "two", "three", "four"]


def test_it_ends_behind_the_module_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave, seen = threading.Event(), threading.Event(), []

    def load(name: str) -> None:
        entered.set()
        assert leave.wait(60)
        seen.append(name)

    monkeypatch.setattr(module, "STAGES", {"train": replace(STAGES["train"], imports=("one", "two"))})
    monkeypatch.setattr(module, "_load", load)
    with import_ahead(["train"]) as begin:
        begin()
        assert entered.wait(60)
        threading.Timer(0.05, leave.set).start()
    assert seen == ["one"]


def test_an_application_that_ends_meanwhile_ends_in_order() -> None:
    program = (
        "import sys\n"
        "from headrace.jobs.import_ahead import import_ahead\n"
        "with import_ahead(['train', 'baseline']) as begin:\n"
        "    begin()\n"
        "    sys.exit(75)\n"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (75, "")
