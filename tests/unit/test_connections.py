"""Connections that `--dry-run` tries: refused ones are told, slow ones are warnings, and --offline tries none."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import connections
from headrace.cli.connections import SECONDS, check_connections
from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.storage import StoreAway
from tests.cli_support import Yard, make_yard


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    return make_yard(tmp_path, monkeypatch)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def postgres(port: int) -> tuple[str, ...]:
    settings = {"kind": "postgres", "port": port, "sslmode": "disable"}
    return tuple(word for key, value in settings.items() for word in ("--set", f"publish.warehouse.{key}={value}"))


def test_a_warehouse_that_is_down_is_refused_unless_offline(yard: Yard, closed_port: int) -> None:
    refused = yard.run("--dry-run", *postgres(closed_port))
    assert refused.exit_code == 2
    assert f"cannot reach 127.0.0.1:{closed_port}/headrace as user 'headrace'" in refused.stderr
    assert "would run" not in refused.output
    for words in (("--offline",), ("--to", "score")):
        assert yard.run("--dry-run", *words, *postgres(closed_port)).exit_code == 0
    alone = yard.run("--offline")
    assert (alone.exit_code, yard.submitted) == (2, [])
    assert "--offline goes with --dry-run" in alone.stderr


def test_a_warehouse_that_says_nothing_is_a_warning_after_a_second(yard: Yard, silent_port: int) -> None:
    spec = load_spec("clicks", [word for word in postgres(silent_port) if word != "--set"])
    start = time.monotonic()
    (warning,) = check_connections(spec, Workspace(yard.home), ["publish"])
    assert SECONDS <= time.monotonic() - start < 5 * SECONDS
    assert warning.startswith("publish.warehouse postgres at 127.0.0.1 has not answered within 1 s; a run waits longer")


def test_the_registry_is_asked_for_by_stages_with_models(yard: Yard, closed_port: int, silent_port: int) -> None:
    def ask(port: int, *stages: str) -> list[str]:
        ws = Workspace(yard.home, registry_server=f"http://127.0.0.1:{port}")
        return check_connections(load_spec("clicks"), ws, stages)

    with pytest.raises(UserError, match=rf"registry: cannot reach 127\.0\.0\.1:{closed_port} \(Connection refused\)"):
        ask(closed_port, "train")
    assert ask(silent_port, "train") == []
    assert ask(closed_port, "ingest", "features") == []


@pytest.mark.parametrize(
    "warehouse", [{}, {"kind": "delta"}, {"kind": "duckdb"}, {"kind": "sqlalchemy", "url": "sqlite:////HOME/s.db"}]
)
def test_of_files_and_the_embedded_server_the_folder_is_looked_at(tmp_path: Path, warehouse: dict[str, Any]) -> None:
    overrides = [f"publish.warehouse.{k}={v}".replace("/HOME", str(tmp_path / "home")) for k, v in warehouse.items()]
    spec, ws = load_spec("clicks", overrides), Workspace(tmp_path / "home")
    assert check_connections(spec, ws, ["publish"]) == []
    assert not ws.home.exists(), "nothing is made"
    ws.home.write_text("a file")
    with pytest.raises(UserError, match=r"publish\.warehouse: .*home is a file"):
        check_connections(spec, ws, ["publish"])


def test_a_store_that_is_away_is_told_and_all_share_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, ws = load_spec("clicks"), Workspace(tmp_path)

    def attempts(*seconds: float, error: Exception | None = None) -> list[connections.ConnectionAttempt]:
        def connect(duration: float) -> None:
            time.sleep(duration)
            if error is not None:
                raise error

        return [connections.ConnectionAttempt(f"store {s}", lambda s=s: connect(s)) for s in seconds]  # type: ignore[misc]

    monkeypatch.setattr(connections, "connections", lambda *_: attempts(0.0, 2.5, 2.5))
    start = time.monotonic()
    assert [w.partition(" has")[0] for w in check_connections(spec, ws, [])] == ["store 2.5", "store 2.5"]
    assert time.monotonic() - start < 2
    monkeypatch.setattr(connections, "connections", lambda *_: attempts(0.0, error=StoreAway("s3://b is away")))
    with pytest.raises(StoreAway, match="is away"):
        check_connections(spec, ws, [])
