"""Public names of `headrace.embeddings`; importing the package without using it does not import torch."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

import headrace.embeddings
from headrace.config import EmbeddingOptimizerKind, ShardingKind
from headrace.embeddings import Plan, ShardedEmbeddings, Table
from headrace.embeddings.sharding_plan import blocks_for
from headrace.embeddings.update_rules import RULES


def test_all_public_names_are_there() -> None:
    for name in headrace.embeddings.__all__:
        assert getattr(headrace.embeddings, name).__name__ == name
    assert ShardedEmbeddings.__module__ == "headrace.embeddings.layer"
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        headrace.embeddings.Missing  # noqa: B018


def test_what_needs_no_torch_loads_none() -> None:
    """The driver of a training run, and the plain values of tables."""
    modules = "headrace.embeddings, headrace.embeddings.sharding_plan, headrace.embeddings.dynamic.spec, headrace.cli"
    code = f"import sys, {modules}, headrace.train.stage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_optimizer_of_the_settings_has_its_rule() -> None:
    assert set(get_args(EmbeddingOptimizerKind)) == RULES.keys()


@pytest.mark.parametrize("kind", get_args(ShardingKind))
def test_every_sharding_kind_of_the_settings_makes_a_plan(kind: ShardingKind) -> None:
    table = Table("t", rows=10, dim=8)
    plan = Plan((table,), (), tuple(blocks_for(table, kind, 2)), 2)
    assert plan.kind_of("t") == kind
