"""One source of a pipeline as `ingest` loads it: its declaration, and the two tables that it becomes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from headrace.config import LandingSource, Source, Table, TableSource, id_columns
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.landing.files import file_patterns
from headrace.lake.landing.load_history import LoadHistory
from headrace.lake.scratch import task_folder
from headrace.stage import Context
from headrace.storage import Location, StoreRefused, is_uri
from headrace.workspace import Workspace


@dataclass(frozen=True)
class SourceContext:
    """One source of a run. Sources know nothing of each other."""

    run: Context
    #: Of a named source; None: the main one, whose table is `events`.
    name: str | None
    source: Source
    table: Table

    @property
    def ws(self) -> Workspace:
        return self.run.ws

    @property
    def pipeline(self) -> str:
        return self.run.spec.pipeline

    @property
    def ds(self) -> str:
        return self.run.ds

    @property
    def key(self) -> str:
        """The key of the run."""
        return self.run.key

    @property
    def events(self) -> Location:
        """The Delta table of good rows."""
        return self.ws.events(self.pipeline, self.name)

    @property
    def quarantine(self) -> Location:
        """The Delta table of bad rows."""
        return self.ws.quarantine(self.pipeline, self.name)

    def staging(self) -> AbstractContextManager[Location]:
        """Give a folder for rows on their way, gone at the end (a killed run's goes before)."""
        return task_folder(self.run, "ingest", self.name)

    @property
    def forgotten(self) -> ForgottenValues | None:
        """Values of `headrace forget` that are of this source's columns; None: there are none."""
        values = ForgottenValues.load(self.ws.forgotten_values(self.pipeline))
        return None if values is None else values.restricted_to([c.name for c in self.table.columns])

    @property
    def ids(self) -> frozenset[str]:
        """The declared text columns whose values are ids."""
        return id_columns(self.run.spec)[self.name]

    @property
    def table_source(self) -> TableSource | None:
        """The source, where it is a table."""
        return self.source if isinstance(self.source, TableSource) else None

    @property
    def landing_source(self) -> LandingSource:
        """The source, where it is landing files.

        Raises:
            UserError: it is a table.
        """
        if isinstance(self.source, LandingSource):
            return self.source
        raise UserError(f"{self.key_prefix}source: {self.source.title} is a table, and this is done with landing files")

    def input_name(self, ds: str) -> str:
        """Return a manifest's name of a landing day: the URI of its files, where the spec has one."""
        source = self.landing_source
        if is_uri(source.path):
            (pattern,) = file_patterns(source, self.ws, ds)
            return str(pattern)
        return f"landing/{self.pipeline}{'' if self.name is None else f'/{self.name}'}/{ds}"

    @property
    def key_prefix(self) -> str:
        """Prefix of `source` and `table` in a key of the spec, for messages."""
        return "" if self.name is None else f"sources.{self.name}."

    @contextmanager
    def naming_keys(self) -> Iterator[None]:
        """Raise what a store refuses as an error with the keys that name the place."""
        try:
            yield
        except StoreRefused as e:
            raise UserError(f"{self.key_prefix}source.path or source.complete: {e}") from None

    def history(self) -> LoadHistory:
        """Return the history of loads, as the table's log has it now."""
        return LoadHistory(DeltaLog(self.events))


def source_contexts(ctx: Context) -> Iterator[SourceContext]:
    """Yield the main source, then the named ones in the order of the spec."""
    spec = ctx.spec
    yield SourceContext(ctx, None, spec.source, spec.table)
    for name, named in spec.sources.items():
        yield SourceContext(ctx, name, named.source, named.table)
