"""What `model.args` may hold of collaborative models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.section import Section


class MatrixFactorizationArgs(Section):
    """A vector of each user and item (Koren et al., 2009), by BPR (Rendle et al., 2009), softmax or cross-entropy."""

    #: The feature of users.
    user: str = "user_id"
    #: The feature of items.
    item: str = "item_id"
    #: bpr and softmax are of positive rows beside `train.negatives` with `as: candidates`.
    loss: Literal["bce", "bpr", "softmax"] = "bpr"
    #: What a user and an item have in common: dot product, or cosine.
    similarity: Literal["dot", "cosine"] = "dot"
    #: It is divided by this.
    temperature: float = Field(default=1.0, gt=0)
    #: With `similarity: dot`: whether an item has a bias.
    item_bias: bool = True


class NeuMFArgs(Section):
    """A generalised matrix factorisation (GMF) beside an MLP (He et al., Neural Collaborative Filtering, 2017)."""

    #: The feature of users.
    user: str = "user_id"
    #: The feature of items.
    item: str = "item_id"
    #: Both, or one of them alone.
    part: Literal["neumf", "gmf", "mlp"] = "neumf"
    #: Width of the MLP's embeddings; null: embedding_dim, which is the GMF's.
    mlp_dim: int | None = Field(default=None, ge=1)
    #: Hidden widths of the MLP.
    mlp: tuple[int, ...] = (64, 32, 16)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)
    #: Share of the numbers of the embeddings that a training step leaves out.
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    #: With `train.pretrained`: what the GMF's weights count in the fused layer, the MLP's being the rest.
    alpha: float = Field(default=0.5, ge=0, le=1)


class MultVAEArgs(Section):
    """A variational autoencoder of lists of items (Liang et al., 2018)."""

    #: The feature that is a row's list of items.
    history: str
    #: The feature of single items, of the list's vocabulary: what is scored.
    item: str = "item_id"
    #: Widths of the encoder, and from the last to the first of the decoder; the latent vector between them is
    #: embedding_dim wide.
    hidden: tuple[int, ...] = Field(default=(600,), min_length=1)
    #: Share of a list's items that a training step leaves out.
    dropout: float = Field(default=0.5, ge=0, lt=1)
    #: False: the latent vector is its mean (Mult-DAE).
    variational: bool = True
    #: What the divergence counts beside the likelihood.
    kl_weight: float = Field(default=0.2, ge=0)
    #: Steps in which it rises to that from 0.
    anneal_steps: int = Field(default=20_000, ge=0)


class LightGCNArgs(Section):
    """Vectors propagated over the graph of the training rows (He et al., LightGCN, 2020)."""

    #: The feature of users.
    user: str = "user_id"
    #: The feature of items.
    item: str = "item_id"
    #: Steps of propagation.
    layers: int = Field(default=3, ge=1)
    #: bpr and softmax are of positive rows beside `train.negatives` with `as: candidates`.
    loss: Literal["bce", "bpr", "softmax"] = "bpr"
    #: What a user and an item have in common: dot product, or cosine.
    similarity: Literal["dot", "cosine"] = "dot"
    #: It is divided by this.
    temperature: float = Field(default=1.0, gt=0)


class SimpleXArgs(Section):
    """Cosines of items and users with their histories, by the cosine contrastive loss (Mao et al., SimpleX, 2021)."""

    #: The feature of users.
    user: str = "user_id"
    #: The feature of items.
    item: str = "item_id"
    #: The feature that is a row's list of items; null: there is none.
    history: str | None = None
    #: What the user's own vector counts; the mean of the history is the rest.
    user_share: float = Field(default=0.5, ge=0, le=1)
    #: Negatives whose cosine is below add nothing to the loss.
    margin: float = Field(default=0.8, ge=-1, le=1)
    #: What a row's negatives count together.
    negative_weight: float = Field(default=100.0, ge=0)
    #: Share of the numbers of a user's vector that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)
