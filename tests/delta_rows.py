"""Delta tables of numbered rows whose log the tests write themselves: rows that others add and mark as deleted."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.lake.delta.data_files import statistics
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import create_table
from headrace.storage import Location

FIELDS = [
    {"name": name, "type": kind, "nullable": True, "metadata": {}}
    for name, kind in (("row", "long"), ("user", "string"), ("ds", "string"))
]
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def make_table(table: Location) -> None:
    """Make a table of days whose rows may be marked as deleted."""
    create_table(table, FIELDS, ["ds"])
    features = ["deletionVectors"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    commit(table, {"protocol": protocol})


def commit(table: Location, *actions: Mapping[str, Any]) -> int:
    """Commit as another writer does, after whatever is there; the version."""
    version = (DeltaLog(table).version or 0) + 1
    text = "".join(json.dumps(a) + "\n" for a in ({"commitInfo": {"operation": "WRITE"}}, *actions))
    assert (table / "_delta_log" / f"{version:020d}.json").put_new_text(text)
    return version


def data_file(table: Location, ds: str, rows: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Write a data file of (row, user), in row groups of three; its `add` action."""
    path, footers = f"ds={ds}/part-{uuid.uuid4()}.parquet", list[Any]()
    data = pa.table({"row": pa.array([n for n, _ in rows], pa.int64()), "user": [user for _, user in rows]})
    with (table / path).new_file() as file:
        pq.write_table(data, file, metadata_collector=footers, row_group_size=3)
    return {
        "path": path,
        "partitionValues": {"ds": ds},
        "size": (table / path).size(),
        "modificationTime": 1,
        "dataChange": True,
        "stats": statistics(footers[0], data.schema, {"row": 0, "user": 0}),
    }


def live_rows(table: Location) -> list[int]:
    """The rows of the newest version, by a reader of the tests' own."""
    return sorted(n for add in live(table) for n, _ in rows_of(table, add))


def live(table: Location) -> list[dict[str, Any]]:
    """The `add` actions of the newest version, by path and deletion vector."""
    live_files: dict[tuple[str, str], dict[str, Any]] = {}
    log = DeltaLog(table)
    for version in sorted(log.versions()):
        for action in log.actions(version):
            for kind in ("add", "remove"):
                if kind in action:
                    key = (action[kind]["path"], (action[kind].get("deletionVector") or {}).get("pathOrInlineDv", ""))
                    if kind == "add":
                        live_files[key] = action[kind]
                    else:
                        assert live_files.pop(key, None) is not None, (
                            f"version {version} removes what is not there: {key}"
                        )
    return list(live_files.values())


def rows_of(table: Location, add: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(row, user) of a file that its deletion vector does not hide, as `mark_deleted` has written it."""
    data = pq.ParquetFile((table / add["path"]).local_path()).read()
    rows = list(zip(data["row"].to_pylist(), data["user"].to_pylist(), strict=True))
    hidden = set((add.get("deletionVector") or {}).get("hidden", ()))
    return [row for n, row in enumerate(rows) if n not in hidden]


def mark_deleted(table: Location, add: Mapping[str, Any], positions: Collection[int]) -> int:
    """Commit a deletion vector of a live file with more positions; the version. (`hidden` is the tests' own key.)"""
    old = add.get("deletionVector")
    hidden = sorted({*positions, *(old or {}).get("hidden", ())})
    vector = inline_vector(hidden) | {"hidden": hidden}
    keys = ("path", "partitionValues", "size")
    remove = {key: add[key] for key in keys} | {"deletionTimestamp": 2, "dataChange": True}
    remove |= {"deletionVector": old} if old else {}
    return commit(table, {"remove": remove}, {"add": {**add, "deletionVector": vector}})


def inline_vector(positions: Sequence[int]) -> dict[str, Any]:
    """The descriptor of a deletion vector in the log itself, of arrays of 16 bits."""
    data = serialized(positions)
    data += b"\0" * (-len(data) % 4)
    text = encoded(data)
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data), "cardinality": len(positions)}


def serialized(positions: Sequence[int]) -> bytes:
    """Positions as Delta's format of 64 bits has them, every container an array."""
    uppers = sorted({p >> 32 for p in positions})
    data = struct.pack("<iq", 1681511377, len(uppers))
    for upper in uppers:
        lower = [p & 0xFFFFFFFF for p in positions if p >> 32 == upper]
        keys = sorted({p >> 16 for p in lower})
        blocks = [[p & 0xFFFF for p in lower if p >> 16 == key] for key in keys]
        data += struct.pack("<III", upper, 12346, len(keys))
        data += b"".join(struct.pack("<HH", key, len(block) - 1) for key, block in zip(keys, blocks, strict=True))
        data += b"\0" * 4 * len(keys)  # offsets, which a reader in order does not need
        data += b"".join(struct.pack(f"<{len(block)}H", *block) for block in blocks)
    return data


def encoded(data: bytes) -> str:
    """Bytes, whole fours of them, in Z85."""
    text = ""
    for i in range(0, len(data), 4):
        value, five = int.from_bytes(data[i : i + 4], "big"), ""
        for _ in range(5):
            value, rest = divmod(value, 85)
            five = _Z85[rest] + five
        text += five
    return text
