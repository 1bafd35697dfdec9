"""Click logs as `headrace generate` writes them: JSON lines and CSV side by side."""

from __future__ import annotations

from pyspark.sql import DataFrame

from headrace.lake.blocks.delimited import DelimitedForm
from headrace.lake.landing import LandingFile
from headrace.lake.sources.compression import COMPRESSIONS, without_ending
from headrace.lake.sources.delimited import delimited, with_header
from headrace.lake.sources.json_lines import json_lines
from headrace.lake.sources.lines import FileRefused, LandingBatch
from headrace.lake.sources.reader import LandingReader

_JSON_ENDINGS = (".json", ".jsonl", ".ndjson")
_CSV_ENDINGS = (".csv", ".tsv", ".txt")


class ClicksReader(LandingReader):
    """The format `clicks`."""

    by_arrow = True

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Read JSON lines (`.json.gz`) and CSV with a header (`.csv.gz`) side by side.

        Raises:
            FileRefused: a file with another ending.
        """
        json_files: list[int] = []
        csv_files: list[int] = []
        for i, (_, file) in enumerate(batch.files):
            (json_files if is_json(file) else csv_files).append(i)
        frames = [json_lines(batch, json_files)] if json_files else []
        return frames + delimited(batch, csv_files, separator=",", header=True)

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm | None:
        file = batch.files[number][1]
        return None if is_json(file) else with_header(batch, file)


def is_json(file: LandingFile) -> bool:
    """Whether a file has JSON lines; else it is CSV.

    Raises:
        FileRefused: its name does not say.
    """
    stem = without_ending(file.name)
    if stem.endswith(_JSON_ENDINGS):
        return True
    if stem.endswith(_CSV_ENDINGS):
        return False
    raise FileRefused(
        file,
        f"landing file {file.name}: its name ends in neither .json nor .csv (with or without "
        f"{', '.join(COMPRESSIONS)}), so its format is unknown; rename it, or narrow source.path",
    )
