"""The TalkingData AdTracking Fraud Detection log."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.lake.sources.delimited import delimited
from headrace.lake.sources.lines import LandingBatch


def read_talkingdata(batch: LandingBatch) -> list[DataFrame]:
    """CSV with a header: ip, app, device, os, channel, click_time, attributed_time, is_attributed.

    Times are `yyyy-MM-dd HH:mm:ss` in the competition's files, and `yyyy-MM-dd H:mm` in samples that went through a
    spreadsheet; both are read (as UTC).
    """
    fix = {"click_time": _two_digit_hour, "attributed_time": _two_digit_hour}
    return delimited(batch, range(len(batch.files)), separator=",", header=True, fix=fix)


def _two_digit_hour(text: Column) -> Column:
    return F.regexp_replace(text, r"^(\d{4}-\d{2}-\d{2}) (\d:)", "$1 0$2")
