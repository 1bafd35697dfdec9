"""Conditions on texts in dictionaries: as on the texts, and without making those of all rows."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headrace.features.table_ops.predicate import Predicate
from headrace.features.types import ValueType

TYPES = {"a": ValueType("string"), "b": ValueType("string")}
LEFT = ["b", None, "a", "é", "", "ab", "b", None, "a"]
RIGHT = ["a", "b", "a", "z", None, "ab", "é", None, ""]


@pytest.mark.parametrize("sign", ["=", "!=", "<", "<=", ">", ">="])
def test_dictionaries_compare_as_their_texts(sign: str) -> None:
    plain = {"a": pa.array(LEFT), "b": pa.array(RIGHT)}
    # With a null among the texts, too, and texts that no row has.
    texts = pa.array(["unused", None, *sorted({t for t in RIGHT if t is not None}, reverse=True)])
    places = pa.array(
        [None if t is None and i else texts.to_pylist().index(t) for i, t in enumerate(RIGHT)], pa.int32()
    )
    encoded = {"a": plain["a"].dictionary_encode(), "b": pa.DictionaryArray.from_arrays(places, texts)}
    assert encoded["b"].to_pylist() == RIGHT
    for text in (f"a {sign} b", f"a {sign} 'ab'", f"'ab' {sign} b", f"not b {sign} 'ab'", f"b {sign} a"):
        condition = Predicate(text, TYPES)
        expected = condition.arrow(plain.__getitem__)
        assert condition.arrow(encoded.__getitem__).equals(expected), text
        assert condition.arrow({**plain, "b": encoded["b"]}.__getitem__).equals(expected), text


def test_more_text_than_an_array_holds() -> None:
    size, rows = 32 << 20, 66  # of which an array of texts has 2 GiB at most
    texts = pa.array(["x" * size, "short"])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows + [1, None], pa.int32()), texts)
    for text, count in (("a = 'short'", 1), ("a in ('short', 'x')", 1), ("a > 'x'", rows), ("a = a", rows + 1)):
        assert pc.sum(Predicate(text, TYPES).arrow(lambda name: column)).as_py() == count
