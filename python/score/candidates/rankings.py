"""Which class answers for which kind of source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.score.candidates.covisitation import CovisitedItems
from headrace.score.candidates.popular import PopularItems
from headrace.score.candidates.recent import RecentItems, UnseenItems
from headrace.score.candidates.source import ItemRanking, SourceContext
from headrace.score.candidates.table import ListedItems
from headrace.score.candidates.vectors.source import VectorItems

#: By `kind`: from the context of the run, the source's section and its place in the spec to the prepared source.
RANKINGS: Mapping[str, Callable[[SourceContext, Any, str], ItemRanking]] = {
    "vectors": VectorItems,
    "covisitation": CovisitedItems,
    "popular": PopularItems,
    "recent": RecentItems,
    "new_items": UnseenItems,
    "table": ListedItems,
}
