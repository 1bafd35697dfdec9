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

    #: Curve after the warm-up.
    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    #: Steps of the linear rise.
    warmup_steps: int = Field(default=0, ge=0)
    #: linear, cosine: learning rate of the last step, as a share of the highest one.
    final: float = Field(default=0.0, ge=0, le=1)
    #: step: number of steps after which the rate is multiplied by `factor`.
    every_steps: int | None = Field(default=None, ge=1)
    #: step: factor of the learning rate.
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
    #: Learning rate at the top of the schedule.
    learning_rate: float = Field(default=0.05, gt=0)
    #: Weight decay: a step subtracts this share of a weight, times the learning rate.
    weight_decay: float = Field(default=0.0, ge=0)
    #: The learning rate by step.
    schedule: Schedule = Schedule()


class TableOptimizer(Section):
    """Settings of one table's updates; None: those of all tables."""

    #: Learning rate of this table.
    learning_rate: float | None = Field(default=None, gt=0)
    #: Weight decay of this table.
    weight_decay: float | None = Field(default=None, ge=0)


class DynamicTable(Section):
    """The table of a feature of raw ids (`raw_id`): which ids get a row, and which let go of theirs."""

    #: Number of times that training sees an id before it gets a row.
    admit_after: int = Field(default=1, ge=1)
    #: Chance that an id gets a row each time it is seen, once `admit_after` is reached.
    admit_chance: float = Field(default=1.0, gt=0, le=1)
    #: Rows over all ranks; each rank has its even share. None: not limited.
    max_rows: int | None = Field(default=None, ge=1)
    #: MiB of each rank for rows, optimizer states, counts and the hash table. None: not limited.
    memory_mib: float | None = Field(default=None, gt=0)
    #: Rows that are evicted when the table is full: lfu, those seen least often (of equals the longest ago); lru, those
    #: seen longest ago (of equals the least often).
    evict: Literal["lfu", "lru"] = "lfu"
    #: Share of the rows that one eviction removes, because each eviction costs a pass over the counts.
    evict_share: float = Field(default=0.1, gt=0, le=1)
    #: Ids that wait for admission, over all ranks; beyond, those seen longest ago are forgotten.
    max_waiting: int = Field(default=1_000_000, ge=1)


class EmbeddingOptimizer(Section):
    """The optimizer of embedding rows. `rowwise_adagrad` keeps one number a row where adagrad keeps one a weight."""

    #: The rule.
    kind: EmbeddingOptimizerKind = "adagrad"
    #: Learning rate at the top of the schedule.
    learning_rate: float = Field(default=0.05, gt=0)
    #: Weight decay as of the dense optimizer, for the rows that a step touches.
    weight_decay: float = Field(default=0.0, ge=0)
    #: The learning rate by step.
    schedule: Schedule = Schedule()
    #: Scale a step's gradient down to this norm over all rows of all tables; None: leave it.
    clip_norm: float | None = Field(default=None, gt=0)
    #: Exceptions by table (a vocabulary's name, else the feature's).
    tables: Mapping[str, TableOptimizer] = Field(default_factory=dict)
    #: Settings by feature of raw ids; others have the defaults.
    dynamic: Mapping[str, DynamicTable] = Field(default_factory=dict)


class TableSharding(TrainedSection):
    """Choices for one table, made before the planner decides the rest."""

    #: Sharding of the table; null: the planner's choice.
    kind: Annotated[ShardingKind | None, Effect.SPEED] = None
    #: Ranks that the rows, or blocks of columns, are dealt to; None: the planner's choice.
    parts: Annotated[int | None, Effect.SPEED] = Field(default=None, ge=1)
    #: Storage of rows; arithmetic is float32.
    storage: Annotated[Literal["fp32", "fp16", "bf16", "int8"] | None, Effect.STORAGE] = None
    #: Whether owners sum the rows of a list before they travel; None: what is cheaper (with `kind: row_wise`: no).
    pooled: Annotated[bool | None, Effect.SPEED] = None
    #: With `train.device: cuda`: the share of the rows that the ranks' GPUs hold, those used most; all of them are then
    #: in host memory. None: the planner's choice, which is 1 where all tables fit.
    cached: Annotated[float | None, Effect.SPEED] = Field(default=None, gt=0, le=1)


class Sharding(TrainedSection):
    """The spread of embedding tables over the ranks. `row_wise`: all of them; `auto`: by the planner's cost model."""

    #: How shardings are chosen.
    kind: Annotated[Literal["row_wise", "auto"], Effect.SPEED] = "row_wise"
    #: Storage of rows; arithmetic is float32.
    storage: Annotated[Literal["fp32", "fp16", "bf16", "int8"], Effect.STORAGE] = "fp32"
    #: Type of float32 vectors and gradients between ranks. bf16 halves the bytes; each number is then rounded to 8 bits
    #: of mantissa (an error of at most 2^-8 of it).
    wire: Annotated[Literal["fp32", "bf16"], Effect.STORAGE] = "fp32"
    #: Route of messages between machines: direct from rank to rank, or combined inside machines first
    #: (`ranks_per_node`), which sends rows that several ranks need once; auto: the faster one (with `kind: row_wise`:
    #: direct).
    exchange: Annotated[Literal["auto", "direct", "by_machine"], Effect.SPEED] = "auto"
    #: Exceptions by table (a vocabulary's name, else the feature's).
    tables: Annotated[Mapping[str, TableSharding], Effect.BY_KEY] = Field(default_factory=dict)
    #: GiB of each rank for tables, optimizer states and a step's buffers; None: not limited. With `train.device: cuda`
    #: it is the GPU's memory, None is nine tenths of the free memory without `reserve_gib`, and tables that do not fit
    #: are in host memory, their hot rows on the GPU too.
    memory_gib: Annotated[float | None, Effect.SPEED] = Field(default=None, gt=0)
    #: With `train.device: cuda`: GiB of each GPU for the dense part, its activations and CUDA graphs; None: an estimate
    #: from the model's shapes and the rows of a step.
    reserve_gib: Annotated[float | None, Effect.SPEED] = Field(default=None, ge=0)
    #: Largest size of a rank's weights and states, in means over the ranks, where that is possible (sizes below 1 GiB
    #: do not count); None: the fastest plan, however uneven.
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
    #: Microseconds of a message, besides its bytes.
    latency_us: Annotated[float, Effect.SPEED] = Field(default=20.0, ge=0)
    #: Assumed popularity of codes: code i is looked up in proportion to (i + 1) ** -zipf; 0: all alike.
    zipf: Annotated[float, Effect.SPEED] = Field(default=1.05, ge=0)
