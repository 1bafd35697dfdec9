"""The TalkingData AdTracking Fraud Detection log."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.lake.sources.delimited import delimited
from headrace.lake.sources.lines import LandingBatch

#: Of a time with one digit of hours, as a regular expression and what replaces it in Arrow's spelling.
TWO_DIGIT_HOUR = (r"^(\d{4}-\d{2}-\d{2}) (\d:)", r"\1 0\2")
TIMES = ("click_time", "attributed_time")


def read_talkingdata(batch: LandingBatch) -> list[DataFrame]:
    """CSV with a header: ip, app, device, os, channel, click_time, attributed_time, is_attributed.

    Times are `yyyy-MM-dd HH:mm:ss` in the competition's files, and `yyyy-MM-dd H:mm` in samples that went through a
    spreadsheet; both are read (as UTC).
    """
    fix = dict.fromkeys(TIMES, _two_digit_hour)
    return delimited(batch, range(len(batch.files)), separator=",", header=True, fix=fix)


def _two_digit_hour(text: Column) -> Column:
    pattern, replacement = TWO_DIGIT_HOUR
    return F.regexp_replace(text, pattern, replacement.replace("\\", "$"))
