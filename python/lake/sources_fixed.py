"""Adapters of public click logs whose columns are fixed: Criteo and TalkingData."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.lake.lines import Reading
from headrace.lake.sources import delimited, fields

#: Names as the Kaggle page of the Criteo Display Advertising Challenge gives them; the 1 TB logs have the same fields.
CRITEO = ("label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27)))


def criteo(reading: Reading) -> list[DataFrame]:
    """Tab-separated lines without a header: label, 13 counts, 26 hashed categories (hex text); blanks are null.

    The Kaggle file and the `day_N` files of the 1 TB logs. No quotes, so a line is split at its tabs alone.
    """
    lines = reading.lines(range(len(reading.files)))
    lines = lines.select("*", F.split("_text", "\t").alias("_f_parts"))

    def part(k: int) -> Column:
        text = F.get("_f_parts", F.lit(k))
        return F.when(text != "", text)

    texts = {name: part(k) for k, name in enumerate(CRITEO)}
    return [fields(reading, lines, texts, F.size("_f_parts") != len(CRITEO))]


def talkingdata(reading: Reading) -> list[DataFrame]:
    """CSV with a header: ip, app, device, os, channel, click_time, attributed_time, is_attributed.

    Times are `yyyy-MM-dd HH:mm:ss` in the competition's files, and `yyyy-MM-dd H:mm` in samples that went through a
    spreadsheet; both are read (as UTC).
    """
    fix = {"click_time": _two_digit_hour, "attributed_time": _two_digit_hour}
    return delimited(reading, range(len(reading.files)), separator=",", header=True, fix=fix)


def _two_digit_hour(text: Column) -> Column:
    return F.regexp_replace(text, r"^(\d{4}-\d{2}-\d{2}) (\d:)", "$1 0$2")
