"""Commits to a Delta table without Spark: a table is made, partitions of it are replaced by data files, or files added.

Written to Delta's protocol document (PROTOCOL.md of delta-io/delta). A commit is one file of the log that appears whole
or not at all, and only under a version that nobody has taken; where others have taken it first, the commit goes after
theirs if they have changed nothing that it rests on, and is refused else. A table with features of which a writer must
know more than is here is refused by name.

Under a lease a commit carries its holder's token, and is refused after a commit of a later holder. The token is a `txn`
action: the lease is the application, and its version is the holder's token with a number behind it, which is larger in
each commit. So a log tells whose commit is the newest, Delta's own writers refuse a commit that another one of the
application has overtaken, and a store needs no knowledge of leases.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headrace.config.schema import quoted
from headrace.errors import UserError
from headrace.lake.delta.log import (
    FEATURE,
    LOG_RETENTION,
    PROPERTY,
    DeltaLog,
    TableState,
    file_path,
    widened_fields,
    with_feature,
)
from headrace.lake.delta.log_files import commit_file, newest_checkpoint, set_torn_aside
from headrace.storage import Fence, LeaseLost, Location, sync_files

#: Writer features without requirements for commits that add and remove whole files of a table with these settings.
#: `invariants`, `checkConstraints`: the caller checks them (`Transaction.constraints`).
_WRITER_FEATURES = frozenset(
    {
        "allowColumnDefaults",
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "domainMetadata",
        "generatedColumns",
        "identityColumns",
        "invariants",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
#: Writer features with requirements only for commits that add files or change the table.
_OF_FILES = frozenset({"clustering", "icebergCompatV1", "icebergCompatV2", "rowTracking", "variantType"})
#: Writer version from which the protocol lists features; lower versions imply fixed sets.
_MOST_VERSION = 7
#: Keys in the metadata of columns whose values the writer may not choose.
_GENERATED = ("delta.generationExpression", "delta.identity.start", "delta.invariants")
_CHECKPOINT_INTERVAL = 10
#: Protocol of a table that `delta-spark` creates with these settings.
_PROTOCOL = {"minReaderVersion": 1, "minWriterVersion": 7}
#: Protocol of a table that `delta-spark` creates without settings.
_OLDEST: Mapping[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 2}
_CONFIGURATION = {
    "delta.enableChangeDataFeed": "true",
    "delta.enableDeletionVectors": "false",
    # The load history is in the log.
    "delta.logRetentionDuration": LOG_RETENTION,
}


class UnsupportedTable(UserError):
    """A table that must not be written from here: it uses what headrace does not write."""


class TransactionOvertaken(UserError):
    """Another commit came in between, on which this one would have to rest. Nothing was committed: read again."""


def claim(table: Location, fence: Fence | None) -> None:
    """Have commits of earlier holders of a lease refused from now on, also where this one commits nothing else.

    For what is not a commit and must not be crossed by one: files that no commit names are removed, or looked at for
    the last time. It is a commit of the holder's token alone; none is made where the log's newest one is its own.

    Args:
        table: its folder; one that is no table stays none.
        fence: of the holder; None: there is no lease.

    Raises:
        UserError: the table uses features that headrace does not write.
        LeaseLost: a later holder has committed.
    """
    if fence is not None and DeltaLog(table).version is not None:
        Transaction(table, fence=fence, files=False).claim()


def create_table(
    folder: Location,
    fields: Sequence[Mapping[str, Any]],
    partitioned_by: Sequence[str],
    adds: Sequence[Mapping[str, Any]] = (),
    user_metadata: str | None = None,
    application: tuple[str, int] | None = None,
    fence: Fence | None = None,
    configuration: Mapping[str, str] = _CONFIGURATION,
) -> bool:
    """Make a table, where there is none.

    Args:
        folder: of the table.
        fields: its columns, as the schema's JSON has them.
        partitioned_by: names of columns.
        adds: the `add` actions of its first data files.
        user_metadata: the commit's userMetadata.
        application: see `Transaction.append`.
        fence: see `Transaction`.
        configuration: its properties.

    Returns:
        Whether it was made; False where another process has made it meanwhile.

    Raises:
        UserError: a name that a table cannot have.
    """
    names = [str(f["name"]) for f in fields]
    for name in names:
        # Blanks and ` ,;{}()=` pass: Delta creates no table with them, but reads and writes existing ones.
        if not name:
            raise UserError(f"{folder}: a Delta table cannot have a column '{name}'; give it another name")
        if sum(name.lower() == second.lower() for second in names) > 1:
            raise UserError(f"{folder}: a Delta table cannot have two columns '{name}'; give one another name")
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": _json({"type": "struct", "fields": list(fields)}),
        "partitionColumns": list(partitioned_by),
        "configuration": dict(configuration),
        "createdTime": _now(),
    }
    parameters = {
        "partitionBy": _json(list(partitioned_by)),
        "clusterBy": "[]",
        "description": None,
        "isManaged": "false",
        "properties": _json(dict(configuration)),
    }
    protocol = (
        _PROTOCOL | {"writerFeatures": ["changeDataFeed", "appendOnly", "invariants"]} if configuration else _OLDEST
    )
    info = _info("CREATE TABLE AS SELECT" if adds else "CREATE TABLE", parameters, None, is_append=True)
    if user_metadata is not None:
        info |= {"userMetadata": user_metadata}
    actions: list[Mapping[str, Any]] = [{"commitInfo": info}, {"metaData": metadata}, {"protocol": protocol}]
    tokens = _applications(application) + _token(folder, fence, None)
    set_torn_aside(folder)
    _sync_added(folder, [{"add": add} for add in adds])
    return _put(folder, 0, [*actions, *({"add": add} for add in adds), *tokens])


class Transaction:
    """One commit to a table, which rests on one version of it."""

    def __init__(
        self, folder: Location, version: int | None = None, fence: Fence | None = None, files: bool = True
    ) -> None:
        """Begin at a version of the table; None: the newest.

        Args:
            folder: of the table.
            version: on which the commit rests.
            fence: of the holder of the lease under which the table is written; None: there is no lease. Each commit
                then raises LeaseLost, and nothing is committed, where a later holder has committed before.
            files: whether it may name files.

        Raises:
            UnsupportedTable: a table that must not be written from here.
            UserError: one that is not there.
        """
        self.folder, self._fence = folder, fence
        set_torn_aside(folder)
        self._log = DeltaLog(folder)
        version = self._log.version if version is None else version
        state = self._log.state(version, current=False) if version is not None else None
        if version is None or state is None:
            raise UserError(f"{folder}: there is no Delta table, or its log is not whole")
        self._version, self._state = version, state
        _check(folder, state, files)

    @property
    def adds(self) -> Sequence[Mapping[str, Any]]:
        """Return the `add` actions of the live files."""
        return self._state.adds

    @property
    def fields(self) -> list[dict[str, Any]]:
        """Return the table's columns, as the schema's JSON has them."""
        columns: list[dict[str, Any]] = json.loads(self._state.metadata["schemaString"])["fields"]
        return columns

    @property
    def constraints(self) -> dict[str, str]:
        """Return by name what must be true of every row, as SQL. The caller checks it before the commit."""
        prefix = "delta.constraints."
        declared = {k.removeprefix(prefix): v for k, v in self._state.configuration.items() if k.startswith(prefix)}
        required = (f["name"] for f in self.fields if not f["nullable"])
        return declared | {f"{name} is not null": f"{quoted(name)} IS NOT NULL" for name in required}

    def replace(
        self,
        column: str,
        values: Collection[str],
        adds: Sequence[Mapping[str, Any]],
        user_metadata: str,
        fields: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """Replace whole partitions by data files, in one commit: also where there are none, and were none.

        Args:
            column: the table's partition column.
            values: of the partitions.
            adds: the `add` actions of the data files.
            user_metadata: the commit's userMetadata.
            fields: columns that the table has afterwards, as the schema's JSON has them; those that it lacks are added,
                and those that it has with a narrower type get the wider one (headrace.lake.delta.log).

        Returns:
            the version that was committed.

        Raises:
            TransactionOvertaken: another writer has changed these partitions, or the table itself, since this
                transaction began.
            UserError: the table only grows.
        """
        now = _now()
        replaced = [a for a in self._state.adds if dict(a["partitionValues"] or {}).get(column) in values]
        if replaced and self._state.configuration.get("delta.appendOnly") == "true":
            raise UserError(f"{self.folder}: the table only grows (delta.appendOnly), and its days are replaced")
        actions: list[Mapping[str, Any]] = [{"remove": _removal(add, now)} for add in replaced]
        actions += [{"add": add} for add in adds]
        actions = [*self._schema_actions(fields, add=True), *actions]
        listed = ", ".join(f"'{v}'" for v in sorted(values))
        parameters = {"mode": "Overwrite", "predicate": f"{column} IN ({listed})"}
        info = _info("WRITE", parameters, self._version, is_append=False) | {"userMetadata": user_metadata}
        return self._commit(
            [{"commitInfo": info}, *actions], lambda other_version: self._allow(other_version, column, values)
        )

    def widen(self, fields: Sequence[Mapping[str, Any]]) -> None:
        """Give columns wider types, in a commit of its own; none where no column of the table has a narrower type.

        Args:
            fields: columns that are about to be written, as the schema's JSON has them.

        Raises:
            TransactionOvertaken: another writer has changed the table itself since this transaction began.
        """
        actions = self._schema_actions(fields, add=False)
        if actions:
            info = _info("CHANGE COLUMNS", {}, self._version, is_append=False)
            self._commit([{"commitInfo": info}, *actions], lambda other_version: self._allow(other_version, "", ()))

    def _schema_actions(self, fields: Sequence[Mapping[str, Any]], add: bool) -> list[Mapping[str, Any]]:
        """Return the actions after which the table has the columns; none where it has them. `add`: those it lacks."""
        existing = {str(f["name"]).lower() for f in self.fields}
        new = [f for f in fields if str(f["name"]).lower() not in existing] if add else []
        columns = widened_fields(self.fields, fields)
        is_widened = columns != self.fields
        if not new and not is_widened:
            return []
        metadata = _plain(self._state.metadata) | {
            "schemaString": _json({"type": "struct", "fields": [*columns, *new]})
        }
        actions: list[Mapping[str, Any]] = [{"metaData": metadata}]
        if is_widened:
            metadata["configuration"] = {**self._state.configuration, PROPERTY: "true"}
            if FEATURE not in (self._state.protocol.get("readerFeatures") or ()):
                actions.append({"protocol": with_feature(self._state.protocol)})
        return actions

    def append(self, adds: Sequence[Mapping[str, Any]], user_metadata: str, application: tuple[str, int]) -> int:
        """Add data files to a table without partitions, in one commit.

        Args:
            adds: the `add` actions of the data files.
            user_metadata: the commit's userMetadata.
            application: (its name, the last version that it had written when this transaction began, -1 where none).
                The commit is its next one.

        Returns:
            the version that was committed.

        Raises:
            TransactionOvertaken: since this transaction began the application has written, or somebody has changed
                the table itself, or added or removed rows.
            UserError: the table has partitions.
        """
        if self._state.metadata.get("partitionColumns"):
            raise UserError(f"{self.folder} has partitions, and headrace adds files to tables without any")
        name, _ = application
        info = _info("WRITE", {"mode": "Append", "partitionBy": "[]"}, self._version, is_append=True)
        actions: list[Mapping[str, Any]] = [{"commitInfo": info | {"userMetadata": user_metadata}}]
        actions += [*({"add": add} for add in adds), *_applications(application)]

        def allow(other_version: int) -> None:
            for action in self._log.actions(other_version):
                is_of_application = action.get("txn", {}).get("appId") == name
                if is_of_application or _changes_rows(action) or "metaData" in action or "protocol" in action:
                    raise TransactionOvertaken(
                        f"{self.folder} was changed at version {other_version} since it was read"
                    )

        return self._commit(actions, allow)

    def rewrite(
        self, files: Mapping[str, Mapping[str, Any] | None], user_metadata: str, obsolete: Collection[Location] = ()
    ) -> int:
        """Put data files in the places of others that have fewer rows, in one commit that rests on all rows.

        Args:
            files: by path in the log of a live file, the `add` action of the one in its place; None: nothing is.
            user_metadata: the commit's userMetadata.
            obsolete: other files that the caller removes after the commit, so that no other commit may name them.

        Returns:
            the version that was committed.

        Raises:
            TransactionOvertaken: since this transaction began another writer has added rows, changed the table itself,
                or added, removed or marked rows of one of these files.
            UserError: a file is not live, or the table only grows.
        """
        check_may_shrink(self.folder, self._state)
        now = _now()
        live = {str(add["path"]): add for add in self._state.adds}
        if missing := sorted(files.keys() - live.keys()):
            raise UserError(f"{self.folder}: {missing[0]} is not in the table any more; run again")
        info = _info("DELETE", {"predicate": "[]"}, self._version, is_append=False) | {"userMetadata": user_metadata}
        actions: list[Mapping[str, Any]] = [{"commitInfo": info}]
        actions += [{"remove": _removal(live[path], now)} for path in files]
        actions += [{"add": add} for add in files.values() if add is not None]
        touched = {file_path(self.folder, path) for path in files} | set(obsolete)
        return self._commit(actions, lambda other_version: self._allow_files(other_version, touched, added_rows=False))

    def join(self, paths: Collection[str], adds: Sequence[Mapping[str, Any]]) -> int:
        """Put data files in the places of others with the same rows, in one commit: also where the table only grows.

        Args:
            paths: in the log, of live files.
            adds: the `add` actions of the new ones, which say that no data changes.

        Returns:
            the version that was committed.

        Raises:
            TransactionOvertaken: since this transaction began another writer has removed one of these files or marked
                rows of it, or changed the table itself.
        """
        now = _now()
        live = {str(add["path"]): add for add in self._state.adds}
        info = _info("OPTIMIZE", {"predicate": "[]"}, self._version, is_append=False)
        actions: list[Mapping[str, Any]] = [{"commitInfo": info}]
        actions += [{"remove": _removal(live[path], now) | {"dataChange": False}} for path in paths]
        actions += [{"add": add} for add in adds]
        touched = {file_path(self.folder, path) for path in paths}
        return self._commit(actions, lambda other_version: self._allow_files(other_version, touched, added_rows=True))

    def refuse_changes_since(self, version: int, column: str, values: Collection[str], local: Collection[int]) -> None:
        """Refuse to go on where others have changed rows of partitions since the version on which a caller rests.

        Args:
            version: that the caller read; -1: there was no table. Later ones up to this transaction's are looked at.
            column: the table's partition column.
            values: of the partitions.
            local: versions that the caller has committed itself.

        Raises:
            TransactionOvertaken: they have.
        """
        for other_version in range(version + 1, self._version + 1):
            if other_version not in local and any(
                _changes_rows(action) and _is_in(action, column, values) for action in self._log.actions(other_version)
            ):
                raise self._overtaken(other_version, values)

    def claim(self) -> None:
        """See `claim`."""
        assert self._fence is not None, "asked for a holder"
        if not is_of_holder(self._fence, self._state.applications.get(lease_application(self._fence))):
            info = _info("FENCE", {}, self._version, is_append=False)
            self._commit([{"commitInfo": info}], lambda other_version: None)

    def wants_checkpoint(self, version: int) -> bool:
        """Return whether a checkpoint is due after a commit: the last one is at least the table's interval of commits
        ago.
        """
        interval = int(self._state.configuration.get("delta.checkpointInterval", _CHECKPOINT_INTERVAL))
        last = newest_checkpoint(self.folder / "_delta_log", version)
        return version - (0 if last is None else last.version) >= interval

    def _commit(self, actions: Sequence[Mapping[str, Any]], allow: Callable[[int], None]) -> int:
        """Commit after those of others; `allow` raises where this one may not follow that of a version."""
        last = None if self._fence is None else self._state.applications.get(lease_application(self._fence))
        _sync_added(self.folder, actions)
        new_version = self._version + 1
        while not _put(self.folder, new_version, [*actions, *_token(self.folder, self._fence, last)]):
            if self._fence is not None:
                for action in self._log.actions(new_version):
                    application_version = lease_version_in(action, self._fence)
                    last = last if application_version is None else application_version
                refuse_overtaken(self.folder, self._fence, last)
            allow(new_version)
            new_version += 1
        return new_version

    def _allow_files(self, version: int, files: Collection[Location], added_rows: bool) -> None:
        """Raise TransactionOvertaken where a commit of another writer changes these files or the table itself.

        `added_rows`: whether it may add rows in other files.
        """
        for action in self._log.actions(version):
            file: Mapping[str, Any] = action.get("add") or action.get("remove") or {}
            names_one = "path" in file and file_path(self.folder, str(file["path"])) in files
            adds_rows = "add" in action and _changes_rows(action)
            if names_one or "metaData" in action or "protocol" in action or (adds_rows and not added_rows):
                raise TransactionOvertaken(f"{self.folder} was changed at version {version} meanwhile; run again")

    def _allow(self, version: int, column: str, values: Collection[str]) -> None:
        """Raise TransactionOvertaken where a commit of another writer is one that this one may not follow."""
        for action in self._log.actions(version):
            if "metaData" in action or "protocol" in action:
                raise self._overtaken(version, values, "the table itself")
            if _is_in(action, column, values):
                raise self._overtaken(version, values)

    def _overtaken(self, version: int, values: Collection[str], touched: str = "") -> TransactionOvertaken:
        infos = (action["commitInfo"] for action in self._log.actions(version) if "commitInfo" in action)
        info: Mapping[str, Any] = next(infos, {})
        operation = info.get("operation", "a commit")
        days = ", ".join(sorted(values))
        return TransactionOvertaken(
            f"{self.folder}: {operation} at version {version} has changed {touched or days} meanwhile; nothing of "
            f"{days} was loaded; run again"
        )


def _changes_rows(action: Mapping[str, Any]) -> bool:
    """Return whether an action adds or removes rows: not where files are only rewritten (OPTIMIZE)."""
    file: Mapping[str, Any] | None = action.get("add") or action.get("remove")
    return file is not None and bool(file.get("dataChange", True))


def _is_in(action: Mapping[str, Any], column: str, values: Collection[str]) -> bool:
    """Return whether an action adds or removes a file of partitions, or does not say of which."""
    file = action.get("add") or action.get("remove")
    if file is None:
        return False
    partition = file.get("partitionValues")
    return partition is None or dict(partition).get(column) in values


def _check(folder: Location, state: TableState, files: bool) -> None:
    configuration = state.configuration
    if files and configuration.get("delta.columnMapping.mode", "none") != "none":
        raise UnsupportedTable(
            f"{folder} has column mapping, and headrace writes columns by their own names; turn it off"
        )
    version = state.protocol.get("minWriterVersion") or 1
    known = _WRITER_FEATURES if files else _WRITER_FEATURES | _OF_FILES
    unknown = sorted(set(state.protocol.get("writerFeatures") or ()) - known)
    if version > _MOST_VERSION:
        unknown.append(f"writer version {version}")
    if unknown:
        raise UnsupportedTable(
            f"{folder}: this Delta table uses features that headrace does not write: {', '.join(unknown)}; drop them "
            f"(ALTER TABLE delta.`{folder}` DROP FEATURE {unknown[0]}), or move the table away to load it again"
        )
    for field in json.loads(state.metadata["schemaString"])["fields"] if files else ():
        generated = [key for key in _GENERATED if key in (field.get("metadata") or {})]
        if generated:
            raise UnsupportedTable(
                f"{folder}: column '{field['name']}' has {generated[0]}, which headrace does not write"
            )


def check_may_shrink(folder: Location, state: TableState | None) -> None:
    """Raise UserError where rows of a table are to go, and it has a setting that none may."""
    if state is not None and state.configuration.get("delta.appendOnly") == "true":
        raise UserError(
            f"{folder}: the table only grows (delta.appendOnly), and rows of it are to go; run ALTER TABLE "
            f"delta.`{folder}` SET TBLPROPERTIES ('delta.appendOnly' = 'false')"
        )


def _removal(add: Mapping[str, Any], now: int) -> dict[str, Any]:
    removal: dict[str, Any] = {
        "path": add["path"],
        "deletionTimestamp": now,
        "dataChange": True,
        "extendedFileMetadata": add.get("size") is not None,
        "partitionValues": dict(add["partitionValues"] or {}),
    }
    return removal | {key: _plain(add[key]) for key in ("size", "stats", "deletionVector") if add.get(key) is not None}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: without nulls, and maps as maps. A Parquet map reads as a list of pairs."""
    if isinstance(value, list) and value and all(isinstance(pair, tuple) for pair in value):
        value = dict(value)
    if isinstance(value, Mapping):
        plain = {k: _plain(v) for k, v in value.items() if v is not None}
        for name in ("configuration", "options"):
            if name in plain:
                plain[name] = dict(plain[name])
        return plain
    return value


def _applications(application: tuple[str, int] | None) -> list[Mapping[str, Any]]:
    """Return the `txn` action of an application's next version."""
    if application is None:
        return []
    name, last = application
    return [{"txn": {"appId": name, "version": last + 1, "lastUpdated": _now()}}]


def _token(folder: Location, fence: Fence | None, last: int | None) -> list[Mapping[str, Any]]:
    """Return the `txn` action of a lease's holder; `last`: see `next_lease_version`."""
    if fence is None:
        return []
    version = next_lease_version(folder, fence, last)
    return [{"txn": {"appId": lease_application(fence), "version": version, "lastUpdated": _now()}}]


def _info(operation: str, parameters: Mapping[str, Any], read: int | None, is_append: bool) -> dict[str, Any]:
    return {
        "timestamp": _now(),
        "operation": operation,
        "operationParameters": parameters,
        **({} if read is None else {"readVersion": read}),
        "isolationLevel": "Serializable",
        "isBlindAppend": is_append,
        "operationMetrics": {},
        "engineInfo": "headrace",
        "txnId": str(uuid.uuid4()),
    }


def _sync_added(folder: Location, actions: Sequence[Mapping[str, Any]]) -> None:
    """Return when the data files that a commit adds survive a power cut: a commit must not outlive them."""
    sync_files([file_path(folder, action["add"]["path"]) for action in actions if "add" in action], folder)


def _put(folder: Location, version: int, actions: Sequence[Mapping[str, Any]]) -> bool:
    """Write a commit; False where the version is taken."""
    text = "".join(_json(action) + "\n" for action in actions)
    return commit_file(folder / "_delta_log", version).put_new_text(text)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _now() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


#: Bits of an application version for the commits of one holder. The other 43 bits hold milliseconds since 1970.
_BITS = 20


def lease_application(fence: Fence) -> str:
    """Return the application that commits of a lease's holders are versions of."""
    return f"headrace.lease.{fence.lease}"


def next_lease_version(table: Location, fence: Fence, last: int | None) -> int:
    """Return the application version of a holder's next commit to a table.

    Args:
        table: its folder.
        fence: of the holder.
        last: the newest application version in the table's log; None: there is none.

    Raises:
        LeaseLost: that one is of a later holder.
    """
    first = fence.token << _BITS
    if last is None or last < first:
        return first
    refuse_overtaken(table, fence, last)
    return last + 1


def is_of_holder(fence: Fence, last: int | None) -> bool:
    """Return whether an application version belongs to this holder."""
    return last is not None and last >> _BITS == fence.token


def refuse_overtaken(table: Location, fence: Fence, last: int | None) -> None:
    """Raise LeaseLost where the newest application version in a table's log is of a later holder."""
    if last is not None and last >> _BITS > fence.token:
        raise LeaseLost(
            f"{table}: a later holder of the lease has committed since; nothing of this run was committed there. Run "
            f"it again"
        )


def lease_version_in(action: Mapping[str, Any], fence: Fence) -> int | None:
    """Return the application version that a log's action has of this lease; None: it has none."""
    txn = action.get("txn")
    return int(txn["version"]) if txn and txn["appId"] == lease_application(fence) else None


def committed_as(log: DeltaLog, fence: Fence, version: int, after: int) -> int | None:
    """Return the table's version, after the version `after`, whose commit carries an application version; or None."""
    for table_version in sorted(log.versions(after + 1), reverse=True):
        if any(lease_version_in(action, fence) == version for action in log.actions(table_version)):
            return table_version
    return None
