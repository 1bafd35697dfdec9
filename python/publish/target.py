"""What a warehouse must do to take a day's scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace.config import Spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Check:
    """One finding. `value` and `limit` as shown to people; `detail` names offenders where it failed."""

    name: str
    value: float
    limit: str
    ok: bool
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.value:g}, must be {self.limit}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class Limits:
    """What to hold the day's scores against."""

    #: Rows that the scores' manifest states.
    expected_rows: int
    min_rows: int
    top_k: int
    #: Largest relative difference from the last published day's rows; None: not checked.
    max_row_change: float | None


@dataclass(frozen=True)
class Publication:
    """The record of a day that was published."""

    key: str
    rows: int
    #: The checks that held, as JSON values.
    audit: list[dict[str, Any]]


class Target(Protocol):
    """An open warehouse, for the scores table of one pipeline. A reader sees a day as it was, or as it is published."""

    #: As people write the table, and its kind in manifests.
    label: str
    kind: str
    #: The server and the account on it, for people; `embedded` for our own.
    address: str

    def create(self, spark_types: Sequence[tuple[str, str]]) -> None:
        """Make the table where there is none, for scores of these columns and Spark types.

        Raises:
            UserError: the warehouse cannot hold them, or there is a table of that name with others.
        """
        ...

    def publish(self, df: DataFrame, ds: str, key: str, source: str, limits: Limits) -> list[Check]:
        """Write the day's scores to staging, audit them, and make them the day's rows if every check holds.

        Args:
            df: the scores, from a Spark session.
            ds: their day.
            key: of the run, recorded.
            source: where they come from, recorded.
            limits: what they are held against.

        Returns:
            All checks; where one failed, the table is as it was.
        """
        ...

    def published(self, ds: str) -> Publication | None:
        """The record of a day; None where it has not been published."""
        ...

    def missing(self, ds: str, key: str) -> str | None:
        """Why the day's rows are not those of the run `key`, or None."""
        ...

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        """The first rows of a day, by key: column -> value. Raises UserError where there is no table."""
        ...


def table_name(spec: Spec) -> str:
    """The table of a pipeline's scores."""
    assert spec.publish is not None, "asked for pipelines that publish"
    return spec.publish.table or f"{spec.pipeline}_scores"
