"""The section `observe`: who else hears of what the stages do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, field_validator

from headrace.config.section import PathText, Section
from headrace.redaction import holds_secret


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
    """Who else hears of what the stages do. It changes nothing that they make."""

    #: Events of runs; without it they are sent where OpenLineage's own variables or its file ask for them.
    openlineage: OpenLineage | None = None
    #: A folder in which each pipeline has a file with its metrics (`headrace_PIPELINE.prom`), written anew by each
    #: stage: that of node_exporter's textfile collector.
    prometheus: PathText | None = None


def _secret_keys(value: Mapping[str, Any]) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _secret_keys(inner)
        elif holds_secret(str(key), inner):
            yield str(key)
