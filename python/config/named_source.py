"""An entry of the section `sources`: a source of a pipeline besides the main one."""

from __future__ import annotations

from headrace.config.section import NAME, Section
from headrace.config.source import Source
from headrace.config.table import Table

#: Names of other tables of a pipeline, and the ending of those of bad rows.
_TAKEN = ("events", "quarantine", "vocabulary", "scores", "statistics", "published")
_BAD_ROWS = "_quarantine"


class NamedSource(Section):
    """What lands, and what it becomes: the Delta tables `lake/PIPELINE/NAME` and `lake/PIPELINE/NAME_quarantine`.

    It is loaded by `ingest` as the main source is, and read by operators that say `from: NAME`.
    """

    #: Where its rows come from.
    source: Source
    #: What a row of it is.
    table: Table


def check_name(name: str) -> None:
    """Refuse names that can be no table of a pipeline.

    Raises:
        ValueError: with the reason.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"sources: '{name}' must match {NAME.pattern}")
    if name in _TAKEN or name.endswith(_BAD_ROWS):
        raise ValueError(f"sources: '{name}' is the name of another table of a pipeline; take another one")
