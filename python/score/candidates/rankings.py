"""Which class answers for which kind of source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.score.candidates.source import ItemRanking, SourceContext

#: By `kind`: from the context of the run and the source's section to the prepared source.
RANKINGS: Mapping[str, Callable[[SourceContext, Any], ItemRanking]] = {}
