"""Messages of an application with several stages to its submitter: lines of JSON among its other output."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Literal

#: Begins such a line: the control character "record separator", which no text has in it.
MARK = b"\x1e"
#: Letters of a reason. A line so short reaches a pipe in one piece, whoever else writes to it (PIPE_BUF).
_MOST_REASON = 300

Kind = Literal["check", "run", "skip", "done", "failed"]


@dataclass(frozen=True)
class StageEvent:
    """Something about a stage: it is checked, it begins to work, there is nothing to do, it is done, it has failed."""

    stage: str
    kind: Kind
    #: Why it works (`run`).
    reason: str = ""
    #: The day; empty: that of the application.
    ds: str = ""
    #: The id of the attempt (`check`, `run`).
    run_id: str = ""

    def send(self) -> None:
        """Print it, behind what this process has printed before."""
        sys.stdout.flush()
        sys.stderr.flush()
        data = asdict(self) | {"reason": self.reason[:_MOST_REASON]}
        os.write(sys.stdout.fileno(), MARK + json.dumps(data).encode() + b"\n")

    @staticmethod
    def parse(line: bytes) -> StageEvent | None:
        """Return the event that follows MARK in a line, or None."""
        try:
            return StageEvent(**json.loads(line))
        except (ValueError, TypeError):
            return None
