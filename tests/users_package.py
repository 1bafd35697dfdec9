"""Packages as users would write them: one with a model (`my_package.nets:MyNet`); examples/own_package, installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.config.installation import checkout
from headrace.plugins import installed_entry_points

_PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "my-package"
version = "1.0"

[tool.setuptools]
packages = ["my_package"]
"""
#: The example of docs/models.md, with a sequence and a loss of its own.
_NETS = '''\
"""Factors of users and items, and what a row's tags say of its item."""

import torch
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup
from torch import nn
from torch.nn.functional import softplus


class MyNet(nn.Module):
    def __init__(self, features: InputFeatures, user: str, item: str, tags: str, dim: int = 4) -> None:
        super().__init__()
        self.lookups = (
            EmbeddingLookup("user", user, dim),
            EmbeddingLookup("item", item, dim),
            EmbeddingLookup("bias", item, 1, table="bias"),
            EmbeddingLookup("tags", tags, dim, pooling="none"),
        )
        self.numbers = nn.Linear(features.continuous_columns, 1)

    def forward(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        logits = self.numbers(inputs.continuous).squeeze(1)
        user, item, tags = inputs.embedding("user"), inputs.embedding("item"), inputs.sequence("tags")
        row = torch.repeat_interleave(torch.arange(inputs.rows), tags.lengths)
        like = torch.sigmoid((tags.values * item[row]).sum(dim=1, keepdim=True))
        taste = user.index_add(0, row, like * tags.values)
        return {"logits": logits + (taste * item).sum(dim=1) + inputs.embedding("bias").squeeze(1)}

    def loss(self, outputs: dict[str, torch.Tensor], inputs: Inputs) -> torch.Tensor:
        """Cross-entropy of labels that are a little uncertain."""
        label = 0.98 * inputs.labels + 0.01
        return (softplus(outputs["logits"]) - label * outputs["logits"]).sum()
'''


def model_of(user: str, item: str, tags: str) -> dict[str, Any]:
    """The section `model` for features of these names."""
    return {
        "class": "my_package.nets:MyNet",
        "embedding_dim": 4,
        "args": {"user": user, "item": item, "tags": tags, "dim": 4},
    }


def install(source: Path, site: Path) -> None:
    """Write the package's project to a folder, and let pip install it into another, without the network."""
    (source / "my_package").mkdir(parents=True)
    (source / "pyproject.toml").write_text(_PROJECT)
    (source / "my_package" / "__init__.py").touch()
    (source / "my_package" / "nets.py").write_text(_NETS)
    pip_options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *pip_options, "--target", str(site), str(source)],
        check=True,
        timeout=300,
    )


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
        installed_entry_points.cache_clear()
        try:
            yield
        finally:
            installed_entry_points.cache_clear()
