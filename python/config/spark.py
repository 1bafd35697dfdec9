"""The section `spark`, the profiles that it names, and which settings one application can serve."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from headrace.config.installation import installation
from headrace.config.section import Section
from headrace.errors import UserError, nearest
from headrace.logs import holds_secret

LOOPBACK = "127.0.0.1"

#: The catalog by which Spark reads Iceberg tables by path. `headrace.lake.spark.session` adds Iceberg's jar where a
#: property names its class.
ICEBERG_BY_PATH = {"spark.sql.catalog.default_iceberg": "org.apache.iceberg.spark.SparkCatalog"}

#: Value of a property of an Iceberg REST catalog that names an environment variable. Iceberg looks it up itself
#: (RESTSessionCatalog, by EnvironmentUtil).
_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")


class Spark(Section):
    """The Spark application of each stage: a profile of conf/spark, and this pipeline's changes to it."""

    #: Profile of Spark's settings, a file of conf/spark: cpu or gpu.
    profile: str = "cpu"
    #: Spark's master URL.
    master: str = "local[*]"
    #: Heap of the driver, in Spark's notation.
    driver_memory: str = "3g"
    #: MiB of values and tables by key that the driver's Python process may hold where Spark merges their statistics
    #: (`scratch: own`, `features.engine: spark`). Beyond that, Spark assigns the codes and tasks make the tables. The
    #: libraries of the process take about 300 MiB more.
    driver_python_mib: int = Field(default=1024, ge=256)
    #: How tasks exchange files. `shared`: by one scratch folder, which all hosts see at one path; `own`: each host has
    #: its own scratch folder, so by Spark's shuffle or the lake; `auto`: `own` where executors are on other machines.
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
        raise UserError(f"spark.profile: no Spark profile '{name}'{nearest(name, known)}; known: {', '.join(known)}")
    return path


def read_properties(path: Path) -> dict[str, str]:
    """Return a Spark properties file: `key value` a line, `#` comments."""
    props: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        parts = text.split(None, 1)
        if len(parts) != 2:
            raise UserError(f"{path}:{number}: write `key value`, not '{text}'")
        props[parts[0]] = parts[1].strip()
    return props


def with_slots(spark: Spark, ranks: int) -> Spark:
    """Return the session's settings with a task slot for each rank, where the master is this machine.

    Ranks must run at the same time. They are processes of their own, so more slots than cores are possible.
    """
    slots = local_slots(spark.master)
    return spark if slots is None else spark.model_copy(update={"master": f"local[{max(slots, ranks)}]"})


def local_slots(master: str) -> int | None:
    """Return how many tasks a local master runs at once, None for another master."""
    match = re.fullmatch(r"local(?:\[(\d+|\*)\])?", master)
    if match is None:
        return None
    return {None: 1, "*": os.cpu_count() or 1}.get(match[1]) or int(match[1])


def settings_agree(first: Spark, second: Spark) -> bool:
    """Return whether one application can run the stages with these settings.

    False with a plugin: RAPIDS keeps its GPU memory until the application ends.
    """
    if "spark.plugins" in (read_properties(spark_profile(first.profile)) | dict(first.properties)):
        return False
    # local[*] is local[2] on two cores.
    masters = [local_slots(conf.master) or conf.master for conf in (first, second)]
    return masters[0] == masters[1] and first.model_copy(update={"master": second.master}) == second
