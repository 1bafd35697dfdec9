"""The stage `ingest`: landing files to the lake's Delta table, one commit a landing day.

A day is loaded in this order, so that a kill between any two steps is healed by running again:

1. its files are read once, typed and judged, into a staging folder; expectations can stop the day here;
2. bad rows replace the day's partition of the quarantine table;
3. good rows replace the day's partition of the events table. The same commit says which files it came from, so the
   day is loaded if and only if its rows are there.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from functools import reduce
from pathlib import Path
from typing import Any

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Spec
from headrace.errors import UserError
from headrace.lake import dedup, expectations, landing, ledger
from headrace.lake.cast import BAD, GOOD, check_table, quoted, typed
from headrace.lake.landing import Day
from headrace.lake.lines import FileDamaged, Reading, damage_named, one_file_a_task, settings
from headrace.lake.log import DeltaLog
from headrace.lake.profile import FileProfile, profiles
from headrace.lake.session import session
from headrace.lake.sources import Adapter, adapter
from headrace.manifest import Input, Manifest, Output, fingerprint
from headrace.stage import Context, Result

_LOG = logging.getLogger("headrace.lake")

#: Landing bytes that are read and staged together. More days than that are loaded in several goes.
CHUNK_BYTES = 256 << 20
#: The ledger is in the log, so the log is kept.
_LOG_RETENTION = "interval 3650 days"
#: Delta leaves out a commit that changes nothing, and with it the ledger's entry.
_SKIP_EMPTY = "spark.databricks.delta.skipRecordingEmptyCommits"
_QUARANTINE = "_source_file string, _source_line bigint, _raw string, _reason string, ds string"
#: Characters that Delta refuses in a column's name (without column mapping).
_NOT_IN_NAMES = set(" ,;{}()\n\t=")


class Ingest:
    """Load the landing files of a day, and of earlier days that are not loaded, exactly once."""

    name = "ingest"
    version = 1
    needs: tuple[str, ...] = ()

    def applies(self, spec: Spec) -> bool:
        """Every pipeline has a source."""
        return True

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The sections `source` and `table`."""
        return {"source": spec.source.model_dump(mode="json"), "table": spec.table.model_dump(mode="json")}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """The landing files of each day covered, as one input a day. UserError where the run's own day has none."""
        found = landing.days(ctx.spec.source, ctx.ws, ctx.ds)
        return tuple(
            Input(kind="landing", name=f"landing/{ctx.spec.pipeline}/{day.ds}", version=day.version) for day in found
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Both tables still have their version, and the events of the days loaded are on disk."""
        for output in manifest.outputs:
            log = DeltaLog(ctx.ws.home / output.name)
            version = int(output.version)
            if not log.has(version):
                return f"version {version} of {output.name} is gone"
            if output.kind != "delta":
                continue
            there = ledger.rows_there(log, version, set(manifest.facts["days"]))
            if there is None or sum(there.values()) != output.rows:
                return f"rows of version {version} of {output.name} are gone"
        return None

    def run(self, ctx: Context) -> Result:
        """See the module.

        Raises:
            UserError: files that are damaged, changed while they were read, or lack a required column; a day that is
                empty or breaks an expectation; refused columns; a declaration that does not fit the table. Days before
                that one are loaded.
        """
        check_table(ctx.spec.table)
        load = _Load.prepare(ctx)
        if load.days:
            with session(ctx.spec.spark, ctx.ws, f"ingest {ctx.spec.pipeline} {ctx.ds}") as spark:
                load.check_columns()
                load.create_tables(spark)
                for chunk in _chunks(load.days):
                    load.load(spark, chunk)
        else:
            _LOG.info("all landing files up to %s are loaded already", ctx.ds)
        return load.result()


@dataclass
class _Load:
    """One run's work."""

    ctx: Context
    declared: str
    judged: str
    #: To load, oldest first.
    days: list[Day]
    entries: dict[str, ledger.Entry]

    @staticmethod
    def prepare(ctx: Context) -> _Load:
        """Look what there is and what is loaded."""
        spec = ctx.spec
        log = DeltaLog(ctx.ws.table(spec.pipeline, "events"))
        entries = ledger.read(log)
        covered = landing.days(spec.source, ctx.ws, ctx.ds)
        declared, judged = _declared(spec), fingerprint(spec.table.model_dump(mode="json"))
        todo, owed = ledger.pending(covered, entries, declared, judged, log)
        names = {d.ds for d in todo}
        if spec.source.daily and spec.table.keys:
            owed |= {x for d in names if d in entries for x in _after(d, entries, spec.table.late_days)} - names
        for ds in sorted(owed):
            day = landing.find(spec.source, ctx.ws, ds)
            if day.files:
                todo.append(day)
            else:
                _LOG.warning(
                    "%s should be loaded again after an earlier day changed, but its landing files are gone", ds
                )
        return _Load(ctx, declared, judged, sorted(todo, key=lambda d: d.ds), entries)

    @property
    def events(self) -> Path:
        return self.ctx.ws.table(self.ctx.spec.pipeline, "events")

    @property
    def quarantine(self) -> Path:
        return self.ctx.ws.table(self.ctx.spec.pipeline, "quarantine")

    def check_columns(self) -> None:
        """Raises UserError where the table has a declared column as another type."""
        there = {name.lower(): (name, type_) for name, type_ in DeltaLog(self.events).columns().items()}
        for c in self.ctx.spec.table.columns:
            if c.name.lower() not in there:
                continue
            name, type_ = there[c.name.lower()]
            if name != c.name or not _same_type(type_, c.type):
                raise UserError(
                    f"table.columns declares '{c.name}' as {c.type}, but {self.events} has '{name}' as {type_}; give "
                    f"the column another name, or the pipeline, or move that table away to load everything again"
                )

    def create_tables(self, spark: SparkSession) -> None:
        """Make both tables, empty, where they are not there."""
        columns = self.ctx.spec.table.spark_schema
        for path, ddl in (
            (self.quarantine, _QUARANTINE),
            (self.events, f"{columns}, _source_file string, _source_line bigint, ds string"),
        ):
            if DeltaLog(path).version is None:
                schema = spark.createDataFrame([], ddl).schema
                (
                    DeltaTable.createIfNotExists(spark)
                    .location(str(path))
                    .addColumns(schema)
                    .partitionedBy("ds")
                    .property("delta.logRetentionDuration", _LOG_RETENTION)
                    .property("delta.enableDeletionVectors", "false")
                    .property("delta.enableChangeDataFeed", "true")
                    .execute()
                )

    def load(self, spark: SparkSession, chunk: list[Day]) -> None:
        """Read some days together, commit them one by one."""
        spec = self.ctx.spec
        reading = Reading(spark, spec.source, spec.table, tuple(chunk))
        try:
            self._load(spark, reading, chunk)
        except FileDamaged as e:
            damaged = e
        else:
            return
        before = [day for day in chunk if day.ds < damaged.ds]
        if before:
            self.load(spark, before)
        raise UserError(
            f"landing file {damaged.file.name} cannot be read: {damaged.cause}. Nothing of {damaged.ds} was loaded; "
            f"deliver the file again"
        )

    def _load(self, spark: SparkSession, reading: Reading, chunk: list[Day]) -> None:
        spec, tick = self.ctx.spec, time.perf_counter()
        with self._staging() as staging:
            rows = self._staged(spark, reading, staging / "rows")
            found = profiles(rows, spec.table, reading)
            repeats: dict[str, int] = {}
            dropped = self._duplicates(spark, rows, chunk)
            if dropped is not None:
                dropped = _stage(spark, dropped, staging / "dropped")
                repeats = {r["_ds"]: r["count"] for r in dropped.groupBy("_ds").count().collect()}
            read = sum(f.read for f in found)
            seconds = time.perf_counter() - tick
            _LOG.info(
                "read %s rows of %d files in %.1f s (%s rows/s)",
                f"{read:,}",
                len(found),
                seconds,
                f"{read / max(seconds, 1e-9):,.0f}",
            )
            judged, stopped = self._judged_days(chunk, found, repeats)
            if judged:
                any_bad = any(entry.rows["quarantined"] for _, entry, _ in judged)
                self._quarantine(rows, [day for day, _, _ in judged], any_bad)
            for day, entry, extra in judged:
                self._commit(rows, dropped if repeats.get(day.ds) else None, day, entry, extra)
            if stopped is not None:
                raise stopped

    def _judged_days(
        self, chunk: list[Day], found: list[FileProfile], repeats: Mapping[str, int]
    ) -> tuple[list[tuple[Day, ledger.Entry, list[str]]], UserError | None]:
        """(day, ledger's entry, undeclared columns) of the days up to the first that may not be loaded, and why not."""
        judged: list[tuple[Day, ledger.Entry, list[str]]] = []
        there = DeltaLog(self.events).columns()
        for day in chunk:
            try:
                files = [f for f in found if f.ds == day.ds]
                entry, extra = self._judged(day, files, repeats.get(day.ds, 0), there)
            except UserError as e:
                return judged, e
            judged.append((day, entry, extra))
            there |= dict.fromkeys(extra, "string")
        return judged, None

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        """A folder for rows on their way, gone at the end (a killed run's goes here)."""
        folder = self.ctx.ws.spark_local / "ingest" / self.ctx.spec.pipeline
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def _staged(self, spark: SparkSession, reading: Reading, folder: Path) -> DataFrame:
        """The rows of some days, judged, as Parquet files: one a landing file.

        Not Spark's cache: a plan that reads files is a short one, and this one is planned again for each commit.
        """
        chosen = _adapter(reading)
        with one_file_a_task(spark), damage_named(reading):
            frames = [typed(frame, reading.table) for frame in chosen.parse(reading)]
            rows = _stage(spark, reduce(DataFrame.unionByName, frames), folder / "lines")
        return rows if chosen.finish is None else _stage(spark, chosen.finish(rows, reading), folder / "finished")

    def _duplicates(self, spark: SparkSession, rows: DataFrame, chunk: list[Day]) -> DataFrame | None:
        spec = self.ctx.spec
        if not spec.table.keys:
            return None
        there = None
        if spec.source.daily:
            late = timedelta(days=spec.table.late_days)
            low, high = date.fromisoformat(chunk[0].ds) - late, date.fromisoformat(chunk[-1].ds) + late
            near = spark.read.format("delta").load(str(self.events))
            near = near.where(F.col("ds").between(low.isoformat(), high.isoformat()))
            # Days that are loaded and stay: those still to be loaded again are compared when their turn comes.
            coming = {d.ds for d in self.days if d.ds >= chunk[0].ds}
            near = near.where(~F.col("ds").isin(sorted(coming)))
            there = near.select(*(F.col(k) for k in quoted(spec.table.keys)), "ds")
        return dedup.duplicates(rows, there, spec.table)

    def _quarantine(self, rows: DataFrame, days: list[Day], any_bad: bool) -> None:
        """Bad rows of all the days, in one commit: what a kill before the events' commits leaves is replaced again."""
        for day in days:
            _check_unchanged(day)
        names = [day.ds for day in days]
        if not any_bad and not _holds(self.quarantine, names):
            return
        bad = rows.where((F.col("_state") == BAD) & F.col("_ds").isin(names))
        line = F.col("_line").alias("_source_line")
        bad = bad.select("_source_file", line, "_raw", "_reason", F.col("_ds").alias("ds"))
        _replace(bad, self.quarantine, names, "")

    def _commit(
        self, rows: DataFrame, dropped: DataFrame | None, day: Day, entry: ledger.Entry, extra: list[str]
    ) -> None:
        tick = time.perf_counter()
        _check_unchanged(day)
        good = rows.where((F.col("_ds") == day.ds) & (F.col("_state") == GOOD))
        if dropped is not None:
            good = good.join(
                dropped.where(F.col("_ds") == day.ds).drop("_ds"), ["_file", "_line", "_copy"], "left_anti"
            )
        columns = [*quoted([c.name for c in self.ctx.spec.table.columns])]
        good = good.select(
            *columns,
            *(F.try_element_at("_extra", F.lit(name)).alias(name) for name in extra),
            "_source_file",
            F.col("_line").alias("_source_line"),
            F.col("_ds").alias("ds"),
        )
        _replace(good, self.events, [day.ds], entry.metadata())
        counts = ", ".join(f"{name} {n:,}" for name, n in entry.rows.items())
        _LOG.info("%s: %s; committed in %.1f s", day.ds, counts, time.perf_counter() - tick)

    def _judged(
        self, day: Day, files: list[FileProfile], repeats: int, there: Mapping[str, str]
    ) -> tuple[ledger.Entry, list[str]]:
        """The ledger's entry, and the undeclared columns that the table has or gets; raises what stops the day."""
        table = self.ctx.spec.table
        read, expanded = sum(f.read for f in files), sum(f.expanded for f in files)
        if not read and table.expectations.min_rows:
            globs = " nor ".join(landing.patterns(self.ctx.spec.source, self.ctx.ws, day.ds))
            raise UserError(
                f"the {len(files)} landing files of {day.ds} hold no rows ({globs}); deliver them again, or set "
                f"table.expectations.min_rows to 0"
            )
        declared = {c.name for c in table.columns}
        accepted = frozenset(n for n in there if n not in declared and n != "ds" and not n.startswith("_"))
        found = expectations.drift(files, table, accepted)
        for d in found:
            _LOG.warning("%s: column '%s' is %s: %s", d.ds, d.column, d.change, d.detail)
        expectations.refuse(files, table, found)
        new = sorted(accepted)
        if table.new_columns == "accept":
            new += _acceptable([d.column for d in found if d.change == "new"], there)
        reasons = _summed(f.reasons for f in files)
        checks = expectations.check(day.ds, files, repeats, table.expectations)
        expectations.enforce(checks, found, reasons, repeats)
        good, bad = sum(f.good for f in files), sum(f.bad for f in files)
        rows = {"read": read, "kept": good - repeats, "quarantined": bad, "duplicates": repeats}
        if expanded:
            rows["expanded"] = expanded
        then = _after(day.ds, self.entries, table.late_days) if day.ds in self.entries and table.keys else []
        entry = ledger.Entry(
            ds=day.ds,
            key=self.ctx.key,
            declared=self.declared,
            judged=self.judged,
            files=[list(f.identity) for f in day.files],
            rows=rows,
            then=then if self.ctx.spec.source.daily else [],
            drift=expectations.as_facts(found),
            expectations=expectations.as_facts(checks),
            reasons=reasons,
        )
        return entry, new

    def result(self) -> Result:
        """What this run, its killed attempts included, has loaded; else what the day was loaded with."""
        ws = self.ctx.ws
        entries = ledger.read(DeltaLog(self.events))
        mine = [entries[ds] for ds in sorted(entries) if entries[ds].key == self.ctx.key] or [entries[self.ctx.ds]]
        rows = _summed(e.rows for e in mine)
        order = ("read", "kept", "quarantined", "duplicates", "expanded")
        return Result(
            outputs=tuple(
                Output(
                    kind=kind, name=str(path.relative_to(ws.home)), version=str(DeltaLog(path).version), rows=rows[n]
                )
                for kind, path, n in (("delta", self.events, "kept"), ("quarantine", self.quarantine, "quarantined"))
            ),
            rows={name: rows[name] for name in order if name in rows},
            facts={
                "days": [e.ds for e in mine],
                "drift": [d for e in mine for d in e.drift],
                "expectations": [c for e in mine for c in e.expectations],
                "reasons": _summed(e.reasons for e in mine),
            },
        )


def _adapter(reading: Reading) -> Adapter:
    chosen = adapter(reading.source.format)
    declared = {c.name for c in reading.table.columns}
    for name in chosen.columns:
        if name not in declared:
            raise UserError(f"source.format '{reading.source.format}' needs column '{name}' in table.columns")
    return chosen


def _stage(spark: SparkSession, frame: DataFrame, folder: Path) -> DataFrame:
    frame.write.parquet(str(folder))
    return spark.read.schema(frame.schema).parquet(str(folder))


def _check_unchanged(day: Day) -> None:
    for file in day.files:
        if not file.unchanged():
            raise UserError(
                f"landing file {file.name} changed while it was read; nothing of {day.ds} was loaded. Run again when "
                f"it is complete"
            )


def _holds(table: Path, days: list[str]) -> bool:
    """Whether a table has, or may have, rows of the days."""
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else []
    return files is None or any(f.partition.get("ds") in days for f in files)


def _replace(frame: DataFrame, path: Path, days: list[str], metadata: str) -> None:
    """Make the rows those of the days, in one commit: also where there are none, and were none."""
    shown = ", ".join(f"'{ds}'" for ds in days)
    with settings(frame.sparkSession, {_SKIP_EMPTY: "false"}):
        (
            frame.write.format("delta")
            .mode("overwrite")
            .option("replaceWhere", f"ds IN ({shown})")
            .option("mergeSchema", "true")
            .option("userMetadata", metadata)
            .save(str(path))
        )


def _chunks(days: list[Day]) -> Iterable[list[Day]]:
    chunk: list[Day] = []
    for day in days:
        if chunk and sum(d.size for d in chunk) + day.size > CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(day)
    if chunk:
        yield chunk


def _declared(spec: Spec) -> str:
    """All that decides what becomes of a row; not what only stops a day."""
    table = spec.table.model_dump(mode="json")
    table["expectations"] = {"ranges": table["expectations"]["ranges"]}
    source = spec.source.model_dump(mode="json", exclude={"path", "catch_up_days"})
    return fingerprint({"version": Ingest.version, "table": table, "source": source})


def _after(ds: str, entries: Mapping[str, ledger.Entry], late_days: int) -> list[str]:
    """Loaded days within `late_days` after `ds`."""
    first = date.fromisoformat(ds)
    near = ((first + timedelta(days=k)).isoformat() for k in range(1, late_days + 1))
    return [d for d in near if d in entries]


def _acceptable(names: list[str], there: Mapping[str, str]) -> list[str]:
    known = {n.lower() for n in there}
    for name in names:
        if not name or name.startswith("_") or name.lower() in known or set(name) & _NOT_IN_NAMES:
            raise UserError(
                f"new column '{name}' cannot be added to the table: its name is empty, reserved, has a character that "
                f"Delta refuses, or differs from another column's in case alone. Set table.new_columns to report"
            )
        known.add(name.lower())
    return names


def _same_type(there: str, declared: str) -> bool:
    """Delta's spelling of a type against the declaration's."""
    simple = {"integer": "int", "long": "bigint"}
    if declared.startswith("array<"):
        return f'"elementType": "{_delta_name(declared[6:-1])}"' in there
    return simple.get(there, there) == declared


def _delta_name(type_: str) -> str:
    return {"int": "integer", "bigint": "long"}.get(type_, type_)


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, n in one.items():
            total[name] = total.get(name, 0) + n
    return total
