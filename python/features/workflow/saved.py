"""A fitted workflow in a folder: `workflow.json`, `vocabulary/NAME.parquet` (value, code), `table/NAME.parquet`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace import __version__
from headrace.config import Chain
from headrace.dataset.layout import column_bytes
from headrace.errors import UserError
from headrace.features.vocabulary.keyed_tables import KEY, FileKeyedTable, KeyedTable, MappedKeyedTable
from headrace.features.vocabulary.lookup import FileLookup, Lookup, MappedLookup
from headrace.features.vocabulary.table_writer import write_table
from headrace.schema import DatasetSchema, TableColumn
from headrace.storage import Location, StoreAway, local
from headrace.storage.once import made_once

#: Bytes of values, above which neither a vocabulary nor a keyed table is taken into memory: Arrow's texts have 2 GiB.
MOST_TEXT = 3 << 29
#: Vocabularies and keyed tables with more values, or with more bytes of them, are mapped where that is asked for: a
#: smaller one costs a process a few MB.
MAPPED_VALUES, MAPPED_TEXT = 100_000, 16 << 20


class SavedWorkflow(BaseModel):
    """`workflow.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = Field(default=1, ge=1, le=1)
    headrace: str
    columns: tuple[TableColumn, ...]
    label: str
    carried: tuple[str, ...]
    chains: tuple[Chain, ...]
    #: By chain, step and column.
    states: tuple[tuple[dict[str, dict[str, Any]], ...], ...]
    #: How many values each vocabulary has, and how many keys each keyed table.
    vocabularies: dict[str, int]
    tables: dict[str, int] = Field(default_factory=dict)
    dataset_schema: DatasetSchema


def file_of(folder: Location) -> Location:
    """Return `workflow.json` in the folder of a saved workflow."""
    return folder / "workflow.json"


def table_file(folder: Location, name: str) -> Location:
    """Return the file of a keyed table in a saved workflow."""
    return folder / "table" / f"{quote(name, safe='')}.parquet"


def vocabulary_file(folder: Location, name: str) -> Location:
    """Return the file of a vocabulary in a saved workflow."""
    return folder / "vocabulary" / f"{quote(name, safe='')}.parquet"


def write(
    folder: Location, saved: SavedWorkflow, vocabularies: Mapping[str, Lookup], tables: Mapping[str, KeyedTable]
) -> None:
    """Fill a folder; `workflow.json` comes last."""
    (folder / "vocabulary").make_dir()
    for name, keyed in tables.items():
        if isinstance(keyed, FileKeyedTable):
            table_file(folder, name).copy_from(local(keyed.path))
            continue
        with table_file(folder, name).new_file() as path:
            write_table(keyed.table, path, KEY)
    for name, vocabulary in vocabularies.items():
        if isinstance(vocabulary, FileLookup):
            vocabulary_file(folder, name).copy_from(local(vocabulary.path))
            continue
        with vocabulary_file(folder, name).new_file() as path:
            write_table(vocabulary.table, path, "value")
    file_of(folder).put_text(json.dumps(saved.model_dump(mode="json"), indent=1) + "\n")


def read(
    folder: Location, most_values: int | None = None, maps: Location | None = None
) -> tuple[SavedWorkflow, dict[str, Lookup], dict[str, KeyedTable]]:
    """Read what `write` wrote.

    Args:
        most_values: a vocabulary or keyed table with more values stays in its file; None: none does.
        maps: where large ones are kept as files that all processes of the host map (made where they are not there
            yet); of this workflow alone. None: all of them are in this process's memory.

    Raises:
        UserError: a file is missing or damaged.
    """
    path = file_of(folder)
    try:
        saved = SavedWorkflow.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise UserError(f"no saved workflow in {folder} (workflow.json is not there)") from None
    except (ValidationError, UnicodeDecodeError) as e:
        raise UserError(
            f"{path} is not a workflow that headrace {__version__} reads: {' '.join(str(e).split())[:300]}"
        ) from None
    vocabularies: dict[str, Lookup] = {}
    for name, rows in saved.vocabularies.items():
        file = vocabulary_file(folder, name)
        if most_values is not None and rows > most_values:
            vocabularies[name] = FileLookup(file.local_path())
            continue
        _check(file, rows, path)
        size = _text_bytes(file, "value")
        if maps is not None and (rows > MAPPED_VALUES or size > MAPPED_TEXT):
            write = partial(_write_mapped, file)
            vocabularies[name] = MappedLookup(made_once(maps / quote(name, safe=""), write))
        else:
            vocabularies[name] = FileLookup(file.local_path()) if size > MOST_TEXT else Lookup(_read(file))
    tables: dict[str, KeyedTable] = {}
    for name, rows in saved.tables.items():
        file = table_file(folder, name)
        _check_table(file, rows, path)
        size = _text_bytes(file, KEY)
        if most_values is not None and rows > most_values:
            tables[name] = FileKeyedTable(file.local_path())
        elif maps is not None and (rows > MAPPED_VALUES or size > MAPPED_TEXT):
            # No vocabulary's quoted name has this sign.
            write = partial(_write_mapped_table, file)
            tables[name] = MappedKeyedTable(made_once(maps / f"table={quote(name, safe='')}", write))
        elif size > MOST_TEXT:
            tables[name] = FileKeyedTable(file.local_path())
        else:
            tables[name] = KeyedTable(_read(file))
    return saved, vocabularies, tables


def whole_vocabularies(folder: Location) -> Iterator[tuple[str, pa.Table]]:
    """Yield (name, its table (value, code)) of the vocabularies in a folder; what is gone or damaged is passed over."""
    try:
        saved = SavedWorkflow.model_validate_json(file_of(folder).read_text())
    except StoreAway:
        raise
    except (OSError, ValueError):
        return
    for name, rows in saved.vocabularies.items():
        file = vocabulary_file(folder, name)
        try:
            _check(file, rows, file_of(folder))
            yield name, _read(file)
        except UserError:
            continue


def _check(file: Location, rows: int, said_by: Location) -> None:
    footer = _metadata(file)
    if footer.num_rows != rows or footer.schema.names != ["value", "code"]:
        raise UserError(f"{file} does not hold the {rows} values (value, code) that {said_by} says")


def _check_table(file: Location, rows: int, said_by: Location) -> None:
    footer = _metadata(file)
    if footer.num_rows != rows or KEY not in footer.schema.names:
        raise UserError(f"{file} does not hold the {rows} keys that {said_by} says")


def _text_bytes(file: Location, column: str) -> int:
    """Return bytes of the values of a column, none of which is twice."""
    return sum(column_bytes(_metadata(file), column))


def _metadata(file: Location) -> pq.FileMetaData:
    try:
        return pq.read_metadata(file)
    except StoreAway:
        raise
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{file} cannot be read: {' '.join(str(e).split())[:300]}") from None


def _write_mapped_table(file: Location, folder: Location) -> None:
    MappedKeyedTable.write_file(file.local_path(), folder)


def _write_mapped(file: Location, folder: Location) -> None:
    MappedLookup.write_file(file.local_path(), folder)


def _read(file: Location) -> pa.Table:
    try:
        return pq.read_table(file)
    except StoreAway:
        raise
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{file} cannot be read: {' '.join(str(e).split())[:300]}") from None


def copy_table(table: FileKeyedTable, folder: Location, name: str) -> Location:
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
