"""The section `drift`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from headrace.config.section import Section


class DriftColumn(Section):
    """Limits of one column; None: the section's."""

    #: Population stability index.
    max_psi: float | None = Field(default=None, ge=0)
    #: Difference of the shares of rows without a value.
    max_missing_change: float | None = Field(default=None, ge=0, le=1)
    #: Share of today's values that the vocabulary lacks.
    max_oov_rate: float | None = Field(default=None, ge=0, le=1)
    #: ignore: counted, never judged.
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
    #: A category's most frequent values that are counted one by one.
    top_values: int = Field(default=20, ge=1, le=10_000)

    def limits(self, column: str) -> DriftColumn:
        """What holds for a column or feature."""
        own = self.columns.get(column, DriftColumn())
        return DriftColumn(
            **{f: getattr(self if getattr(own, f) is None else own, f) for f in DriftColumn.model_fields}
        )
