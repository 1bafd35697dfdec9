"""Declared columns: their types, and where the source has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.config.schema import (
    COLUMN_TYPES,
    TableColumn,
    how_to_declare,
    match_names,
    path_of,
    path_steps,
    unique_names,
)
from headrace.features.types import declared


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4), st.sampled_from("'\""))
def test_any_names_can_be_a_path(names: list[str], quote: str) -> None:
    assert path_steps("".join(f"[{quote}{n.replace(quote, 2 * quote)}{quote}]" for n in names)) == tuple(names)


def test_paths() -> None:
    assert path_steps("user.geo.country") == ("user", "geo", "country")
    assert path_steps("attributes['os.name'].x") == ("attributes", "os.name", "x")
    assert TableColumn(name="a.b").steps == ("a.b",)
    for bad in ("", ".a", "a.", "a..b", "a[", "a['b", "a]b", "a[b]", "a['']"):
        with pytest.raises(ValueError, match="is no path"):
            path_steps(bad)


def test_names_match_exactly_or_in_case_alone() -> None:
    assert match_names(["price", "Größe", "gone"], ["PRICE", "größe", "other"]) == {"price": "PRICE", "Größe": "größe"}
    assert match_names(["price"], ["Price", "price", "PRICE"]) == {"price": "price"}
    # A name that is asked for itself stands for no other one.
    assert match_names(["price", "Price"], ["Price"]) == {"Price": "Price"}
    assert match_names(["price", "Price"], ["Price", "PRICE"]) == {"price": "PRICE", "Price": "Price"}
    # What nobody asks for may differ in case alone.
    assert match_names(["a"], ["a", "b", "B"]) == {"a": "a"}
    with pytest.raises(ValueError, match="'Price' and 'PRICE' both differ from column 'price' in case alone"):
        match_names(["price"], ["Price", "x", "PRICE"])


def test_what_to_declare_for_names_that_differ_in_case_alone() -> None:
    message = how_to_declare(["Price [EUR]", "price [eur]"])
    assert "(table.columns: {name: price_eur_1, path: \"['Price [EUR]']\"}, " in message
    for steps in (("a.b", "c"), ("it's", "['x']"), ("user", "geo")):
        assert path_steps(path_of(steps)) == steps
    assert unique_names(["Price", "price", "price_2", "PRICE"]) == ["Price", "price_3", "price_2", "PRICE_4"]


def test_types() -> None:
    assert TableColumn(name="a", type="decimal( 10 , 2)").type == "decimal(10,2)"
    assert str(declared(TableColumn(name="a", type="decimal(10,2)"))) == "decimal(10,2)"
    for type_ in COLUMN_TYPES:
        column = TableColumn(name="a", type=type_)
        # What features see has room for all that the lake stores.
        assert declared(column).arrow is not None
        assert column.model_dump() == {"name": "a", "type": type_, "required": False, "path": None}
        assert TableColumn.model_validate(column.model_dump()) == column
    with_path = TableColumn(name="a", path="b.c")
    assert TableColumn.model_validate_json(with_path.model_dump_json()) == with_path
    for bad, message in (
        ("byte", "'tinyint'"),
        ("decimal(39,1)", "1 to 38"),
        ("decimal(2,3)", "scale"),
        ("map", "types"),
    ):
        with pytest.raises(ValidationError, match=message):
            TableColumn(name="a", type=bad)
