"""A day's landing files: one function writes any one of them, and one rename publishes the whole day."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from datetime import date

import numpy as np
import pyarrow as pa

from headrace.counter_random import Ints, stream
from headrace.generate.click_model import ClickModel, events
from headrace.generate.faults import duplicate_sources, malformed_kind, malformed_lines
from headrace.generate.purchase_model import purchases
from headrace.generate.serialize import Format, header, lines, values
from headrace.generate.truth import EXACT_ROWS, DayTruth, GeneratedFile, Tally, tally
from headrace.storage import Location

#: More rows than this go to more files: a file is made in memory (about 1 KB a row at the peak), as one task.
MAX_FILE_ROWS = 500_000
#: Fast: level 6 takes four times as long as all else, for files smaller by a fifth.
_GZIP_LEVEL = 1
_WBITS_GZIP = 31


@dataclass(frozen=True)
class DayPlan:
    """What one day's files are made from: small enough to send to every task."""

    model: ClickModel
    ds: str
    start: date
    #: Days since the first day.
    number: int

    @property
    def rows(self) -> int:
        return self.model.params.rows_per_day

    @property
    def files(self) -> int:
        return min(self.rows, max(self.model.params.files_per_day, -(-self.rows // MAX_FILE_ROWS)))

    @property
    def duplicates(self) -> int:
        return round(self.rows * self.model.params.duplicates)

    @property
    def malformed(self) -> int:
        return round(self.rows * self.model.params.malformed)

    def format(self, file: int) -> Format:
        formats = self.model.params.formats
        return formats[file % len(formats)]

    def file_name(self, file: int) -> str:
        return f"part-{file:04d}.{'json' if self.format(file) == 'jsonl' else 'csv'}.gz"


def write_file(day: DayPlan, file: int, folder: Location) -> Tally:
    """Make file number `file` of a day in `folder`.

    Its bytes depend on (day, file) alone, so a task that runs twice does no harm. Good rows, duplicates and malformed
    lines are each divided among the files in ranges, and are shuffled within a file.
    """
    model, fmt = day.model, day.format(file)
    row = _share(day.rows, file, day.files)
    twice = _share(day.duplicates, file, day.files)
    bad = _share(day.malformed, file, day.files)
    good = events(model, np.full(len(row), day.number), row)
    first_day, first_row = duplicate_sources(model, day.number, twice, day.rows)
    again = events(model, first_day, first_row)
    bought = purchases(model, good)
    columns = values(good, day.start, fmt, bought)
    all_lines = pa.concat_arrays(
        [
            lines(columns, fmt),
            lines(values(again, day.start, fmt, purchases(model, again)), fmt),
            malformed_lines(model, day.start, day.number, bad, fmt),
        ]
    )
    order = np.random.default_rng([stream(model.params.seed, "order"), day.number, file]).permutation(len(all_lines))
    written = write_gzip(folder / day.file_name(file), header(columns, fmt), all_lines.take(pa.array(order)))
    before = int((first_day < day.number).sum())
    return tally(
        good,
        bought,
        model.late_days,
        same_day=len(twice) - before,
        day_before=before,
        malformed_kinds=malformed_kind(model, day.number, bad),
        exact=day.rows <= EXACT_ROWS,
        file=written,
    )


def _share(total: int, part: int, parts: int) -> Ints:
    """The numbers of 0..total-1 that fall to one of the parts: int64."""
    return np.arange(total * part // parts, total * (part + 1) // parts)


def write_gzip(path: Location, first: str, all_lines: pa.StringArray) -> GeneratedFile:
    """One gzip member with no name and time 0 (RFC 1952), so that equal lines are equal bytes."""
    assert all_lines.offset == 0
    _, offsets, data = all_lines.buffers()
    end = int(np.frombuffer(offsets, dtype=np.int32)[len(all_lines)]) if len(all_lines) else 0
    body = memoryview(data)[:end] if end else b""
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _WBITS_GZIP)
    with path.new_file() as partial, open(partial, "wb") as f:
        f.write(packer.compress(first.encode()))
        f.write(packer.compress(body))
        f.write(packer.flush())
        size = f.tell()
    return GeneratedFile(
        name=path.name, lines=len(all_lines), bytes=size, crc32=zlib.crc32(body, zlib.crc32(first.encode()))
    )


def truth_path(landing: Location, ds: str) -> Location:
    """Where a day's truth is, below the pipeline's landing folder."""
    return landing / "truth" / f"{ds}.json"


def publish_truth(landing: Location, truth: DayTruth) -> None:
    """Write what is known of a day, just before its folder appears.

    Killed in between, there is a truth without its day or with an older one: `stale_reason` sees that, and the next run
    makes the day again.
    """
    truth_path(landing, truth.ds).put_text(truth.model_dump_json(indent=1) + "\n")


def stale_reason(
    landing: Location, ds: str, key: str, parameters: dict[str, object]
) -> tuple[str | None, DayTruth | None]:
    """Why a day must be made, or None where it is up to date with these parameters; and its truth file, if any."""
    folder = landing / ds
    truth = DayTruth.load(truth_path(landing, ds))
    if not folder.is_dir():
        return "not there yet", truth
    if truth is None:
        return "its truth file is missing or of another version", None
    if truth.key != key:
        return _changes(truth.parameters, parameters), truth
    names = {f.name for f in truth.files}
    for extra in (p.name for p in folder.entries() if p.name.endswith(".gz") and p.name not in names):
        return f"{folder / extra} does not belong to it", truth
    for file in truth.files:
        if not _intact(folder / file.name, file):
            return f"{folder / file.name} is gone or damaged", truth
    return None, truth


def _changes(old: dict[str, object], new: dict[str, object]) -> str:
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    shown = ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names)
    return f"its parameters have changed ({shown})" if shown else "it was made by another version of the generator"


def _intact(path: Location, file: GeneratedFile) -> bool:
    """Size and gzip's own checksum agree: cheap, and it tells any two generated files apart."""
    try:
        with path.open() as f:
            f.seek(-8, os.SEEK_END)
            (crc32,) = struct.unpack("<I", f.read(4))
        return path.size() == file.bytes and crc32 == file.crc32
    except OSError:
        return False
