"""Criteo's click logs."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.lake.landing.delimited import DelimitedForm
from headrace.lake.landing.frame import fixed_fields
from headrace.lake.landing.reader import LandingBatch, LandingReader

#: Names as the Kaggle page of the Criteo Display Advertising Challenge gives them; the 1 TB logs have the same fields.
CRITEO = ("label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27)))


class CriteoReader(LandingReader):
    """Criteo's files."""

    by_arrow = True
    lists_by_arrow = False

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Read tab-separated lines without a header: label, 13 counts, 26 hashed categories (hex); blanks are null.

        The Kaggle file and the `day_N` files of the 1 TB logs. No quotes, so a line is split at its tabs alone.
        """
        lines = batch.lines(range(len(batch.files)))
        lines = lines.select("*", F.split("_text", "\t").alias("_f_parts"))

        def part(k: int) -> Column:
            text = F.get("_f_parts", F.lit(k))
            return F.when(text != "", text)

        texts = {name: part(k) for k, name in enumerate(CRITEO)}
        return [fixed_fields(batch, lines, texts, F.size("_f_parts") != len(CRITEO))]

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm:
        return DelimitedForm(CRITEO, "\t", quotes=False)
