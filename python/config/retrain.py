"""The section `retrain`: what a day's training has of the days before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.config.section import Section

#: Keys of `train` that say how models are measured, or that other keys of this section say.
_NOT_OF_WARM_STARTS = ("evaluation", "rank_group", "rank_k", "search", "ranks", "device", "warm_start", "tasks")


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
    #: Keys that are put over the section `train` on a day that starts from an earlier day's model: its epochs, its
    #: learning rates, such as {epochs: 1}.
    warm: Mapping[str, Any] = Field(default={})

    @field_validator("warm")
    @classmethod
    def _of_training(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for key in _NOT_OF_WARM_STARTS:
            if key in value:
                raise ValueError(f"'{key}' is of all days: write it into the section train")
        return value
