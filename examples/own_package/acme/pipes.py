"""The reader of the format `acme_pipes`."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.lake.landing.delimited import DelimitedForm
from headrace.lake.landing.frame import fixed_fields
from headrace.lake.landing.reader import LandingBatch, LandingReader


class PipesReader(LandingReader):
    """Fields in the order of `table.columns`; an empty field is null."""

    by_arrow = True
    lists_by_arrow = False

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        names = [c.name for c in batch.table.columns]
        lines = batch.lines(range(len(batch.files)))
        lines = lines.select("*", F.split("_text", r"\|").alias("_f_parts"))
        parts = {name: F.get("_f_parts", F.lit(k)) for k, name in enumerate(names)}
        texts = {name: F.when(part != "", part) for name, part in parts.items()}
        return [fixed_fields(batch, lines, texts, F.size("_f_parts") != len(names))]

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm:
        return DelimitedForm(tuple(c.name for c in batch.table.columns), "|", quotes=False)
