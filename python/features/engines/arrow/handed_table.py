"""A table by key for the tasks of a fit's next turn: in a file that all hosts see, of which each host maps a copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import quote

from headrace.features.engines.arrow.host_folder import HostFolder, of_run_here
from headrace.features.vocabulary.keyed_tables import KeyedTable, MappedKeyedTable
from headrace.storage import Location
from headrace.storage.once import made_once


@dataclass(frozen=True)
class HandedTable:
    """Where it is. Pickled into tasks."""

    file: Location
    #: Which of a run's tables it is: so the copies are called, whose files may be called alike in two turns.
    name: str
    #: Where the copies are: a folder that all tasks see, or each host's own.
    host: Location | HostFolder

    def open(self) -> KeyedTable:
        """The table, whose columns this host's workers map: of a key 16 bytes are in memory while they are made."""
        return _mapped(self.file, of_run_here(self.host) / "handed" / quote(self.name, safe=""))


@lru_cache(maxsize=16)
def _mapped(file: Location, folder: Location) -> KeyedTable:
    return MappedKeyedTable(made_once(folder, partial(_write, file)))


def _write(file: Location, folder: Location) -> None:
    MappedKeyedTable.write_file(file.local_path(), folder)
