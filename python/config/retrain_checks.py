"""Whether the section `retrain` agrees with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.config.features import Features
from headrace.config.model import Model
from headrace.config.retrain import Replay, Retrain
from headrace.config.table import Table
from headrace.config.train import Train


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
    """Rows have days, a step has some of both kinds, and nothing looks at the rows of a step together."""
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
