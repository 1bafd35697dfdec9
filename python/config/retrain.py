"""The sections `retrain` and `challenger`: a day that learns from the days before it, and a model that does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.config.features import Features
from headrace.config.model import Model
from headrace.config.section import Section, parse_ds
from headrace.config.table import Table
from headrace.config.train import Train
from headrace.errors import UserError

#: Keys of `train` that say how models are measured, or that other keys of this section say.
_NOT_OF_ONE_TRAINING = ("evaluation", "rank_group", "rank_k", "search", "ranks", "device", "warm_start", "tasks")


def _of_one_training(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _NOT_OF_ONE_TRAINING:
        if key in keys:
            raise ValueError(f"'{key}' is of all days: write it into the section train")
    return keys


class Replay(Section):
    """Rows of days before the window in each step: the split `valid` of those days' datasets, as they lie there.

    A model that learns from a window alone forgets what it was taught before (Rolnick et al., "Experience Replay for
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
    """A model that is trained from nothing beside one that goes on from day to day, and registered as `challenger`."""

    #: Days after the newest model that was trained from nothing until another is.
    every_days: int = Field(default=7, ge=1)
    #: How much better a challenger is by `train.monitor`, on the rows on which both were measured, for the day's model
    #: to have fallen behind: the next day trains a challenger again, and starts warm from this one.
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
