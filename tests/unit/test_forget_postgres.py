"""Erased users of the embedded PostgreSQL: no byte of them is in any file of its data folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Warehouse, load_spec
from headrace.config.workspace import Workspace
from headrace.publish.postgres import embedded
from headrace.publish.postgres.target import PostgresTarget, open_postgres
from tests.storage_support import Killed

pytestmark = pytest.mark.service

#: One whom statistics know as the most frequent, one in many rows, one in a day of its own.
ERASED_USERS = ["user-gone-0001", "user-gone-0002", "user-gone-0003"]
DAYS = ["2026-01-03", "2026-01-04"]
SPEC = load_spec("clicks", ['publish.warehouse={"kind": "embedded"}'])


@pytest.fixture
def ws(tmp_path: Path) -> Iterator[Workspace]:
    ws = Workspace(tmp_path / "home")
    yield ws
    embedded.stop(ws)


def files_with(ws: Workspace, values: list[str]) -> list[str]:
    encoded = [v.encode() for v in values]
    files = [f for f in (ws.postgres / "data").rglob("*") if f.is_file()]
    assert len(files) > 100
    return sorted(str(f.relative_to(ws.postgres)) for f in files if any(v in f.read_bytes() for v in encoded))


def publish(target: PostgresTarget) -> None:
    """Publish rows of two days: loaded, analysed, changed, and a table that was dropped."""
    columns = {"ds": "string", "user_id": "string", "item_id": "string", "rank": "int", "score": "float"}
    target.create([*columns.items(), ("model_version", "string")])
    conn, table = target._conn, f"{target._schema}.{target._name}"
    for n, ds in enumerate(DAYS):
        users = [*ERASED_USERS[: 2 + n], *(f"user-{k:04d}" for k in range(40))]
        conn.execute(f"CREATE TABLE {table}_{n} PARTITION OF {table} FOR VALUES IN ('{ds}')")  # type: ignore[call-overload]
        for rank in range(1, 6):
            conn.execute(  # type: ignore[call-overload]
                f"INSERT INTO {table} (ds, user_id, item_id, rank, score, model_version) "
                f"SELECT '{ds}', u, 'i', {rank}, 0.5, 'v' "
                f"FROM unnest(%s::text[]) u",
                [users],
            )
    conn.execute(f"CREATE TABLE {target._schema}.staging_old AS SELECT * FROM {table}")  # type: ignore[call-overload]
    conn.execute(f"DROP TABLE {target._schema}.staging_old")  # type: ignore[call-overload]
    conn.execute(f"ANALYZE {table}")  # type: ignore[call-overload]


def rows(target: PostgresTarget) -> list[Any]:
    return target._conn.execute(  # type: ignore[call-overload]
        f"SELECT ds::text, user_id, rank FROM {target._schema}.{target._name} ORDER BY 1, 2, 3"
    ).fetchall()


def test_no_file_has_a_byte_of_them(ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_postgres(SPEC, ws) as target:
        assert isinstance(target, PostgresTarget)
        publish(target)
        published = rows(target)
        assert any("pg_wal" in name for name in files_with(ws, ERASED_USERS))
        assert target.rows_with("user_id", ERASED_USERS) == {DAYS[0]: 10, DAYS[1]: 15}
        # Killed after the rows are deleted: a rerun knows that there is something to do, and does it.
        with monkeypatch.context() as patch:

            def killed(*_: object) -> None:
                raise Killed

            patch.setattr(embedded, "superuser_connection", killed)
            with pytest.raises(Killed):
                target.erase("user_id", ERASED_USERS)
        assert target.rows_with("user_id", ERASED_USERS) == {}
        assert files_with(ws, ERASED_USERS)
        assert target.leftovers("user_id", ERASED_USERS) == 1
        assert target.erase("user_id", ERASED_USERS) == ""
        assert target.leftovers("user_id", ERASED_USERS) == 0
        assert target.not_reached == ""
        assert rows(target) == [row for row in published if row[1] not in ERASED_USERS]
        assert files_with(ws, ERASED_USERS) == []
        assert target._conn.execute("SHOW wal_recycle").fetchone() == ("on",)


def test_the_proof_names_a_server_that_headrace_does_not_run(ws: Workspace) -> None:
    with open_postgres(SPEC, ws) as target:
        assert isinstance(target, PostgresTarget)
        port = target._server.port
        warehouse = Warehouse(kind="postgres", port=port, password_file=str(ws.postgres / "password"))
        assert SPEC.publish is not None
        spec = SPEC.model_copy(update={"publish": SPEC.publish.model_copy(update={"warehouse": warehouse})})
        with open_postgres(spec, ws) as external:
            assert f"127.0.0.1:{port}/headrace" in external.not_reached or f":{port}/headrace" in external.not_reached
