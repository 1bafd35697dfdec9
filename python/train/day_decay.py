"""Training rows that count less the older their day is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from headrace.config import Spec
from headrace.errors import UserError
from headrace.features.layout.day_ranges import split_ranges
from headrace.features.layout.split_rule import day_number
from headrace.schema import DatasetSchema

_DAY_MICROS = 86_400 * 1_000_000


class DayDecay(BaseModel):
    """The weights of a day's training rows (`retrain.half_life_days`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The event's time, a column of the events table.
    column: str
    half_life_days: float
    #: The last training day, in UTC.
    last_day: str
    #: Days of the training range.
    days: int
    #: Whether rows before the range are replayed, and count 1: their share says how much they are.
    replayed: bool = False

    @staticmethod
    def of(spec: Spec, ds: str) -> DayDecay | None:
        """What a spec asks for of the training of `ds`; None: all rows count alike."""
        if spec.retrain is None or spec.retrain.half_life_days is None:
            return None
        assert spec.table.event_time is not None  # config.Spec sees to it
        return DayDecay(
            column=spec.table.event_time,
            half_life_days=spec.retrain.half_life_days,
            last_day=split_ranges(spec, ds)[0][1],
            days=spec.features.window_days,
            replayed=spec.retrain.replay is not None,
        )

    def carried_name(self, schema: DatasetSchema) -> str:
        """The dataset's name of the column.

        Raises:
            UserError: it is no carried timestamp.
        """
        feature = schema.carried_columns.get(self.column)
        if feature is None or not feature.is_timestamp:
            raise UserError(
                f"retrain.half_life_days: the event_time '{self.column}' is no carried column of timestamps; name it "
                f"in features.carried"
            )
        return feature.name

    def weights(self, times: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """The weights of rows by their events' times, int64 microseconds since 1970 [B] -> float32 [B].

        Of rows spread evenly over the days the mean is 1. Rows before the range have the weight of its first day; where
        they are replayed, 1.
        """
        days = day_number(self.last_day) - times // _DAY_MICROS
        age = np.clip(days, 0, self.days - 1)
        mean = np.mean(0.5 ** (np.arange(self.days) / self.half_life_days))
        found: npt.NDArray[np.float32] = (0.5 ** (age / self.half_life_days) / mean).astype(np.float32)
        if self.replayed:
            found[days >= self.days] = 1.0
        return found


def decay_of(carried: Mapping[str, npt.NDArray[Any]], decay: DayDecay, column: str) -> npt.NDArray[np.float32]:
    """The weights of a batch's rows by its carried columns.

    Raises:
        UserError: a row has no time.
    """
    times = carried[column]
    if times.dtype.kind != "i":
        raise UserError(f"retrain.half_life_days: rows of a batch have no {decay.column}: declare it required")
    return decay.weights(times)
