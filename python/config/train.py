"""The sections `train`, `retrain`, `challenger`: tasks, the loop, its optimizers, training on top of earlier days."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, field_validator, model_validator

from headrace.config.embeddings import EmbeddingOptimizer, Optimizer, Sharding
from headrace.config.evaluation import (
    HIGHER_IS_BETTER,
    CatalogueMetric,
    ClickMetric,
    Evaluation,
    RankingMetric,
    UserMetric,
)
from headrace.config.features import Features
from headrace.config.model import Loss, Model
from headrace.config.score import Score
from headrace.config.section import NAME, Effect, Section, TrainedSection, parse_ds
from headrace.config.table import Table
from headrace.config.variants import Search
from headrace.config.warehouse import Publish
from headrace.errors import UserError, nearest

#: What the outputs of a model are called that no task may be.
_RESERVED = ("logits",)


class KnownAfter(Section):
    """The age at which a label is final: that of a younger row counts as missing."""

    #: Days from the row's event to the end of ds (UTC) for its label to count.
    days: float = Field(gt=0)
    #: A carried column of timestamps: when the row's event happened.
    event_time: str


class Task(Section):
    """A label of a model that learns several. The first task is the pipeline's own label, of all rows: `click: {}`.

    Its output ranks; the others are outputs of the same model. A row without a label is none of a task's rows.
    """

    #: A carried column of numbers or booleans, null where it is not known. Of the first task: `features.label`.
    label: str | None = None
    #: bce or focal, of the probability of a label in [0, 1]; squared_error, of any number.
    loss: Loss = Loss()
    #: Factor of its loss, a sum over its rows. 0: it is measured and not learned.
    weight: float = Field(default=1.0, ge=0)
    #: Its rows: those on which the label of an earlier task is 1, by its name; or those for which a condition over
    #: carried columns is true, in the words of `lambda`. None: all.
    where: str | None = None
    #: Labels that others may still change, such as purchases within a week, count when their time is over.
    known_after: KnownAfter | None = None
    #: The probability that all of these tasks happen, the product of their outputs; its label is the product of theirs.
    product: tuple[str, ...] = ()
    #: Metrics of probabilities besides auc, log_loss, calibration and base_rate; None: those of `evaluation.metrics`.
    metrics: tuple[ClickMetric | UserMetric, ...] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Task:
        if self.product:
            if len(self.product) < 2:
                raise ValueError("a product is of two tasks or more")
            if self.label is not None or self.known_after is not None:
                raise ValueError("a product has the labels of its tasks: leave out label and known_after")
            if not self.is_probability:
                raise ValueError("a product is a probability: its loss is bce or focal")
        if not self.loss.is_of_rows:
            raise ValueError(f"loss: {self.loss.kind} is no loss of a label alone; write bce, focal or squared_error")
        if not self.is_probability and self.metrics:
            raise ValueError(f"{self.metrics[0]} is of probabilities; a task with loss: squared_error has rmse and mae")
        return self

    @property
    def is_probability(self) -> bool:
        """Return whether the output is the logit of a probability, not the label's value."""
        return self.loss.predicts == "probability"


def check_tasks(tasks: Mapping[str, Task]) -> None:
    """Raise ValueError where tasks do not fit each other."""
    earlier: set[str] = set()
    for i, (name, task) in enumerate(tasks.items()):
        if not NAME.fullmatch(name) or name in _RESERVED:
            raise ValueError(f"tasks: '{name}' is no name of a task; it must match {NAME.pattern}, and not be logits")
        if i == 0:
            for key in ("label", "where", "known_after", "product"):
                if getattr(task, key):
                    raise ValueError(
                        f"tasks.{name}.{key}: the first task is the pipeline's label (features.label) of all rows"
                    )
            if not task.is_probability:
                raise ValueError(f"tasks.{name}.loss: the first task ranks, and is a probability: bce or focal")
        elif task.label is None and not task.product:
            raise ValueError(f"tasks.{name}: name its label, a carried column, or the tasks whose product it is")
        for factor in task.product:
            if factor not in tasks or tasks[factor].product or not tasks[factor].is_probability:
                known = ", ".join(n for n, t in tasks.items() if t.is_probability and not t.product)
                raise ValueError(f"tasks.{name}.product: '{factor}' is no task of a probability; there are: {known}")
        if task.where in tasks and (task.where not in earlier or not tasks[task.where].is_probability):
            raise ValueError(
                f"tasks.{name}.where: '{task.where}' is no task with a label in [0, 1] that stands before '{name}'"
            )
        earlier.add(name)
    if tasks and not any(task.weight for task in tasks.values()):
        raise ValueError("tasks: all weights are 0: nothing would be learned")


class Negatives(Section):
    """Negatives drawn anew for each batch: rows of the label 0, or items beside the rows, for losses that compare."""

    model_config = ConfigDict(populate_by_name=True)

    #: Column of the item that is drawn, which has a feature.
    column: str
    #: rows: each positive row is followed by copies of it with another value of `column` and the label 0. candidates:
    #: rows stay as they are; values are drawn for each, for models whose loss compares a row's item with them.
    form: Literal["rows", "candidates"] = Field(default="rows", alias="as")
    #: Copies of each positive row; with `as: candidates` values that are drawn for each row, whatever its label.
    per_positive: int = Field(default=4, ge=1)
    #: uniform: any known value. in_batch: those of the positive rows that are read together with it, a row group of the
    #: stream (with `as: candidates` the stream's rows of the step); so a value is drawn as often as it is clicked.
    #: popularity (of candidates): in proportion to the positive rows of the split train, to the power `exponent`.
    method: Literal["uniform", "popularity", "in_batch"] = "uniform"
    #: Of `method: popularity`: 1 as often as it is clicked, 0 all alike.
    exponent: float = Field(default=0.75, ge=0)
    #: For candidates: draw once for all rows of a step, `per_positive` values; a row's own may be among them.
    shared: bool = False
    #: For candidates: a list feature of the same vocabulary, none of whose values is drawn for its row.
    exclude: str | None = None
    #: Of rows, `method: uniform`: a categorical feature, the user: no value is drawn that it has in positive rows of
    #: the split train. Each rank holds these pairs, 8 bytes each.
    exclude_seen: str | None = None

    @model_validator(mode="after")
    def _fits_the_form(self) -> Negatives:
        if self.form == "rows":
            keys = {"method: popularity": self.method == "popularity", "shared": self.shared, "exclude": self.exclude}
            if wrong := [name for name, is_set in keys.items() if is_set]:
                raise ValueError(f"`{wrong[0]}` is for `as: candidates`")
            if self.exclude_seen is not None and self.method != "uniform":
                raise ValueError("`exclude_seen` goes with `method: uniform`")
        elif self.exclude_seen is not None:
            raise ValueError("`exclude_seen` is for `as: rows`; with candidates write `exclude`, a list feature")
        if self.shared and (self.method == "in_batch" or self.exclude is not None):
            raise ValueError("`shared` draws once for all rows: not with `method: in_batch` or `exclude`")
        return self


#: What each task of `train.tasks` is measured by, whatever is asked for: one of probabilities, one of numbers.
_OF_TASKS = {True: ("log_loss", "auc"), False: ("rmse", "mae")}


class Train(TrainedSection):
    """The loop. Batches and their order depend on seed, batch_size and streams, never on the number of ranks."""

    #: Horovod ranks. Must divide `streams`.
    ranks: Annotated[int, Effect.SPEED] = Field(default=2, ge=1)
    #: Rows of a step, over all ranks.
    batch_size: Annotated[int, Effect.WEIGHTS] = Field(default=4_096, ge=1)
    #: The dataset is read as this many independent streams; each rank reads streams/ranks of them.
    streams: Annotated[int, Effect.WEIGHTS] = Field(default=4, ge=1)
    #: Passes over the dataset at most.
    epochs: Annotated[int, Effect.WEIGHTS] = Field(default=3, ge=1)
    #: Stop after this many steps, whatever the epochs.
    max_steps: Annotated[int | None, Effect.WEIGHTS] = None
    #: Number of parts in which a step's rows are processed, one after the other: less memory for the same step.
    accumulate: Annotated[int, Effect.WEIGHTS] = Field(default=1, ge=1)
    #: Evaluate after each so many steps, besides the ends of epochs.
    eval_steps: Annotated[int | None, Effect.WEIGHTS] = Field(default=None, ge=1)
    #: Stop after this many evaluations in a row (of epochs' ends, where `eval_steps` is not set) that did not better
    #: `monitor`. The model is that of the best. None: take all epochs and keep the last.
    patience: Annotated[int | None, Effect.WEIGHTS] = Field(default=1, ge=1)
    #: The metric of `patience`: any that the split `valid` has (`log_loss`, `auc`, those of `evaluation.metrics`; of a
    #: task of `tasks`, `auc.buy`), of full rankings over `valid` (`ndcg_at_20_full`), or of the lists of the split
    #: `rank` (`ndcg_at_k`), where that is not what is reported.
    monitor: Annotated[str, Effect.WEIGHTS] = "log_loss"
    #: Seed of the initial weights and of the order of batches.
    seed: Annotated[int, Effect.WEIGHTS] = 1
    #: Arithmetic of the dense part in training. bf16: matrix products of bfloat16 (torch.autocast); tf32 (cuda): of
    #: float32 with 10 bits of mantissa; weights, embeddings, their gradients and the loss stay fp32, as do evaluation
    #: and scores.
    precision: Annotated[Literal["fp32", "tf32", "bf16"], Effect.WEIGHTS] = "fp32"
    #: Device of tables and dense part. With `cuda` each rank has the GPU that Spark assigned to its task
    #: (`spark.task.resource.gpu.amount`), else that of its number on its machine.
    device: Annotated[Literal["cpu", "cuda"], Effect.SPEED] = "cpu"
    #: With `device: cuda`: launch the dense part's forward and backward pass as one CUDA graph.
    cuda_graphs: Annotated[bool, Effect.SPEED] = False
    #: The optimizer of the dense part.
    dense: Annotated[Optimizer, Effect.WEIGHTS] = Optimizer(kind="adam", learning_rate=0.001)
    #: The optimizer of embedding rows.
    embeddings: Annotated[EmbeddingOptimizer, Effect.WEIGHTS] = EmbeddingOptimizer(kind="adagrad", learning_rate=0.05)
    #: Negatives that are drawn anew for each batch; null: none but the dataset's.
    negatives: Annotated[Negatives | None, Effect.WEIGHTS] = None
    #: By categorical feature of one value a row: the share of the known ids in training rows that are out of vocabulary
    #: instead, others in each epoch: a user's or item's first day is then one that the model has learned from.
    #: Evaluation leaves ids as they are.
    unknown_rate: Annotated[Mapping[str, Annotated[float, Field(gt=0, lt=1)]], Effect.WEIGHTS] = Field(
        default_factory=dict
    )
    #: A carried column of numbers, at least 0: factor of a row's loss. The sum is divided by the rows of a step, not by
    #: their weights: with a mean of 1 learning rates keep their meaning. Evaluation counts each row once.
    sample_weight: Annotated[str | None, Effect.WEIGHTS] = None
    #: The labels that the model learns at once, by name; none: `features.label` alone. Each has an output of its own.
    tasks: Annotated[Mapping[str, Task], Effect.WEIGHTS] = Field(default_factory=dict)
    #: Distribution of embedding tables over the ranks.
    sharding: Annotated[Sharding, Effect.BY_KEY] = Sharding()
    #: For a dataset in a store of objects: MiB that each rank fetches to its host's disk ahead of use; at least two row
    #: groups of each stream.
    read_ahead_mib: Annotated[int, Effect.SPEED] = Field(default=256, ge=1)
    #: Steps between checkpoints; there is one at the end, too. The newest `keep` are retained.
    checkpoint_steps: Annotated[int, Effect.SPEED] = Field(default=200, ge=1)
    #: Number of the newest checkpoints that are retained.
    keep: Annotated[int, Effect.SPEED] = Field(default=2, ge=1)
    #: Write checkpoints while training goes on. A rank then needs twice the memory of its tables while it writes.
    background_checkpoints: Annotated[bool, Effect.SPEED] = False
    #: Start from the newest finished model of an earlier day.
    warm_start: Annotated[bool, Effect.WEIGHTS] = True
    #: Where there is no such model: pipelines whose newest models the parts of the network start from, by part, such as
    #: {gmf: movielens_gmf, mlp: movielens_mlp} of neumf. They have the same vocabularies.
    pretrained: Annotated[Mapping[str, str], Effect.WEIGHTS] = Field(default_factory=dict)
    #: Factor of adagrad's sums at a warm start. They only grow: with 1, nothing moves after a year of days; with 0, the
    #: first steps of a day are as large as those of untrained rows, and forget.
    warm_decay: Annotated[float, Effect.WEIGHTS] = Field(default=0.5, ge=0, le=1)
    #: Threads of torch in each rank; None: cores / ranks.
    threads: Annotated[int | None, Effect.SPEED] = None
    #: Attempts after a failed launch, each from the last checkpoint.
    retries: Annotated[int, Effect.SPEED] = Field(default=1, ge=0)
    #: Seconds for which a launch waits for a task slot for each rank, as executors of a cluster may start late.
    start_seconds: Annotated[int, Effect.SPEED] = Field(default=600, ge=1)
    #: Seconds that a message between the ranks may take: all work that one rank does while the others wait, such as
    #: writing its part of a checkpoint. After that the launch fails with the names of the missing ranks.
    deadline_seconds: Annotated[float, Effect.SPEED] = Field(default=600.0, gt=0)
    #: Seconds from a request to stop (SIGTERM) to the end of the ranks: for the step they are in, and a checkpoint.
    stop_seconds: Annotated[float, Effect.SPEED] = Field(default=30.0, gt=0)
    #: Measure the parts of a step, and write a trace of some (docs/training.md).
    profile: Annotated[bool, Effect.SPEED] = False
    #: HR@k and NDCG@k over the split `rank`, grouped by this carried column.
    rank_group: Annotated[str | None, Effect.METRICS] = None
    #: k of HR@k and NDCG@k.
    rank_k: Annotated[int, Effect.METRICS] = Field(default=10, ge=1)
    #: Further metrics, slices and intervals.
    evaluation: Annotated[Evaluation, Effect.METRICS] = Evaluation()
    #: Hyper-parameters to search for (`headrace tune`); training itself ignores it.
    search: Annotated[Search | None, Effect.SPEED] = None

    @model_validator(mode="after")
    def _divisible(self) -> Train:
        if self.streams % self.ranks:
            raise ValueError(f"ranks ({self.ranks}) must divide streams ({self.streams})")
        if self.batch_size % self.streams:
            raise ValueError(f"streams ({self.streams}) must divide batch_size ({self.batch_size})")
        return self

    @model_validator(mode="after")
    def _lists_given(self) -> Train:
        list_metrics = self.evaluation.metrics_of(RankingMetric, CatalogueMetric)
        if list_metrics and self.rank_group is None and self.evaluation.full_ranking is None:
            raise ValueError(f"evaluation.metrics: {list_metrics[0]} is of lists: set rank_group")
        return self

    @model_validator(mode="after")
    def _tasks_fit(self) -> Train:
        check_tasks(self.tasks)
        if self.tasks and self.negatives is not None:
            raise ValueError("negatives have no labels of tasks: leave negatives or tasks out")
        if self.evaluation.user is None:
            for name, task in self.tasks.items():
                if task.metrics and set(task.metrics) & set(get_args(UserMetric)):
                    raise ValueError(f"tasks.{name}.metrics are of users: name a carried column, evaluation.user")
        return self

    @model_validator(mode="after")
    def _monitor_measured(self) -> Train:
        known = self.monitored()
        if self.monitor not in known:
            hint = nearest(self.monitor, known)
            raise ValueError(f"monitor: '{self.monitor}' is not measured{hint}; there are: {', '.join(known)}")
        return self

    def monitored(self) -> list[str]:
        """Return the values that `monitor` may have."""
        evaluation = self.evaluation
        lists = [] if self.rank_group is None else ["hr_at_k", "ndcg_at_k", *evaluation.metrics_of(RankingMetric)]
        full = [] if evaluation.full_ranking is None else evaluation.full_ranking.metrics()
        tasks = [f"{m}.{name}" for name, task in self.tasks.items() for m in _OF_TASKS[task.is_probability]]
        return ["log_loss", "auc", *evaluation.metrics_of(ClickMetric, UserMetric), *lists, *full, *tasks]

    def objectives(self) -> list[str]:
        """Return the values that `search.objective` may have: metrics of this dataset, requested or not."""
        lists = [] if self.rank_group is None else ["ndcg", "hr_at_k", "ndcg_at_k", *get_args(RankingMetric)]
        users = [] if self.evaluation.user is None else get_args(UserMetric)
        full = [] if self.evaluation.full_ranking is None else self.evaluation.full_ranking.metrics()
        return ["auc", "log_loss", *get_args(ClickMetric), *users, *lists, *full]

    @property
    def monitor_falls(self) -> bool:
        """Return whether a lower value of `monitor` is better."""
        return not HIGHER_IS_BETTER.get(self.monitor.split(".")[0], True)

    @model_validator(mode="after")
    def _of_gpus(self) -> Train:
        for setting, is_set in (("precision: tf32", self.precision == "tf32"), ("cuda_graphs: true", self.cuda_graphs)):
            if is_set and self.device != "cuda":
                raise ValueError(f"`{setting}` is for `device: cuda`")
        return self


def check_loss(model: Model, train: Train, features: Features, score: Score | None, publish: Publish | None) -> None:
    """See that labels and loss fit each other, and that a list's column is carried.

    Raises:
        ValueError: they do not.
    """
    loss, kind = model.loss, model.kind
    if loss is not None and loss.group and loss.group not in features.carried:
        raise ValueError(f"model.loss.group: '{loss.group}' must be in features.carried")
    is_number = loss is not None and loss.predicts == "number"
    if features.label_type == "number" and not is_number and (loss is not None or ":" not in kind):
        raise ValueError(
            f"features.label_type is 'number', and model.loss is {loss.kind if loss else 'bce'}: set model.loss to "
            f"squared_error, or take a class of your own with a loss of such labels"
        )
    if is_number and train.evaluation.off_policy:
        raise ValueError(
            "train.evaluation.off_policy takes probabilities, and model.loss squared_error predicts numbers: leave "
            "it out"
        )
    if publish and is_number and score and score.model != "baseline":
        raise ValueError("publish takes probabilities, and model.loss squared_error predicts numbers: leave it out")


def check_labels_of_tasks(train: Train, features: Features, score: Score | None, publish: Publish | None) -> None:
    """Check that labels of tasks are carried, that no feature is made of one, and that the scored output is a task.

    Raises:
        ValueError: a check fails.
    """
    for name, task in train.tasks.items():
        columns = {"label": task.label}
        if task.known_after is not None:
            columns["known_after.event_time"] = task.known_after.event_time
        for key, column in columns.items():
            if column is not None and column not in features.carried:
                raise ValueError(f"train.tasks.{name}.{key}: '{column}' must be in features.carried")
        for i, chain in enumerate(features.workflow):
            if task.label in chain.columns:
                raise ValueError(
                    f"features.workflow[{i}].columns: '{task.label}' is the label of train.tasks.{name}; a feature "
                    f"made of it would leak it"
                )

    if score is None or (output := score.output) is None:
        return
    if output not in train.tasks:
        known = ", ".join(train.tasks) or "there are none"
        raise ValueError(f"score.output: '{output}' is no task of train.tasks ({known})")
    if score.model not in ("neural", "today"):
        raise ValueError(f"score.output is of the neural model, and score.model is '{score.model}'")
    if publish and not train.tasks[output].is_probability:
        raise ValueError(f"score.output: publish takes probabilities, and '{output}' has loss: squared_error")


#: Keys of `train` that say how models are measured, or that other keys of this section say.
_NOT_OF_ONE_TRAINING = ("evaluation", "rank_group", "rank_k", "search", "ranks", "device", "warm_start", "tasks")


def _of_one_training(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _NOT_OF_ONE_TRAINING:
        if key in keys:
            raise ValueError(f"'{key}' is of all days: write it into the section train")
    return keys


class Replay(Section):
    """Rows of days before the window in each step: the split `valid` of those days' datasets, unchanged.

    A model that learns from a window alone forgets earlier data (Rolnick et al., "Experience Replay for
    Continual Learning", 2019).
    """

    #: Share of the rows of a step; its rows of the window become so many fewer.
    share: float = Field(gt=0, lt=1)
    #: Days before the window whose datasets are drawn from, where they are there. Not those that
    #: have rows of `forgetting_day`.
    days: int = Field(default=28, ge=1)
    #: row: each row of these days is as likely as any other; day: each day gives as many rows.
    by: Literal["row", "day"] = "row"

    def rows(self, batch_size: int, streams: int) -> int:
        """Return the rows of a step that are replayed: a multiple of the streams."""
        return round(self.share * batch_size / streams) * streams


class Retrain(Section):
    """Training anew every day (docs/retrain.md): weights of days, a day that starts warm, rows of new ids."""

    #: Days after which a training row counts half: its loss is multiplied by 0.5 ** (age / half_life_days), age being
    #: whole days (UTC) between its event and the last training day, divided by the mean of that over the days of
    #: `features.window_days`. Null: all days count alike. `features.carried` has the table's event_time.
    half_life_days: float | None = Field(default=None, gt=0)
    #: Where rows of ids start that the model of the day before did not know. random: as in a new model; mean: at the
    #: mean of the table's known rows; segment: at that of the known rows of the same segment, the categorical feature
    #: that the feature's metadata names, `metadata: {segment: item_category}`, else at the table's.
    new_rows: Literal["random", "mean", "segment"] = "mean"
    #: A day (UTC) on whose rows each later day's model is measured, besides its own: what the models forget. The rows
    #: are those of the split valid of that day's dataset, which stays for it. Null: none.
    forgetting_day: str | None = None
    #: Of so many days one saved model holds all rows of the embedding tables; the others hold the rows that changed,
    #: and name the model that they started from, without which they cannot be opened. Null: each has all rows.
    full_copy_days: int | None = Field(default=None, ge=2)
    #: Rows of older days, beyond the window, among those of each step. Null: none.
    replay: Replay | None = None
    #: Keys that are put over the section `train` on a day that starts from an earlier day's model: its epochs, its
    #: learning rates, such as {epochs: 1}.
    warm: Mapping[str, Any] = Field(default={})

    @field_validator("forgetting_day", mode="before")
    @classmethod
    def _is_a_day(cls, value: Any) -> Any:
        # YAML reads 2026-01-01 as a date.
        try:
            return None if value is None else parse_ds(str(value))
        except UserError as e:
            raise ValueError(str(e)) from None  # so that the message names the key

    @field_validator("warm")
    @classmethod
    def _of_training(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return _of_one_training(value)


class Challenger(Section):
    """A model trained from scratch beside the one of daily warm starts, and registered as `challenger`."""

    #: Days after the newest model that was trained from nothing until another is.
    every_days: int = Field(default=7, ge=1)
    #: Difference by which a challenger is better by `train.monitor`, on the rows on which both were measured, for the
    #: day's model to have fallen behind: the next day trains a challenger again, and starts warm from this one.
    behind: float = Field(default=0.001, ge=0)
    #: Keys that are put over the section `train` for it.
    train: Mapping[str, Any] = Field(default={})

    @field_validator("train")
    @classmethod
    def _of_training(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return _of_one_training(value)


def check_retrain(
    retrain: Retrain, table: Table, features: Features, train: Train, warm: Callable[[], Train], model: Model
) -> None:
    """See that days are there and carried, and that a day that starts warm is a training like any other.

    Args:
        retrain, table, features, train, model: the sections.
        warm: `train` of a day that starts warm; raises ValueError where that does not take what `retrain.warm` says.

    Raises:
        ValueError: they do not agree.
    """
    if retrain.half_life_days is not None:
        time = table.event_time
        if features.split.by != "time" or time not in features.carried:
            raise ValueError(
                "retrain.half_life_days weighs rows by the days of their events: set features.split.by to 'time', "
                "and name table.event_time in features.carried"
            )
    if retrain.warm:
        try:
            warm()
        except ValueError as e:
            raise ValueError(f"retrain.warm.{e}") from None
    if retrain.replay is not None:
        _check_replay(retrain.replay, features, model, (train, warm()))


def _check_replay(replay: Replay, features: Features, model: Model, trainings: Sequence[Train]) -> None:
    """Check that rows have days, a step has some of both kinds, and nothing looks at the rows of a step together."""
    if features.split.by != "time":
        raise ValueError("retrain.replay draws rows of the days before the window: set features.split.by to 'time'")
    if trainings[0].negatives is not None or (model.loss is not None and model.loss.group is not None):
        raise ValueError("retrain.replay: not with train.negatives or model.loss.group, which are of a step's rows")
    for train in trainings:
        rows = replay.rows(train.batch_size, train.streams)
        if not 0 < rows < train.batch_size:
            raise ValueError(
                f"retrain.replay.share: {replay.share:g} of train.batch_size ({train.batch_size}) is {rows} rows "
                f"(a multiple of train.streams, {train.streams}): some must be of either kind"
            )
