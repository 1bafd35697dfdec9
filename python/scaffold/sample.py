"""Some rows of a table or of files, whatever their size, and the section `source` that reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal

import pyarrow as pa

from headrace.errors import UserError
from headrace.lake.sources.compression import COMPRESSIONS, without_ending
from headrace.scaffold.table_sample import TableRows, delta_rows, folder_rows, iceberg_rows
from headrace.scaffold.text_sample import csv_rows, json_rows, sample_bytes
from headrace.storage import Location, is_uri, local, local_folder, location_of
from headrace.storage.store import Info

Format = Literal["csv", "jsonl", "parquet", "orc", "avro"]

#: Ends of names, before those of compressed files.
_ENDINGS: Mapping[str, Format] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".data": "csv",
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".orc": "orc",
    ".avro": "avro",
}
_DATE = re.compile(r"(?<!\d)\d{4}-\d{2}-\d{2}(?!\d)")


@dataclass(frozen=True)
class Sample:
    """What was seen of the data."""

    #: Text columns as text: headrace.scaffold.columns says what is in them.
    rows: pa.Table
    #: The keys of the section `source`, in order.
    source: Mapping[str, Any]
    #: All rows; an estimate unless `whole`.
    total_rows: int
    #: Whether `rows` are all there are.
    whole: bool
    #: For a person: format, files, size.
    shown: str
    #: What a person should know about the source; a comment each.
    notes: tuple[str, ...] = ()
    #: A name for the pipeline.
    name: str = "pipeline"
    #: YYYY-MM-DD: the newest file's.
    modified: str = ""
    #: Columns that partition a table.
    partitions: tuple[str, ...] = field(default=())
    #: The newest day that a path with `{ds}` has files of.
    newest_day: str | None = None


def take_sample(text: str) -> Sample:
    """Look at a file, a folder, a glob, a Delta or an Iceberg table; of stores at tables and folders of data files.

    Raises:
        UserError: nothing is there, several formats are mixed, or it cannot be read.
    """
    if is_uri(text) and (place := location_of(text, "PATH")).scheme != "file":
        return _in_store(place.as_plain())
    path = local_folder(text, "PATH").expanduser().absolute()
    if (found := _table(local(path))) is not None:
        return found
    files = _files(path, text)
    format_ = _format(files, text)
    size = sum(f.stat().st_size for f in files)
    shown = f"{format_}, {len(files):,} file{'s' if len(files) > 1 else ''}, {_bytes(size)}"
    if format_ != "csv" and format_ != "jsonl":
        root = path if path.is_dir() else path.parent
        rows = folder_rows([local(f) for f in files], local(root), format_)
        return _of_table(local(path), format_, rows, _modified(files), shown)
    pattern, newest = _by_day(path, files)
    source: dict[str, Any] = {"format": format_, "path": pattern}
    chunks = sample_bytes(files)
    notes: tuple[str, ...] = ()
    if format_ == "csv":
        rows, options, notes = csv_rows(chunks, text)
        source |= options
    else:
        rows = json_rows(chunks, text)
    if not rows.num_rows:
        raise UserError(f"{text}: no rows to look at")
    read = sum(c.read_bytes for c in chunks)
    whole = all(c.whole for c in chunks) and len(chunks) == len(files)
    total = rows.num_rows if whole else round(rows.num_rows * size / max(read, 1))
    return Sample(rows, source, total, whole, shown, notes, _name(path), _modified(files), (), newest)


def _table(place: Location) -> Sample | None:
    """Of a Delta or Iceberg table; None where it is none."""
    if found := (place / "_delta_log").infos():
        return _of_table(place, "delta", delta_rows(place), _newest(found), "Delta table")
    if found := {name: info for name, info in (place / "metadata").infos().items() if name.endswith(".metadata.json")}:
        return _of_table(place, "iceberg", iceberg_rows(place), _newest(found), "Iceberg table")
    return None


def _in_store(place: Location) -> Sample:
    if (table := _table(place)) is not None:
        return table
    infos = {n: i for n, i in place.infos().items() if _ending(PurePosixPath(n)) is not None and not _hidden(n)}
    if not infos:
        raise UserError(f"{place}: there is no Delta or Iceberg table, and no file that ends in {', '.join(_ENDINGS)}")
    format_ = _format([PurePosixPath(name) for name in infos], str(place))
    if format_ == "csv" or format_ == "jsonl":
        raise UserError(f"{place}: of files of text `headrace init` looks at those on a disk alone: copy some to one")
    files = [place / name for name in sorted(infos)]
    size = sum(info.size for info in infos.values())
    shown = f"{format_}, {len(files):,} file{'s' if len(files) > 1 else ''}, {_bytes(size)}"
    return _of_table(place, format_, folder_rows(files, place, format_), _newest(infos), shown)


def _of_table(path: Location, format_: str, found: TableRows, modified: str, shown: str) -> Sample:
    source = {"format": format_, "path": str(path)}
    about = (found.notes, _name(path), modified, found.partitions)
    return Sample(found.rows, source, found.total, found.whole, shown, *about)


def _newest(files: Mapping[str, Info]) -> str:
    return _date(max(info.modified_ns for info in files.values()) / 1e9)


def _files(path: Path, text: str) -> list[Path]:
    if path.is_dir():
        found = [
            p
            for p in sorted(path.rglob("*"))
            if p.is_file() and _ending(p) is not None and not _hidden(p.relative_to(path))
        ]
        if not found:
            raise UserError(
                f"{text}: no Delta log, no metadata of Iceberg, and no files that end in {', '.join(_ENDINGS)} "
                f"({', '.join(COMPRESSIONS)} may follow)"
            )
        return found
    if path.is_file():
        return [path]
    found = [p for p in sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))) if p.is_file()]
    if not found:
        raise UserError(
            f"{text}: no such file or folder. A table of a catalog is read by `source: {{table: NAME}}`; for a look "
            f"at it here, give its folder"
        )
    return found


def _hidden(name: str | PurePath) -> bool:
    return any(part.startswith(("_", ".")) for part in PurePath(name).parts)


def _ending(file: PurePath) -> Format | None:
    name = without_ending(file.name.lower())
    return next((f for ending, f in _ENDINGS.items() if name.endswith(ending)), None)


def _format(files: Sequence[PurePath], text: str) -> Format:
    formats = {_ending(f) for f in files}
    if formats == {None} or not formats:
        raise UserError(
            f"{text}: its name ends in none of {', '.join(_ENDINGS)} ({', '.join(COMPRESSIONS)} may follow)"
        )
    if len(formats) > 1:
        names = ", ".join(sorted(str(f) for f in formats))
        raise UserError(f"{text}: files of several kinds ({names}); give a glob of those that are rows of one table")
    (format_,) = formats
    assert format_ is not None
    return format_


def _by_day(path: Path, files: Sequence[Path]) -> tuple[str, str | None]:
    """(the glob of section `source`, the newest day where names have days)."""
    if len(files) > 1 or path.is_dir():
        days = [_DATE.findall(str(f)) for f in files]
        if all(len(set(d)) == 1 for d in days):
            patterns = {_DATE.sub("{ds}", str(f)) for f in files}
            newest = max(d[0] for d in days)
            return _common(patterns), newest
    if path.is_dir():
        return _common({str(f) for f in files}), None
    return str(path), None


def _common(paths: set[str]) -> str:
    """One glob for paths that differ in their names."""
    if len(paths) == 1:
        return next(iter(paths))
    parts = [Path(p).parts for p in paths]
    if len({len(p) for p in parts}) > 1:
        shortest = min(len(p) for p in parts)
        same = [a[0] for a in zip(*(p[: shortest - 1] for p in parts), strict=False) if len(set(a)) == 1]
        return str(Path(*same, "**", "*"))
    made = []
    for options in zip(*parts, strict=True):
        if len(set(options)) == 1:
            made.append(options[0])
            continue
        endings = {"".join(Path(o).suffixes) for o in options}
        kept = "{ds}*" if all(o.startswith("{ds}") for o in options) else "*"
        made.append(kept + (next(iter(endings)) if len(endings) == 1 else ""))
    return str(Path(*made))


def _name(path: Path | Location) -> str:
    """A pipeline's name from a path."""
    stem = path.name.split(".")[0] if not path.is_dir() else path.name
    name = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_")
    return name if re.match(r"[a-z]", name) else f"pipeline_{name}".rstrip("_")


def _modified(files: Sequence[Path]) -> str:
    return _date(max(f.stat().st_mtime for f in files))


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def _bytes(size: int) -> str:
    for unit in ("bytes", "KB", "MB"):
        if size < 1_000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size = size // 1_000 if size >= 1_000_000 else size / 1_000  # type: ignore[assignment]
    return f"{size:,.1f} GB"
