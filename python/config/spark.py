"""The section `spark`, and the profiles it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from headrace.config.section import Section
from headrace.errors import UserError, nearest
from headrace.workspace import checkout


class Spark(Section):
    """The Spark application of each stage: a profile of conf/spark and what this pipeline changes in it."""

    profile: str = "cpu"
    master: str = "local[*]"
    driver_memory: str = "3g"
    #: Further properties, highest priority.
    properties: Mapping[str, str] = Field(default_factory=dict)


def spark_profile(name: str) -> Path:
    """The properties file of a Spark profile.

    Raises:
        UserError: there is none of that name.
    """
    path = checkout() / "conf" / "spark" / f"{name}.conf"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.conf"))
        raise UserError(f"no Spark profile '{name}'{nearest(name, known)}; known: {', '.join(known)}")
    return path
