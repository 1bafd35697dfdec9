"""Codes of a vocabulary: assigned once, in order, and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from headrace.compute import pc
from headrace.config.schema import OOV_CODE
from headrace.errors import UserError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.features.vocabulary.lookup import Lookup


@dataclass(frozen=True)
class VocabularyRule:
    """Rule by which the values of a vocabulary get codes."""

    #: Values seen fewer times in the training range get no code.
    min_count: int = 1
    #: At most this many values, the most frequent; None: no limit.
    max_size: int | None = None
    #: Other values hash into so many codes, 1..oov_buckets.
    oov_buckets: int = 1

    @property
    def first_code(self) -> int:
        """The code of the vocabulary's first value."""
        return OOV_CODE + self.oov_buckets


def assign_codes(name: str, counted: pa.Table, known: pa.Table, rule: VocabularyRule) -> pa.Table:
    """Return the counted values that are not known, with codes that go on after the highest: (value, code, count).

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
    """Return the error for a vocabulary whose lowest code is that of other buckets."""
    return UserError(
        f"vocabulary '{name}' began with oov_buckets: {lowest - 1}, and its codes stay for ever; "
        f"set oov_buckets to {lowest - 1} again, or begin another (vocabulary: NEW_NAME)"
    )


class Vocabularies(Protocol):
    """Store of codes from one fit to the next."""

    def update(
        self, counts: DataFrame | pa.Table, rules: Mapping[str, VocabularyRule]
    ) -> Mapping[str, pa.Table | Lookup]:
        """Give codes to the values that have none yet; return each vocabulary as (value, code), in order of code.

        Args:
            counts: (name string, value string, count bigint, day), a row a value, those below min_count left out. A
                frame is looked at more than once.
            rules: of all vocabularies; one without any value comes out empty.
        """
        ...


class VocabulariesInMemory:
    """Codes as headrace.features.vocabulary.delta_table gives them, kept in this process alone.

    A fit that begins with the vocabularies of an earlier one keeps all their codes, and gives new values those after
    them.
    """

    def __init__(self, known: Mapping[str, Lookup] | None = None) -> None:
        """`known`: by name, what an earlier fit left (`FittedWorkflow.vocabularies`)."""
        self._known = {name: lookup_.table for name, lookup_ in (known or {}).items()}

    def update(self, counts: DataFrame | pa.Table, rules: Mapping[str, VocabularyRule]) -> dict[str, pa.Table]:
        """See `Vocabularies.update`."""
        from headrace.features.vocabulary import lookup  # late: a spec's check needs the rules alone

        counted = counts if isinstance(counts, pa.Table) else counts.toArrow()
        for name, rule in rules.items():
            known = self._known.get(name, lookup.SCHEMA.empty_table())
            new = assign_codes(name, counted.filter(pc.equal(counted.column("name"), name)), known, rule)
            parts = [known, new.select(["value", "code"]).cast(lookup.SCHEMA)]
            self._known[name] = pa.concat_tables(parts).sort_by("code").combine_chunks()
        return {name: self._known[name] for name in rules}
