"""`publish.warehouse.url` and `options`: what they must not repeat, and secrets; where files wait to be loaded."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from headrace.config import load_spec
from headrace.errors import UserError
from headrace.publish.files import files_folder
from headrace.publish.opening import open_target
from headrace.storage import Location, local
from headrace.storage.objects import calls, copies
from headrace.workspace import Workspace
from tests.cloud_support import conf


def test_an_option_repeats_nothing_of_a_url(tmp_path: Path) -> None:
    url = f"url=sqlite:///{tmp_path / 'scores.db'}?timeout=5"
    spec = load_spec("clicks", conf("sqlalchemy", url, "options.timeout='6'"))
    with (
        pytest.raises(UserError, match=r"options\.timeout: the driver is given this by publish\.warehouse\.url"),
        open_target(spec, Workspace(tmp_path)),
    ):
        pass


def test_an_option_that_a_driver_does_not_know_is_the_users_to_mend(tmp_path: Path) -> None:
    spec = load_spec("clicks", conf("sqlalchemy", f"url=sqlite:///{tmp_path / 'scores.db'}", "options.tiemout='6'"))
    with (
        pytest.raises(
            UserError, match=r"options \(tiemout\): the client library of sqlalchemy does not take them: .*tiem"
        ),
        open_target(spec, Workspace(tmp_path)) as target,
    ):
        target.days()


def test_a_url_has_no_password() -> None:
    for url in (
        "mysql+pymysql://me:secret@h/db",
        "mysql+pymysql://me:sec/ret@h/db",
        "mysql+pymysql://h/db?password=secret",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BUID%3Dme%3BPWD%3Dsecret",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3B+Password+%3Dsecret",
    ):
        with pytest.raises(UserError, match="url has a password in it"):
            load_spec("clicks", ["publish.warehouse.kind=sqlalchemy", f"publish.warehouse.url={url}"])
    for url in ("sqlite:////data/a:b@c.db", "mssql+pyodbc://me@h:1433/db?driver=X", "postgresql://me@h:5432/db"):
        load_spec("clicks", ["publish.warehouse.kind=sqlalchemy", f"publish.warehouse.url={url}"])


def test_files_of_a_lake_in_a_store_are_among_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.store import MemoryStore

    monkeypatch.setenv(copies.VARIABLE, str(tmp_path / "cache"))
    bucket = MemoryStore()
    calls.put(bucket, "lake/staging/clicks/d/part-0.parquet", b"rows")
    stored = calls.head(bucket, "lake/staging/clicks/d/part-0.parquet")
    assert stored is not None
    folder = files_folder(Location(PurePosixPath("/bucket/lake/staging/clicks"), "s3"))
    assert copies.file(bucket, "s3://bucket", stored).is_relative_to(folder)
    assert files_folder(local(tmp_path)) == tmp_path
