"""The TalkingData AdTracking Fraud Detection log."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.lake.landing.delimited import DelimitedForm
from headrace.lake.landing.formats import delimited, with_header
from headrace.lake.landing.reader import LandingBatch, LandingReader

#: Of a time with one digit of hours, as a regular expression and what replaces it in Arrow's spelling.
_TWO_DIGIT_HOUR = (r"^(\d{4}-\d{2}-\d{2}) (\d:)", r"\1 0\2")
_TIMES = ("click_time", "attributed_time")


class TalkingDataReader(LandingReader):
    """TalkingData's files."""

    by_arrow = True

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Read CSV with a header: ip, app, device, os, channel, click_time, attributed_time, is_attributed.

        Times are `yyyy-MM-dd HH:mm:ss` in the competition's files, and `yyyy-MM-dd H:mm` in samples that went through a
        spreadsheet; both are read (as UTC).
        """
        fix = dict.fromkeys(_TIMES, _two_digit_hour)
        return delimited(batch, range(len(batch.files)), separator=",", header=True, fix=fix)

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm:
        return with_header(batch, batch.files[number][1], dict.fromkeys(_TIMES, _TWO_DIGIT_HOUR))


def _two_digit_hour(text: Column) -> Column:
    pattern, replacement = _TWO_DIGIT_HOUR
    return F.regexp_replace(text, pattern, replacement.replace("\\", "$"))
