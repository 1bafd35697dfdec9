"""The section `spark`, and the profiles it names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from headrace.config.section import Section
from headrace.errors import UserError, nearest
from headrace.logs import holds_secret
from headrace.workspace import installation

LOOPBACK = "127.0.0.1"

#: The catalog by which Spark reads Iceberg tables that are given by their paths. (By its class a session's jars are
#: chosen: headrace.lake.spark.session.)
ICEBERG_BY_PATH = {"spark.sql.catalog.default_iceberg": "org.apache.iceberg.spark.SparkCatalog"}

#: The name of a variable as the value of a property of a REST catalog of Iceberg, which looks it up itself
#: (EnvironmentUtil of Iceberg, as RESTSessionCatalog asks it).
_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")


class Spark(Section):
    """The Spark application of each stage: a profile of conf/spark and what this pipeline changes in it."""

    #: A file of conf/spark: cpu or gpu.
    profile: str = "cpu"
    #: Spark's master URL.
    master: str = "local[*]"
    #: The driver's heap, as Spark spells it.
    driver_memory: str = "3g"
    #: MiB that the driver's Python process may take of values and tables by key where their statistics are merged by
    #: Spark (`scratch: own`, `features.engine: spark`): where there are more, Spark gives the codes and tasks make the
    #: tables. What the process imports takes some 300 besides.
    driver_python_mib: int = Field(default=1024, ge=256)
    #: Whether the executors share a disk for what tasks hand to each other: `shared`, one scratch folder at one path;
    #: `own`, each host has its own, and it goes through Spark's shuffle or the lake; `auto`: `own` where executors are
    #: on other machines.
    scratch: Literal["auto", "shared", "own"] = "auto"
    #: Further properties, highest priority.
    properties: Mapping[str, str] = Field(default_factory=dict)

    @field_validator("properties")
    @classmethod
    def _no_secrets(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for key, text in value.items():
            is_catalog = key.startswith("spark.sql.catalog.")
            if not holds_secret(key, text) or (is_catalog and _VARIABLE.fullmatch(text)):
                continue
            catalog = "; a REST catalog of Iceberg takes `env:VARIABLE` as the value" if is_catalog else ""
            raise ValueError(
                f"{key}: a secret does not belong in a pipeline's file, on a command line or in a properties file. "
                f"Give it to Spark by the environment of driver and executors or by a credential provider "
                f"(spark.hadoop.hadoop.security.credential.provider.path){catalog}"
            )
        return value

    @property
    def own_scratch(self) -> bool:
        """Return whether no executor sees the scratch folder of another host."""
        return self.scratch == "own" or (self.scratch == "auto" and not self.is_local)

    @property
    def is_local(self) -> bool:
        """Return whether driver and executors are on this machine: `local[...]` and `local-cluster[...]`."""
        return self.master.startswith("local")


def spark_profile(name: str) -> Path:
    """Return the properties file of a Spark profile.

    Raises:
        UserError: there is none of that name.
    """
    path = installation() / "conf" / "spark" / f"{name}.conf"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.conf"))
        raise UserError(f"no Spark profile '{name}'{nearest(name, known)}; known: {', '.join(known)}")
    return path
