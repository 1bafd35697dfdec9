"""What was found of persons in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """One place that has some of what is to go. Looking at it again once it is erased finds none."""

    #: events, quarantine, table, vocabulary, statistics, dataset, search, cache, log, report, training, model,
    #: warehouse, online, landing, source.
    kind: str
    #: A path below the workspace, or a name that people know.
    what: str
    #: Rows, or what is counted like rows: values of a vocabulary, rows of embeddings, users of a store.
    rows: int = 0
    #: Files that are written again, and that go.
    rewritten: int = 0
    removed: int = 0
    #: Bytes of the latter.
    size: int = 0
    #: What could not be done, or must be done by hand; empty where all is.
    left: str = ""
    #: Whether a later run of the command does what is left.
    later: bool = False
    #: What becomes of it, for people.
    note: str = ""
    #: Does it, and says what is left to be done by hand, if anything; None: it is not ours.
    act: Callable[[], str | None] | None = field(default=None, repr=False, compare=False)
