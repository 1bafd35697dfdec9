"""In how many lists a rule could not be met, and in how many of these no list of their items could have met it."""

from __future__ import annotations

from collections import Counter

import numpy as np

from headrace.score.rerank.lists import I64, Bools, Rectangle, Rule
from headrace.score.rerank.select import Caps, Share

#: Of a rule: the lists that do not meet it; those of them that provably could not.
LISTS, IMPOSSIBLE = "lists", "impossible"

_NAMES = {Rule.FRESH: "freshness", Rule.NEW_ITEM: "new_items"}


def unmet_rules(shown: I64, grid: Rectangle, caps: Caps, shares: list[Share], k: int) -> Counter[tuple[str, str]]:
    """Count, by (rule, LISTS or IMPOSSIBLE), some users' lists.

    A share is not met where a beginning of the list has fewer such items than it asks for. It is impossible where, of
    the ranked items, the caps let fewer into any list, each cap by itself. Caps are met always; what they cost is
    counted: lists that are shorter than k although more items were ranked.

    Args:
        shown: what stands at each position: int64 [n, positions], columns of the rectangle, -1 beyond a list's end.
        grid: the ranked items.
        caps: of the same.
        shares: that the rules ask for.
        k: `score.top_k`.
    """
    there = shown >= 0
    length, columns = there.sum(1), np.maximum(shown, 0)
    found: Counter[tuple[str, str]] = Counter()

    def note(rule: str, unmet: Bools, impossible: Bools) -> None:
        found[rule, LISTS] += int(unmet.sum())
        found[rule, IMPOSSIBLE] += int((unmet & impossible).sum())

    for share in shares:
        have = (there & np.take_along_axis(share.members, columns, 1)).cumsum(1)
        short = (there & (have < share.least[1 : shown.shape[1] + 1])).any(1)
        note(_NAMES[share.rule], short, caps.at_most(share.members) < share.least[length])
    if caps.most:
        wanted = np.minimum(k, grid.there.sum(1))
        note("caps", length < wanted, caps.at_most(grid.there) < wanted)
    return found
