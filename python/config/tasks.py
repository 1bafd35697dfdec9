"""The section `train.tasks`: the labels that a model learns at once, each with its loss, weight, rows and metrics."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from headrace.config.evaluation import ClickMetric, UserMetric
from headrace.config.loss import Loss
from headrace.config.section import NAME, Section

#: What the outputs of a model are called that no task may be.
_RESERVED = ("logits",)


class KnownAfter(Section):
    """When a label is final: that of a younger row counts as missing."""

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
    #: What its loss, a sum over its rows, is multiplied by. 0: it is measured and not learned.
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
        """Whether its output is the logit of a probability, not the label's value."""
        return self.loss.predicts == "probability"


def check_tasks(tasks: Mapping[str, Task]) -> None:
    """Raise ValueError where tasks do not fit each other."""
    before: set[str] = set()
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
        for other in task.product:
            if other not in tasks or tasks[other].product or not tasks[other].is_probability:
                known = ", ".join(n for n, t in tasks.items() if t.is_probability and not t.product)
                raise ValueError(f"tasks.{name}.product: '{other}' is no task of a probability; there are: {known}")
        if task.where in tasks and (task.where not in before or not tasks[task.where].is_probability):
            raise ValueError(
                f"tasks.{name}.where: '{task.where}' is no task with a label in [0, 1] that stands before '{name}'"
            )
        before.add(name)
    if tasks and not any(task.weight for task in tasks.values()):
        raise ValueError("tasks: all weights are 0: nothing would be learned")
