"""The section `publish.warehouse`: where scores are published, and how it is reached."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import parse_qsl

from pydantic import ConfigDict, Field, model_validator

from headrace.config.section import PathText, Section
from headrace.redaction import holds_secret, is_secret

#: By kind: arguments that headrace gives to the client itself, by the client's names -> the key that says their value;
#: None: no key does. (Secrets are refused by their names, below.)
_OWN_ARGUMENTS: Mapping[str, Mapping[str, str | None]] = {
    # `user` and `user_name` are other names of `username`.
    "clickhouse": dict.fromkeys(("username", "user", "user_name"), "user")
    | {"host": "host", "port": "port", "database": "database"},
    "snowflake": {"user": "user", "database": "database", "schema": "schema", "autocommit": None},
    "bigquery": {"project": "catalog"},
    "redshift": {"host": "host", "port": "port", "database": "database", "user": "user"},
    "databricks": {"server_hostname": "host", "staging_allowed_local_path": None},
}


class Warehouse(Section):
    """Where scores are published. `embedded` starts the PostgreSQL that comes as a wheel, on loopback."""

    #: embedded: a PostgreSQL of the workspace's own. postgres: a server of yours. Others: see docs/warehouse.md.
    kind: Literal[
        "embedded",
        "postgres",
        "duckdb",
        "delta",
        "iceberg",
        "parquet",
        "sqlalchemy",
        "clickhouse",
        "snowflake",
        "bigquery",
        "redshift",
        "databricks",
    ] = "embedded"
    #: duckdb: the file. delta, parquet: the folder in which the table's folder is. Default: below `HOME/warehouse`.
    path: PathText | None = None
    #: sqlalchemy: the database's URL without a password, such as `sqlite:////data/scores.db`.
    url: str | None = None
    #: iceberg: the name of a catalog of `spark.properties`. databricks, bigquery: the catalog, the project.
    catalog: str | None = None
    #: Where files wait for the warehouse to load them. snowflake: a stage (`@name`; default: the table's own).
    #: bigquery: `gs://bucket/folder`; default: sent with the job. redshift: `s3://bucket/folder`.
    #: databricks: a volume (`/Volumes/catalog/schema/volume/folder`).
    stage: str | None = None
    #: What else the warehouse's client is to be given when it connects, by its own names (account, role, http_path).
    options: Mapping[str, str] = Field(default_factory=dict)
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

    @model_validator(mode="after")
    def _names_its_place(self) -> Warehouse:
        needed = {"sqlalchemy": "url", "iceberg": "catalog", "redshift": "stage", "databricks": "stage"}.get(self.kind)
        if needed is not None and getattr(self, needed) is None:
            raise ValueError(f"kind {self.kind} needs the key '{needed}'")
        begin = {"redshift": "s3://", "bigquery": "gs://"}.get(self.kind, "")
        if self.stage is not None and not self.stage.startswith(begin):
            raise ValueError(f"stage: kind {self.kind} loads files from {begin}BUCKET/FOLDER, not from '{self.stage}'")
        if self.url is not None and _has_secret(self.url):
            raise ValueError("url has a password in it: leave it out and name password_env or password_file")
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> Warehouse:
        given = {**{f"options.{key}": value for key, value in self.options.items()}, "stage": self.stage}
        for key, value in given.items():
            if holds_secret(key, value) or key.lower() == "options.pwd":
                raise ValueError(
                    f"{key}: a secret does not belong in a pipeline's file: name password_env or password_file, or an "
                    f"option that names a file"
                )
        return self

    @model_validator(mode="after")
    def _repeats_no_argument(self) -> Warehouse:
        for name, key in _OWN_ARGUMENTS.get(self.kind, {}).items():
            if name in self.options:
                instead = "leave it out" if key is None else f"set publish.warehouse.{key} instead"
                raise ValueError(f"options.{name}: headrace gives this to the client of {self.kind} itself: {instead}")
        return self

    @property
    def ssl(self) -> dict[str, str]:
        """The connection's parameters of libpq that say how it is encrypted and who answers."""
        if self.kind == "embedded":
            return {"sslmode": "disable"}
        mode = self.sslmode or ("prefer" if _is_this_machine(self.host) else "verify-full")
        files = {"sslrootcert": self.sslrootcert, "sslcert": self.sslcert, "sslkey": self.sslkey}
        return {"sslmode": mode} | {name: path for name, path in files.items() if path is not None}


def _has_secret(url: str) -> bool:
    """Whether a database's URL has a password: before the host, in its query, or in the text for ODBC there."""
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
