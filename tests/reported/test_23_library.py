"""Input 23: frames whose columns have values of several types, or a name twice; and a parameter that is misspelt."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import UserError

N = 40
BASE = pd.DataFrame({"y": np.arange(N) % 2})
CHAIN = ["x"] >> hr.Categorify()


def fitted(frame: Any) -> Any:
    return hr.Workflow(CHAIN, label="y").fit(frame).transform(frame)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, "1"] * 20, "column 'x' has values of the type int, str, which"),
        (["a", 2.5] * 20, "column 'x' has values of the type float, str, which"),
        ([uuid.UUID(int=i % 3) for i in range(N)], "column 'x' has values of the type UUID, which"),
        ([object(), None] * 20, "column 'x' has values of the type object, which"),
        ([[1], ["a"]] * 20, "column 'x' has values of the type list, which"),
        (["a\ud83d", "b"] * 20, "column 'x' has a text that is not Unicode"),
        ([b"a", "b"] * 20, r"column 'x' .*(bytes, str|binary)"),
    ],
)
def test_values_that_make_no_column_are_named(values: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^{message}"):
        fitted(BASE.assign(x=values))
    # A column that nothing reads may hold anything.
    transformed = fitted(BASE.assign(x=["a", "b"] * 20, other=values))
    assert sorted(transformed["x"].unique()) == [2, 3]


@pytest.mark.parametrize("library", ["pandas", "arrow"])
def test_a_name_that_is_there_twice(library: str) -> None:
    frame = pd.concat([BASE, pd.DataFrame({"x": range(N)}), pd.DataFrame({"x": range(N)})], axis=1)
    arrays = [pa.array(frame.iloc[:, k]) for k in range(3)]
    with pytest.raises(UserError, match=r"^the frame has 2 columns 'x': "):
        fitted(frame if library == "pandas" else pa.table(arrays, ["y", "x", "x"]))


def test_frames_that_are_right_stay_so() -> None:
    numbered = BASE.join(pd.DataFrame({0: np.arange(N) % 3}))
    transformed = hr.Workflow(["0"] >> hr.Categorify(), label="y").fit(numbered).transform(numbered)
    assert transformed["0"].nunique() == 3
    assert fitted(BASE.assign(x=pd.Categorical(["a", "b", None, "a"] * 10)))["x"].nunique() == 3
    indexed = BASE.assign(x=["a", "b"] * 20).set_index(pd.Index(range(100, 100 + N)))
    assert list(fitted(indexed).index) == list(range(100, 100 + N))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hr.Categorify(min_cnt=2), "Categorify: unknown parameter 'min_cnt'; did you mean 'min_count'?"),
        (lambda: hr.Categorify(min_count="many"), "Categorify: parameter 'min_count': "),
        (lambda: hr.Pad(), "Pad: parameter 'length' is missing"),
    ],
)
def test_parameters_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match="^" + message.replace("?", r"\?")) as raised:
        make()
    assert "\n" not in str(raised.value)
