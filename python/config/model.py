"""The sections `model` and `baseline`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.section import Section


class Model(Section):
    """A DLRM (Naumov et al., 2019): bottom MLP over continuous features, embeddings, pairwise dots, top MLP."""

    #: The one there is.
    kind: Literal["dlrm"] = "dlrm"
    #: Width of every embedding; the bottom MLP ends in it.
    embedding_dim: int = Field(default=16, ge=1)
    #: Hidden widths; the last layer of the bottom (embedding_dim) and of the top (1) is added.
    bottom_mlp: tuple[int, ...] = (64,)
    #: Hidden widths of the MLP over the dots of all vectors.
    top_mlp: tuple[int, ...] = (64, 32)
    #: Share of the top MLP's hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)
    #: How the vectors of a list become one.
    pooling: Literal["sum", "mean", "max"] = "sum"


class Baseline(Section):
    """XGBoost on Spark (`xgboost.spark`) over the same dataset and split."""

    #: Trees.
    rounds: int = Field(default=60, ge=1)
    #: Of a tree.
    max_depth: int = Field(default=6, ge=1)
    #: The share of each tree that is added.
    learning_rate: float = Field(default=0.2, gt=0)
    #: Spark tasks that train together.
    workers: int = Field(default=2, ge=1)
    #: Train on at most this many rows, a deterministic sample.
    max_rows: int | None = 2_000_000
