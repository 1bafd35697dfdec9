"""The sections `generate`, `drift`, `observe`, `housekeeping` and `spark`: settings besides the stages.

They describe the generated log, limits of changed distributions, receivers of events of runs, retention, and Spark: its
settings, the profiles that they name, and which of them one application can serve.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.config.installation import installation
from headrace.config.section import PathText, Section, parse_ds
from headrace.config.source import LandingSource, Source
from headrace.config.table import Table
from headrace.errors import UserError, nearest
from headrace.logs import holds_secret

LOOPBACK = "127.0.0.1"


#: Value of a property of an Iceberg REST catalog that names an environment variable. Iceberg looks it up itself
#: (RESTSessionCatalog, by EnvironmentUtil).
_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")


class Spark(Section):
    """The Spark application of each stage: a profile of conf/spark, and this pipeline's changes to it."""

    #: Profile of Spark's settings, a file of conf/spark: cpu or gpu.
    profile: str = "cpu"
    #: Spark's master URL.
    master: str = "local[*]"
    #: Heap of the driver, in Spark's notation.
    driver_memory: str = "3g"
    #: MiB of values and tables by key that the driver's Python process may hold where Spark merges their statistics
    #: (`scratch: own`, `features.engine: spark`). Beyond that, Spark assigns the codes and tasks make the tables. The
    #: libraries of the process take about 300 MiB more.
    driver_python_mib: int = Field(default=1024, ge=256)
    #: How tasks exchange files. `shared`: by one scratch folder, which all hosts see at one path; `own`: each host has
    #: its own scratch folder, so by Spark's shuffle or the lake; `auto`: `own` where executors are on other machines.
    scratch: Literal["auto", "shared", "own"] = "auto"
    #: Further properties, highest priority.
    properties: Mapping[str, str] = Field(default_factory=dict)

    @field_validator("properties")
    @classmethod
    def _no_secrets(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for key, text in value.items():
            is_catalog = key.startswith("spark.sql.catalog.")
            if not holds_secret(key, text) or (is_catalog and _VARIABLE.fullmatch(text)):
                continue
            catalog = "; a REST catalog of Iceberg takes `env:VARIABLE` as the value" if is_catalog else ""
            raise ValueError(
                f"{key}: a secret does not belong in a pipeline's file, on a command line or in a properties file. "
                f"Give it to Spark by the environment of driver and executors or by a credential provider "
                f"(spark.hadoop.hadoop.security.credential.provider.path){catalog}"
            )
        return value

    @property
    def own_scratch(self) -> bool:
        """Return whether no executor sees the scratch folder of another host."""
        return self.scratch == "own" or (self.scratch == "auto" and not self.is_local)

    @property
    def is_local(self) -> bool:
        """Return whether driver and executors are on this machine: `local[...]` and `local-cluster[...]`."""
        return self.master.startswith("local")


def spark_profile(name: str) -> Path:
    """Return the properties file of a Spark profile.

    Raises:
        UserError: there is none of that name.
    """
    path = installation() / "conf" / "spark" / f"{name}.conf"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.conf"))
        raise UserError(f"spark.profile: no Spark profile '{name}'{nearest(name, known)}; known: {', '.join(known)}")
    return path


def read_properties(path: Path) -> dict[str, str]:
    """Return a Spark properties file: `key value` a line, `#` comments."""
    props: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        parts = text.split(None, 1)
        if len(parts) != 2:
            raise UserError(f"{path}:{number}: write `key value`, not '{text}'")
        props[parts[0]] = parts[1].strip()
    return props


def with_slots(spark: Spark, ranks: int) -> Spark:
    """Return the session's settings with a task slot for each rank, where the master is this machine.

    Ranks must run at the same time. They are processes of their own, so more slots than cores are possible.
    """
    slots = local_slots(spark.master)
    return spark if slots is None else spark.model_copy(update={"master": f"local[{max(slots, ranks)}]"})


def local_slots(master: str) -> int | None:
    """Return how many tasks a local master runs at once, None for another master."""
    match = re.fullmatch(r"local(?:\[(\d+|\*)\])?", master)
    if match is None:
        return None
    return {None: 1, "*": os.cpu_count() or 1}.get(match[1]) or int(match[1])


def settings_agree(first: Spark, second: Spark) -> bool:
    """Return whether one application can run the stages with these settings.

    False with a plugin: RAPIDS keeps its GPU memory until the application ends.
    """
    if "spark.plugins" in (read_properties(spark_profile(first.profile)) | dict(first.properties)):
        return False
    # local[*] is local[2] on two cores.
    masters = [local_slots(conf.master) or conf.master for conf in (first, second)]
    return masters[0] == masters[1] and first.model_copy(update={"master": second.master}) == second


class Site(Section):
    """The site that shows users their published lists (`headrace simulate-site`); see headrace.lake.generate.site."""

    #: Number of items that a visitor is shown.
    length: int = Field(default=10, ge=1, le=1000)
    #: A visitor looks at the item of place r with probability r^-position_bias; 0: at all items.
    position_bias: float = Field(default=0.3, ge=0)
    #: Share of the visits with items that are drawn uniformly from all items.
    random: float = Field(default=0.2, ge=0, le=1)


class Generate(Section):
    """The click-log generator (`headrace generate`); see headrace.lake.generate for the model of the clicks."""

    #: Seed of the log.
    seed: int = 7
    #: The first day of the log. The data of a day do not depend on the days that are generated.
    start: str = "2026-01-01"
    #: Rows a day, before duplicates and malformed rows are added.
    rows_per_day: int = Field(default=60_000, ge=1, le=10**11)
    #: Users alive on the first day.
    users: int = Field(default=3_000, ge=2, le=10**9)
    #: Items alive on the first day.
    items: int = Field(default=800, ge=2, le=10**9)
    #: New users each day, as a share of the first day's number.
    new_users: float = Field(default=0.01, ge=0)
    #: New items each day, as a share of the first day's number.
    new_items: float = Field(default=0.01, ge=0)
    #: Zipf exponent of the popularity of users.
    user_zipf: float = Field(default=0.8, ge=0)
    #: Zipf exponent of the popularity of items.
    item_zipf: float = Field(default=1.05, ge=0)
    #: Share of clicks for which the intercept is set (a day's differs by its noise and the drift).
    base_rate: float = Field(default=0.2, gt=0, lt=1)
    #: Share of the clicks that are followed by a purchase, in a column `purchased`; null: no such column.
    purchase_rate: float | None = Field(default=None, gt=0, lt=1)
    #: Standard deviation of the latent taste's part of the logit; that of ids, countries and prices is about 1.5.
    taste: float = Field(default=0.3, ge=0)
    #: Standard deviation of a day's step of each coordinate (variance 1) of a user's latent taste.
    drift: float = Field(default=0.02, ge=0)
    #: Share of the values of optional columns that are missing.
    nulls: float = Field(default=0.02, ge=0, le=1)
    #: Share of rows that occur twice.
    duplicates: float = Field(default=0.005, ge=0, le=1)
    #: Share of rows that land up to `table.late_days` days late.
    late: float = Field(default=0.01, ge=0, le=1)
    #: Share of lines that cannot be parsed.
    malformed: float = Field(default=0.001, ge=0, le=1)
    #: Files a day.
    files_per_day: int = Field(default=4, ge=1)
    #: Formats of the files, in turn.
    formats: tuple[Literal["jsonl", "csv"], ...] = Field(default=("jsonl", "jsonl", "jsonl", "csv"), min_length=1)

    #: The simulated site, for `headrace simulate-site` alone.
    site: Site = Site()

    @field_validator("start", mode="before")
    @classmethod
    def _start_is_a_date(cls, value: Any) -> Any:
        # YAML reads 2026-01-01 as a date.
        try:
            return parse_ds(str(value))
        except UserError as e:
            raise ValueError(str(e)) from None  # so that the message names the key


class DriftColumn(Section):
    """Limits of one column; None: the section's."""

    #: Population stability index.
    max_psi: float | None = Field(default=None, ge=0)
    #: Largest change of the share of rows without a value.
    max_missing_change: float | None = Field(default=None, ge=0, le=1)
    #: Largest share of today's values that are out of vocabulary.
    max_oov_rate: float | None = Field(default=None, ge=0, le=1)
    #: ignore: counted, never judged.
    action: Literal["warn", "stop", "ignore"] | None = None


class Drift(Section):
    """Limits of drift of the newest rows (split `valid`) against the training range, and the action beyond them.

    With this section the features stage keeps statistics of every day in a Delta table, which the stage `drift` judges.
    """

    #: Population stability index of a column or a feature; None: not checked. 0.1: a change, 0.25: another population.
    max_psi: float | None = Field(default=0.25, ge=0)
    #: Largest change of the share of rows without a value.
    max_missing_change: float | None = Field(default=0.1, ge=0, le=1)
    #: Largest share of today's values that are out of vocabulary.
    max_oov_rate: float | None = Field(default=0.3, ge=0, le=1)
    #: warn: a line in the report. stop: the day ends there, before training.
    action: Literal["warn", "stop"] = "warn"
    #: Other limits by name of a column or a feature; they apply to both where both have the name.
    columns: Mapping[str, DriftColumn] = Field(default_factory=dict)
    #: Least number of values on both sides for a limit of PSI, which is large by chance for few values.
    min_values: int = Field(default=1_000, ge=1)
    #: A number's bins are about these quantiles of the training range; a category's are its most frequent values.
    quantiles: int = Field(default=10, ge=2, le=1_000)
    #: A category's most frequent values that are counted one by one.
    top_values: int = Field(default=20, ge=1, le=10_000)

    def check_names(self, names: Sequence[str]) -> None:
        """Check that limits are for columns that are counted.

        Args:
            names: of the features and of the columns that they are made of.

        Raises:
            UserError: a limit is for a column that is not there.
        """
        for name in self.columns:
            if name not in names:
                raise UserError(
                    f"drift.columns: '{name}' is neither a feature nor a column that one is made of"
                    f"{nearest(name, names)} (there are: {', '.join(names)})"
                )

    def limits(self, column: str) -> DriftColumn:
        """Return the limits of a column or feature."""
        limits = self.columns.get(column, DriftColumn())
        return DriftColumn(
            **{f: getattr(self if getattr(limits, f) is None else limits, f) for f in DriftColumn.model_fields}
        )


class OpenLineage(Section):
    """Events of each stage's run to a receiver that speaks OpenLineage."""

    #: Namespace of the pipelines' jobs; the variable OPENLINEAGE_NAMESPACE takes precedence.
    namespace: str = Field(default="headrace", min_length=1)
    #: As in `openlineage.yml`: `{type: http, url: ...}`, `{type: file, log_file_path: ...}`. Secrets do not belong
    #: here: give them by variables (OPENLINEAGE_API_KEY, OPENLINEAGE__TRANSPORT__AUTH). Such variables, and that file,
    #: go before this.
    transport: Mapping[str, Any] = Field(default_factory=dict)
    #: Seconds for which the end of an application waits for events in flight.
    wait_seconds: float = Field(default=5, ge=0)

    @field_validator("transport")
    @classmethod
    def _no_secrets(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for key in _secret_keys(value):
            raise ValueError(
                f"{key}: a secret does not belong in a pipeline's file: give it by a variable of the environment "
                f"(OPENLINEAGE_API_KEY, OPENLINEAGE__TRANSPORT__AUTH)"
            )
        return value


class Observe(Section):
    """Receivers of lineage events and metrics. They change nothing that the stages write."""

    #: OpenLineage events of runs; without it they are sent where OpenLineage's own variables or file name a receiver.
    openlineage: OpenLineage | None = None
    #: A folder in which each pipeline has a file with its metrics (headrace_PIPELINE.prom), written anew by each
    #: stage: that of node_exporter's textfile collector.
    prometheus: PathText | None = None


def _secret_keys(value: Mapping[str, Any]) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _secret_keys(inner)
        elif holds_secret(str(key), inner):
            yield str(key)


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
