"""Tables by key that a turn of a fit made, for the next one: files that all hosts see."""

from __future__ import annotations

from headrace.features.vocabulary.keyed_tables import FileKeyedTable
from headrace.features.workflow.saved import table_file
from headrace.storage import Location, local


def hand_on(table: FileKeyedTable, folder: Location, name: str) -> Location:
    """Put a table that the driver does not hold where a saved workflow has it (`workflow.saved.table_file`).

    Args:
        table: its file is this host's.
        folder: which all tasks see.
        name: `CHAIN.STEP.NAME`.

    Returns:
        The file.
    """
    file = table_file(folder, name)
    file.copy_from(local(table.path))
    return file
