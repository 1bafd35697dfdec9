"""Vocabularies of this process: for a notebook, a test, a model that is fitted once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.vocabulary import lookup
from headrace.features.vocabulary.codes import give_codes
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.vocabulary.rule import VocabularyRule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class VocabulariesInMemory:
    """Codes as headrace.features.vocabulary.delta_table gives them, kept in this process alone.

    A fit that begins with the vocabularies of an earlier one keeps all their codes, and gives new values those after
    them.
    """

    def __init__(self, known: Mapping[str, Lookup] | None = None) -> None:
        """`known`: by name, what an earlier fit left (`FittedWorkflow.vocabularies`)."""
        self._known = {name: found.table for name, found in (known or {}).items()}

    def update(self, counts: DataFrame | pa.Table, rules: Mapping[str, VocabularyRule]) -> dict[str, pa.Table]:
        """See `headrace.features.vocabulary.delta_table.Vocabularies.update`."""
        counted = counts if isinstance(counts, pa.Table) else counts.toArrow()
        for name, rule in rules.items():
            known = self._known.get(name, lookup.SCHEMA.empty_table())
            new = give_codes(name, counted.filter(pc.equal(counted.column("name"), name)), known, rule)
            parts = [known, new.select(["value", "code"]).cast(lookup.SCHEMA)]
            self._known[name] = pa.concat_tables(parts).sort_by("code").combine_chunks()
        return {name: self._known[name] for name in rules}
