"""A Delta table's log, read without Spark: versions, what commits said of themselves, and the files of a version.

Enough to look before a session (9 s) is started. Written to Delta's protocol document (PROTOCOL.md of delta-io/delta):
JSON commits and classic (single- or multi-part) Parquet checkpoints; no deletion vectors, which our tables do not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

from headrace.storage import Location

#: For tables whose old versions are read again: their log is kept.
LOG_RETENTION = "interval 3650 days"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")


@dataclass(frozen=True)
class DataFile:
    """One live data file."""

    path: Location
    partition: dict[str, str | None]
    #: None where the writer kept no statistics.
    rows: int | None


class DeltaLog:
    """The log of the table in `folder`, which need not be there."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self._log = folder / "_delta_log"

    @property
    def version(self) -> int | None:
        """The newest version; None where there is no table."""
        return max(self._commits(), default=None)

    def has(self, version: int) -> bool:
        """Whether the commit of `version` is still in the log."""
        return version in self._commits()

    def user_metadata(self) -> Iterator[tuple[int, str]]:
        """(version, userMetadata) of the commits that have one, newest first."""
        for version in sorted(self._commits(), reverse=True):
            for action in self._actions(version):
                text = action.get("commitInfo", {}).get("userMetadata")
                if text is not None:
                    yield version, str(text)

    def application_version(self, application: str, version: int) -> int | None:
        """The last version that an application has written by its name (`txnAppId`), as of `version` of the table.

        None where it has written none, or so long ago that the log does not say.
        """
        for at in sorted((v for v in self._commits() if v <= version), reverse=True):
            for action in self._actions(at):
                if (txn := action.get("txn")) and txn["appId"] == application:
                    return int(txn["version"])
        found = (a["txn"] for a in self._checkpoint_before(version)[1] if a.get("txn"))
        return max((int(txn["version"]) for txn in found if txn["appId"] == application), default=None)

    def columns(self) -> dict[str, str]:
        """Column name -> type (as the schema JSON has it; nested ones as JSON text) of the newest version."""
        version = self.version
        if version is None:
            return {}
        metadata = None
        for at in sorted(self._commits(), reverse=True):
            metadata = next((a["metaData"] for a in self._actions(at) if "metaData" in a), None)
            if metadata is not None:
                break
        if metadata is None:
            metadata = next((a["metaData"] for a in self._checkpoint_before(version)[1] if a.get("metaData")), None)
        if metadata is None:
            return {}
        fields = json.loads(metadata["schemaString"])["fields"]
        return {f["name"]: f["type"] if isinstance(f["type"], str) else json.dumps(f["type"]) for f in fields}

    def files(self, version: int) -> list[DataFile] | None:
        """The live data files at `version`; None where the log no longer reaches back that far."""
        start, actions = self._checkpoint_before(version)
        live: dict[str, dict[str, Any]] = {}
        for action in actions:
            _replay(live, action)
        commits = self._commits()
        for at in range(start + 1, version + 1):
            if at not in commits:
                return None
            for action in self._actions(at):
                _replay(live, action)
        return [_data_file(self.folder, add) for add in live.values()]

    def _commits(self) -> set[int]:
        return {int(m.group(1)) for p in self._log.entries() if (m := _COMMIT.fullmatch(p.name))}

    def _actions(self, version: int) -> Iterator[dict[str, Any]]:
        with (self._log / f"{version:020d}.json").open() as f:
            for line in f:
                yield json.loads(line)

    def _checkpoint_before(self, version: int) -> tuple[int, list[dict[str, Any]]]:
        """The newest complete checkpoint at or before `version`: its version and actions; (-1, []) without one."""
        parts: dict[int, list[Location]] = {}
        wanted: dict[int, int] = {}
        for path in self._log.entries():
            if m := _CHECKPOINT.fullmatch(path.name):
                at = int(m.group(1))
                if at <= version:
                    parts.setdefault(at, []).append(path)
                    wanted[at] = int(m.group(3) or 1)
        complete = [at for at, paths in parts.items() if len(paths) >= wanted[at]]
        if not complete:
            return -1, []
        newest = max(complete)
        actions: list[dict[str, Any]] = []
        for path in sorted(parts[newest]):
            names = [n for n in ("add", "metaData", "txn") if n in pq.read_schema(path).names]
            actions += pq.read_table(path, columns=names).to_pylist() if names else []
        return newest, actions


def _replay(live: dict[str, dict[str, Any]], action: dict[str, Any]) -> None:
    if add := action.get("add"):
        live[add["path"]] = add
    elif remove := action.get("remove"):
        live.pop(remove["path"], None)


def _data_file(folder: Location, add: dict[str, Any]) -> DataFile:
    # A Parquet map reads as a list of pairs.
    partition = dict(add["partitionValues"] or {})
    stats = json.loads(add["stats"]) if add.get("stats") else {}
    return DataFile(folder / unquote(add["path"]), partition, stats.get("numRecords"))
