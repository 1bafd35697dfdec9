"""The sections `score` and `publish`: from a model to the warehouse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from headrace.config.section import NAME, Section


class Side(Section):
    """One side of a score: its key and the columns that travel with it, taken from its newest event."""

    key: str
    columns: tuple[str, ...] = ()
    #: Active within the training window, most events first; None: all.
    limit: int | None = None


class Score(Section):
    """Batch scoring of users x candidate items."""

    user: Side
    item: Side
    #: Scores kept for each user.
    top_k: int = Field(default=10, ge=1)
    #: The other columns that the features read: constants.
    context: Mapping[str, Any] = Field(default_factory=dict)
    #: Which registered model: the neural one, the XGBoost one, or the one with the higher validation AUC.
    model: Literal["neural", "baseline", "best"] = "neural"
    #: Leave out items that the user has clicked (label 1) since the training window began (without a time: in train).
    exclude_seen: bool = False


class Warehouse(Section):
    """Where scores are published. `embedded` starts the PostgreSQL that comes as a wheel, on loopback."""

    kind: Literal["embedded", "postgres"] = "embedded"
    host: str = "127.0.0.1"
    #: 0 with `embedded`: a free port.
    port: int = Field(default=0, ge=0, le=65_535)
    database: str = "headrace"
    user: str = "headrace"
    schema_name: str = Field(default="public", alias="schema")
    #: The password's place (never the password): a variable's name or a file. Embedded makes its own file.
    password_env: str | None = None
    password_file: str | None = None
    sslmode: Literal["disable", "prefer", "require", "verify-ca", "verify-full"] = "prefer"

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


class Publish(Section):
    """Write, audit, publish."""

    #: Table in the warehouse; default `<pipeline>_scores`.
    table: str | None = None
    warehouse: Warehouse = Warehouse()
    #: The audit: rows, users with a full top-K, scores within [0, 1], no nulls, no duplicate keys.
    min_rows: int = Field(default=1, ge=0)
    #: The number of rows may differ from the last published day's by this share; None: not checked.
    max_row_change: float | None = 0.5

    @field_validator("table")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and not NAME.fullmatch(value):
            raise ValueError(f"table name '{value}' must match {NAME.pattern}")
        return value
