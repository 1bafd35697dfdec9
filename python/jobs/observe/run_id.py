"""Ids of runs: UUIDs of version 7 (RFC 9562), which sort by time, as OpenLineage advises."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from uuid import UUID


def new_run_id() -> str:
    """Return an id that no other run has."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | secrets.randbits(12) << 64
    return str(UUID(int=value | 0b10 << 62 | secrets.randbits(62)))


@dataclass(frozen=True)
class ParentRun:
    """A run that has started others: of the command line, of Airflow."""

    namespace: str
    job: str
    run_id: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.job}/{self.run_id}"

    @staticmethod
    def parse(text: str | None) -> ParentRun | None:
        """Parse `namespace/job/run id`, as variables of the environment have it; None where it is no such text.

        A namespace may have slashes in it.
        """
        parts = (text or "").rsplit("/", 2)
        if len(parts) != 3 or not all(parts):
            return None
        try:
            UUID(parts[2])
        except ValueError:
            return None
        return ParentRun(*parts)


@dataclass(frozen=True)
class Run:
    """One attempt of a stage, or a whole `headrace run`."""

    pipeline: str
    ds: str
    #: Empty: the whole run.
    stage: str
    run_id: str
    parent: ParentRun | None = None
    #: The outermost one; None: the parent.
    root: ParentRun | None = None
