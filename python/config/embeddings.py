"""Optimizers and embedding tables of the section `train`: rules, schedules, raw ids, the spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.config.section import Effect, Section, TrainedSection

#: How embedding rows learn: see headrace.embeddings.update_rules.
EmbeddingOptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
#: How an embedding table is cut: see headrace.embeddings.sharding_plan.
ShardingKind = Literal["table_wise", "row_wise", "column_wise", "data_parallel"]


class Schedule(Section):
    """The learning rate by step (headrace.train.optim): a linear rise over `warmup_steps`, then a curve."""

    #: The curve behind the rise.
    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    #: Steps of the linear rise.
    warmup_steps: int = Field(default=0, ge=0)
    #: linear, cosine: the share of the learning rate that the last step has.
    final: float = Field(default=0.0, ge=0, le=1)
    #: step: after each so many steps the rate is multiplied by `factor`.
    every_steps: int | None = Field(default=None, ge=1)
    #: step: what the rate is multiplied by.
    factor: float = Field(default=0.1, gt=0)

    @model_validator(mode="after")
    def _step_has_a_length(self) -> Schedule:
        if (self.kind == "step") != (self.every_steps is not None):
            raise ValueError("`every_steps` is needed with `kind: step`, and only there")
        return self


class Optimizer(Section):
    """An optimizer and its settings."""

    #: The rule.
    kind: Literal["sgd", "adagrad", "adam"] = "adagrad"
    #: At the top of the schedule.
    learning_rate: float = Field(default=0.05, gt=0)
    #: Share of a weight that a step takes off, times the learning rate.
    weight_decay: float = Field(default=0.0, ge=0)
    #: The learning rate by step.
    schedule: Schedule = Schedule()


class TableOptimizer(Section):
    """Settings of one table's updates; None: as for the others."""

    #: Of this table.
    learning_rate: float | None = Field(default=None, gt=0)
    #: Of this table.
    weight_decay: float | None = Field(default=None, ge=0)


class DynamicTable(Section):
    """The table of a feature of raw ids (`raw_id`): which ids get a row, and which let go of theirs."""

    #: Times that an id is seen in training before it gets a row.
    admit_after: int = Field(default=1, ge=1)
    #: Chance that an id gets a row each time it is seen, once `admit_after` is reached.
    admit_chance: float = Field(default=1.0, gt=0, le=1)
    #: Rows over all ranks; each rank has its even share. None: not limited.
    max_rows: int | None = Field(default=None, ge=1)
    #: MiB of each rank for rows, optimizer states, counts and the hash table. None: not limited.
    memory_mib: float | None = Field(default=None, gt=0)
    #: Who goes where there is no room: lfu, those seen least often (of equals the longest ago); lru, those seen longest
    #: ago (of equals the least often).
    evict: Literal["lfu", "lru"] = "lfu"
    #: Share of the rows that go at once where there is no room: each eviction costs a pass over the counts.
    evict_share: float = Field(default=0.1, gt=0, le=1)
    #: Ids that wait for admission, over all ranks; beyond, those seen longest ago are forgotten.
    max_waiting: int = Field(default=1_000_000, ge=1)


class EmbeddingOptimizer(Section):
    """The optimizer of embedding rows. `rowwise_adagrad` keeps one number a row where adagrad keeps one a weight."""

    #: The rule.
    kind: EmbeddingOptimizerKind = "adagrad"
    #: At the top of the schedule.
    learning_rate: float = Field(default=0.05, gt=0)
    #: As of the dense optimizer; of the rows that a step touches.
    weight_decay: float = Field(default=0.0, ge=0)
    #: The learning rate by step.
    schedule: Schedule = Schedule()
    #: Scale a step's gradient down to this norm over all rows of all tables; None: leave it.
    clip_norm: float | None = Field(default=None, gt=0)
    #: Exceptions by table (a vocabulary's name, else the feature's).
    tables: Mapping[str, TableOptimizer] = Field(default_factory=dict)
    #: By feature of raw ids; one that is not here has the defaults.
    dynamic: Mapping[str, DynamicTable] = Field(default_factory=dict)


class TableSharding(TrainedSection):
    """Choices for one table, made before the planner decides the rest."""

    #: How it is cut; null: the planner's choice.
    kind: Annotated[ShardingKind | None, Effect.SPEED] = None
    #: Ranks that the rows, or blocks of columns, are dealt to; None: the planner's choice.
    parts: Annotated[int | None, Effect.SPEED] = Field(default=None, ge=1)
    #: How rows are stored; arithmetic is float32.
    storage: Annotated[Literal["fp32", "fp16", "bf16", "int8"] | None, Effect.STORAGE] = None
    #: Whether owners sum the rows of a list before they travel; None: what is cheaper (with `kind: row_wise`: no).
    pooled: Annotated[bool | None, Effect.SPEED] = None
    #: With `train.device: cuda`: the share of the rows that the ranks' GPUs hold, those used most; all of them are then
    #: in host memory. None: the planner's choice, which is 1 where all tables fit.
    cached: Annotated[float | None, Effect.SPEED] = Field(default=None, gt=0, le=1)


class Sharding(TrainedSection):
    """The spread of embedding tables over the ranks. `row_wise`: all of them; `auto`: by the planner's cost model."""

    #: Who decides.
    kind: Annotated[Literal["row_wise", "auto"], Effect.SPEED] = "row_wise"
    #: How rows are stored; arithmetic is float32.
    storage: Annotated[Literal["fp32", "fp16", "bf16", "int8"], Effect.STORAGE] = "fp32"
    #: How float32 vectors and gradients travel between ranks. bf16 halves the bytes; each number is then rounded to 8
    #: bits of mantissa (an error of at most 2^-8 of it).
    wire: Annotated[Literal["fp32", "bf16"], Effect.STORAGE] = "fp32"
    #: Messages between machines: directly from rank to rank, or inside machines first (`ranks_per_node`), which sends
    #: what several ranks of a machine want once; auto: what is faster (with `kind: row_wise`: directly).
    exchange: Annotated[Literal["auto", "direct", "by_machine"], Effect.SPEED] = "auto"
    #: Exceptions by table (a vocabulary's name, else the feature's).
    tables: Annotated[Mapping[str, TableSharding], Effect.BY_KEY] = Field(default_factory=dict)
    #: GiB of each rank for tables, optimizer states and what a step needs of them; None: not limited. With
    #: `train.device: cuda` it is the GPU's memory that is meant, None is nine tenths of what is free there without
    #: `reserve_gib`, and tables that do not fit are kept in host memory, their hot rows on the GPU too.
    memory_gib: Annotated[float | None, Effect.SPEED] = Field(default=None, gt=0)
    #: With `train.device: cuda`: GiB of each GPU for the dense part, its activations and CUDA graphs; None: an estimate
    #: from the model's shapes and the rows of a step.
    reserve_gib: Annotated[float | None, Effect.SPEED] = Field(default=None, ge=0)
    #: Most weights and states of a rank, in means over the ranks, where there is a way (below 1 GiB no matter what);
    #: None: what is fastest, however uneven.
    memory_imbalance: Annotated[float | None, Effect.SPEED] = Field(default=2.0, ge=1)
    #: Ranks of one machine.
    ranks_per_node: Annotated[int, Effect.SPEED] = Field(default=8, ge=1)
    #: GB/s of a rank to its memory.
    memory_gbps: Annotated[float, Effect.SPEED] = Field(default=2_000.0, gt=0)
    #: GB/s of a rank to ranks of its machine.
    node_gbps: Annotated[float, Effect.SPEED] = Field(default=200.0, gt=0)
    #: GB/s of a rank to other machines.
    network_gbps: Annotated[float, Effect.SPEED] = Field(default=20.0, gt=0)
    #: GB/s from host memory to a rank's GPU: PCIe 4 with 16 lanes.
    host_gbps: Annotated[float, Effect.SPEED] = Field(default=25.0, gt=0)
    #: Seconds that a message costs besides its bytes.
    latency_us: Annotated[float, Effect.SPEED] = Field(default=20.0, ge=0)
    #: Popularity of codes that is assumed: code i is looked up in proportion to (i + 1) ** -zipf; 0: all alike.
    zipf: Annotated[float, Effect.SPEED] = Field(default=1.05, ge=0)
