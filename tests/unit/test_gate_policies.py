"""Models as policies over raw rows: what they would choose, against softmax written out for each row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.evaluation import OffPolicy
from headrace.errors import UserError
from headrace.quality.gate import predictions
from headrace.quality.gate.predictions import RawActions, logits_of

ITEMS, PRICES = ["a", "b", "c"], [1.0, 2.5, 4.0]


def actions(policy: str = "softmax") -> RawActions:
    settings = OffPolicy.model_validate({"propensity": "p", "action": "item", "policy": policy, "temperature": 0.5})
    return RawActions(settings, "item", pa.table({"item": ITEMS, "price": pa.array(PRICES, pa.float32())}))


def predict(rows: pa.RecordBatch) -> np.ndarray:
    """Looks at what follows from the action, and at what does not."""
    price, age = (rows.column(name).to_numpy(zero_copy_only=False) for name in ("price", "age"))
    return (1 / (1 + np.exp(-(price / 3 - age / 40)))).astype(np.float32)


@given(
    st.lists(st.tuples(st.sampled_from([*ITEMS, "new", None]), st.integers(0, 90)), min_size=1, max_size=30),
    st.integers(1, 40),
)
def test_choices_are_a_softmax_of_the_logits_of_all_actions(rows: list[tuple[str | None, int]], cells: int) -> None:
    items, ages = zip(*rows, strict=True)
    batch = pa.RecordBatch.from_pydict(
        {"age": pa.array(ages, pa.int32()), "item": pa.array(items, pa.large_string()), "price": [7.0] * len(rows)}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "_CELLS", cells)  # blocks of any size
        choices = actions().choices(predict, batch)
        greedy = actions("greedy").choices(predict, batch)
    for i, (item, age) in enumerate(rows):
        logits = np.array([price / 3 - age / 40 for price in PRICES])
        share = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum()
        reward = 1 / (1 + np.exp(-logits))
        assert choices.chosen[i] == pytest.approx(share[ITEMS.index(item)] if item in ITEMS else 0.0, rel=1e-4)
        assert choices.expected[i] == pytest.approx((share * reward).sum(), rel=1e-4)
        assert greedy.chosen[i] == (item == "c")
        assert greedy.expected[i] == pytest.approx(reward[2], rel=1e-4)


def test_numbers_that_are_no_probabilities_are_refused() -> None:
    assert logits_of(np.array([0.5, 0.0, 1.0], np.float32)).tolist() == pytest.approx([0.0, -16.118, 16.118], abs=1e-3)
    for value in (1.5, -0.1, np.nan):
        with pytest.raises(UserError, match="no probabilities"):
            logits_of(np.array([value], np.float32))
