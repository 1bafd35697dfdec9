"""Publishing to a database in SQL: load the files into a staging table, count, and replace the day in a transaction."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import Any

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.files import FilesTarget, Record, StagedFiles
from headrace.publish.sql.client import SqlClient, TokenOvertaken, cleanup
from headrace.publish.target import SCORES, Key, KeyLimits, Publication, lease_lost
from headrace.stage import RunLock
from headrace.storage import Fence, LeaseLost

log = logging.getLogger("headrace.publish")

#: One row for each (table, ds): which run made the day's rows, from what.
PUBLICATIONS = "headrace_publications"
#: One row for each (table, privilege, role) that `publish.grants` has given.
GRANTS = "headrace_grants"
#: Table of earlier releases, with the tokens of all tables.
SHARED_FENCES = "headrace_fences"
STAGING_PREFIX = "headrace_staging_"
#: Values per statement: databases take some thousands.
_KEYS_AT_ONCE = 500


class SqlTarget(FilesTarget):
    """A scores table in a database that `connect` opens; each call opens a connection of its own."""

    def __init__(
        self,
        spec: Spec,
        ws: Workspace,
        kind: str,
        label: str,
        address: str,
        client: type[SqlClient],
        connect: Callable[[], AbstractContextManager[SqlClient]],
        lock: RunLock | None = None,
    ) -> None:
        super().__init__(spec, ws, kind, label, address, lock)
        self._types = client.types
        self._connect = connect
        #: One row for each lease: the token of its newest holder. A table of its own: it is held while a day is
        #: replaced, and many warehouses hold tables rather than rows, which would have other pipelines wait.
        self._fences = f"{self.name}_fences"

    @property
    def types(self) -> Mapping[str, str]:
        return self._types

    def claim(self) -> None:
        with self._connect() as client:
            # Before the table exists, too: a paused run may be about to make the first publication.
            self._claim(client)

    def key_limits(self, column: str) -> KeyLimits:
        with self._connect() as client:
            return client.key_limits(column == self.user)

    def create_table(self) -> None:
        with self._connect() as client:
            self._claim(client)
            table, q = self._id(client, self.name), client.quote
            existing = client.columns(self.name)
            if not existing:
                key = f", PRIMARY KEY ({q('ds')}, {q(self.user)}, {q('rank')})" if client.has_keys else ""
                defined = ", ".join(self._definition(client, i) for i in range(len(self.columns)))
                client.run(f"CREATE TABLE {table} ({defined}{key}){client.table_options(self.user)}")
            elif missing := [c for c, _ in self.columns[:SCORES] if c not in existing]:
                raise UserError(
                    f"table {self.label} does not fit the scores: it has no column {', '.join(missing)}. Publish to "
                    f"another table (publish.table) or change this one"
                )
            for i, (column, _) in enumerate(self.columns):
                if existing and column not in existing:
                    client.run(client.add_column(table, self._definition(client, i)))
            self._create_publications(client)
            view = f"{self.name}_current"
            if client.columns(view) != (columns := client.columns(self.name)):
                newest = (
                    f"SELECT max({q('ds')}) FROM {self._id(client, PUBLICATIONS)} "
                    f"WHERE {q('table_name')} = '{self.name}'"
                )
                listed = ", ".join(map(q, columns))
                select = f"SELECT {listed} FROM {table} WHERE {q('ds')} = ({newest})"
                for statement in client.create_view(self._id(client, view), select):
                    client.run(statement)

    def _create_publications(self, client: SqlClient) -> None:
        if client.columns(PUBLICATIONS):
            return
        text, key, q = client.text_type, client.key_type, client.quote
        primary = f", PRIMARY KEY ({q('table_name')}, {q('ds')})" if client.has_keys else ""
        kinds = {
            "table_name": key,
            "ds": client.type_of("date"),
            "run_key": text,
            "row_count": client.count_type,
            "model": text,
            "source": text,
            "audit": text,
            "published_at": client.moment_type,
        }
        defined = ", ".join(f"{q(name)} {kind}" for name, kind in kinds.items())
        client.run(f"CREATE TABLE {self._id(client, PUBLICATIONS)} ({defined}{primary}){client.publications_options}")

    def _definition(self, client: SqlClient, i: int) -> str:
        column, spark = self.columns[i]
        kind = client.type_of("date" if column == "ds" else spark)
        if spark == "string" and column == self.user:
            kind = client.key_type
        return f"{client.quote(column)} {f'{kind} NOT NULL' if i < SCORES else client.optional(kind)}"

    def publish_files(self, staged: StagedFiles, record: Record) -> None:
        prefix = STAGING_PREFIX + hashlib.sha256(f"{self.label}/{staged.ds}".encode()).hexdigest()[:16]
        name = f"{prefix}_{uuid.uuid4().hex[:8]}"
        columns = [c for c, _ in self.columns]
        with self._connect() as client:
            self._claim(client)
            for left in client.tables(prefix):
                client.run(f"DROP TABLE {self._id(client, left)}")
                log.info("dropped %s, left by an earlier run", left)
            staging, table = self._id(client, name), self._id(client, self.name)
            quoted = [client.quote(c) for c in columns]
            for statement in client.create_staging(staging, table, quoted):
                client.run(statement)
            left = f"{self.label}: the table {name} is left; the next run of {staged.ds} drops it"
            with cleanup(lambda: client.run(client.drop_table(staging)), left):
                client.load(staging, columns, staged.files)
                loaded = int(client.run(f"SELECT count(*) FROM {staging}")[0][0])
                if loaded != staged.rows:
                    raise UserError(
                        f"{self.label}: {staged.rows:,} rows were sent and {loaded:,} arrived in {name}; the table is "
                        f"as it was. Run the same command again"
                    )
                with self._changing(client):
                    for statement in client.replace_day(table, staging, quoted, staged.ds):
                        client.run(statement)
                    if not client.transactions:
                        self._check_replaced(client, staged.ds)
                    self._record(client, staged.ds, record)
                    # Once more: the record may have replaced that of a later run.
                    if not client.transactions:
                        self._check_replaced(client, staged.ds)

    def _claim(self, client: SqlClient) -> None:
        """Note this run's token for the table, in statements of their own. Raises LeaseLost after a later run's."""
        if self.fence is None:
            return
        q, token, record = client.quote, self.fence.token, self._id(client, self._fences)
        self._claim_shared(client, self.fence)
        if not client.columns(self._fences):
            kinds = {"table_name": client.key_type, "lease": client.key_type, "token": client.count_type}
            primary = f", PRIMARY KEY ({q('table_name')}, {q('lease')})" if client.has_keys else ""
            defined = ", ".join(f"{q(name)} {kind} NOT NULL" for name, kind in kinds.items())
            client.run(f"CREATE TABLE {record} ({defined}{primary}){client.fences_options}")
        condition, lease = self._of_lease(client), self.fence.lease
        highest = client.highest_token(record, condition, lease)
        if highest > token:
            raise lease_lost(self.label)
        if not highest:
            names = ", ".join(map(q, ("table_name", "lease", "token")))
            client.run(f"INSERT INTO {record} ({names}) VALUES ('{self.name}', {client.mark}, {token})", [lease])
        elif highest < token:
            self._raise_token(client, record, self.fence)

    def _claim_shared(self, client: SqlClient, fence: Fence) -> None:
        """Refuse whom an earlier version's run has overtaken, and have runs of earlier versions refused, that stand."""
        if client.columns(SHARED_FENCES):
            record = self._id(client, SHARED_FENCES)
            highest = client.highest_token(record, self._of_lease(client), fence.lease)
            if highest > fence.token:
                raise lease_lost(self.label)
            if 0 < highest < fence.token:
                self._raise_token(client, record, fence)

    def _raise_token(self, client: SqlClient, record: str, fence: Fence) -> None:
        token, lower = client.quote("token"), f"{self._of_lease(client)} AND {client.quote('token')} < {fence.token}"
        client.run(client.update_rows(record, f"{token} = {fence.token}", lower), [fence.lease])

    @contextmanager
    def _changing(self, client: SqlClient) -> Iterator[None]:
        """Give a transaction that is this run's to make. Raises LeaseLost, and changes nothing, after a later run's."""
        self._claim(client)
        # Before the transaction: BigQuery's is a script, which returns no rows before its end.
        records = self._tokens(client)
        try:
            with client.transaction():
                self._hold(client, records)
                yield
        except TokenOvertaken:
            raise lease_lost(self.label) from None

    def _tokens(self, client: SqlClient) -> list[str]:
        """Return the tables, quoted, that have tokens of holders: the own one first, then that of earlier versions, if
        any.
        """
        if self.fence is None:
            return []
        shared = [SHARED_FENCES] if client.columns(SHARED_FENCES) else []
        return [self._id(client, name) for name in (self._fences, *shared)]

    def _hold(self, client: SqlClient, records: Sequence[str]) -> None:
        """Keep later runs from the table until the transaction ends, by its row; raise where one was first.

        Args:
            client: the connection.
            records: of `_tokens`. Rows of the own one are held; the other, which other pipelines need, is read.
        """
        if self.fence is None:
            return
        token, own_record, condition = self.fence.token, records[0], self._of_lease(client)
        if client.transactions:
            change = f"{client.quote('token')} = {token}", f"{condition} AND {client.quote('token')} <= {token}"
            client.run(client.update_rows(own_record, *change), [self.fence.lease])
        for record in records:
            client.check_token(record, condition, self.fence.lease, token)

    def _check_replaced(self, client: SqlClient, ds: str) -> None:
        """Check the token again after a day, for databases where a check and a day are not one step."""
        try:
            self._hold(client, self._tokens(client))
        except TokenOvertaken:
            # Without its record, the next run publishes the day again.
            client.run(client.delete_rows(self._id(client, PUBLICATIONS), self._of_day(client, ds)))
            raise LeaseLost(
                f"{self.label}: a later run of the pipeline was at work there while this one replaced {ds}, which may "
                f"have rows of either now. Publish it again: headrace run {self.spec.argument} --ds {ds} --from publish"
            ) from None

    def _of_lease(self, client: SqlClient) -> str:
        return f"{client.quote('table_name')} = '{self.name}' AND {client.quote('lease')} = {client.mark}"

    def _record(self, client: SqlClient, ds: str, record: Record) -> None:
        values = {
            "table_name": self.name,
            "run_key": record.key,
            "row_count": record.rows,
            "model": record.model,
            "source": record.source,
            "audit": json.dumps(record.audit),
            "published_at": datetime.now(UTC).replace(tzinfo=None),
        }
        names = ", ".join(map(client.quote, ["ds", *values]))
        marks = ", ".join([client.day(ds), *[client.mark] * len(values)])
        *first_statements, last = client.replace_record(
            self._id(client, PUBLICATIONS), names, marks, self._of_day(client, ds)
        )
        for statement in first_statements:
            client.run(statement)
        client.run(last, list(values.values()))

    def _of_day(self, client: SqlClient, ds: str) -> str:
        # The table's name is one of a spec: letters, digits and underscores.
        return f"{client.quote('table_name')} = '{self.name}' AND {client.quote('ds')} = {client.day(ds)}"

    def published(self, ds: str) -> Publication | None:
        with self._connect() as client:
            if not client.columns(PUBLICATIONS) or not client.columns(self.name):
                return None
            q = client.quote
            rows = client.run(
                f"SELECT {q('run_key')}, {q('row_count')}, {q('audit')} FROM {self._id(client, PUBLICATIONS)} "
                f"WHERE {self._of_day(client, ds)} ORDER BY {q('published_at')}"
            )
        return None if not rows else Publication(str(rows[-1][0]), int(rows[-1][1]), json.loads(rows[-1][2]))

    def rows_by_day(self) -> dict[str, int]:
        with self._connect() as client:
            if not client.columns(PUBLICATIONS):
                return {}
            q = client.quote
            rows = client.run(
                f"SELECT {q('ds')}, {q('row_count')} FROM {self._id(client, PUBLICATIONS)} "
                f"WHERE {q('table_name')} = '{self.name}' ORDER BY {q('published_at')}"
            )
        return {str(ds)[:10]: int(count) for ds, count in rows}

    def count(self, ds: str) -> int:
        with self._connect() as client:
            condition = f"{client.quote('ds')} = {client.day(ds)}"
            return int(client.run(f"SELECT count(*) FROM {self._id(client, self.name)} WHERE {condition}")[0][0])

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        with self._connect() as client:
            columns = client.columns(self.name)
            if not columns:
                raise UserError(f"there is no table {self.label} yet")
            q = client.quote
            select = (
                f"SELECT {', '.join(map(q, columns))} FROM {self._id(client, self.name)} "
                f"WHERE {q('ds')} = {client.day(ds)} ORDER BY {q(columns[1])}, {q('rank')}"
            )
            records = client.run(client.first_rows(select, int(rows)))
        return [dict(zip(columns, row, strict=True)) for row in records]

    def drop_days(self, days: Sequence[str]) -> None:
        for ds in days:
            with self._connect() as client, self._changing(client):
                client.run(client.delete_day(self._id(client, self.name), ds))
                client.run(f"DELETE FROM {self._id(client, PUBLICATIONS)} WHERE {self._of_day(client, ds)}")

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        counts: dict[str, int] = {}
        with self._connect() as client:
            if column not in client.columns(self.name):
                return counts
            q, table = client.quote, self._id(client, self.name)
            for condition, some in _having(client, column, keys):
                for ds, count in client.run(
                    f"SELECT {q('ds')}, count(*) FROM {table} WHERE {condition} GROUP BY {q('ds')}", some
                ):
                    counts[str(ds)[:10]] = counts.get(str(ds)[:10], 0) + int(count)
        return counts

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        left = {ds: self.count(ds) - rows for ds, rows in self.rows_with(column, keys).items()}
        with self._connect() as client, self._changing(client):
            table, records = self._id(client, self.name), self._id(client, PUBLICATIONS)
            # The records first: without transactions, a rerun then computes the same numbers.
            for ds, rows in left.items():
                change = f"{client.quote('row_count')} = {rows}"
                client.run(client.update_rows(records, change, self._of_day(client, ds)))
            for condition, some in _having(client, column, keys):
                client.run(client.delete_rows(table, condition), some)
        return ""

    def grant(self, grants: Mapping[str, Sequence[str]]) -> None:
        requested = {(privilege, role) for privilege, roles in grants.items() for role in roles}
        with self._connect() as client:
            self._claim(client)
            q, record = client.quote, self._id(client, GRANTS)
            names = self._id(client, self.name), self._id(client, f"{self.name}_current")
            key_columns = [q(c) for c in ("table_name", "privilege", "role")]
            if not client.columns(GRANTS):
                if not requested:
                    return
                defined = ", ".join(f"{c} {client.key_type} NOT NULL" for c in key_columns)
                client.run(f"CREATE TABLE {record} ({defined}){client.grants_options}")
            of_table = f"{key_columns[0]} = '{self.name}'"
            recorded = client.run(f"SELECT {key_columns[1]}, {key_columns[2]} FROM {record} WHERE {of_table}")
            granted = {(str(privilege), str(role)) for privilege, role in recorded}
            # The record comes before its grant and goes after its revocation: a killed run leaves no unknown grant.
            for privilege, role in sorted(granted - requested):
                if not self._revoke(client, client.rights(privilege, *names), role):
                    continue
                condition = f"{of_table} AND {key_columns[1]} = {client.mark} AND {key_columns[2]} = {client.mark}"
                client.run(f"DELETE FROM {record} WHERE {condition}", [privilege, role])
            for privilege, role in sorted(requested):
                statements = [f"GRANT {right} TO {client.grantee(role)}" for right in client.rights(privilege, *names)]
                if (privilege, role) not in granted:
                    marks = ", ".join([client.mark] * len(key_columns))
                    client.run(
                        f"INSERT INTO {record} ({', '.join(key_columns)}) VALUES ({marks})",
                        [self.name, privilege, role],
                    )
                for statement in statements:
                    client.run(statement)

    def _revoke(self, client: SqlClient, rights: Sequence[str], role: str) -> bool:
        """Take rights away from a role; a failure is told and does not end the run, whose day is published by now.

        Returns:
            whether the role has none of them.
        """
        if client.has_role(role) is False:
            log.warning("%s: the role %s is gone, and with it what it was granted", self.label, role)
            return True
        grantee, failed = client.grantee(role), False
        for right in rights:
            try:
                client.run(f"REVOKE {right} FROM {grantee}")
            except Exception as e:  # each client library has errors of its own
                failed = True
                log.warning(
                    "%s: REVOKE %s FROM %s failed: %s. The next run tries again; if the role is gone, delete its rows "
                    "from %s",
                    self.label,
                    right,
                    grantee,
                    (str(e).splitlines() or [type(e).__name__])[0],
                    GRANTS,
                )
        return not failed

    def _id(self, client: SqlClient, name: str) -> str:
        return client.quote(*client.schema, name)


def _having(client: SqlClient, column: str, keys: Sequence[Key]) -> Iterator[tuple[str, Sequence[Key]]]:
    """Conditions that a column has one of some keys, and the keys of each."""
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys[start : start + _KEYS_AT_ONCE]
        yield f"{client.quote(column)} IN ({', '.join([client.mark] * len(some))})", some
