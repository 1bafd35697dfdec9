"""The sections `score` and `publish`: from a model to the warehouse."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.config.section import NAME, Section


class Entity(Section):
    """One side of a score: its key and the columns that travel with it, taken from its newest event."""

    #: The column that says which one.
    key: str
    #: Columns that the features read, as its newest event has them.
    columns: tuple[str, ...] = ()
    #: Active within the training window, most events first; None: all.
    limit: int | None = None


class Score(Section):
    """Batch scoring of users x candidate items."""

    #: Who is scored for.
    user: Entity
    #: What is scored.
    item: Entity
    #: Scores kept for each user.
    top_k: int = Field(default=10, ge=1)
    #: The other columns that the features read: constants.
    context: Mapping[str, Any] = Field(default_factory=dict)
    #: Which registered model: the neural one, the XGBoost one, or the one that is better on the split `valid`.
    model: Literal["neural", "baseline", "best"] = "neural"
    #: best: the metric by which, of those that both are measured by (`train.evaluation.metrics`, HR and NDCG of
    #: `train.rank_group`); errors and losses are better where they are lower.
    metric: str = "auc"
    #: Rank by this task of `train.tasks`, such as a product of click and purchase; None: by the first one.
    output: str | None = None
    #: Leave out items that the user has clicked (label 1) since the training window began (without a time: in train).
    exclude_seen: bool = False

    @field_validator("metric")
    @classmethod
    def _has_a_better_side(cls, value: str) -> str:
        if value not in HIGHER_IS_BETTER:
            raise ValueError(f"'{value}' tells no better model from a worse; metrics: {', '.join(HIGHER_IS_BETTER)}")
        return value

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Fingerprints of specs that compare by AUC, and rank by the first output, are those from before."""
        dumped: dict[str, Any] = serialize(self)
        if self.metric == "auc":
            dumped.pop("metric", None)
        if self.output is None:
            dumped.pop("output", None)
        return dumped


class Warehouse(Section):
    """Where scores are published. `embedded` starts the PostgreSQL that comes as a wheel, on loopback."""

    #: embedded: a PostgreSQL of the workspace's own. postgres: a server of yours.
    kind: Literal["embedded", "postgres"] = "embedded"
    #: A name, an address, or the folder of a socket.
    host: str = "127.0.0.1"
    #: 0 with `embedded`: a free port.
    port: int = Field(default=0, ge=0, le=65_535)
    #: It must be there already, but for `embedded`.
    database: str = "headrace"
    #: The role that owns the tables.
    user: str = "headrace"
    #: The schema of the tables.
    schema_name: str = Field(default="public", alias="schema")
    #: Where the password or access token is (never itself): a variable's name or a file. Embedded makes its own file.
    password_env: str | None = None
    #: Path of the file with the password.
    password_file: str | None = None
    #: As libpq's. None: verify-full, and prefer for a server on this machine (a loopback address, a socket's folder).
    sslmode: Literal["disable", "prefer", "require", "verify-ca", "verify-full"] | None = None
    #: Files, as libpq's, at the same path on each executor: the root certificate (`system`: those of the machine's
    #: OpenSSL; None: ~/.postgresql/root.crt), and a client's certificate with its key.
    sslrootcert: str | None = None
    #: Path of the client's certificate.
    sslcert: str | None = None
    #: Path of its private key.
    sslkey: str | None = None

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)

    @model_validator(mode="after")
    def _key_with_certificate(self) -> Warehouse:
        if (self.sslcert is None) != (self.sslkey is None):
            raise ValueError("sslcert and sslkey go together: name both files, or none")
        return self

    @property
    def ssl(self) -> dict[str, str]:
        """The connection's parameters of libpq that say how it is encrypted and who answers."""
        if self.kind == "embedded":
            return {"sslmode": "disable"}
        mode = self.sslmode or ("prefer" if _is_this_machine(self.host) else "verify-full")
        files = {"sslrootcert": self.sslrootcert, "sslcert": self.sslcert, "sslkey": self.sslkey}
        return {"sslmode": mode} | {name: path for name, path in files.items() if path is not None}


def _is_this_machine(host: str) -> bool:
    if host == "localhost" or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Publish(Section):
    """Write, audit, publish."""

    #: Table in the warehouse; default `<pipeline>_scores`.
    table: str | None = None
    #: Where to.
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
