"""Which run's scores a store of keys and values has."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Version:
    """A day's scores by one run."""

    ds: str
    #: Of the run.
    key: str

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Version:
        """From the text of `to_json`; what else is there is passed over."""
        found = json.loads(text)
        return Version(found["ds"], found["key"])
