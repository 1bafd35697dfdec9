"""The section `table`, and the section `sources`: further sources with their tables, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from headrace.config.schema import TableColumn, decimal_digits, quoted
from headrace.config.section import NAME, Section
from headrace.config.source import Source
from headrace.errors import nearest

_NUMERIC = ("tinyint", "smallint", "int", "bigint", "float", "double")


class Expectations(Section):
    """Expectations of a day's rows; a breach stops the day before anything is committed."""

    #: Least number of rows of a day, without those in quarantine.
    min_rows: int = Field(default=1, ge=0)
    #: Largest number of rows of a day; null: any number.
    max_rows: int | None = None
    #: Largest share of rows that may go to quarantine.
    max_bad_rate: float = Field(default=0.05, ge=0, le=1)
    #: Largest share of nulls by column.
    null_rate: Mapping[str, float] = Field(default_factory=dict)
    #: Column -> [low, high], inclusive. Rows outside go to quarantine.
    ranges: Mapping[str, tuple[float | None, float | None]] = Field(default_factory=dict)
    #: The newest event may be at most this many hours before the end of the landing day; None: not checked.
    freshness_hours: float | None = None
    #: Landing files of a day, or files of a Parquet, ORC or Avro folder, that may be damaged or of another format. Each
    #: is named, none of its rows is taken, and one that is delivered again is loaded. With more the day is not loaded.
    max_bad_files: int = Field(default=0, ge=0)
    #: present: each declared column is in some file (or table) of the day. null: one that is in none is a warning.
    columns: Literal["present"] | None = None


class Ids(Section):
    """Limits of texts that are ids: keys of the table, of users and of items (headrace.config.spec).

    Each id becomes a key of a warehouse's index or of a store of keys, which take no key of any length.
    """

    #: UTF-8 bytes of an id; a longer one sends its row to quarantine. null: any number.
    max_bytes: int | None = Field(default=480, ge=1)
    #: Action for a row whose id is the empty text.
    empty: Literal["quarantine", "keep"] = "quarantine"
    #: Action for a row whose id has a NUL character (U+0000), which PostgreSQL does not accept.
    nul: Literal["quarantine", "keep"] = "quarantine"


class Table(Section):
    """The lake's Delta table, partitioned by `ds` (the landing day; a snapshot's: the run's)."""

    #: The columns that are read. Other columns are only reported (`new_columns`).
    columns: tuple[TableColumn, ...]
    #: Rows equal in these columns are one event: the first is kept, also against the days within `late_days`.
    keys: tuple[str, ...] = ()
    #: Timestamp column with the time of the event; None: the source has no time.
    event_time: str | None = None
    #: An event may arrive this many days late; later ones go to quarantine, as do events from after the day.
    late_days: int = Field(default=3, ge=0)
    #: An event's time may be this many seconds after the end of its landing day, because clocks of senders differ.
    clock_skew_seconds: int = Field(default=0, ge=0, le=86_400)
    #: Action for an undeclared column: report it and go on, add it to the table as text, or stop.
    new_columns: Literal["report", "accept", "refuse"] = "report"
    #: Limits of ids.
    ids: Ids = Ids()
    #: Action for a row with a NUL character (U+0000) in a text that is not an id.
    text_nul: Literal["quarantine", "keep"] = "quarantine"
    #: Expectations of a day.
    expectations: Expectations = Expectations()

    @model_validator(mode="after")
    def _columns_exist(self) -> Table:
        names = [c.name for c in self.columns]
        declared: set[str] = set()
        for name in names:
            # Spark's names have no case: 'Clicked' would be the label that is declared as 'clicked'.
            if name.lower() in declared:
                raise ValueError(f"column '{name}' is declared twice (names that differ in case alone are one)")
            declared.add(name.lower())
            if name.startswith("_") or name.lower() == "ds":
                raise ValueError(f"columns: '{name}' is a reserved name (`ds` and names that begin with `_`)")
        used = {
            "keys": self.keys,
            "event_time": () if self.event_time is None else (self.event_time,),
            "expectations.null_rate": self.expectations.null_rate,
            "expectations.ranges": self.expectations.ranges,
        }
        for key, columns in used.items():
            for name in columns:
                if name not in names:
                    raise ValueError(f"{key}: column '{name}' is used but not declared{nearest(name, names)}")
        return self

    @model_validator(mode="after")
    def _rows_can_be_judged(self) -> Table:
        types = {c.name: c.type for c in self.columns}
        for name in self.expectations.ranges:
            if types[name] not in _NUMERIC and not decimal_digits(types[name]):
                raise ValueError(f"expectations.ranges: column '{name}' is {types[name]}, not a number")
        if self.event_time and types[self.event_time] not in ("timestamp", "date"):
            raise ValueError(
                f"event_time: column '{self.event_time}' is {types[self.event_time]}; declare it timestamp or date"
            )
        return self

    @property
    def spark_schema(self) -> str:
        """The declared columns as a Spark DDL string."""
        return ", ".join(f"{quoted(c.name)} {c.stored_type}" for c in self.columns)


#: Names of other tables of a pipeline, and the ending of those of bad rows.
_TAKEN = ("events", "quarantine", "vocabulary", "scores", "statistics", "published")
_BAD_ROWS = "_quarantine"


class NamedSource(Section):
    """A further source, and its Delta tables `lake/PIPELINE/NAME` and `lake/PIPELINE/NAME_quarantine`.

    It is loaded by `ingest` as the main source is, and read by operators that say `from: NAME`.
    """

    #: The source of its rows.
    source: Source
    #: The columns of its rows.
    table: Table


def check_name(name: str) -> None:
    """Refuse names that can be no table of a pipeline.

    Raises:
        ValueError: with the reason.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"sources: '{name}' must match {NAME.pattern}")
    if name in _TAKEN or name.endswith(_BAD_ROWS):
        raise ValueError(f"sources: '{name}' is the name of another table of a pipeline; take another one")
