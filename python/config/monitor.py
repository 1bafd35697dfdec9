"""The sections `drift` and `observe`: limits of drift by day, and receivers of lineage events and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.config.section import PathText, Section
from headrace.logs import holds_secret


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
    """Limits of drift of the newest rows (split `valid`) against the training range, and the action beyond them.

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
        """Return the limits of a column or feature."""
        limits = self.columns.get(column, DriftColumn())
        return DriftColumn(
            **{f: getattr(self if getattr(limits, f) is None else limits, f) for f in DriftColumn.model_fields}
        )


class OpenLineage(Section):
    """Events of each stage's run to a receiver that speaks OpenLineage."""

    #: Of the pipelines' jobs; the variable OPENLINEAGE_NAMESPACE goes before it.
    namespace: str = Field(default="headrace", min_length=1)
    #: As in `openlineage.yml`: `{type: http, url: ...}`, `{type: file, log_file_path: ...}`. Secrets do not belong
    #: here: give them by variables (OPENLINEAGE_API_KEY, OPENLINEAGE__TRANSPORT__AUTH). Such variables, and that file,
    #: go before this.
    transport: Mapping[str, Any] = Field(default_factory=dict)
    #: Seconds that the end of an application waits for events that are on their way.
    wait_seconds: float = Field(default=5, ge=0)

    @field_validator("transport")
    @classmethod
    def _no_secrets(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for key in _secret_keys(value):
            raise ValueError(
                f"{key}: a secret does not belong in a pipeline's file: give it by a variable of the environment "
                f"(OPENLINEAGE_API_KEY, OPENLINEAGE__TRANSPORT__AUTH)"
            )
        return value


class Observe(Section):
    """Receivers of lineage events and metrics. They change nothing that the stages write."""

    #: Events of runs; without it they are sent where OpenLineage's own variables or its file ask for them.
    openlineage: OpenLineage | None = None
    #: A folder in which each pipeline has a file with its metrics (headrace_PIPELINE.prom), written anew by each
    #: stage: that of node_exporter's textfile collector.
    prometheus: PathText | None = None


def _secret_keys(value: Mapping[str, Any]) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _secret_keys(inner)
        elif holds_secret(str(key), inner):
            yield str(key)
