"""Contract of a reader of landing files, and the reader of a source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from pyspark.sql import DataFrame

from headrace.config import LandingSource
from headrace.lake.blocks.delimited import DelimitedForm
from headrace.lake.sources.lines import LandingBatch
from headrace.plugins import import_class


class LandingReader(ABC):
    """A reader of one format of landing files.

    `read` and `finish` are plans of Spark. Where the lines are delimited text or JSON objects, `by_arrow` and `form`
    let Arrow read them, about ten times as fast; lines that Arrow is unsure of still go to `read`.
    """

    #: Whether Arrow may read the files, by `form`.
    by_arrow: ClassVar[bool] = False
    #: Whether Arrow may read columns that are declared as lists.
    lists_by_arrow: ClassVar[bool] = True
    #: Whether `finish` makes the rows anew: splits, drawn negatives.
    remakes_rows: ClassVar[bool] = False

    @abstractmethod
    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Return the lines of a batch as frames with the columns that `headrace.lake.sources.frame` describes.

        Raises:
            UserError: a file whose name or header is refused.
        """

    def finish(self, rows: DataFrame, batch: LandingBatch) -> DataFrame:
        """Return what becomes of a batch's typed rows (`headrace.lake.ingest.typed_rows`), with the same columns."""
        return rows

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm | None:
        """Return how a file of the batch is written, by its number in `batch.files`; None: JSON lines.

        Raises:
            UserError: a header that is refused.
        """
        raise NotImplementedError(f"{type(self).__name__} reads by Arrow, and has no form")


def reader_of(source: LandingSource) -> LandingReader:
    """Return the reader of a source's format.

    Raises:
        UserError: it cannot be imported, or is no reader.
    """
    key = f"source.format {source.format}"
    # What is imported is a subclass; one with abstract methods left raises TypeError here.
    return import_class(source.file_format.reader, LandingReader, key, "reader")()  # type: ignore[type-abstract]
