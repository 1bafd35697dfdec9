"""Whether labels, losses and tasks agree with what is carried, scored and published."""

from __future__ import annotations

from headrace.config.features import Features
from headrace.config.model import Model
from headrace.config.publish import Publish
from headrace.config.score import Score
from headrace.config.train import Train


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


def check_tasks(train: Train, features: Features, score: Score | None, publish: Publish | None) -> None:
    """See that labels of tasks are carried, that no feature is made of one, and that what is scored is one.

    Raises:
        ValueError: one of it does not hold.
    """
    for name, task in train.tasks.items():
        asked = {"label": task.label}
        if task.known_after is not None:
            asked["known_after.event_time"] = task.known_after.event_time
        for key, column in asked.items():
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
