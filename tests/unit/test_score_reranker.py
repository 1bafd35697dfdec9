"""Rules over the ranked items of a task: what they are told of items, and which settings cannot hold."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.config import Spec, Split, build_spec
from headrace.config.score import Rerank
from headrace.errors import UserError
from headrace.score.columns import check_rule_columns
from headrace.score.items import ItemTable
from headrace.score.ranking import Ranked
from headrace.score.rerank.reranker import RuleReranker, hashes, is_fresh
from headrace.storage import local

DS = "2026-01-05"
#: The end of that day.
END = datetime(2026, 1, 6, tzinfo=UTC)


def item_table(folder: Path) -> ItemTable:
    """Ten items: of two sellers and without one; one a day younger than the next; few or no events."""
    ages = [timedelta(days=n) for n in range(10)]
    table = pa.table(
        {
            "item": [f"i{n}" for n in range(10)],
            "seller": ["a", "b", None, "a", "a", "b", None, "a", "b", "b"],
            "first_event": pa.array([None, *(END - a for a in ages[1:])], pa.timestamp("us", "UTC")),
            "events": pa.array([None, 1, 5, 9, 9, 9, 9, 4, 9, 9], pa.int64()),
        }
    )
    return ItemTable.of_arrow(table, "item", local(folder / "items"), part_rows=4)


def ranked(sources: bool = True) -> Ranked:
    """Two users: items in descending order of their number, and some of them."""
    rows = np.array([*range(9, -1, -1), 3, 0, 7], np.int32)
    scores = np.concatenate([np.linspace(0.9, 0.1, 10), [0.5, 0.4, 0.3]]).astype(np.float32)
    masks = np.array([1] * 10 + [3, 2, 1], np.int32) if sources else None
    return Ranked(pa.array(["u", "v"]), np.array([0, 10, 13]), rows, scores, masks)


def listed(folder: Path, rules: dict[str, Any], k: int = 4, sources: bool = True, **more: Any) -> list[list[Any]]:
    """Return (item's row, reason) pairs, one list a user."""
    ranked_lists, table = ranked(sources), item_table(folder)
    reranked = RuleReranker(Rerank.model_validate(rules), k, DS, ("similar", "popular"), **more)(ranked_lists, table)
    assert (reranked.propensity == 1).all()
    pairs = list(zip(ranked_lists.item_rows[reranked.rows].tolist(), reranked.reason.to_pylist(), strict=True))
    return [pairs[a:b] for a, b in zip(reranked.offsets[:-1], reranked.offsets[1:], strict=True)]


def test_what_rules_are_told_of_items(tmp_path: Path) -> None:
    assert listed(tmp_path, {}) == [
        [(9, "similar"), (8, "similar"), (7, "similar"), (6, "similar")],
        [(3, "similar,popular"), (0, "popular"), (7, "similar")],
    ]
    assert listed(tmp_path, {}, k=1, sources=False) == [[(9, "score")], [(3, "score")]]
    # Items without a seller are not counted.
    assert listed(tmp_path, {"caps": {"seller": 1}}) == [
        [(9, "similar"), (7, "similar"), (6, "similar"), (2, "similar")],
        [(3, "similar,popular")],
    ]
    # Fewer than 5 events: the items 0, which has none, 1 and 7.
    assert listed(tmp_path, {"new_items": {"share": 0.5, "below_events": 5}}, k=2) == [
        [(9, "similar"), (7, "new_item,similar")],
        [(3, "similar,popular"), (0, "popular")],
    ]
    # Younger than 3 days are the items 1 and 2; of item 0 it is not known.
    assert listed(tmp_path, {"freshness": {"days": 3, "share": 0.5}}, k=2) == [
        [(9, "similar"), (2, "fresh,similar")],
        [(3, "similar,popular"), (0, "popular")],
    ]


def test_vectors_are_asked_for_once_an_item_and_need_not_be_of_length_1(tmp_path: Path) -> None:
    requested_rows: list[int] = []

    def vectors(rows: np.ndarray) -> np.ndarray:
        requested_rows.extend(rows.tolist())
        # Two directions of any length, and none at all.
        directions = np.where((rows % 2)[:, None] == 0, [1.0, 0.0], [0.0, 1.0]) * (rows[:, None] + 1.0)
        return np.where(rows[:, None] == 8, 0.0, directions).astype(np.float32)

    result = listed(tmp_path, {"diversity": {"relevance": 0.5}}, k=3, vectors=vectors)
    # 9, then 8, which is like nothing, then the best of the other direction.
    assert [row for row, _ in result[0]] == [9, 8, 6]
    assert sorted(requested_rows) == sorted(set(requested_rows)) == list(range(10))


def test_freshness_of_dates_and_times() -> None:
    now = int(END.timestamp()) * 1_000_000
    days = pa.array([date(2026, 1, 5), date(2026, 1, 3), date(2026, 1, 4), None, date(2026, 2, 1)])
    assert is_fresh(days, now, 2).tolist() == [True, False, False, False, True]
    assert is_fresh(days, now, 2.5).tolist() == [True, False, True, False, True]
    for unit in ("s", "ms", "us", "ns"):
        times = pa.array([END - timedelta(hours=n) for n in (35, 36, 37)], pa.timestamp(unit, "UTC"))
        assert is_fresh(times, now, 1.5).tolist() == [True, False, False]


def test_users_are_told_apart_by_their_keys() -> None:
    for keys in (
        pa.array([1, 2, 3], pa.int32()),
        pa.array(["a", "b", "é"]),
        pa.array([date(2026, 1, 5), date(2026, 1, 3), date(2026, 1, 4)]),
    ):
        key_hashes = hashes(keys)
        assert key_hashes.dtype == np.uint64
        assert len(set(key_hashes.tolist())) == 3
        assert hashes(keys.slice(1, 2)).tolist() == key_hashes[1:].tolist()


def spec(rerank: dict[str, Any] | None, **score: Any) -> Spec:
    columns = {"user": "bigint", "item": "string", "seller": "string", "tags": "array<string>", "ts": "timestamp"}
    item = {"key": "item", "columns": ["seller", "tags", "ts"]}
    return build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "jsonl", "path": "{ds}/*"},
            "table": {
                "columns": [{"name": n, "type": t} for n, t in columns.items()] + [{"name": "click", "type": "int"}]
            },
            "features": {"label": "click", "workflow": [], "split": {"by": "position"}},
            "score": {"user": {"key": "user"}, "item": item, "rerank": rerank} | score,
        }
    )


@pytest.mark.parametrize(
    ("rerank", "score", "message"),
    [
        ({"caps": {"shop": 2}}, {}, "'shop' is not in score.item.columns"),
        ({"new_items": {"share": 0.05}}, {}, "0.05 of 10 items is less than one"),
        ({"caps": {"seller": 2}}, {"rank_depth": 9}, "rank_depth is 9, and top_k 10"),
        (
            {"new_items": {"share": 0.1}},
            {"user": {"key": "events"}},
            "'events' is the name of a column that rerank makes",
        ),
        ({"caps": {"tags": 2}}, {}, "the rules look at single values"),
        ({"freshness": {"days": 3, "boost": 0.1, "column": "seller"}}, {}, "no date and no timestamp"),
        ({"freshness": {"days": 3, "boost": 0.1}}, {}, "there is no table.event_time"),
    ],
)
def test_rules_that_do_not_fit_the_pipeline(rerank: dict[str, Any], score: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_rule_columns(spec(rerank, **score))


def test_what_is_fresh_must_be_told_from_the_window() -> None:
    rules_spec = spec({"freshness": {"days": 14, "share": 0.1}})
    timed = rules_spec.model_copy(update={"table": rules_spec.table.model_copy(update={"event_time": "ts"})})
    with pytest.raises(UserError, match=r"the events go back 14 days \(features.window_days"):
        check_rule_columns(timed)
    split = rules_spec.features.model_copy(update={"split": Split(by="time", valid_days=2, test_days=1)})
    check_rule_columns(timed.model_copy(update={"features": split}))
    rules = Rerank.model_validate({"freshness": {"days": 16, "share": 0.1}})
    assert timed.score is not None
    changed = {
        "features": split.model_copy(update={"window_days": 13}),
        "score": timed.score.model_copy(update={"rerank": rules}),
    }
    with pytest.raises(UserError, match="go back 16 days"):
        check_rule_columns(timed.model_copy(update=changed))
    check_rule_columns(spec({"freshness": {"days": 14, "share": 0.1, "column": "ts"}}))


def test_what_is_kept_for_the_rules() -> None:
    def ranked_items(rerank: dict[str, Any] | None, **score: Any) -> int:
        score_settings = spec(rerank, **score).score
        assert score_settings is not None
        return score_settings.ranked

    assert ranked_items({}) == 100
    assert ranked_items({}, top_k=3, rank_depth=50) == 50
    assert ranked_items(None, rank_depth=50) == 10
