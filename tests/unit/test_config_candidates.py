"""Refusals of the sections `score.candidates` and `score.filters`, and their messages."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from headrace.config import Candidates, Entity, Popular, Score, Spec, build_spec
from headrace.config.installation import pipeline_file
from headrace.errors import UserError

BLOCKED: dict[str, Any] = {
    "source": {"format": "jsonl", "path": "blocked/{ds}/*"},
    "table": {"columns": [{"name": "user_id", "type": "bigint"}, {"name": "item", "type": "bigint"}]},
}


def clicks(sources: dict[str, Any] | None = None, **score: Any) -> Spec:
    data = yaml.safe_load(pipeline_file("clicks").read_text())
    data["sources"] = {"blocked": BLOCKED} if sources is None else sources
    data["score"] |= score
    return build_spec(data)


def test_an_entry_is_of_its_kind() -> None:
    score = clicks(
        candidates={"limit": 40, "sources": {"liked": {"kind": "popular", "by": ["user_country"], "share": 0.3}}},
        filters=[{"kind": "seen"}, {"kind": "table", "from": "blocked", "user": "user_id", "item": "item"}],
    ).score
    assert score is not None
    assert score.candidates is not None
    assert isinstance(score.candidates.sources["liked"], Popular)
    assert score.candidates.places() == {"liked": 12}
    assert [f.kind for f in score.filters] == ["seen", "table"]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a": {"kind": "poplar"}}, r"sources\.a: 'poplar' is no kind of source; did you mean 'popular'"),
        ({"a": {"k": 3}}, r"sources\.a: kind is missing \(there are: .*covisitation"),
        ({"a": {"kind": "popular", "sahre": 1}}, r"unknown key 'score\.candidates\.sources\.a\.sahre'; did you mean"),
        ({"a": {"kind": "popular", "by": ["user_contry"]}}, r"by: 'user_contry' is not in .*'user_country'"),
        ({"a": {"kind": "recent", "column": "item_prise"}}, r"column: 'item_prise' is not in .*'item_price'"),
        ({"a": {"kind": "popular", "from": "blockd"}}, r"a\.from: 'blockd' is no source .*'blocked'"),
        ({"a": {"kind": "popular", "from": "blocked", "item": "itm"}}, r"a\.item: column 'itm' is not .*'item'"),
        (
            {"a": {"kind": "popular", "from": "blocked"}},
            r"a\.item: column 'item_id' is not declared in sources\.blocked",
        ),
        ({"a": {"kind": "table", "from": "blocked", "item": "item", "order": "weight"}}, r"a\.order: column 'weight'"),
        ({"a": {"kind": "popular", "item": "itm_id"}}, r"a\.item: column 'itm_id' is not declared .*'item_id'"),
        ({"a": {"kind": "covisitation", "user": "usr_id"}}, r"a\.user: column 'usr_id' is not declared .*'user_id'"),
        ({"a": {"kind": "table"}}, r"give path .* or from"),
        ({"a": {"kind": "table", "path": "t", "user": "u", "by": ["user_age"]}}, r"not both"),
        ({n: {"kind": "popular", "share": 0.6} for n in ("a", "b")}, r"shares of the sources add up to more than 1"),
        ({"A": {"kind": "popular"}}, r"'A' must match"),
        ({}, r"at least 1"),
    ],
)
def test_sources_that_are_refused(sources: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        clicks(candidates={"sources": sources})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "sen"}, r"score\.filters\.0: 'sen' is no kind of filter; did you mean 'seen'"),
        ({"kind": "where", "wher": "true"}, r"unknown key 'score\.filters\.0\.wher'; did you mean 'where'"),
        ({"kind": "table", "path": "t"}, r"name the table's columns"),
        ({"kind": "seen", "from": "blocked"}, r"filters\[0\]\.item: column 'item_id' is not declared"),
    ],
)
def test_filters_that_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        clicks(candidates={"sources": {"a": {"kind": "popular"}}}, filters=[entry])


@pytest.mark.parametrize("name", ["events", "First_Event", "item_row", "__items"])
@pytest.mark.parametrize("side", ["user", "item"])
def test_columns_that_candidates_make_are_refused(side: str, name: str) -> None:
    sources = {"sources": {"a": {"kind": "popular"}}}
    sides = {"user": {"key": "user_id"}, "item": {"key": "item_id"}}
    entities = {s: Entity(**entity, columns=(name,) if s == side else ()) for s, entity in sides.items()}
    Score(**entities)
    with pytest.raises(ValueError, match=f"'{name}' is the name of a column that candidates make"):
        Score(**entities, candidates=Candidates.model_validate(sources))


@pytest.mark.parametrize("side", ["user", "item"])
def test_a_key_named_like_a_column_of_the_scores_is_refused_with_candidates(side: str) -> None:
    entities = {s: Entity(key="source" if s == side else f"{s}_id") for s in ("user", "item")}
    Score(**entities)
    with pytest.raises(ValueError, match=rf"{side}\.key: 'source' is the name of a column that candidates add"):
        Score(**entities, candidates=Candidates.model_validate({"sources": {"a": {"kind": "popular"}}}))


def test_filters_need_candidates() -> None:
    with pytest.raises(UserError, match="filters are of candidates"):
        clicks(filters=[{"kind": "seen"}])


def test_sides_from_a_named_source() -> None:
    sides = {"user": {"key": "user_id", "from": "blocked"}, "item": {"key": "item_id", "from": "blocked"}}
    with pytest.raises(UserError, match=r"score\.item\.key: column 'item_id' is not declared in sources\.blocked"):
        clicks(**sides)
