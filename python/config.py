"""The pipeline's spec: one immutable object, built from YAML or Python, checked where it is built.

    spec = load_spec("conf/pipelines/clicks.yaml", overrides=["train.epochs=2"])

Every field says its unit. Unknown keys and wrong types are refused with the file, the key's path and the nearest
valid name. Nothing below the command line reads the environment: what a stage obeys is in here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace.errors import UserError, nearest
from headrace.schema import Column
from headrace.workspace import checkout, pipeline_file

_NAME = re.compile(r"^[a-z][a-z0-9_]*$")
_DS = re.compile(r"^\d{4}-\d{2}-\d{2}$")


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Generate(Section):
    """The click-log generator (`headrace generate`); see headrace.generate for the model of the clicks."""

    seed: int = 7
    #: The first day of the log; days are counted from here, so a day's data never depend on which days were asked for.
    start: str = "2026-01-01"
    #: Rows a day, before duplicates and malformed rows are added.
    rows_per_day: int = Field(default=60_000, ge=1, le=10**11)
    #: Users and items alive on the first day.
    users: int = Field(default=3_000, ge=2, le=10**9)
    items: int = Field(default=800, ge=2, le=10**9)
    #: New ones each day, as a share of the first day's number.
    new_users: float = Field(default=0.01, ge=0)
    new_items: float = Field(default=0.01, ge=0)
    #: Zipf exponents of popularity.
    user_zipf: float = Field(default=0.8, ge=0)
    item_zipf: float = Field(default=1.05, ge=0)
    #: Share of clicks that the intercept is set for (a day's differs by its noise and the drift).
    base_rate: float = Field(default=0.2, gt=0, lt=1)
    #: Standard deviation of the latent taste's part of the logit; what ids, countries, prices explain has about 1.5.
    taste: float = Field(default=0.3, ge=0)
    #: Standard deviation of a day's step of each coordinate (variance 1) of a user's latent taste.
    drift: float = Field(default=0.02, ge=0)
    #: Shares of rows that are broken on purpose.
    nulls: float = Field(default=0.02, ge=0, le=1)
    duplicates: float = Field(default=0.005, ge=0, le=1)
    late: float = Field(default=0.01, ge=0, le=1)
    malformed: float = Field(default=0.001, ge=0, le=1)
    #: Files a day, and their formats in turn.
    files_per_day: int = Field(default=4, ge=1)
    formats: tuple[Literal["jsonl", "csv"], ...] = Field(default=("jsonl", "jsonl", "jsonl", "csv"), min_length=1)

    @field_validator("start", mode="before")
    @classmethod
    def _start_is_a_date(cls, value: Any) -> Any:
        # YAML reads 2026-01-01 as a date.
        try:
            return parse_ds(str(value))
        except UserError as e:
            raise ValueError(str(e)) from None  # so that the message names the key


class Source(Section):
    """Landing files.

    `path` is a glob, relative to the workspace's home unless absolute. With `{ds}` in it, each day has its own files
    (a day's run also catches up on earlier days not yet loaded); without, the files are one snapshot, loaded as the
    run's ds.
    """

    #: A reader of headrace.lake.sources.
    format: Literal["clicks", "csv", "jsonl", "criteo", "talkingdata", "movielens", "movielens_ncf"]
    path: str
    #: csv only.
    separator: str = ","
    header: bool = True
    #: The text that means null, besides the empty one.
    null_value: str | None = None
    #: Days before the run's ds whose unloaded landing files are loaded too.
    catch_up_days: int = Field(default=30, ge=0)

    @property
    def daily(self) -> bool:
        return "{ds}" in self.path


class Expectations(Section):
    """What must hold for a day's rows; a breach stops the day before anything is committed."""

    min_rows: int = Field(default=1, ge=0)
    max_rows: int | None = None
    #: Largest share of rows that may go to quarantine.
    max_bad_rate: float = Field(default=0.05, ge=0, le=1)
    #: Largest share of nulls by column.
    null_rate: Mapping[str, float] = Field(default_factory=dict)
    #: Column -> [low, high], inclusive. Rows outside go to quarantine.
    ranges: Mapping[str, tuple[float | None, float | None]] = Field(default_factory=dict)
    #: The newest event may be at most this many hours before the end of the day (UTC); None: not checked.
    freshness_hours: float | None = None


class Table(Section):
    """The lake's Delta table, partitioned by `ds` (the landing day; a snapshot's: the run's)."""

    columns: tuple[Column, ...]
    #: Rows equal in these columns are one event: the first is kept, also against the days within `late_days`.
    keys: tuple[str, ...] = ()
    #: Timestamp column that says when the event happened; None where the source has no time.
    event_time: str | None = None
    #: An event may arrive this many days late; later ones go to quarantine, as do events from after the day.
    late_days: int = Field(default=3, ge=0)
    #: A column that the declaration lacks: report it and go on, add it to the table as text, or stop.
    new_columns: Literal["report", "accept", "refuse"] = "report"
    expectations: Expectations = Expectations()

    @model_validator(mode="after")
    def _columns_exist(self) -> Table:
        names = [c.name for c in self.columns]
        for twice in {n for n in names if names.count(n) > 1}:
            raise ValueError(f"column '{twice}' is declared twice")
        wanted = [*self.keys, *self.expectations.null_rate, *self.expectations.ranges]
        for name in [*wanted, *([self.event_time] if self.event_time else [])]:
            if name not in names:
                raise ValueError(f"column '{name}' is used but not declared{nearest(name, names)}")
        return self

    @property
    def spark_schema(self) -> str:
        """The declared columns as a Spark DDL string."""
        return ", ".join(f"`{c.name}` {c.type}" for c in self.columns)


class OpSpec(Section):
    """One operator: in YAML `name`, or `name: {parameter: value}`. Parameters are checked by headrace.features."""

    op: str
    params: Mapping[str, Any] = Field(default_factory=dict)


def _op_spec(value: Any) -> Any:
    if isinstance(value, str):
        return {"op": value}
    if isinstance(value, Mapping) and len(value) == 1 and "op" not in value:
        ((op, params),) = value.items()
        return {"op": op, "params": {} if params is None else params}
    return value


class Chain(Section):
    """Columns and the operators they pass through, in order: `["price"] >> FillMissing() >> LogOp()`.

    A column may begin several chains; the names of the features that come out are unique.
    """

    columns: tuple[str, ...]
    ops: tuple[Annotated[OpSpec, BeforeValidator(_op_spec)], ...] = ()
    #: Of the chain's features. `ops: [{add_tags: [user, id]}]` is another way to write it.
    tags: tuple[str, ...] = ()
    #: Of the chain's features, kept in the dataset's schema. `ops: [{add_metadata: {unit: EUR}}]` is the same.
    metadata: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _labels_as_ops(cls, data: Any) -> Any:
        """Operators that only label: taken out, wherever in the chain they are, so that there is one spec."""
        if not isinstance(data, Mapping) or not isinstance(data.get("ops"), (list, tuple)):
            return data
        ops, tags, metadata = [], list(data.get("tags") or ()), dict(data.get("metadata") or {})
        for given in data["ops"]:
            op = _op_spec(given)
            name = op.get("op") if isinstance(op, Mapping) else None
            if name == "add_tags":
                found = op["params"].get("tags") if isinstance(op["params"], Mapping) else op["params"]
                if not isinstance(found, (list, tuple)) or not found:
                    raise ValueError("add_tags: write a list, for example add_tags: [user, id]")
                tags += [t for t in found if t not in tags]
            elif name == "add_metadata":
                if not isinstance(op["params"], Mapping) or not op["params"]:
                    raise ValueError("add_metadata: write a mapping, for example add_metadata: {unit: EUR}")
                metadata |= op["params"]
            else:
                ops.append(given)
        return {**data, "ops": ops, "tags": tags, "metadata": metadata}


class Split(Section):
    """How rows become train and valid (and `rank`, for ranked candidate lists).

    time: events of the last `valid_days` days up to ds are valid, those before are train.
    position: the last `valid_fraction` of the rows, in source order.
    column: the value of `column` names the split (`train`, `valid`, `rank`).
    """

    by: Literal["time", "position", "column"]
    valid_days: int = Field(default=1, ge=1)
    valid_fraction: float = Field(default=0.1, gt=0, lt=1)
    column: str | None = None

    @model_validator(mode="after")
    def _column_given(self) -> Split:
        if (self.by == "column") != (self.column is not None):
            raise ValueError("`column` is needed with `by: column`, and only there")
        return self


class Features(Section):
    """From the events table to the dataset."""

    #: 0/1 column.
    label: str
    workflow: tuple[Chain, ...]
    split: Split
    #: Train on this many days before the validation range (daily sources); statistics come from these rows alone.
    window_days: int = Field(default=14, ge=1)
    #: Operators over the whole events table before the chains, in order: filters, joins, what was before an event.
    prepare: tuple[Annotated[OpSpec, BeforeValidator(_op_spec)], ...] = ()
    #: Days before the training range that `prepare` reads and that are then dropped (split by time of a daily source).
    #: None: as many as the longest window in `prepare` asks for.
    history_days: int | None = Field(default=None, ge=0)
    #: Columns taken along unchanged, for evaluation and for reading the dataset (not fed to the model).
    carried: tuple[str, ...] = ()
    #: Rows a Parquet row group: what the reader decodes at a time.
    row_group_rows: int = Field(default=131_072, ge=1)
    #: The dataset has at least this many row groups a split where it has the rows, so that every stream gets some.
    min_row_groups: int = Field(default=12, ge=1)
    #: Which body of the operators writes the dataset: Spark expressions or Arrow kernels (the same bits on CPUs).
    #: auto: spark with the profile `gpu`, else arrow.
    engine: Literal["auto", "spark", "arrow"] = "auto"


class DriftColumn(Section):
    """Limits of one column; None: the section's."""

    max_psi: float | None = Field(default=None, ge=0)
    max_missing_change: float | None = Field(default=None, ge=0, le=1)
    max_oov_rate: float | None = Field(default=None, ge=0, le=1)
    action: Literal["warn", "stop", "ignore"] | None = None


class Drift(Section):
    """How far the newest rows (split `valid`) may be from those of the training range, and what then.

    With this section the features stage keeps statistics of every day in a Delta table, which the stage `drift` judges.
    """

    #: Population stability index of a column or a feature; None: not checked. 0.1: a change, 0.25: another population.
    max_psi: float | None = Field(default=0.25, ge=0)
    #: Difference of the shares of rows without a value.
    max_missing_change: float | None = Field(default=0.1, ge=0, le=1)
    #: Largest share of today's values that the vocabulary lacks.
    max_oov_rate: float | None = Field(default=0.3, ge=0, le=1)
    #: warn: a line in the report. stop: the day ends there, before training.
    action: Literal["warn", "stop"] = "warn"
    #: Other limits by name of a column or a feature; both where both have the name.
    columns: Mapping[str, DriftColumn] = Field(default_factory=dict)
    #: PSI is judged only with this many values on both sides: of few, it is large by chance.
    min_values: int = Field(default=1_000, ge=1)
    #: A number's bins are about these quantiles of the training range; a category's are its most frequent values.
    quantiles: int = Field(default=10, ge=2, le=1_000)
    top_values: int = Field(default=20, ge=1, le=10_000)

    def limits(self, column: str) -> DriftColumn:
        """What holds for a column or feature."""
        own = self.columns.get(column, DriftColumn())
        return DriftColumn(
            **{f: getattr(self if getattr(own, f) is None else own, f) for f in DriftColumn.model_fields}
        )


class Optimizer(Section):
    """An optimizer and its settings."""

    kind: Literal["sgd", "adagrad", "adam"] = "adagrad"
    learning_rate: float = Field(default=0.05, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)


class TableOptimizer(Section):
    """What is special about one table's updates; None: as for the others."""

    learning_rate: float | None = Field(default=None, gt=0)
    weight_decay: float | None = Field(default=None, ge=0)


class EmbeddingOptimizer(Section):
    """The optimizer of embedding rows. `rowwise_adagrad` keeps one number a row where adagrad keeps one a weight."""

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "adagrad"
    learning_rate: float = Field(default=0.05, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    #: Scale a step's gradient down to this norm over all rows of all tables; None: leave it.
    clip_norm: float | None = Field(default=None, gt=0)
    #: Exceptions by table (a vocabulary's name, else the feature's).
    tables: Mapping[str, TableOptimizer] = Field(default_factory=dict)


class TableSharding(Section):
    """What is decided about one table before the planner decides the rest."""

    kind: Literal["table_wise", "row_wise", "column_wise", "data_parallel"] | None = None
    #: Ranks that the rows, or blocks of columns, are dealt to; None: the planner's choice.
    parts: int | None = Field(default=None, ge=1)
    #: How rows are stored; arithmetic is float32.
    storage: Literal["fp32", "fp16", "bf16"] | None = None


class Sharding(Section):
    """How embedding tables are spread over the ranks. `row_wise`: all of them; `auto`: by the planner's cost model."""

    kind: Literal["row_wise", "auto"] = "row_wise"
    storage: Literal["fp32", "fp16", "bf16"] = "fp32"
    #: Exceptions by table (a vocabulary's name, else the feature's).
    tables: Mapping[str, TableSharding] = Field(default_factory=dict)
    #: GiB of each rank for tables, optimizer states and what a step needs of them; None: not limited.
    memory_gib: float | None = Field(default=None, gt=0)
    #: Ranks of one machine, and GB/s of a rank: to its memory, to ranks of its machine, to other machines.
    ranks_per_node: int = Field(default=8, ge=1)
    memory_gbps: float = Field(default=2_000.0, gt=0)
    node_gbps: float = Field(default=200.0, gt=0)
    network_gbps: float = Field(default=20.0, gt=0)
    #: Seconds that a message costs besides its bytes.
    latency_us: float = Field(default=20.0, ge=0)
    #: Popularity of codes that is assumed: code i is looked up in proportion to (i + 1) ** -zipf; 0: all alike.
    zipf: float = Field(default=1.05, ge=0)


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


class Negatives(Section):
    """Negatives drawn anew for each batch: for every positive row, copies with another value of `column`, label 0."""

    column: str
    per_positive: int = Field(default=4, ge=1)


class Train(Section):
    """The loop. Batches and their order depend on seed, batch_size and streams, never on the number of ranks."""

    #: Horovod ranks. Must divide `streams`.
    ranks: int = Field(default=2, ge=1)
    #: Rows of a step over all ranks together.
    batch_size: int = Field(default=4_096, ge=1)
    #: The dataset is read as this many independent streams; each rank reads streams/ranks of them.
    streams: int = Field(default=4, ge=1)
    epochs: int = Field(default=3, ge=1)
    #: Stop after this many steps, whatever the epochs.
    max_steps: int | None = None
    #: Stop after this many epochs in a row that did not lower the log loss of the split `valid`. The model is that of
    #: the epoch with the lowest. None: take all epochs and keep the last.
    patience: int | None = Field(default=1, ge=1)
    seed: int = 1
    dense: Optimizer = Optimizer(kind="adam", learning_rate=0.001)
    embeddings: EmbeddingOptimizer = EmbeddingOptimizer(kind="adagrad", learning_rate=0.05)
    negatives: Negatives | None = None
    sharding: Sharding = Sharding()
    #: A checkpoint each this many steps, and at the end; the newest `keep` stay.
    checkpoint_steps: int = Field(default=200, ge=1)
    keep: int = Field(default=2, ge=1)
    #: Write checkpoints while training goes on. A rank then needs twice the memory of its tables while it writes.
    background_checkpoints: bool = False
    #: Start from the newest finished model of an earlier day.
    warm_start: bool = True
    #: The share of adagrad's sums that a warm start keeps. They only grow: with 1, nothing moves after a year of days;
    #: with 0, the first steps of a day are as large as those of untrained rows, and forget.
    warm_decay: float = Field(default=0.5, ge=0, le=1)
    #: Threads of torch in each rank; None: cores / ranks.
    threads: int | None = None
    #: Tries after a failed launch, each from the last checkpoint.
    retries: int = Field(default=1, ge=0)
    #: HR@k and NDCG@k over the split `rank`, grouped by this carried column.
    rank_group: str | None = None
    rank_k: int = Field(default=10, ge=1)

    @model_validator(mode="after")
    def _divisible(self) -> Train:
        if self.streams % self.ranks:
            raise ValueError(f"ranks ({self.ranks}) must divide streams ({self.streams})")
        if self.batch_size % self.streams:
            raise ValueError(f"streams ({self.streams}) must divide batch_size ({self.batch_size})")
        return self


class Baseline(Section):
    """XGBoost on Spark (`xgboost.spark`) over the same dataset and split."""

    rounds: int = Field(default=60, ge=1)
    max_depth: int = Field(default=6, ge=1)
    learning_rate: float = Field(default=0.2, gt=0)
    workers: int = Field(default=2, ge=1)
    #: Train on at most this many rows, a deterministic sample.
    max_rows: int | None = 2_000_000


class Side(Section):
    """One side of a score: its key and the columns that travel with it, taken from its newest event."""

    key: str
    columns: tuple[str, ...] = ()
    #: Active within the training window, most events first; None: all.
    limit: int | None = None


class Score(Section):
    """Batch scoring of users x candidate items."""

    user: Side
    item: Side
    #: Scores kept for each user.
    top_k: int = Field(default=10, ge=1)
    #: The other columns that the features read: constants.
    context: Mapping[str, Any] = Field(default_factory=dict)
    #: Which registered model: the neural one, the XGBoost one, or the one with the higher validation AUC.
    model: Literal["neural", "baseline", "best"] = "neural"
    #: Leave out items that the user has clicked (label 1) since the training window began (without a time: in train).
    exclude_seen: bool = False


class Warehouse(Section):
    """Where scores are published. `embedded` starts the PostgreSQL that comes as a wheel, on loopback."""

    kind: Literal["embedded", "postgres"] = "embedded"
    host: str = "127.0.0.1"
    #: 0 with `embedded`: a free port.
    port: int = Field(default=0, ge=0, le=65_535)
    database: str = "headrace"
    user: str = "headrace"
    schema_name: str = Field(default="public", alias="schema")
    #: The password's place (never the password): a variable's name or a file. Embedded makes its own file.
    password_env: str | None = None
    password_file: str | None = None
    sslmode: Literal["disable", "prefer", "require", "verify-ca", "verify-full"] = "prefer"

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


class Publish(Section):
    """Write, audit, publish."""

    #: Table in the warehouse; default `<pipeline>_scores`.
    table: str | None = None
    warehouse: Warehouse = Warehouse()
    #: The audit: rows, users with a full top-K, scores within [0, 1], no nulls, no duplicate keys.
    min_rows: int = Field(default=1, ge=0)
    #: The number of rows may differ from the last published day's by this share; None: not checked.
    max_row_change: float | None = 0.5

    @field_validator("table")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and not _NAME.match(value):
            raise ValueError(f"table name '{value}' must match {_NAME.pattern}")
        return value


class Spark(Section):
    """The Spark application of each stage: a profile of conf/spark and what this pipeline changes in it."""

    profile: str = "cpu"
    master: str = "local[*]"
    driver_memory: str = "3g"
    #: Further properties, highest priority.
    properties: Mapping[str, str] = Field(default_factory=dict)


class Spec(Section):
    """A whole pipeline."""

    pipeline: str
    description: str = ""
    #: The day that is run when none is given (snapshots).
    ds: str | None = None
    generate: Generate | None = None
    source: Source
    table: Table
    features: Features
    drift: Drift | None = None
    model: Model = Model()
    train: Train = Train()
    baseline: Baseline | None = None
    score: Score | None = None
    publish: Publish | None = None
    spark: Spark = Spark()

    @field_validator("pipeline")
    @classmethod
    def _pipeline_name(cls, value: str) -> str:
        if not _NAME.match(value):
            raise ValueError(f"'{value}' must match {_NAME.pattern}")
        return value

    @field_validator("ds", mode="before")
    @classmethod
    def _ds_text(cls, value: Any) -> Any:
        # YAML reads 2026-01-01 as a date.
        return None if value is None else parse_ds(str(value))

    @model_validator(mode="after")
    def _names_meet(self) -> Spec:
        names = [c.name for c in self.table.columns]
        wanted: dict[str, Sequence[str]] = {
            "features.label": [self.features.label],
            "features.carried": self.features.carried,
        }
        if self.features.split.column:
            wanted["features.split.column"] = [self.features.split.column]
        if self.score:
            for side_name, side in (("user", self.score.user), ("item", self.score.item)):
                wanted[f"score.{side_name}"] = [side.key, *side.columns]
            wanted["score.context"] = list(self.score.context)
        for where, columns in wanted.items():
            for column in columns:
                # What `prepare` adds, headrace.features knows.
                if column not in names and not self.features.prepare:
                    hint = nearest(column, names)
                    raise ValueError(f"{where}: column '{column}' is not declared in table.columns{hint}")
        if self.features.split.by == "time" and not self.table.event_time:
            raise ValueError("features.split.by is 'time', but table.event_time is not set")
        if self.train.rank_group and self.train.rank_group not in self.features.carried:
            raise ValueError(f"train.rank_group: '{self.train.rank_group}' must be in features.carried")
        if self.publish and not self.score:
            raise ValueError("publish needs a score section")
        return self


def parse_ds(text: str) -> str:
    """A date as YYYY-MM-DD.

    Raises:
        UserError: it is none.
    """
    from datetime import date

    try:
        if not _DS.match(text):
            raise ValueError
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise UserError(f"'{text}' is not a date of the form YYYY-MM-DD") from None


def load_spec(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Build the spec of a YAML file, or of a shipped pipeline by name.

    Args:
        path_or_name: a path, or a name below conf/pipelines.
        overrides: `key.path=value`, the value read as YAML.

    Raises:
        UserError: no such file, not YAML, an unknown key, a wrong type; all faults at once, each with its key path.
    """
    path = Path(path_or_name)
    if not (path.suffix in (".yaml", ".yml") or path.is_file()):
        path = pipeline_file(str(path_or_name))
        if not path.is_file():
            shipped = sorted(p.stem for p in path.parent.glob("*.yaml"))
            raise UserError(
                f"no pipeline '{path_or_name}'{nearest(str(path_or_name), shipped)}; shipped: {', '.join(shipped)}; "
                f"or give the path of a .yaml file"
            )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such pipeline file: {path}") from None
    except (yaml.YAMLError, ValueError) as e:  # ValueError: bytes that are no text, or a date like 2026-02-30
        raise UserError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a pipeline is a mapping of sections, not a {type(data).__name__}")
    for override in overrides:
        _apply(data, override)
    return build_spec(data, where=str(path))


def build_spec(data: Mapping[str, Any], where: str = "spec") -> Spec:
    """Validate a mapping. Raises UserError that lists every fault."""
    try:
        return Spec.model_validate(data)
    except ValidationError as e:
        raise UserError("\n".join(_explain(error, where) for error in e.errors())) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {override}: write key=value, for example --set train.epochs=2")
    *parents, leaf = key.strip().split(".")
    node: Any = data
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise UserError(f"--set {override}: '{parent}' is not a section")
    try:
        node[leaf] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as e:
        raise UserError(f"--set {override}: the value is not YAML: {' '.join(str(e).split())}") from None


def _explain(error: Any, where: str) -> str:
    path = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key '{path}'{nearest(str(error['loc'][-1]), _fields_at(error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"{where}: key '{path}' is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    quiet = error["type"] == "value_error" or isinstance(error["input"], (dict, list))
    shown = "" if quiet else f" (got {error['input']!r})"
    return f"{where}: {path + ': ' if path else ''}{message}{shown}"


def _fields_at(loc: Sequence[Any]) -> list[str]:
    """Valid keys of the section at a key path."""
    model: Any = Spec
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return []
        model = _section_of(field.annotation)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _section_of(annotation: Any) -> Any:
    """The pydantic model inside `X | None`, `tuple[X, ...]`, `Annotated[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_of(inner)
        if found is not None:
            return found
    return None


def spark_profile(name: str) -> Path:
    """The properties file of a Spark profile.

    Raises:
        UserError: there is none of that name.
    """
    path = checkout() / "conf" / "spark" / f"{name}.conf"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.conf"))
        raise UserError(f"no Spark profile '{name}'{nearest(name, known)}; known: {', '.join(known)}")
    return path
