"""Settings of each model class, `model.args`: ranking, several tasks, histories, retrieval, collaborative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.config.section import Section

#: What a feature must be that a setting names: categorical with one id a row, or with a list of them, or with either;
#: numbers; any feature.
FeatureRole = Literal["id", "ids", "categorical", "number", "any"]


class ModelArgs(Section):
    """Settings of a model class, and facts about its network for checks of a spec, which do not import it."""

    #: Settings that name features of the dataset, and what these must be.
    feature_keys: ClassVar[Mapping[str, FeatureRole]] = {}
    #: Settings that name features of one vocabulary.
    share_vocabulary: ClassVar[tuple[str, ...]] = ()
    #: Whether the network is in retrieval form (docs/retrieval.md): vectors of users and of items, and a loss of its
    #: own over them.
    has_vectors: ClassVar[bool] = False
    #: Whether it has an output for each task of `train.tasks`.
    has_task_outputs: ClassVar[bool] = False
    #: The saved models that it starts from, `train.pretrained`.
    starts_from: ClassVar[tuple[str, ...]] = ()

    def named_features(self) -> list[tuple[str, str, FeatureRole]]:
        """Return (setting, feature, what it must be) for each feature that is named."""
        named: list[tuple[str, str, FeatureRole]] = []
        for key, role in self.feature_keys.items():
            value = getattr(self, key)
            features = (value,) if isinstance(value, str) else value or ()
            named += [(key, feature, role) for feature in features]
        return named

    @property
    def compares_drawn_items(self) -> bool:
        """Return whether its loss needs `train.negatives` with `as: candidates`."""
        return False

    def fault_of_widths(self, embedding_dim: int) -> str | None:
        """Return why widths do not go together with `model.embedding_dim`, or None."""
        return None


class NextItemArgs(ModelArgs):
    """Settings that models of the next item have in common (headrace.models.next_item)."""

    feature_keys: ClassVar = {"item": "id", "history": "ids"}
    share_vocabulary: ClassVar = ("item", "history")
    has_vectors: ClassVar = True

    #: The feature that is a row's item.
    item: str
    #: The list feature with the items before it.
    history: str
    #: Which end of the history is the newest event; see `history` of features.prepare.
    newest: Literal["last", "first"] = "last"
    #: Items of a history that are looked at, the newest.
    length: int = Field(default=50, ge=1)
    #: all: each item of a history is a target, and the row's own; last: the row's own alone.
    positions: Literal["all", "last"] = "all"
    #: bce: cross-entropy of a target and of drawn items; sampled_softmax: among a target and drawn items; softmax:
    #: among all items. Items are drawn by `train.negatives` with `as: candidates`, and uniformly.
    loss: Literal["bce", "sampled_softmax", "softmax"] = "sampled_softmax"
    #: A target is compared with all drawn items of the step, with those of its row, or with one of its row's, the next
    #: at each place (`per_positive` as large as `length` gives each place one of its own).
    negatives: Literal["batch", "row", "position"] = "batch"
    #: Logits are cosines over this; null: dot products.
    temperature: float | None = Field(default=None, gt=0)
    #: Layers.
    blocks: int = Field(default=2, ge=1)
    #: Heads of the attention, which share `embedding_dim`.
    heads: int = Field(default=1, ge=1)
    #: Share of the inputs and hidden units that a training step leaves out.
    dropout: float = Field(default=0.2, ge=0, lt=1)

    @property
    def compares_drawn_items(self) -> bool:
        """See `ModelArgs.compares_drawn_items`."""
        return self.loss != "softmax"


class SASRecArgs(NextItemArgs):
    """Causal self-attention over a history (Kang and McAuley, SASRec, 2018)."""

    #: Hidden width of a block's MLP; null: `embedding_dim`.
    mlp: int | None = Field(default=None, ge=1)

    def fault_of_widths(self, embedding_dim: int) -> str | None:
        """See `ModelArgs.fault_of_widths`."""
        if embedding_dim % self.heads:
            return f"embedding_dim {embedding_dim} is no multiple of heads {self.heads}"
        return None


class HSTUArgs(NextItemArgs):
    """Gated pointwise attention over a history (Zhai et al., Actions Speak Louder than Words, 2024)."""

    feature_keys: ClassVar = {**NextItemArgs.feature_keys, "times": "number"}

    #: Width of queries and keys of a head; null: `embedding_dim` / heads.
    attention_dim: int | None = Field(default=None, ge=1)
    #: Width of values and gates of a head; null: `embedding_dim` / heads.
    linear_dim: int | None = Field(default=None, ge=1)
    #: A padded feature of numbers with the times of the history's items, in its order, in any unit.
    times: str | None = None
    #: Learned weights of distances in time, by the logarithm of the distance.
    time_buckets: int = Field(default=64, ge=1)


class DINArgs(ModelArgs):
    """Attention of a row's item over a history (Zhou et al., Deep Interest Network, 2018)."""

    #: List features by the feature that looks at them, which has the same values: `{item: viewed_items}`.
    histories: Mapping[str, str] = Field(min_length=1)
    #: Hidden widths of the MLP that weighs an item of the history.
    attention_mlp: tuple[int, ...] = Field(default=(36,), min_length=1)
    #: Hidden widths of the MLP over all features.
    mlp: tuple[int, ...] = Field(default=(64, 32), min_length=1)
    #: Activation of both MLPs.
    activation: Literal["dice", "prelu"] = "dice"
    #: Whether the weights of a history sum to 1, by a softmax; the paper's keep the strength of an interest.
    softmax: bool = False
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)

    def named_features(self) -> list[tuple[str, str, FeatureRole]]:
        """See `ModelArgs.named_features`."""
        named: list[tuple[str, str, FeatureRole]] = []
        for item, history in self.histories.items():
            named += [("histories", item, "id"), ("histories", history, "ids")]
        return named


class TwoTowerArgs(ModelArgs):
    """A tower over a user's features and one over an item's, by in-batch softmax (Yi et al., 2019).

    Monitor a metric of rankings (`train.monitor`): logits are no probabilities.
    """

    feature_keys: ClassVar = {"item": "id", "user_features": "any", "item_features": "any"}
    has_vectors: ClassVar = True

    #: The feature of items.
    item: str = "item_id"
    #: Features of users; none: those with the tag `user`.
    user_features: tuple[str, ...] = ()
    #: Features of items besides `item`; none: those with the tag `item`.
    item_features: tuple[str, ...] = ()
    #: Hidden widths of the user's tower.
    user_mlp: tuple[int, ...] = (128, 64)
    #: Hidden widths of the item's tower.
    item_mlp: tuple[int, ...] = (128, 64)
    #: Width of the vectors; null: embedding_dim.
    dim: int | None = Field(default=None, ge=1)
    #: Whether vectors have length 1.
    normalize: bool = True
    #: Dot products are divided by it.
    temperature: float = Field(default=0.1, gt=0)
    #: Whether a row is compared with the items of the step's other positive rows, those of all ranks.
    in_batch: bool = True
    #: Whether it is compared with drawn items, those of `train.negatives` with `as: candidates` (Yang et al., 2020:
    #: `shared: true`). Then items have no further features.
    drawn: bool = False
    #: Of a row's drawn items only so many count, those of the greatest logits now (Zhang et al., 2013); null: all.
    hard: int | None = Field(default=None, ge=1)
    #: Whether logits are corrected for how often items are met or drawn.
    log_q: bool = True
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _compares(self) -> TwoTowerArgs:
        if not (self.in_batch or self.drawn):
            raise ValueError("without `in_batch` and `drawn` there is nothing to compare a row's item with")
        if self.hard is not None and not self.drawn:
            raise ValueError("`hard` is of drawn items: set `drawn`")
        return self

    @property
    def compares_drawn_items(self) -> bool:
        """See `ModelArgs.compares_drawn_items`."""
        return self.drawn


class MatrixFactorizationArgs(ModelArgs):
    """A vector of each user and item (Koren et al., 2009), by BPR (Rendle et al., 2009), softmax or cross-entropy."""

    feature_keys: ClassVar = {"user": "categorical", "item": "id"}
    has_vectors: ClassVar = True

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

    @property
    def compares_drawn_items(self) -> bool:
        """See `ModelArgs.compares_drawn_items`."""
        return self.loss != "bce"


class NeuMFArgs(ModelArgs):
    """A generalised matrix factorisation (GMF) beside an MLP (He et al., Neural Collaborative Filtering, 2017)."""

    feature_keys: ClassVar = {"user": "categorical", "item": "categorical"}
    starts_from: ClassVar = ("gmf", "mlp")

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


class MultVAEArgs(ModelArgs):
    """A variational autoencoder of lists of items (Liang et al., 2018)."""

    feature_keys: ClassVar = {"item": "id", "history": "ids"}
    share_vocabulary: ClassVar = ("item", "history")
    has_vectors: ClassVar = True

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


class LightGCNArgs(ModelArgs):
    """Vectors propagated over the graph of the training rows (He et al., LightGCN, 2020)."""

    feature_keys: ClassVar = {"user": "id", "item": "id"}
    has_vectors: ClassVar = True

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

    @property
    def compares_drawn_items(self) -> bool:
        """See `ModelArgs.compares_drawn_items`."""
        return self.loss != "bce"


class SimpleXArgs(ModelArgs):
    """Cosines of items and users with their histories, by the cosine contrastive loss (Mao et al., SimpleX, 2021)."""

    feature_keys: ClassVar = {"user": "categorical", "item": "categorical", "history": "categorical"}
    has_vectors: ClassVar = True

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

    @property
    def compares_drawn_items(self) -> bool:
        """See `ModelArgs.compares_drawn_items`."""
        return True


class WideDeepArgs(ModelArgs):
    """A linear model of ids and numbers beside an MLP over embeddings (Cheng et al., Wide & Deep, 2016)."""

    #: Hidden widths of the deep part.
    deep_mlp: tuple[int, ...] = (64, 32)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class DeepFMArgs(ModelArgs):
    """A factorisation machine and an MLP over the same vectors (Guo et al., DeepFM, 2017)."""

    #: Hidden widths of the deep part.
    deep_mlp: tuple[int, ...] = (64, 32)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class DCNv2Args(ModelArgs):
    """Cross layers with an MLP behind or beside them (Wang et al., DCN V2, 2021)."""

    #: The deep part after the cross layers, or beside them.
    structure: Literal["stacked", "parallel"] = "stacked"
    #: Cross layers.
    layers: int = Field(default=2, ge=1)
    #: Rank of the cross layers' matrices; none: full matrices.
    low_rank: int | None = Field(default=None, ge=1)
    #: Experts of a low-rank layer, mixed by a gate.
    experts: int = Field(default=1, ge=1)
    #: Hidden widths of the deep part.
    deep_mlp: tuple[int, ...] = (64, 32)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class FinalMLPArgs(ModelArgs):
    """Two gated MLPs and a bilinear fusion of both (Mao et al., FinalMLP, 2023)."""

    feature_keys: ClassVar = {"first_gate": "any", "second_gate": "any"}

    #: Hidden widths of the first stream.
    first_mlp: tuple[int, ...] = Field(default=(64, 32), min_length=1)
    #: Hidden widths of the second stream.
    second_mlp: tuple[int, ...] = Field(default=(64, 32), min_length=1)
    #: Heads of the bilinear fusion; both streams' last widths are multiples of it.
    heads: int = Field(default=1, ge=1)
    #: Whether a gate weighs the inputs of each stream.
    gates: bool = True
    #: The features that the first gate looks at; none: what it says is learned and the same for all rows.
    first_gate: tuple[str, ...] = ()
    #: The features that the second gate looks at.
    second_gate: tuple[str, ...] = ()
    #: Hidden widths of the gates.
    gate_mlp: tuple[int, ...] = (32,)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)

    def fault_of_widths(self, embedding_dim: int) -> str | None:
        """See `ModelArgs.fault_of_widths`."""
        for width in (self.first_mlp[-1], self.second_mlp[-1]):
            if width % self.heads:
                return f"the last width {width} of a stream is no multiple of heads {self.heads}"
        return None


class MaskNetArgs(ModelArgs):
    """Blocks whose inputs are masked by an MLP over the row (Wang et al., MaskNet, 2021)."""

    #: Mask blocks one behind the other, or side by side.
    structure: Literal["serial", "parallel"] = "serial"
    #: Outputs of each block.
    blocks: tuple[int, ...] = Field(default=(64, 64), min_length=1)
    #: Hidden width of a mask's MLP over the width of what it masks.
    reduction: float = Field(default=2.0, gt=0)
    #: Hidden widths behind parallel blocks.
    deep_mlp: tuple[int, ...] = (64,)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class SharedBottomArgs(ModelArgs):
    """An MLP that the tasks of `train.tasks` share, and one for each behind it (Caruana, Multitask Learning, 1997)."""

    has_task_outputs: ClassVar = True

    #: Hidden widths that all tasks share.
    bottom_mlp: tuple[int, ...] = Field(default=(64,), min_length=1)
    #: Hidden widths of each task.
    tower_mlp: tuple[int, ...] = (32,)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class MMoEArgs(ModelArgs):
    """Experts that are mixed by a gate of each task of `train.tasks` (Ma et al., MMoE, 2018)."""

    has_task_outputs: ClassVar = True

    #: MLPs that all tasks share.
    experts: int = Field(default=4, ge=1)
    #: Hidden widths of an expert.
    expert_mlp: tuple[int, ...] = Field(default=(64,), min_length=1)
    #: Hidden widths of each task.
    tower_mlp: tuple[int, ...] = (32,)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class PLEArgs(ModelArgs):
    """Levels of shared experts and experts of one task of `train.tasks` (Tang et al., PLE, 2020)."""

    has_task_outputs: ClassVar = True

    #: Levels, one behind the other; 1 is customized gate control.
    levels: int = Field(default=2, ge=1)
    #: Experts of a level that all tasks share.
    shared_experts: int = Field(default=2, ge=1)
    #: Experts of a level that each task has for itself.
    task_experts: int = Field(default=2, ge=1)
    #: Hidden widths of an expert.
    expert_mlp: tuple[int, ...] = Field(default=(64,), min_length=1)
    #: Hidden widths of each task.
    tower_mlp: tuple[int, ...] = (32,)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class ESMMArgs(ModelArgs):
    """An MLP of each task over the same embeddings, conversions over all impressions (Ma et al., ESMM, 2018).

    `train.tasks` has a product of the click and what comes after it.
    """

    has_task_outputs: ClassVar = True

    #: Hidden widths of each task.
    tower_mlp: tuple[int, ...] = (64, 32)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


#: The models that headrace has, besides `dlrm`, whose settings stand in `model` itself.
MODEL_ARGS: Mapping[str, type[ModelArgs]] = {
    "wide_deep": WideDeepArgs,
    "deepfm": DeepFMArgs,
    "dcn_v2": DCNv2Args,
    "final_mlp": FinalMLPArgs,
    "masknet": MaskNetArgs,
    "shared_bottom": SharedBottomArgs,
    "mmoe": MMoEArgs,
    "ple": PLEArgs,
    "esmm": ESMMArgs,
    "matrix_factorization": MatrixFactorizationArgs,
    "neumf": NeuMFArgs,
    "mult_vae": MultVAEArgs,
    "lightgcn": LightGCNArgs,
    "simplex": SimpleXArgs,
    "sasrec": SASRecArgs,
    "hstu": HSTUArgs,
    "din": DINArgs,
    "two_tower": TwoTowerArgs,
}
