"""A Delta table's log, read without Spark: versions, what commits said of themselves, and the files of a version.

Enough to look before a session (9 s) is started. Written to Delta's protocol document (PROTOCOL.md of delta-io/delta).

A reader that does not know a feature of `readerFeatures` must not read the table, for it would read wrong rows without
noticing: such a table is refused by name. With the feature `typeWidening` columns get a wider type while their data
files stay as they are: a reader casts the values of each file to the table's type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from headrace.config.schema import is_wider
from headrace.errors import UserError
from headrace.lake.delta.log_files import (
    COMMIT,
    ROWS,
    commit_file,
    last_checkpoint,
    newest_checkpoint,
    read_commit,
    replaced,
    replacements,
    torn_commits,
    versions_listed,
)
from headrace.storage import Location, local, location_named, names_store, not_as_written

#: Log retention of tables whose old versions are read again.
LOG_RETENTION = "interval 3650 days"
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):/")
#: Identifies a data file in a log: its path, and its deletion vector's id (empty without one).
FileKey = tuple[str, str]
_IN_COMMIT_TIMESTAMPS = "delta.enableInCommitTimestamps"


#: Supported reader features. `deletionVectors`: counted (headrace.lake.delta.log.DataFile); `columnMapping`: only where
#: its mode is none; `typeWidening`: readers of data files cast values to the table's types.
READER_FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "v2Checkpoint", "vacuumProtocolCheck"}
)
#: Reader features that do not affect which files are live: files may be listed where Spark reads the rows.
_OF_ROWS = frozenset({"typeWidening-preview", "variantType", "variantType-preview", "variantShredding-preview"})
_MAPPING = "delta.columnMapping.mode"
#: The feature, of readers and writers, and the property without which no writer changes a type.
FEATURE = "typeWidening"
PROPERTY = "delta.enableTypeWidening"
#: Key in a column's metadata: its earlier types, oldest first.
_CHANGES = "delta.typeChanges"
#: Delta's names of types -> Spark SQL's, where they differ.
_SQL_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
#: Features of writer versions below 7, each with the first version that requires it.
_WRITER_FEATURES = (
    (2, "appendOnly"),
    (2, "invariants"),
    (3, "checkConstraints"),
    (4, "changeDataFeed"),
    (4, "generatedColumns"),
    (5, "columnMapping"),
    (6, "identityColumns"),
)
_LISTED_READERS, _LISTED_WRITERS = 3, 7


def check_listable(folder: Location, protocol: Mapping[str, Any] | None) -> None:
    """Refuse a table whose live files would be listed wrongly.

    Args:
        folder: of the table.
        protocol: its newest `protocol` action; None: of the first version.

    Raises:
        UserError: a reader version or feature that is not known.
    """
    protocol = dict(protocol or {})
    protocol["readerFeatures"] = sorted(set(protocol.get("readerFeatures") or ()) - _OF_ROWS)
    check_readable(folder, protocol, None)


def check_readable(
    folder: Location, protocol: Mapping[str, Any] | None, configuration: Mapping[str, str] | None
) -> None:
    """Refuse a table that would be read wrongly.

    Args:
        folder: of the table.
        protocol: its newest `protocol` action; None: of the first version.
        configuration: of its newest `metaData` action.

    Raises:
        UserError: a reader version or feature that is not known, or column mapping.
    """
    protocol, configuration = protocol or {}, configuration or {}
    version = protocol.get("minReaderVersion") or 1
    if version > 3:
        raise UserError(
            f"{folder}: this Delta table asks for reader version {version}, and headrace reads versions up to 3; write "
            f"its rows to a table of an older version"
        )
    unknown = sorted(set(protocol.get("readerFeatures") or ()) - READER_FEATURES)
    if unknown:
        raise UserError(
            f"{folder}: this Delta table uses features that headrace does not read: {', '.join(unknown)}; drop them "
            f"(ALTER TABLE delta.`{folder}` DROP FEATURE {unknown[0]}), or write its rows to a table without them"
        )
    mode = configuration.get(_MAPPING, "none")
    if version >= 2 and mode != "none":
        raise UserError(
            f"{folder}: this Delta table maps its columns' names ({_MAPPING} = {mode}), which headrace does not read; "
            f"set {_MAPPING} to none (ALTER TABLE delta.`{folder}` SET TBLPROPERTIES ('{_MAPPING}' = 'none')), or "
            f"write its rows to a table without it"
        )


def sql_type(type_: Any) -> str:
    """Return the SQL name of a type of a Delta schema's JSON; of a map or a struct its JSON as text."""
    if isinstance(type_, Mapping) and type_.get("type") == "array":
        return f"array<{sql_type(type_['elementType'])}>"
    return _SQL_NAMES.get(str(type_), str(type_))


def widened_fields(fields: Sequence[Mapping[str, Any]], declared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a table's columns with the wider types that a declaration gives some of them.

    Columns of the same, of a narrower or of another type, and undeclared ones, stay as they are.

    Args:
        fields: the table's columns, as the schema's JSON has them.
        declared: the columns that are about to be written, likewise.
    """
    declared_types = {str(f["name"]): f["type"] for f in declared}
    widened = []
    for column in fields:
        old, new = column["type"], declared_types.get(str(column["name"]), column["type"])
        if not is_wider(sql_type(new), sql_type(old)):
            widened.append(dict(column))
            continue
        change = {"toType": new, "fromType": old}
        if isinstance(old, Mapping):
            change = {"toType": new["elementType"], "fromType": old["elementType"], "fieldPath": "element"}
            new = {**old, "elementType": new["elementType"]}
        metadata = dict(column.get("metadata") or {})
        metadata[_CHANGES] = [*metadata.get(_CHANGES, ()), change]
        widened.append({**column, "type": new, "metadata": metadata})
    return widened


def with_feature(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's `protocol` action with the feature, and those that its older versions stood for by name."""
    readers = set(protocol.get("readerFeatures") or ())
    writers = set(protocol.get("writerFeatures") or ())
    if protocol["minReaderVersion"] == _LISTED_READERS - 1:
        readers.add("columnMapping")
        writers.add("columnMapping")
    if protocol["minWriterVersion"] < _LISTED_WRITERS:
        writers |= {name for version, name in _WRITER_FEATURES if version <= protocol["minWriterVersion"]}
    return {
        "minReaderVersion": _LISTED_READERS,
        "minWriterVersion": _LISTED_WRITERS,
        "readerFeatures": sorted(readers | {FEATURE}),
        "writerFeatures": sorted(writers | {FEATURE}),
    }


@dataclass(frozen=True)
class DataFile:
    """One live data file."""

    path: Location
    partition: Mapping[str, str | None]
    #: Live rows; None where the writer kept no statistics.
    rows: int | None
    #: Size in bytes, by the log.
    size: int
    #: Rows that a deletion vector marks as deleted: readers of the Parquet file itself must leave them out.
    deleted: int = 0
    #: Id of its deletion vector; empty: none.
    vector: str = ""
    #: Erased rows of the file that this one replaced (headrace.lake.delta.log_files).
    erased: int = 0


@dataclass(frozen=True)
class TableState:
    """A version of a table as its log has it: for those who ask Spark for the rows, and the log for the files alone."""

    #: The `add` actions of the live files.
    adds: list[Mapping[str, Any]]
    metadata: Mapping[str, Any]
    protocol: Mapping[str, Any]
    #: The last version that each application has written by its name (`txnAppId`).
    applications: Mapping[str, int] = field(default_factory=dict)

    @property
    def configuration(self) -> dict[str, str]:
        """Return the table's properties."""
        return dict(self.metadata.get("configuration") or {})

    @property
    def unknown_features(self) -> list[str]:
        """Reader features because of which data files may not be read as they are."""
        return sorted(set(self.protocol.get("readerFeatures") or ()) - READER_FEATURES)

    def data_files(self, folder: Location) -> list[DataFile]:
        """Return the live files, in the order of `adds`."""
        return [_data_file(folder, add) for add in self.adds]


@dataclass(frozen=True)
class FileAction:
    """An `add` or `remove` action."""

    key: FileKey
    path: Location
    #: None where a `remove` does not say.
    partition: Mapping[str, str | None] | None
    #: Live rows; None where the writer kept no statistics.
    rows: int | None
    #: Whether rows change: False where files are only rewritten (OPTIMIZE).
    data_change: bool
    #: Size in bytes; None where a `remove` does not say.
    size: int | None = None


@dataclass(frozen=True)
class Commit:
    """One commit: what it says of itself, and the `add` and `remove` actions in it."""

    version: int
    #: DELETE, WRITE, OPTIMIZE, RESTORE, ...
    operation: str
    user_metadata: str | None
    adds: tuple[FileAction, ...]
    removes: tuple[FileAction, ...]
    #: Time by its writer's clock, in milliseconds since 1970; None: not recorded.
    timestamp: int | None = None


@dataclass
class _Snapshot:
    """The state of a version."""

    adds: dict[FileKey, Mapping[str, Any]] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None
    protocol: Mapping[str, Any] | None = None
    applications: dict[str, int] = field(default_factory=dict)

    def apply(self, action: Mapping[str, Any]) -> None:
        """Replay one action."""
        if add := action.get("add"):
            self.adds[_key(add)] = add
        elif remove := action.get("remove"):
            self.adds.pop(_key(remove), None)
        elif metadata := action.get("metaData"):
            self.metadata = metadata
        elif protocol := action.get("protocol"):
            self.protocol = protocol
        elif txn := action.get("txn"):
            self.applications[txn["appId"]] = int(txn["version"])

    def check(self, folder: Location) -> None:
        """Raise UserError where the table would be read wrongly."""
        # A Parquet map reads as a list of pairs.
        configuration = dict((self.metadata or {}).get("configuration") or {})
        check_readable(folder, self.protocol, configuration)


class DeltaLog:
    """The log of the table in `folder`, which need not be there."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self._log = folder / "_delta_log"

    @property
    def version(self) -> int | None:
        """Return the newest version; None where there is no table."""
        # From the last checkpoint on: the list of a long log takes many requests to a store.
        recent = self.versions(last) if (last := last_checkpoint(self._log)) else set[int]()
        return max(recent or self.versions(), default=None)

    def has(self, version: int) -> bool:
        """Return whether the commit of `version` is still in the log."""
        file = commit_file(self._log, version)
        return file.is_file() and not torn_commits(self._log, {version})

    def committed_ns(self, version: int) -> int:
        """Return when the commit of `version` was written, in nanoseconds since the epoch."""
        return commit_file(self._log, version).info().modified_ns

    def commit_files(self) -> dict[int, int]:
        """Return `committed_ns` of each version whose commit is in the log, by one listing of the log."""
        infos = self._log.infos().items()
        return {int(m.group(1)): info.modified_ns for name, info in infos if (m := COMMIT.fullmatch(name))}

    def check(self) -> None:
        """Raise UserError for a table that headrace does not read."""
        version = self.version
        snapshot = self._replay(version, "metaData", "protocol") if version is not None else None
        if snapshot is not None:
            snapshot.check(self.folder)

    def user_metadata(self) -> Iterator[tuple[int, str]]:
        """(version, userMetadata) of the commits that have one, newest first."""
        for version in sorted(self.versions(), reverse=True):
            for action in self.actions(version):
                text = action.get("commitInfo", {}).get("userMetadata")
                if text is not None:
                    yield version, str(text)

    def application_version(self, application: str, version: int) -> int | None:
        """Return the last version that an application has written by its name (`txnAppId`), as of `version` of the
        table.

        None where it has written none, or so long ago that the log does not say.
        """
        checkpoint = newest_checkpoint(self._log, version)
        after = -1 if checkpoint is None else checkpoint.version
        for commit_version in sorted((v for v in self.versions(after + 1) if v <= version), reverse=True):
            for action in self.actions(commit_version):
                if (txn := action.get("txn")) and txn["appId"] == application:
                    return int(txn["version"])
        transactions = (a["txn"] for a in checkpoint.actions("txn")) if checkpoint is not None else ()
        return max((int(txn["version"]) for txn in transactions if txn["appId"] == application), default=None)

    def commits(self, after: int = -1) -> Iterator[Commit]:
        """Yield the commits after a version that are still in the log, newest first."""
        for version in sorted(self.versions(after + 1), reverse=True):
            actions = list(self.actions(version))
            info: dict[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
            yield Commit(
                version,
                str(info.get("operation", "unknown")),
                info.get("userMetadata"),
                tuple(_file_action(self.folder, a["add"]) for a in actions if "add" in a),
                tuple(_file_action(self.folder, a["remove"]) for a in actions if "remove" in a),
                info.get("timestamp"),
            )

    def columns(self) -> dict[str, str]:
        """Column name -> type (as the schema JSON has it; nested ones as JSON text) of the newest version.

        Raises:
            UserError: a table that headrace does not read.
        """
        fields = self._fields(self.version)
        return {f["name"]: f["type"] if isinstance(f["type"], str) else json.dumps(f["type"]) for f in fields}

    def column_types(self, version: int | None = None) -> dict[str, str]:
        """Return the SQL type of each column by name, at a version (None: the newest); empty where that is gone.

        Raises:
            UserError: a table that headrace does not read.
        """
        return {f["name"]: sql_type(f["type"]) for f in self._fields(self.version if version is None else version)}

    def _fields(self, version: int | None) -> list[dict[str, Any]]:
        """Return the columns as the schema's JSON has them; none where there is no table, or not that version."""
        snapshot = self._replay(version, "metaData", "protocol") if version is not None else None
        if snapshot is None or snapshot.metadata is None:
            return []
        snapshot.check(self.folder)
        fields: list[dict[str, Any]] = json.loads(snapshot.metadata["schemaString"])["fields"]
        return fields

    def metadata(self, version: int) -> Mapping[str, Any] | None:
        """Return the `metaData` action that is in force at `version`; None where the log no longer reaches back that
        far.
        """
        snapshot = self._replay(version, "metaData")
        return None if snapshot is None else snapshot.metadata

    def state(self, version: int, current: bool = True) -> TableState | None:
        """Return all of `version`, whatever features the table has; None where the log no longer reaches back that far.

        `current`: with the files that have taken the place of others since (headrace.lake.delta.log_files).
        """
        snapshot = self._replay(version, "add", "metaData", "protocol", "txn", current=current)
        if snapshot is None or snapshot.metadata is None:
            return None
        return TableState(
            list(snapshot.adds.values()), snapshot.metadata, snapshot.protocol or {}, snapshot.applications
        )

    def files(self, version: int) -> list[DataFile] | None:
        """Return the live data files at `version`; None where the log no longer reaches back that far.

        To count and to look whether they are there. Whoever reads them asks for `plain_files`.

        Raises:
            UserError: a table that headrace does not read.
        """
        snapshot = self._replay(version, "add", "metaData", "protocol")
        if snapshot is None:
            return None
        snapshot.check(self.folder)
        return [_data_file(self.folder, add) for add in snapshot.adds.values()]

    def plain_files(self, version: int) -> list[DataFile] | None:
        """Return the live data files at `version`, every row of which is live: a reader of Parquet may take them as
        they are.

        Files all of whose rows were erased since (headrace.lake.delta.log_files) are left out.

        Returns:
            None where Spark must read the table: the log no longer reaches back that far, or rows are marked as
            deleted by deletion vectors.

        Raises:
            UserError: a table that headrace does not read.
        """
        files = self.files(version)
        if files is None or any(f.deleted for f in files):
            return None
        return [f for f in files if f.rows != 0 or not f.erased]

    def versions(self, first: int = 0) -> set[int]:
        """Return the versions from `first` on whose commits are in the log, without those that a power cut has torn at
        its end.
        """
        committed = versions_listed(self._log, first)
        return committed - torn_commits(self._log, committed)

    def actions(self, version: int) -> Iterator[dict[str, Any]]:
        """Yield the actions of one commit, in their order.

        Raises:
            FileNotFoundError: it is not in the log.
            UserError: it is damaged.
        """
        yield from read_commit(commit_file(self._log, version))

    def _replay(self, version: int, *kinds: str, current: bool = True) -> _Snapshot | None:
        """Return the state at `version`, of some kinds of actions; None where a commit is missing.

        `current`: with the files that have taken the place of others since (headrace.lake.delta.log_files).
        """
        snapshot = _Snapshot()
        checkpoint = newest_checkpoint(self._log, version)
        if checkpoint is not None:
            for action in checkpoint.actions(*kinds):
                snapshot.apply(action)
        first = 0 if checkpoint is None else checkpoint.version + 1
        versions = self.versions(first)
        for commit_version in range(first, version + 1):
            if commit_version not in versions:
                return None
            for action in self.actions(commit_version):
                snapshot.apply(action)
        if "add" in kinds and current and (instead := replacements(self.folder)):
            snapshot.adds = {key: replaced(add, instead) for key, add in snapshot.adds.items()}
        return snapshot


def damaged_file(files: Iterable[DataFile]) -> str | None:
    """Return why the first of some data files is not as its commit says, with both sizes; None: all are.

    A power cut or a bad disk may leave a file short: Spark reads a Parquet file of 0 bytes as one without rows.
    """
    return not_as_written({file.path: file.size for file in files})


def check_files(table: Location, files: Iterable[DataFile]) -> None:
    """Compare data files with their sizes in the log before they are read. Not in a store of objects: the put is whole.

    Raises:
        UserError: one is gone or of another size; names it, with both sizes.
    """
    if table.scheme == "file" and (reason := damaged_file(files)) is not None:
        raise UserError(
            f"{reason}: {table} is damaged. Run the day and the stage again that wrote the file, or put it back from a "
            f"backup"
        )


def _key(action: Mapping[str, Any]) -> FileKey:
    vector = action.get("deletionVector")
    if not vector:
        return (action["path"], "")
    offset = vector.get("offset")
    return (action["path"], f"{vector['storageType']}{vector['pathOrInlineDv']}@{'' if offset is None else offset}")


def _live_rows(add: Mapping[str, Any]) -> int | None:
    stats = json.loads(add["stats"]) if add.get("stats") else add.get("stats_parsed") or {}
    rows = stats.get("numRecords")
    return None if rows is None else rows - _deleted(add)


def _deleted(add: Mapping[str, Any]) -> int:
    return (add.get("deletionVector") or {}).get("cardinality") or 0


def _data_file(folder: Location, add: Mapping[str, Any]) -> DataFile:
    # A Parquet map reads as a list of pairs.
    partition = dict(add["partitionValues"] or {})
    path, erased = file_path(folder, add["path"]), int(add.get(ROWS, 0))
    return DataFile(path, partition, _live_rows(add), int(add["size"]), _deleted(add), _key(add)[1], erased)


def _file_action(folder: Location, action: Mapping[str, Any]) -> FileAction:
    return FileAction(
        _key(action),
        file_path(folder, action["path"]),
        action.get("partitionValues"),
        _live_rows(action),
        action.get("dataChange", True),
        action.get("size"),
    )


def file_path(folder: Location, encoded: str) -> Location:
    """Return a data file by its path in an action of the log of the table in `folder`.

    Raises:
        UserError: it is in a store that is not known.
    """
    path = unquote(encoded)
    scheme = _SCHEME.match(path)
    if scheme is None:
        return folder / path
    if scheme.group(1) != "file" and names_store(path):
        place = location_named(path, f"{folder}: a data file")
        return place.as_plain() if folder.plain else place
    if scheme.group(1) != "file":
        raise UserError(
            f"{folder}: this Delta table has a data file at {path} (a shallow clone?), and headrace knows no such "
            f"store; write its rows to a table of its own"
        )
    return local("/" + path.removeprefix("file:").lstrip("/"))


def commit_times(log: DeltaLog, first: int = 0) -> dict[int, int]:
    """Return the time of each version from `first` on that is still in the log: milliseconds since the epoch,
    ascending.

    A commit says so itself where the table has in-commit timestamps; else its file's time does, and where that is not
    after the commit's before it, one millisecond later than that one.
    """
    newest = log.version
    metadata = None if newest is None else log.metadata(newest)
    inside = str(((metadata or {}).get("configuration") or {}).get(_IN_COMMIT_TIMESTAMPS)).lower() == "true"
    times: dict[int, int] = {}
    last: int | None = None
    for version, written_ns in sorted(log.commit_files().items()):
        if version < first:
            continue
        own_time = _in_commit_timestamp(log, version) if inside else None
        time = written_ns // 1_000_000 if own_time is None else own_time
        times[version] = last = time if last is None else max(time, last + 1)
    return times


def newest_until(times: dict[int, int], until_ms: int) -> int | None:
    """Return the newest version that was committed before or at a time; None: there is none."""
    return max((version for version, time in times.items() if time <= until_ms), default=None)


def _in_commit_timestamp(log: DeltaLog, version: int) -> int | None:
    """Return the timestamp in a commit: by the protocol its first action has it."""
    action = next(log.actions(version), {})
    timestamp = (action.get("commitInfo") or {}).get("inCommitTimestamp")
    return None if timestamp is None else int(timestamp)
