"""Why a row is in a user's list, in words: `similar,popular`, `new_item,recent`, `explore,popular`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.score.rerank.lists import Rule

_WORDS = {Rule.SCORE: "", Rule.FRESH: "fresh", Rule.NEW_ITEM: "new_item", Rule.EXPLORE: "explore"}
#: Why an item is there that no rule and no source brought: it was ranked among all items.
_RANKED = "score"


def reasons(rule: NDArray[np.uint8], sources: NDArray[np.int64] | None, names: Sequence[str]) -> pa.StringArray:
    """The rule that put each row there, if one did, then the sources that it came from, with commas between.

    Args:
        rule: a `Rule` each, uint8 [M].
        sources: bit masks by position in `names`, int64 [M]; None: there were no sources, all items were ranked.
        names: of the sources, 48 at most.
    """
    masks = np.zeros(len(rule), np.int64) if sources is None else sources.astype(np.int64)
    distinct, place = np.unique(masks << 8 | rule, return_inverse=True)
    words = [_words(int(of), names) for of in distinct]
    return pa.array(words, pa.string()).take(pa.array(place))


def _words(key: int, names: Sequence[str]) -> str:
    mask, rule = key >> 8, Rule(key & 0xFF)
    found = [_WORDS[rule], *(name for i, name in enumerate(names) if mask >> i & 1)]
    return ",".join(word for word in found if word) or _RANKED
