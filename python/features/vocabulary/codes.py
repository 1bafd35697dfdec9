"""Codes of a vocabulary: given once, in order, and never changed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import UserError
from headrace.features.vocabulary.rule import VocabularyRule


def give_codes(name: str, counted: pa.Table, known: pa.Table, rule: VocabularyRule) -> pa.Table:
    """The counted values that are not known, with codes that go on after the highest: (value, code, count).

    Args:
        name: of the vocabulary, for messages.
        counted: value, count and the day on which it was first seen, those that the rule's `min_count` leaves.
        known: value and code, in any order.
        rule: of the vocabulary.

    Raises:
        UserError: the vocabulary began with another number of out-of-vocabulary buckets.
    """
    first = rule.first_code
    if known.num_rows and (lowest := pc.min(known.column("code")).as_py()) != first:
        raise began_otherwise(name, lowest)
    highest = pc.max(known.column("code")).as_py() if known.num_rows else first - 1
    new = counted.filter(pc.invert(pc.is_in(counted.column("value"), known.column("value"))))
    if rule.max_size is not None:
        # Codes have no gaps in the table, so the highest says how many values there are.
        room = max(rule.max_size - (highest - first + 1), 0)
        new = new.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, room)
    # Arrow orders texts by their UTF-8 bytes.
    new = new.sort_by([("day", "ascending"), ("count", "descending"), ("value", "ascending")])
    codes = pa.array(np.arange(highest + 1, highest + 1 + new.num_rows), pa.int64())
    return new.select(["value", "count"]).append_column("code", codes)


def began_otherwise(name: str, lowest: int) -> UserError:
    """What is wrong where a vocabulary's lowest code is that of other buckets."""
    return UserError(
        f"vocabulary '{name}' began with oov_buckets: {lowest - 1}, and its codes stay for ever; "
        f"set oov_buckets to {lowest - 1} again, or begin another (vocabulary: NEW_NAME)"
    )
