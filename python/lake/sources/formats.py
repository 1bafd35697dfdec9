"""Every `source.format`, and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame

from headrace.lake.sources import lightgcn, movielens
from headrace.lake.sources.clicks import read_clicks
from headrace.lake.sources.criteo import read_criteo
from headrace.lake.sources.delimited import read_csv
from headrace.lake.sources.json_lines import read_jsonl
from headrace.lake.sources.lines import LandingBatch
from headrace.lake.sources.talkingdata import read_talkingdata
from headrace.lake.sources.user_items import COLUMNS as USER_ITEMS
from headrace.lake.sources.user_items import hold_last_two_out, read_user_items


@dataclass(frozen=True)
class SourceFormat:
    """One format of landing files."""

    #: Lines to frames as headrace.lake.sources.frame describes them.
    read: Callable[[LandingBatch], list[DataFrame]]
    #: What needs typed rows: splits, drawn negatives. Takes and returns rows of headrace.lake.ingest.typed_rows.
    finish: Callable[[DataFrame, LandingBatch], DataFrame] | None = None
    #: Columns that the spec must declare.
    columns: tuple[str, ...] = ()
    #: Whether columns may be declared by `path`.
    paths: bool = False


FORMATS: Mapping[str, SourceFormat] = {
    "clicks": SourceFormat(read_clicks, paths=True),
    "csv": SourceFormat(read_csv, paths=True),
    "jsonl": SourceFormat(read_jsonl, paths=True),
    "criteo": SourceFormat(read_criteo),
    "talkingdata": SourceFormat(read_talkingdata),
    "movielens": SourceFormat(movielens.read_ratings, movielens.leave_last_out, movielens.COLUMNS),
    "movielens_ncf": SourceFormat(movielens.read_ncf, movielens.hold_one_out, movielens.COLUMNS),
    "lightgcn": SourceFormat(lightgcn.read_lists, lightgcn.hold_some_out, lightgcn.COLUMNS),
    "user_items": SourceFormat(read_user_items, hold_last_two_out, USER_ITEMS),
}
