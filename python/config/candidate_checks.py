"""Whether the named sources and columns exist that `score` reads for candidates, filters and sides."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from headrace.config.candidate_source import PairEvents
from headrace.config.named_source import NamedSource
from headrace.config.score import Entity, Score
from headrace.config.section import Section
from headrace.errors import nearest


def check_score_sources(
    score: Score, sources: Mapping[str, NamedSource], event_time: str | None, columns: Collection[str] | None
) -> None:
    """See that what `score` reads of named sources, and for candidates of the pipeline's own events, is declared.

    Args:
        score: the section.
        sources: of the pipeline.
        event_time: of its own events.
        columns: of its own events; None where operators add some (`features.prepare`).

    Raises:
        ValueError: a source or a column is not, with the nearest.
    """
    for where, entry in score_entries(score):
        name = getattr(entry, "from_", None)
        if name is None:
            if isinstance(entry, PairEvents) and entry.days is not None and event_time is None:
                raise ValueError(f"{where}.days: the events have no time (table.event_time)")
            if isinstance(entry, PairEvents) and columns is not None:
                _check_declared(where, entry, score, columns, "table.columns")
            continue
        if name not in sources:
            raise ValueError(f"{where}.from: '{name}' is no source of `sources`{nearest(name, sources)}")
        declared = [c.name for c in sources[name].table.columns]
        _check_declared(where, entry, score, declared, f"sources.{name}")


def _check_declared(where: str, entry: Section, score: Score, declared: Collection[str], place: str) -> None:
    for key, column in score_keys(entry, score):
        if column not in declared:
            hint = nearest(column, declared)
            raise ValueError(f"{where}.{key}: column '{column}' is not declared in {place}{hint}")


def score_entries(score: Score) -> Iterator[tuple[str, Section]]:
    """Yield the sections that may name a source, with their places in the spec."""
    yield "score.user", score.user
    yield "score.item", score.item
    if score.candidates is not None:
        for name, source in score.candidates.sources.items():
            yield f"score.candidates.sources.{name}", source
    for i, entry in enumerate(score.filters):
        yield f"score.filters[{i}]", entry


def score_keys(entry: Any, score: Score) -> Iterator[tuple[str, str]]:
    """Yield (key of the spec, column) that an entry of `score_entries` reads of its source."""
    if isinstance(entry, Entity):
        yield "key", entry.key
        return
    pairs = isinstance(entry, PairEvents)
    # Of events both keys are read; a table's are those that it names, an item's at least where items are listed.
    user, item = getattr(entry, "user", None), getattr(entry, "item", None)
    if user is not None or pairs:
        yield "user", user or score.user.key
    if item is not None or pairs or (getattr(entry, "kind", None) == "table" and hasattr(entry, "order")):
        yield "item", item or score.item.key
    if hasattr(entry, "order"):
        yield from (("by", column) for column in entry.by)
        if entry.order is not None:
            yield "order", entry.order
