"""What `model.args` may hold, by the model's name in `model.class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from headrace.config.collaborative_args import (
    LightGCNArgs,
    MatrixFactorizationArgs,
    MultVAEArgs,
    NeuMFArgs,
    SimpleXArgs,
)
from headrace.config.retrieval_args import TwoTowerArgs
from headrace.config.section import Section
from headrace.config.sequence_args import DINArgs, HSTUArgs, SASRecArgs


class WideDeepArgs(Section):
    """A linear model of ids and numbers beside an MLP over embeddings (Cheng et al., Wide & Deep, 2016)."""

    #: Hidden widths of the deep part.
    deep_mlp: tuple[int, ...] = (64, 32)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class DeepFMArgs(Section):
    """A factorisation machine and an MLP over the same vectors (Guo et al., DeepFM, 2017)."""

    #: Hidden widths of the deep part.
    deep_mlp: tuple[int, ...] = (64, 32)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class DCNv2Args(Section):
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


class FinalMLPArgs(Section):
    """Two gated MLPs and a bilinear fusion of both (Mao et al., FinalMLP, 2023)."""

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


class MaskNetArgs(Section):
    """Blocks whose inputs are masked by what an MLP makes of the row (Wang et al., MaskNet, 2021)."""

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


class SharedBottomArgs(Section):
    """An MLP that the tasks of `train.tasks` share, and one for each behind it (Caruana, Multitask Learning, 1997)."""

    #: Hidden widths that all tasks share.
    bottom_mlp: tuple[int, ...] = Field(default=(64,), min_length=1)
    #: Hidden widths of each task.
    tower_mlp: tuple[int, ...] = (32,)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class MMoEArgs(Section):
    """Experts that are mixed by a gate of each task of `train.tasks` (Ma et al., MMoE, 2018)."""

    #: MLPs that all tasks share.
    experts: int = Field(default=4, ge=1)
    #: Hidden widths of an expert.
    expert_mlp: tuple[int, ...] = Field(default=(64,), min_length=1)
    #: Hidden widths of each task.
    tower_mlp: tuple[int, ...] = (32,)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


class PLEArgs(Section):
    """Levels of shared experts and experts of one task of `train.tasks` (Tang et al., PLE, 2020)."""

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


class ESMMArgs(Section):
    """An MLP of each task over the same embeddings, conversions over all impressions (Ma et al., ESMM, 2018).

    `train.tasks` has a product of the click and what comes after it.
    """

    #: Hidden widths of each task.
    tower_mlp: tuple[int, ...] = (64, 32)
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)


#: The models that headrace has, besides `dlrm`, whose settings stand in `model` itself.
MODEL_ARGS: Mapping[str, type[Section]] = {
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
