"""The section `publish`: the warehouse, its rows, the store of keys and values, and the audit before.

`WarehouseKind` says which kinds of warehouses there are, and how each is reached.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal
from urllib.parse import parse_qsl

from pydantic import ConfigDict, Field, field_validator, model_validator

from headrace.config.section import NAME, PathText, Section
from headrace.errors import UserError
from headrace.logs import holds_secret, is_secret
from headrace.plugins import Seam

if TYPE_CHECKING:
    from headrace.config.operations import Spark


class WarehouseKind:
    """One kind of warehouse, as the checks of a spec see it.

    A package of another warehouse extends this and offers it under a name in the group `headrace.warehouses`. The
    module must not import the warehouse's client library: that is for the module of `opens`, which is imported when
    the warehouse is opened.
    """

    #: `module:function` that opens it. Takes (Spec, Workspace, RunLock | None) and returns a context manager of a
    #: `headrace.publish.target.Target`.
    opens: ClassVar[str]
    #: Keys of the section that must be given, such as `stage`.
    needs: ClassVar[tuple[str, ...]] = ()
    #: How `stage` must begin; empty: anything.
    stage_prefix: ClassVar[str] = ""
    #: Why nobody can be given the right to read its tables (`publish.grants`); empty: it has roles.
    no_roles: ClassVar[str] = ""
    #: Arguments that headrace gives to the client library itself, by the library's names -> the key with their value;
    #: None: no key has it. `options` must not repeat them.
    own_arguments: ClassVar[Mapping[str, str | None]] = {}

    @classmethod
    def check(cls, publish: Publish, spark: Spark) -> None:
        """Check the section against the rest of the spec, before anything is opened.

        Raises:
            ValueError: they do not go together; the message begins with a key below `publish`.
        """
        if publish.grants and cls.no_roles:
            raise ValueError(f"grants: {cls.no_roles}")

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str] | None:
        """Return OpenLineage's namespace and name of the table `label`; None: made of the kind and the address."""
        return None


class Postgres(WarehouseKind):
    """The PostgreSQL of the workspace, and a server of the user's."""

    opens = "headrace.publish.postgres.target:open_postgres"


class DuckDb(WarehouseKind):
    """A file of DuckDB."""

    no_roles = "a DuckDB file has no roles; who may read the file may read its tables"
    opens = "headrace.publish.sql.column_stores:open_duckdb"


class Delta(WarehouseKind):
    """A Delta table."""

    no_roles = "a table of files (delta) has no roles: give them to its storage"
    opens = "headrace.publish.tables.delta:open_delta"


class Iceberg(WarehouseKind):
    """An Iceberg table of a catalog of the Spark session."""

    no_roles = "a table of files (iceberg) has no roles: give them to its storage"
    opens = "headrace.publish.tables.iceberg:open_iceberg"
    needs = ("catalog",)

    @classmethod
    def check(cls, publish: Publish, spark: Spark) -> None:
        """See `WarehouseKind.check`."""
        super().check(publish, spark)
        catalog = publish.warehouse.catalog
        if f"spark.sql.catalog.{catalog}" not in spark.properties:
            raise ValueError(
                f"warehouse.catalog: spark.properties define no catalog '{catalog}' "
                f"(spark.sql.catalog.{catalog}: org.apache.iceberg.spark.SparkCatalog, and its type and warehouse)"
            )


class Parquet(WarehouseKind):
    """A folder of Parquet files by day."""

    no_roles = "a folder of Parquet files has no roles: give them to its storage"
    opens = "headrace.publish.tables.parquet:open_parquet"


class SqlAlchemy(WarehouseKind):
    """A database that SQLAlchemy has a dialect for."""

    opens = "headrace.publish.sql.sqlalchemy:open_sqlalchemy"
    needs = ("url",)

    @classmethod
    def check(cls, publish: Publish, spark: Spark) -> None:
        """See `WarehouseKind.check`."""
        if publish.grants and str(publish.warehouse.url).startswith("sqlite"):
            raise ValueError("grants: a SQLite file has no roles; who may read the file may read its tables")


class ClickHouse(WarehouseKind):
    """A ClickHouse server."""

    opens = "headrace.publish.sql.column_stores:open_clickhouse"
    # `user` and `user_name` are other names of `username`.
    own_arguments: ClassVar = {
        **dict.fromkeys(("username", "user", "user_name"), "user"),
        "host": "host",
        "port": "port",
        "database": "database",
    }


_MODULE = "headrace.config.warehouse"
#: `publish.warehouse.kind`.
WAREHOUSES = Seam(
    "headrace.warehouses",
    "warehouse",
    WarehouseKind,
    {
        "embedded": f"{_MODULE}:Postgres",
        "postgres": f"{_MODULE}:Postgres",
        "duckdb": f"{_MODULE}:DuckDb",
        "delta": f"{_MODULE}:Delta",
        "iceberg": f"{_MODULE}:Iceberg",
        "parquet": f"{_MODULE}:Parquet",
        "sqlalchemy": f"{_MODULE}:SqlAlchemy",
        "clickhouse": f"{_MODULE}:ClickHouse",
    },
    {name: f"headrace-{name}" for name in ("snowflake", "bigquery", "redshift", "databricks")},
)


class Warehouse(Section):
    """The warehouse of the scores. `embedded` starts the PostgreSQL that comes as a wheel, on loopback."""

    #: embedded: a PostgreSQL of the workspace's own. postgres: a server of yours. Others: see docs/warehouse.md.
    kind: Annotated[str, WAREHOUSES] = "embedded"
    #: duckdb: the file. delta, parquet: the folder in which the table's folder is. Default: below `HOME/warehouse`.
    path: PathText | None = None
    #: sqlalchemy: the database's URL without a password, such as `sqlite:////data/scores.db`.
    url: str | None = None
    #: iceberg: the name of a catalog of `spark.properties`. databricks, bigquery: the catalog, the project.
    catalog: str | None = None
    #: Place of the files that the warehouse loads. snowflake: a stage (`@name`; default: the table's own). bigquery:
    #: `gs://bucket/folder`; default: sent with the job. redshift: `s3://bucket/folder`. databricks: a volume
    #: (`/Volumes/catalog/schema/volume/folder`).
    stage: str | None = None
    #: Further arguments of the warehouse's client when it connects, by its own names (account, role, http_path).
    options: Mapping[str, str] = Field(default_factory=dict)
    #: A name, an address, or the folder of a socket.
    host: str = "127.0.0.1"
    #: 0 with `embedded`: a free port.
    port: int = Field(default=0, ge=0, le=65_535)
    #: The database, which must exist, except with `embedded`.
    database: str = "headrace"
    #: The role that owns the tables.
    user: str = "headrace"
    #: The schema of the tables.
    schema_name: str = Field(default="public", alias="schema")
    #: Variable (or file) that has the password or access token, never the password itself. Embedded makes its own file.
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

    @field_validator("kind")
    @classmethod
    def _kind_exists(cls, value: str) -> str:
        try:
            WAREHOUSES.find(value, "kind")
        except UserError as e:
            raise ValueError(str(e).removeprefix("kind: ")) from None
        return value

    @model_validator(mode="after")
    def _one_password(self) -> Warehouse:
        _check_password(self)
        return self

    @model_validator(mode="after")
    def _key_with_certificate(self) -> Warehouse:
        if (self.sslcert is None) != (self.sslkey is None):
            raise ValueError("sslcert and sslkey go together: name both files, or none")
        return self

    @model_validator(mode="after")
    def _names_its_place(self) -> Warehouse:
        known = self.known
        for needed in known.needs:
            if getattr(self, needed) is None:
                raise ValueError(f"kind {self.kind} needs the key '{needed}'")
        begin = known.stage_prefix
        if self.stage is not None and not self.stage.startswith(begin):
            raise ValueError(f"stage: kind {self.kind} loads files from {begin}BUCKET/FOLDER, not from '{self.stage}'")
        if self.url is not None and _has_secret(self.url):
            raise ValueError("url has a password in it: leave it out and name password_env or password_file")
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> Warehouse:
        texts = {**{f"options.{key}": value for key, value in self.options.items()}, "stage": self.stage}
        for key, value in texts.items():
            if holds_secret(key, value) or key.lower() == "options.pwd":
                raise ValueError(
                    f"{key}: a secret does not belong in a pipeline's file: name password_env or password_file, or an "
                    f"option that names a file"
                )
        return self

    @model_validator(mode="after")
    def _repeats_no_argument(self) -> Warehouse:
        for name, key in self.known.own_arguments.items():
            if name in self.options:
                instead = "leave it out" if key is None else f"set publish.warehouse.{key} instead"
                raise ValueError(f"options.{name}: headrace gives this to the client of {self.kind} itself: {instead}")
        return self

    @property
    def known(self) -> type[WarehouseKind]:
        """Return the class that describes the kind."""
        return WAREHOUSES.find(self.kind, "publish.warehouse.kind")

    @property
    def ssl(self) -> dict[str, str]:
        """Return the parameters of libpq that say how the connection is encrypted and who answers."""
        if self.kind == "embedded":
            return {"sslmode": "disable"}
        mode = self.sslmode or ("prefer" if _is_this_machine(self.host) else "verify-full")
        files = {"sslrootcert": self.sslrootcert, "sslcert": self.sslcert, "sslkey": self.sslkey}
        return {"sslmode": mode} | {name: path for name, path in files.items() if path is not None}


def _check_password(section: Warehouse | Online) -> None:
    if section.password_env and section.password_file:
        raise ValueError("give password_env or password_file, not both")


def _has_secret(url: str) -> bool:
    """Return whether a database's URL has a password: before the host, in its query, or in the text for ODBC there."""
    if re.match(r"[^/]*://[^:/]*:[^@]*@", url):
        return True
    query = parse_qsl(url.partition("?")[2], keep_blank_values=True)
    odbc = [part for key, value in query if key.lower() == "odbc_connect" for part in value.split(";")]
    names = [key for key, _ in query] + [part.partition("=")[0].strip() for part in odbc]
    return any(name.lower() == "pwd" or is_secret(name) for name in names)


def _is_this_machine(host: str) -> bool:
    if host == "localhost" or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Online(Section):
    """The newest day's items of each user, by the user's key, for serving."""

    #: redis: a server. lmdb: a file that readers map into memory.
    kind: Literal["redis", "lmdb"]
    #: redis: the server's URL without a password, such as `redis://cache:6379/0` (`rediss://` encrypts).
    url: str | None = None
    #: lmdb: the file. Default: `HOME/online/TABLE.lmdb`.
    path: PathText | None = None
    #: Name of the variable that has the password of Redis, never the password itself.
    password_env: str | None = None
    #: Path of the file with the password.
    password_file: str | None = None

    @model_validator(mode="after")
    def _names_its_server(self) -> Online:
        if self.kind == "redis" and self.url is None:
            raise ValueError("kind redis needs the key 'url'")
        if self.url is not None and re.match(r"[^/]*://[^/@]*:[^/@]*@", self.url):
            raise ValueError("url has a password in it: leave it out and name password_env or password_file")
        _check_password(self)
        return self


class Reference(Section):
    """A table that has every value of a column of the scores (a foreign key)."""

    #: A table of a catalog (`catalog.schema.table`), a path of a Delta table, or a folder of Parquet files.
    table: str
    #: Column of that table; None: the one of the same name.
    column: str | None = None


class AuditRule(Section):
    """A figure of your own, within limits."""

    #: An aggregate of Spark SQL over the day's scores, such as `avg(score)` or `count_if(rank = 1 AND score < 0.01)`.
    expr: str | None = None
    #: A SELECT in the warehouse's SQL that gives one number; `{staged}` is the day's rows, `{previous}` those of the
    #: newest published day before it. Double a brace that is meant as such.
    sql: str | None = None
    #: Lower limit.
    min: float | None = None
    #: Upper limit.
    max: float | None = None

    @model_validator(mode="after")
    def _one_figure_with_a_limit(self) -> AuditRule:
        if (self.expr is None) == (self.sql is None):
            raise ValueError("give one of expr (Spark SQL) and sql (the warehouse's SQL)")
        if self.min is None and self.max is None:
            raise ValueError("give min, max, or both: without a limit it holds whatever comes")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class Audit(Section):
    """Checks beyond those of every day: limits against the newest earlier published day, and rules of your own.

    None: not checked. A rule that needs an earlier day holds if there is none.
    """

    #: Population stability index of the scores, over the tenths of the earlier day's.
    max_score_psi: float | None = Field(default=0.25, ge=0)
    #: Population stability index of the items' frequencies in lists, over the `top_items` most frequent and all others.
    max_item_psi: float | None = Field(default=0.25, ge=0)
    #: Bins of `max_item_psi` besides the rest.
    top_items: int = Field(default=20, ge=1, le=1000)
    #: Least share of the candidate items that are in some list.
    min_coverage: float | None = Field(default=None, ge=0, le=1)
    #: Least share of the scored users who have a list.
    min_users: float | None = Field(default=None, ge=0, le=1)
    #: Largest share of the rows whose item was in no list of the earlier day.
    max_new_items: float | None = Field(default=None, ge=0, le=1)
    #: Columns of the scores by the table that must have their values.
    references: Mapping[str, Reference] = Field(default_factory=dict)
    #: Rules by name.
    rules: Mapping[str, AuditRule] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names(self) -> Audit:
        for name in self.rules:
            if not NAME.fullmatch(name):
                raise ValueError(f"rules: '{name}' must match {NAME.pattern}")
        return self


class Publish(Section):
    """Publishing: scores are written to a staging table, audited there, and made visible."""

    #: Table of the warehouse; default `<pipeline>_scores`.
    table: str | None = None
    #: The warehouse.
    warehouse: Warehouse = Warehouse()
    #: Least number of rows. The audit also checks full lists, scores within [0, 1], nulls and duplicate keys.
    min_rows: int = Field(default=1, ge=0)
    #: The number of rows may differ from the last published day's by this share; None: not checked.
    max_row_change: float | None = 0.5
    #: Further checks of a day before it is published; null: none.
    audit: Audit | None = None
    #: Days that the table keeps, the newest published one among them; None: all. Older ones are dropped after a day is
    #: published.
    retain_days: int | None = Field(default=None, ge=1)
    #: Roles of the warehouse that may read the table and its view of the newest day: `{select: [analyst, dashboard]}`.
    #: Publication revokes the rights of a role that is no longer named.
    grants: Mapping[Literal["select"], tuple[str, ...]] = Field(default_factory=dict)

    #: A key-value store that gets the newest day's items of each user; null: none.
    online: Online | None = None

    @field_validator("table")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and not NAME.fullmatch(value):
            raise ValueError(f"table name '{value}' must match {NAME.pattern}")
        return value
