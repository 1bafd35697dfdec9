"""What some pipelines' scores are made otherwise by than the same spec once made them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.config import PairEvents, Score, Spec
from headrace.features.build.source_rows import has_timestamps

#: Raise one when lists of such pipelines come out otherwise; `ScoreCandidates.version` makes all pipelines' days again.
_SHARES_WITH_CAPS = 2  # a cap's last room is kept for the share that needs it; lists shorter than top_k, too
_PAIRS_BY_LOCAL_DAYS = 2  # days of a source without timestamps end by the midnight of its own time zone


def revisions(spec: Spec) -> Mapping[str, int]:
    """What of the stage's fingerprint is of these pipelines alone: {} of all others, whose finished days stay so."""
    score = spec.score
    found = {}
    if score is not None and score.rerank is not None and score.rerank.caps and score.rerank.shares():
        found["shares_with_caps"] = _SHARES_WITH_CAPS
    named = () if score is None else [spec.sources[name] for name in _sources_of_pairs(score)]
    if any(of.source.timezone != "UTC" and not has_timestamps(of) for of in named):
        found["pairs_by_local_days"] = _PAIRS_BY_LOCAL_DAYS
    return found


def _sources_of_pairs(score: Score) -> Iterator[str]:
    """The named sources whose events are read as pairs of a user and an item."""
    listed = [] if score.candidates is None else score.candidates.sources.values()
    for entry in (*listed, *score.filters):
        if isinstance(entry, PairEvents) and entry.from_ is not None:
            yield entry.from_
