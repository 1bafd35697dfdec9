"""Some rows of a table or of files, whatever their size, and the section `source` that reads them."""

from __future__ import annotations

import glob
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

import pyarrow as pa

from headrace.cli.scaffold.spelled import NumberMarks
from headrace.cli.scaffold.table_sample import TableSample, delta_rows, folder_rows, iceberg_rows
from headrace.cli.scaffold.text_chunks import UTF_16, sample_bytes
from headrace.cli.scaffold.text_sample import csv_rows, json_rows
from headrace.errors import UserError, nearest
from headrace.lake.landing.compression import COMPRESSIONS, DamagedError, ending, open_plain, without_ending
from headrace.storage import Location, is_uri, local, local_folder, location_of
from headrace.storage.store import Info

Format = Literal["csv", "jsonl", "parquet", "orc", "avro"]
#: What a path is that names files.
Kind = Literal["folder", "file", "glob"]

#: Ends of names, before those of compressed files.
_ENDINGS: Mapping[str, Format] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".data": "csv",
    ".dat": "csv",
    ".inter": "csv",
    ".svm": "csv",
    ".libsvm": "csv",
    ".libfm": "csv",
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".orc": "orc",
    ".avro": "avro",
}
_DATE = re.compile(r"(?<!\d)\d{4}-\d{2}-\d{2}(?!\d)")
#: First bytes of files that are no text, by the format that they say; the most that a look at the content reads.
_MAGIC: Mapping[bytes, Format] = {b"PAR1": "parquet", b"ORC": "orc", b"Obj\x01": "avro"}
_LOOK = 1 << 12
#: First bytes of files that cannot be read as they are -> what they are, and what to do with FILE.
_UNREADABLE: Mapping[bytes, str] = {
    b"PK\x03\x04": "a zip archive, such as Excel's .xlsx: unpack it, or save the sheet as CSV",
    b"\x1f\x8b": "compressed by gzip: mv FILE FILE.gz && headrace init FILE.gz",
    b"BZh91AY&SY": "compressed by bzip2: mv FILE FILE.bz2 && headrace init FILE.bz2",
    b"\x28\xb5\x2f\xfd": "compressed by Zstandard: mv FILE FILE.zst && headrace init FILE.zst",
    b"\xfd7zXZ\x00": "compressed by xz: xz -dc FILE | gzip > FILE.gz && headrace init FILE.gz",
    b"SQLite format 3\x00": "an SQLite database: sqlite3 -header -csv FILE 'SELECT * FROM TABLE' > table.csv",
    b"\x89HDF": "an HDF5 file: pandas.read_hdf(FILE).to_parquet('events/part.parquet')",
    b"\x80\x04\x95": "a pickle of Python: pandas.read_pickle(FILE).to_parquet('events/part.parquet')",
}
#: Names of files that describe the data beside them.
_PROSE = frozenset({"readme", "license", "licence", "copying", "notice", "changelog", "citation", "authors"})
#: Characters of a pipeline's name: PostgreSQL's names have 63, and `_scores` and more follow.
_NAME_LENGTH = 40
#: How the path of a file below its table's begins where each day has files of its own.
_DAY_FOLDERS: Mapping[str, str] = {
    "{ds:%Y/%m/%d}": r"(\d{4})/(\d{2})/(\d{2})/.*",
    "{ds}": r"(\d{4})-(\d{2})-(\d{2})[/._].*",
    "{ds:%Y%m%d}": r"(\d{4})(\d{2})(\d{2})[/._].*",
}


@dataclass(frozen=True)
class Sample:
    """Sample of the data, and what was seen of the rest."""

    #: Text columns as text: headrace.cli.scaffold.columns says what is in them.
    rows: pa.Table
    #: The keys of the section `source`, in order.
    source: Mapping[str, Any]
    #: All rows; an estimate unless `is_complete`.
    total_rows: int
    #: Whether `rows` are all there are.
    is_complete: bool
    #: For a person: format, files, size.
    description: str
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
    #: Lines looked at that are no rows: of another number of fields, or no JSON object. They are not among `rows`.
    unread_lines: int = 0
    #: Of numbers in text.
    marks: NumberMarks = field(default_factory=NumberMarks)


def take_sample(text: str, requested: str | None = None) -> Sample:
    """Look at a file, a folder, a glob, a Delta or an Iceberg table, on a disk or in a store.

    Args:
        text: its path.
        requested: the format of files; None: by their names and content.

    Raises:
        UserError: nothing is there, several formats are mixed, or it cannot be read.
    """
    if requested is not None and requested not in get_args(Format):
        formats = ", ".join(get_args(Format))
        raise UserError(f"--format {requested}: formats of files: {formats}{nearest(requested, get_args(Format))}")
    if is_uri(text):
        path = location_of(text, "PATH", glob=True).as_plain()
    else:
        path = local(local_folder(text, "PATH").expanduser())
    if (table := _table(path)) is not None:
        return table
    files, kind = _files(path, text, any_name=requested is not None)
    format_ = next((f for f in get_args(Format) if f == requested), None) or _format(files, kind, text)
    size = sum(info.size for info in files.values())
    description = f"{format_}, {len(files):,} file{'s' if len(files) > 1 else ''}, {_bytes(size)}"
    if format_ != "csv" and format_ != "jsonl":
        if kind == "file" and _is_alone(path):
            path, kind = path.parent, "folder"
        if kind != "folder":
            raise UserError(f"{text}: files of {format_} are a table with all others of their folder: give the folder")
        sample = folder_rows(list(files), path, format_)
        return _of_table(path, format_, sample, _modified(files.values()), description, _day_folders(path, files))
    pattern, newest = _by_day(path, list(files), kind)
    if kind == "folder":
        _check_glob(path, pattern, files, text)
    source: dict[str, Any] = {"format": format_, "path": str(pattern)}
    chunks = sample_bytes(files)
    for chunk in chunks:
        if chunk.head.startswith(UTF_16):
            chunk.check_encoding(text)
    marks = NumberMarks()
    if format_ == "csv":
        csv = csv_rows(chunks, text)
        rows, notes, unread, marks = csv.rows, csv.notes, csv.unread_lines, csv.marks
        source |= csv.options
    else:
        rows, notes, unread = json_rows(chunks, text)
    if not rows.num_rows:
        raise UserError(f"{text}: no rows to look at")
    read = sum(c.read_bytes for c in chunks)
    is_complete = all(c.is_complete for c in chunks) and len(chunks) == len(files)
    total = rows.num_rows if is_complete else round(rows.num_rows * size / max(read, 1))
    name = _name(path.name if kind == "folder" else _stem(path))
    return Sample(
        rows, source, total, is_complete, description, notes, name, _modified(files.values()), (), newest, unread, marks
    )


def _table(place: Location) -> Sample | None:
    """Sample a Delta or Iceberg table; None where the place is none."""
    if log_files := (place / "_delta_log").infos():
        return _of_table(place, "delta", delta_rows(place), _modified(log_files.values()), "Delta table")
    if log_files := {
        name: info for name, info in (place / "metadata").infos().items() if name.endswith(".metadata.json")
    }:
        return _of_table(place, "iceberg", iceberg_rows(place), _modified(log_files.values()), "Iceberg table")
    return None


def _of_table(
    path: Location,
    format_: str,
    table: TableSample,
    modified: str,
    description: str,
    days: tuple[str, str] | None = None,
) -> Sample:
    """Return the sample of a table; `days`: how paths of files begin, where with a day, and the newest day."""
    source: dict[str, Any] = {"format": format_, "path": str(path)}
    if days is not None:
        source["day"] = {"path": days[0]}
    about = (table.notes, _name(path.name), modified, table.partitions)
    newest = None if days is None else days[1]
    return Sample(table.rows, source, table.total, table.is_complete, description, *about, newest_day=newest)


def _is_alone(file: Location) -> bool:
    """Return whether a file is the only one of its folder that holds rows."""
    below = file.parent.infos()
    return [name for name in below if not _hidden(name) and _holds_rows(name, below[name])] == [file.name]


def _day_folders(root: Location, files: Collection[Location]) -> tuple[str, str] | None:
    """Return how the paths of a table's files begin, with their day in it, and the newest day; None without days."""
    below = [file.below(root) for file in files]
    for pattern, form in _DAY_FOLDERS.items():
        matches = [re.fullmatch(form, name) for name in below]
        if all(matches) and len({m.groups() for m in matches if m}) > 1:
            return pattern, "-".join(max(m.groups() for m in matches if m))
    return None


def _files(path: Location, text: str, any_name: bool = False) -> tuple[dict[Location, Info], Kind]:
    """Return the files to read, in the order of their names, and the kind of the path."""
    if (below := path.infos()) or path.is_dir():
        in_order = sorted(below, key=lambda name: name.split("/"))
        names = [name for name in in_order if (any_name or _holds_rows(name, below[name])) and not _hidden(name)]
        names = [name for name in names if PurePosixPath(name).stem.lower() not in _PROSE] or names
        if not names:
            raise UserError(
                f"{text}: no Delta log, no metadata of Iceberg, and no files that end in {', '.join(_ENDINGS)} "
                f"({', '.join(COMPRESSIONS)} may follow)"
            )
        return {path / name: below[name] for name in names}, "folder"
    if path.is_file():
        return {path: path.info()}, "file"
    matches = path.glob_files()
    if not matches:
        raise UserError(
            f"{text}: no such file or folder. A table of a catalog is read by `source: {{table: NAME}}`; for a look "
            f"at it here, give its folder"
        )
    return {file: matches[file] for file in sorted(matches)}, "glob"


def _check_glob(root: Location, pattern: Location, files: Collection[Location], text: str) -> None:
    """Check that the glob of the source reads no other files than those looked at, such as a README beside them.

    Raises:
        UserError: it does; says what to move, or has a command with a glob that reads the data alone.
    """
    if "{ds" in str(pattern):
        return
    extra_files = sorted(
        file.name for file in pattern.glob_files() if file not in files and not _hidden(file.below(root))
    )
    if not extra_files:
        return
    (ending_, _), *_ = Counter("".join(PurePosixPath(file.name).suffixes[-2:]) for file in files).most_common(1)
    repair = "move it to another folder"
    if str(pattern).endswith("*") and ending_:
        repair += f", or name the data: headrace init {shlex.quote(str(pattern) + ending_)}"
    raise UserError(
        f"{text}: {', '.join(extra_files[:3])} would be read with the {len(files):,} files of data: {repair}"
    )


def _holds_rows(name: str, info: Info) -> bool:
    """Return whether a file holds rows, by its ending.

    Spark ignores empty data files, too: stores use them for folders.
    """
    return (kind := _ending(name)) is not None and (info.size > 0 or kind in ("csv", "jsonl"))


def _hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def _ending(name: str) -> Format | None:
    plain = without_ending(name.lower())
    return next((f for ending, f in _ENDINGS.items() if plain.endswith(ending)), None)


def _format(files: Collection[Location], kind: Kind, text: str) -> Format:
    """Return the format of files by their names; of a single file by its content where this or its name says more."""
    formats = {_ending(f.name) for f in files}
    if len(formats) > 1:
        names = ", ".join(sorted(str(f) for f in formats))
        raise UserError(f"{text}: files of several kinds ({names}); give a glob of those that are rows of one table")
    (format_,) = formats
    if format_ in (None, "csv") and (kind == "file" or format_ is None):
        file = next(iter(files))
        format_ = _format_of_content(file)
        if format_ is None:
            _refuse_content(file, text)
            raise UserError(
                f"{text}: its name ends in none of {', '.join(_ENDINGS)} ({', '.join(COMPRESSIONS)} may follow), and "
                f"its content is no text and of no known format. Say which one it is: --format FORMAT"
            )
    assert format_ is not None
    return format_


def _format_of_content(file: Location) -> Format | None:
    """Return the format that a file's first bytes say: JSON lines begin with a brace; None: neither text nor known."""
    try:
        with open_plain(file) if ending(file.name) else file.open() as data:
            head = data.read(_LOOK)
    except (OSError, DamagedError):  # told by who reads it
        return "csv"
    known = next((format_ for magic, format_ in _MAGIC.items() if head.startswith(magic)), None)
    if head.startswith(UTF_16):  # told by who reads it
        return "csv"
    if known is not None or b"\0" in head or head.startswith(tuple(_UNREADABLE)):
        return known
    return "jsonl" if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") else "csv"


def _refuse_content(file: Location, text: str) -> None:
    """Raise UserError for a file whose first bytes say what it is, and that it cannot be read; with what to do."""
    if ending(file.name):
        return
    with file.open() as data:
        head = data.read(_LOOK)
    for magic, advice in _UNREADABLE.items():
        if head.startswith(magic):
            raise UserError(f"{text}: it is {advice.replace('FILE', shlex.quote(str(file)))}")


def _by_day(path: Location, files: Collection[Location], kind: Kind) -> tuple[Location, str | None]:
    """Return the glob for section `source`, and the newest day where names have days."""
    root = PurePosixPath(*path.path.parts[: 1 if path.scheme == "file" else 2])
    keys = [str(f.path.relative_to(root)) for f in files]
    if len(files) > 1 or kind == "folder":
        days = [_DATE.findall(key) for key in keys]
        if all(len(set(d)) == 1 for d in days):
            return replace(path, path=root / _common({_DATE.sub("{ds}", key) for key in keys})), max(d[0] for d in days)
    if kind == "folder":
        return replace(path, path=root / _common(set(keys))), None
    return path if kind == "glob" else replace(path, path=root / glob.escape(keys[0])), None


def _common(paths: set[str]) -> str:
    """One glob for paths that differ in their names."""
    parts = [tuple(map(glob.escape, p.split("/"))) for p in paths]
    if len({len(p) for p in parts}) > 1:
        shortest = min(len(p) for p in parts)
        same = [a[0] for a in zip(*(p[: shortest - 1] for p in parts), strict=False) if len(set(a)) == 1]
        return "/".join([*same, "**", "*"])
    patterns = []
    for options in zip(*parts, strict=True):
        if len(set(options)) == 1:
            patterns.append(options[0])
            continue
        endings = {"".join(PurePosixPath(o).suffixes) for o in options}
        suffix = "{ds}*" if all(o.startswith("{ds}") for o in options) else "*"
        patterns.append(suffix + (next(iter(endings)) if len(endings) == 1 else ""))
    return "/".join(patterns)


def _stem(path: Location) -> str:
    return path.name.split(".")[0]


def _name(text: str) -> str:
    """Return a pipeline's name from a file's or a folder's; tables in a warehouse are named after it."""
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:_NAME_LENGTH].rstrip("_")
    return name if re.match(r"[a-z]", name) else f"pipeline_{name}".rstrip("_")


def _modified(infos: Collection[Info]) -> str:
    """Return the day on which the newest file was written."""
    return datetime.fromtimestamp(max(info.modified_ns for info in infos) / 1e9, UTC).date().isoformat()


def _bytes(size: int) -> str:
    for unit in ("bytes", "KB", "MB"):
        if size < 1_000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size = size // 1_000 if size >= 1_000_000 else size / 1_000  # type: ignore[assignment]
    return f"{size:,.1f} GB"
