"""The section `housekeeping`: how long outputs of a pipeline are kept."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from headrace.config.section import Section
from headrace.config.source import LandingSource, Source
from headrace.config.table import Table

#: Days of rows of the tables that stages write, where the section says nothing else. Not here: all are kept.
TABLE_DAYS: Mapping[str, int] = {
    "scores": 90,
    "published": 90,
    "outcomes": 90,
    "score_inputs": 2,
    "statistics": 365,
    "user_vectors": 14,
    "item_vectors": 14,
}


class Housekeeping(Section):
    """Retention: the days and versions that `headrace gc` keeps.

    Days are counted back from the newest day of which a stage has run, itself among them, so that nothing goes while a
    pipeline rests. null: all are kept.
    """

    #: Days whose datasets are kept.
    datasets: int | None = Field(default=7, ge=1)
    #: Days whose models are kept. A version with an alias, and what such a one rests on, is never removed.
    models: int | None = Field(default=30, ge=1)
    #: Versions that were champion before it and are kept as well, to go back to.
    before_champion: int = Field(default=3, ge=0)
    #: Days whose checkpoints, progress and profiles of training are kept. Those of a training that has not finished are
    #: kept as long as `unfinished_days` says.
    checkpoints: int | None = Field(default=2, ge=1)
    #: Days after the last write to it (by the clock) after which what runs that were killed or refused have left goes:
    #: folders that no manifest names, scores that failed their audit, Spark's and the stages' temporary files.
    unfinished_days: float = Field(default=7, ge=0)
    #: Days whose searches of hyper-parameters are kept.
    searches: int | None = Field(default=30, ge=1)
    #: Days whose logs are kept.
    logs: int | None = Field(default=30, ge=1)
    #: Days whose reports are kept.
    reports: int | None = Field(default=365, ge=1)
    #: Days whose manifests are kept, at least: an older day's go where nothing that they name is there any more, in the
    #: workspace and (by `publish.retain_days`) in the warehouse, and with them what the registry has of its trainings.
    #: It is then as if it had never run. null: all are kept.
    manifests: int | None = Field(default=None, ge=1)
    #: Days of rows by the table's name: `events`, `quarantine`, a named source, `scores`, `published`, ... Unless said
    #: otherwise 90 days of `scores`, `published` and `outcomes`, 365 of `statistics`, 14 of `user_vectors` and
    #: `item_vectors`, 2 of `score_inputs` (whose newest day always stays: the next run compares with it), and all
    #: of the others.
    tables: Mapping[str, int | None] = Field(default_factory=dict)
    #: Days at whose versions tables can still be read, besides the newest: their old data files are kept.
    versions: int = Field(default=7, ge=1)
    #: Hours (by the clock) for which data files stay that no version names any more, for those who read now.
    vacuum_hours: float = Field(default=168, ge=0)
    #: A table's partition with this many data files, each smaller than `compact_mib`, has these joined;
    #: null: none is.
    compact_files: int | None = Field(default=32, ge=2)
    #: Size (MiB) from which a data file does not count as small.
    compact_mib: float = Field(default=32, gt=0)

    def table_days(self, name: str) -> int | None:
        """Return the days of rows that a table keeps; None: all."""
        return self.tables[name] if name in self.tables else TABLE_DAYS.get(name)


def check_table_days(
    keep: Housekeeping, sources: Mapping[str, tuple[Source, Table]], window_days: int, served_days: int = 0
) -> None:
    """Check that no run would bring back, or still read, days of events that are removed.

    Args:
        keep: the section.
        sources: by the name of their tables; `events` is of the main one.
        window_days: days of `events` that features read.
        served_days: days of `scores` and `published` that the stage `outcomes` reads.

    Raises:
        ValueError: a table keeps fewer days than that.
    """
    for name, (source, table) in sources.items():
        days = keep.tables.get(name)
        least = (source.catch_up_days if isinstance(source, LandingSource) else 0) + table.late_days + 1
        least = max(least, window_days + 1) if name == "events" else least
        if days is not None and days <= least:
            raise ValueError(
                f"housekeeping.tables.{name}: {days} days are too few: runs load or read those of up to {least} days "
                f"(source.catch_up_days, table.late_days, features.window_days)"
            )
    for name in ("scores", "published"):
        days = keep.table_days(name)
        if days is not None and days < served_days:
            raise ValueError(
                f"housekeeping.tables.{name}: {days} days are too few: the stage outcomes reads lists of {served_days} "
                f"days (outcomes.history_days and its labels' windows)"
            )
