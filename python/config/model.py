"""The sections `model` and `baseline`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.section import Section


class Model(Section):
    """A DLRM (Naumov et al., 2019): bottom MLP over continuous features, embeddings, pairwise dots, top MLP."""

    kind: Literal["dlrm"] = "dlrm"
    #: Width of every embedding; the bottom MLP ends in it.
    embedding_dim: int = Field(default=16, ge=1)
    #: Hidden widths; the last layer of the bottom (embedding_dim) and of the top (1) is added.
    bottom_mlp: tuple[int, ...] = (64,)
    top_mlp: tuple[int, ...] = (64, 32)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    #: How the vectors of a list become one.
    pooling: Literal["sum", "mean", "max"] = "sum"


class Baseline(Section):
    """XGBoost on Spark (`xgboost.spark`) over the same dataset and split."""

    rounds: int = Field(default=60, ge=1)
    max_depth: int = Field(default=6, ge=1)
    learning_rate: float = Field(default=0.2, gt=0)
    workers: int = Field(default=2, ge=1)
    #: Train on at most this many rows, a deterministic sample.
    max_rows: int | None = 2_000_000
