"""Landing files of `bench.bench_ingest`: JSON lines, CSV, Criteo lines; made by Arrow, so that making them takes less
time than loading them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace_datasets.readers import CRITEO

DAY = "2026-03-01"
#: JSON lines whose writer has renamed the key `user` to `visitor`, which becomes a column of the table: Arrow is unsure
#: of each of them.
RENAMED = "renamed"
FORMS = ("jsonl", "csv", "criteo", RENAMED)
#: The forms of `make bench-ingest`.
PLAIN_FORMS = FORMS[:3]
#: By column its Spark type.
CLICKS = {
    "id": "string",
    "ts": "timestamp",
    "user": "bigint",
    "item": "bigint",
    "clicked": "int",
    "price": "double",
    "country": "string",
    "device": "string",
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "jsonl": CLICKS,
    "csv": CLICKS,
    RENAMED: CLICKS,
    "criteo": {c: "string" if c.startswith("C") else "int" for c in CRITEO},
}
_ENDINGS = {"csv": "csv", "criteo": "txt"}
_FILES = 4
_AT_ONCE = 250_000


def write_text(form: str, folder: Path, rows: int) -> list[Path]:
    """Write the landing files: `_FILES` of about as many rows."""
    folder.mkdir(parents=True)
    paths = []
    for k in range(_FILES):
        path = folder / f"part-{k}.{_ENDINGS.get(form, 'jsonl')}"
        paths.append(path)
        with path.open("wb") as out:
            if form == "csv":
                out.write((",".join(CLICKS) + "\n").encode())
            for start in range(rows * k // _FILES, rows * (k + 1) // _FILES, _AT_ONCE):
                end = min(start + _AT_ONCE, rows * (k + 1) // _FILES)
                _write_lines(out, _criteo(start, end) if form == "criteo" else _clicks(form, start, end))
    return paths


def _write_lines(out: BinaryIO, lines: pa.StringArray) -> None:
    terminated = pc.binary_join_element_wise(lines, "", "\n")
    out.write(terminated.buffers()[2])


def _clicks(form: str, start: int, end: int) -> pa.StringArray:
    rng, n = np.random.default_rng([17, start]), end - start
    place = np.arange(n)
    users, items = rng.zipf(1.3, n), rng.zipf(1.2, n)
    prices, seconds = rng.integers(100, 100_000, n), rng.integers(0, 86_400, n)
    midnight = np.datetime64(DAY, "ms").astype(np.int64)
    times = pa.array(midnight + seconds * 1000 + place % 1000).cast(pa.timestamp("ms"))
    fields = {
        "id": _joined("e", _padded(start + place, 12)),
        "ts": pc.strftime(times, "%Y-%m-%dT%H:%M:%SZ"),
        "user": _text(users),
        "item": _text(items),
        "clicked": _text((place % 7 == 0).astype(np.int8)),
        "price": _joined(_text(prices // 100), ".", _padded(prices % 100, 2)),
        "country": _joined("c", _text(users % 200)),
        "device": "phone",
    }
    if form == "csv":
        return pc.binary_join_element_wise(*fields.values(), ",")
    pieces: list[Any] = []
    for name, value in fields.items():
        quote = '"' if CLICKS[name] in ("string", "timestamp") else ""
        key = "visitor" if form == RENAMED and name == "user" else name
        pieces += [f'{", " if pieces else "{"}"{key}": {quote}', value, quote]
    return _joined(*pieces, "}")


def _criteo(start: int, end: int) -> pa.StringArray:
    rng, n = np.random.default_rng([17, start]), end - start
    label, names = rng.integers(0, 2, n), rng.zipf(1.2, (26, n)) % 10_000_000
    counts, missing = rng.integers(-1, 500, (13, n)), rng.random((13, n)) < 0.2
    numbers = [pc.if_else(pa.array(m), "", _text(c)) for c, m in zip(counts, missing, strict=True)]
    return pc.binary_join_element_wise(_text(label), *numbers, *map(_hexadecimal, names), "\t")


def _text(values: npt.NDArray[Any]) -> pa.StringArray:
    return pa.array(values).cast(pa.string())


def _padded(values: npt.NDArray[Any], width: int) -> pa.StringArray:
    return pc.utf8_lpad(_text(values), width, "0")


def _joined(*pieces: pa.StringArray | str) -> pa.StringArray:
    return pc.binary_join_element_wise(*pieces, "")


def _hexadecimal(values: npt.NDArray[np.int64]) -> pa.StringArray:
    """Return the values as eight digits each."""
    nibbles = (values[:, None] >> np.arange(28, -1, -4)) & 15
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles]
    offsets = np.arange(0, 8 * len(values) + 1, 8, dtype=np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(digits))
