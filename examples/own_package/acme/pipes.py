"""The reader of the format `acme_pipes`."""

from __future__ import annotations

from headrace.lake.landing.delimited import DelimitedForm
from headrace.lake.landing.formats import LandingBatch, LandingReader


class PipesReader(LandingReader):
    """Fields in the order of `table.columns`; an empty field is null."""

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm:
        return DelimitedForm(tuple(c.name for c in batch.table.columns), "|", quotes=False)
