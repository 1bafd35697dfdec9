"""A package as a user would write it, with a model of their own: `my_package.nets:MyNet`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

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
#: The example of docs/training.md, with a sequence and a loss of its own.
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
