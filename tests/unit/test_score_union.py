"""The union of candidates, and sums of similarities, against plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.score.candidates.candidates import Quotas, unite
from headrace.score.candidates.covisitation import Neighbors, best_neighbors

#: For each user, for each source, its items best first.
Users = list[list[list[int]]]


def plain(sources: list[list[int]], limit: int, places: list[int]) -> tuple[list[int], list[int]]:
    """One user's union: kept places first, then source by source; listed by source and order."""
    order: list[int] = []
    for items in sources:
        order += [item for item in items if item not in order]
    guaranteed = {item for items, n in zip(sources, places, strict=True) for item in items[:n]}
    fill = [item for item in order if item not in guaranteed][: limit - len(guaranteed)]
    chosen = [item for item in order if item in guaranteed or item in fill]
    return chosen, [sum(1 << s for s, items in enumerate(sources) if item in items) for item in chosen]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Users, int, list[int]]:
    n_sources, n_items = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    source_list = st.lists(st.integers(0, n_items - 1), unique=True)
    users = draw(st.lists(st.lists(source_list, min_size=n_sources, max_size=n_sources), min_size=1, max_size=5))
    places = draw(st.lists(st.integers(0, 4), min_size=n_sources, max_size=n_sources))
    return users, draw(st.integers(max(1, sum(places)), sum(places) + 8)), places


@given(cases())
def test_union_equals_a_plain_one(case: tuple[Users, int, list[int]]) -> None:
    users, limit, places = case
    lists = []
    for s in range(len(places)):
        offsets = np.cumsum([0, *(len(u[s]) for u in users)])
        lists.append((offsets.astype(np.int64), np.array([i for u in users for i in u[s]], np.int32)))
    union = unite(lists, Quotas(limit, tuple(places)))
    assert union.offsets[0] == 0
    for u, sources in enumerate(users):
        user_slice = slice(union.offsets[u], union.offsets[u + 1])
        items, bits = plain(sources, limit, places)
        assert union.items[user_slice].tolist() == items
        assert union.sources[user_slice].tolist() == bits
        for s in range(len(places)):
            assert union.alone[u, s] == sum(b == 1 << s for b in bits)
            for t in range(len(places)):
                both_sources = 1 << s | 1 << t
                assert union.shared[u, s, t] == sum(b & both_sources == both_sources for b in bits)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9))), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
def test_best_neighbors_are_the_greatest_sums(users: list[list[tuple[int, int]]], counts: list[int]) -> None:
    flat = [pair for user in users for pair in user]
    lists = Neighbors(
        np.cumsum([0, *map(len, users)]).astype(np.int64),
        np.array([item for item, _ in flat], np.int32),
        np.array([similarity for _, similarity in flat], np.int64),
    )
    offsets, items = best_neighbors(lists, np.array(counts[: len(users)]))
    for u, user in enumerate(users):
        sums: dict[int, int] = {}
        for item, similarity in user:
            sums[item] = sums.get(item, 0) + similarity
        best = sorted(sums, key=lambda item: (-sums[item], item))[: counts[u]]
        assert items[offsets[u] : offsets[u + 1]].tolist() == best
