"""The package of examples/own_package as an installed one: a folder on `sys.path`, and the metadata of its wheel."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.plugins import offered
from headrace.workspace import checkout

EXAMPLE = checkout() / "examples" / "own_package"


@contextmanager
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the example in a folder, for the block."""
    shutil.copytree(EXAMPLE / "acme", site / "acme", ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    with offering(site, project["name"], project["entry-points"], monkeypatch):
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
                del sys.modules[name]


@contextmanager
def offering(
    site: Path, package: str, groups: Mapping[str, Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Have a folder on `sys.path` offer entry points, as the wheel of a package does."""
    metadata = site / f"{package.replace('-', '_')}-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    sections = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(sections))
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(site))
        offered.cache_clear()
        try:
            yield
        finally:
            offered.cache_clear()
