"""The embedded PostgreSQL and the connection to a warehouse, with real servers."""

from __future__ import annotations

import datetime
import logging
import os
import shutil
import signal
import socket
import socketserver
import ssl
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.config import Warehouse
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.postgres import embedded
from headrace.publish.postgres import processes as postgres_processes
from headrace.publish.postgres import server as warehouse


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace whose cluster is made once; below a folder that only we can enter."""
    private = tmp_path_factory.mktemp("private")
    private.chmod(0o700)
    ws = Workspace(private / "home")
    with embedded.lease(ws):
        pass
    yield ws
    embedded.stop(ws)
    assert not embedded.status(ws).running


def own_server(ws: Workspace, **changes: object) -> Warehouse:
    """The running embedded server, described as a server of the user's own."""
    port = embedded.status(ws).port
    assert port is not None
    fields: dict[str, object] = {"kind": "postgres", "port": port, "password_file": str(ws.postgres / "password")}
    return Warehouse.model_validate(fields | changes)


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up, "waited for a minute"
        time.sleep(0.02)


def test_a_lease_runs_the_server_and_the_last_one_stops_it(home: Workspace) -> None:
    assert not embedded.status(home).running
    with warehouse.connect(Warehouse(), home) as conn:
        assert conn.execute("SELECT current_user, current_database()").fetchone() == ("headrace", "headrace")
        assert conn.execute("SELECT usesuper FROM pg_user WHERE usename = current_user").fetchone() == (False,)
        first = embedded.status(home)
        with warehouse.connect(Warehouse(user='odd "user', database="an o'database"), home) as other_connection:
            assert other_connection.execute("SELECT current_user, current_database()").fetchone() == (
                'odd "user',
                "an o'database",
            )
        assert embedded.status(home) == first
        assert first.running
        assert first.used
    assert not embedded.status(home).running


def test_the_server_listens_on_loopback_only_and_runs_as_no_root(home: Workspace) -> None:
    with embedded.lease(home) as port:
        pid = embedded.status(home).pid
        assert Path(f"/proc/{pid}").stat().st_uid != 0
        listening = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                address, state = line.split()[1], line.split()[3]
                if address.endswith(f":{port:04X}") and state == "0A":
                    listening.add(address.split(":")[0])
        assert listening == {"0100007F"}


def test_a_killed_user_leaves_a_server_that_the_next_one_uses_and_stops(home: Workspace) -> None:
    code = (
        "import sys, time; from pathlib import Path; from headrace.publish.postgres import embedded; "
        "from headrace.config.workspace import Workspace\n"
        "with embedded.lease(Workspace(Path(sys.argv[1]))): print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(home.home)], stdout=subprocess.PIPE, text=True
    ) as user_process:
        assert user_process.stdout is not None
        assert user_process.stdout.readline() == "ready\n"
        pid = embedded.status(home).pid
        with embedded.lease(home):
            pass
        assert embedded.status(home).pid == pid, "stopped while another process uses it"
        assert embedded.stop(home).running, "stopped while another process uses it"
        user_process.kill()
    assert embedded.status(home).pid == pid
    assert not embedded.status(home).used
    with embedded.lease(home):
        assert embedded.status(home).pid == pid
    assert not embedded.status(home).running


def test_start_keeps_the_server_until_stop(home: Workspace) -> None:
    started = embedded.start(home)
    assert started.running
    assert started.keeps_running
    with embedded.lease(home):
        pass
    assert embedded.status(home).pid == started.pid
    assert not embedded.stop(home).running
    assert embedded.start(home).port == started.port, "the port that people noted should stay"
    assert not embedded.stop(home).running


def test_a_killed_server_whose_number_another_process_has_starts_again_with_its_rows(home: Workspace) -> None:
    with warehouse.connect(Warehouse(), home) as conn:
        conn.execute("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS n")
        pid = embedded.status(home).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: not postgres_processes.postgres_in(home.postgres / "data"))
    mark = home.postgres / "data" / "postmaster.pid"
    lines = mark.read_text().splitlines()
    mark.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    with warehouse.connect(Warehouse(), home) as conn:
        assert conn.execute("SELECT count(*), sum(n) FROM kept").fetchone() == (1000, 500_500)
        conn.execute("DROP TABLE kept")


def test_a_half_made_cluster_is_made_again(ws: Workspace) -> None:
    half = ws.postgres / ".data.0123abcd.partial"
    (half / "base").mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    with warehouse.connect(Warehouse(), ws) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
    assert not half.exists()


def test_a_foreign_data_folder_is_refused(ws: Workspace) -> None:
    (ws.postgres / "data").mkdir(parents=True)
    (ws.postgres / "data" / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="holds no PostgreSQL cluster"), embedded.lease(ws):
        pass
    assert (ws.postgres / "data" / "mine.txt").exists()


def test_a_taken_port(home: Workspace) -> None:
    with embedded.lease(home) as noted:
        pass
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", noted))
        taken.listen()
        with pytest.raises(UserError, match=f"port {noted} is taken: set publish.warehouse.port"):
            with embedded.lease(home, port=noted):
                pass
        with embedded.lease(home) as port:
            assert port != noted


def test_a_lost_password_is_explained(ws: Workspace) -> None:
    with embedded.lease(ws):
        pass
    (ws.postgres / "password").unlink()
    with pytest.raises(UserError, match="a password of the embedded PostgreSQL, is gone"), embedded.lease(ws):
        pass
    assert not embedded.stop(ws).running


def test_the_password_is_in_no_command_line_log_or_repr(ws: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[bytes] = []
    stop = False

    def watch() -> None:
        while not stop:
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    try:
                        seen.append((entry / "cmdline").read_bytes() + (entry / "environ").read_bytes())
                    except OSError:
                        continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with warehouse.serve(Warehouse(), ws) as server, warehouse.connect_to(server, Warehouse()) as conn:
            conn.execute("SELECT 1")
            with (
                pytest.raises(UserError) as refused,
                warehouse.connect_to(
                    warehouse.Server(server.host, server.port, "nowhere", server.user, server.password, server.ssl),
                    Warehouse(),
                ),
            ):
                pass
    finally:
        stop = True
        thread.join()
    secret, superuser = embedded.password(ws), (ws.postgres / "superuser").read_text().strip()
    assert secret != superuser
    assert len(secret) >= 24
    assert any(b"initdb" in text for text in seen), "the watcher saw nothing"
    assert not any(s.encode() in text for text in seen for s in (secret, superuser))
    assert secret not in repr(server) + str(server) + str(refused.value) + caplog.text
    assert secret not in (ws.postgres / "data" / "server.log").read_text()
    for name in ("password", "pgpass", "superuser"):
        assert stat.S_IMODE((ws.postgres / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(ws.postgres.stat().st_mode) == 0o700


def test_a_password_of_the_superuser_opens_nothing_else_and_no_other_opens_it(home: Workspace) -> None:
    def enter(port: int, role: str, name: str) -> str:
        secret = (home.postgres / name).read_text().strip()
        with psycopg.connect(host="127.0.0.1", port=port, user=role, password=secret, dbname="headrace") as conn:
            row = conn.execute("SELECT current_user").fetchone()
        assert row is not None
        return str(row[0])

    with embedded.lease(home) as port:
        assert enter(port, "headrace", "password") == "headrace"
        assert enter(port, "postgres", "superuser") == "postgres"
        for role, name in (("postgres", "password"), ("headrace", "superuser")):
            with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
                enter(port, role, name)
    # A cluster of the time when all roles had one password.
    with embedded.lease(home) as port:
        with embedded.superuser_connection(home.postgres, port) as conn:
            conn.execute(
                psycopg.sql.SQL("ALTER ROLE postgres PASSWORD {}").format(
                    embedded.verifier(conn, "postgres", embedded.password(home))
                )
            )
        (home.postgres / "superuser").unlink()
    with embedded.lease(home) as port:
        assert enter(port, "postgres", "superuser") == "postgres"
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            enter(port, "postgres", "password")


def test_psql_info_opens_the_warehouse_without_showing_the_password(home: Workspace) -> None:
    with pytest.raises(UserError, match="headrace warehouse start"):
        warehouse.psql_info(Warehouse(), home)
    with embedded.lease(home):
        command = warehouse.psql_info(Warehouse(), home)
        assert embedded.password(home) not in command
        completed = subprocess.run(
            f"{command} -Atc 'SELECT 6 * 7'", shell=True, capture_output=True, text=True, check=True
        )
        assert completed.stdout == "42\n"


def test_a_server_of_ones_own_with_the_password_from_a_file_or_a_variable(
    home: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with embedded.lease(home):
        with warehouse.connect(own_server(home), home) as conn:
            assert conn.execute("SELECT current_user").fetchone() == ("headrace",)
        monkeypatch.setenv("SCORES_PASSWORD", embedded.password(home))
        place = own_server(home, password_file=None, password_env="SCORES_PASSWORD")
        with warehouse.connect(place, home) as conn:
            assert conn.execute("SELECT current_user").fetchone() == ("headrace",)
        monkeypatch.setenv("SCORES_PASSWORD", "wrong one")
        with pytest.raises(UserError) as refused, warehouse.connect(place, home):
            pass
        message = str(refused.value)
        assert f"cannot reach 127.0.0.1:{place.port}/headrace as user 'headrace': password authentication" in message
        assert "check publish.warehouse.user and the password in SCORES_PASSWORD" in message
        assert "wrong one" not in message
        with pytest.raises(UserError, match="does not exist; create it"):
            with warehouse.connect(own_server(home, database="nowhere"), home):
                pass


def test_a_server_elsewhere_is_verified_unless_the_spec_says_otherwise() -> None:
    for host, mode in (
        ("db.example.com", "verify-full"),
        ("10.0.0.7", "verify-full"),
        ("127.0.0.1", "prefer"),
        ("::1", "prefer"),
        ("localhost", "prefer"),
        ("/run/postgresql", "prefer"),
    ):
        assert Warehouse(kind="postgres", host=host).ssl == {"sslmode": mode}
    assert Warehouse(kind="postgres", host="db.example.com", sslmode="require").ssl == {"sslmode": "require"}
    assert Warehouse().ssl == {"sslmode": "disable"}
    with pytest.raises(ValueError, match="go together"):
        Warehouse(kind="postgres", sslcert="client.crt")


def certificates(folder: Path) -> None:
    """An authority (ca.crt), a server's certificate for `localhost` and a client's (server.*, client.*)."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    for name, host in (("ca", "authority"), ("server", "localhost"), ("client", "headrace"), ("other", "another")):
        key = ca_key if name == "ca" else ec.generate_private_key(ec.SECP256R1())
        is_self_signed = name in ("ca", "other")
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host if is_self_signed else "authority")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_self_signed, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .sign(key if is_self_signed else ca_key, hashes.SHA256())
        )
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.key").write_bytes(pem)
        (folder / f"{name}.key").chmod(0o600)


@contextmanager
def encrypting(folder: Path, port: int, ask_client: bool = False) -> Iterator[int]:
    """A PostgreSQL that speaks TLS, in front of the embedded one, which is built without. Yields its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    if ask_client:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(folder / "ca.crt")

    class Front(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            tls_request = self.request.recv(8)
            assert tls_request == struct.pack("!ii", 8, 80877103), "not libpq's request for TLS"
            self.request.sendall(b"S")
            try:
                client = context.wrap_socket(self.request, server_side=True)
            except (ssl.SSLError, OSError):
                return
            with client, socket.create_connection(("127.0.0.1", port)) as backend:
                back = threading.Thread(target=pump, args=(backend, client))
                back.start()
                pump(client, backend)
                back.join()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Front) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_certificates_of_server_and_client(home: Workspace, tmp_path: Path) -> None:
    certificates(tmp_path)

    def is_encrypted(place: Warehouse) -> bool:
        with warehouse.connect(place, home) as conn:
            return conn.pgconn.ssl_in_use

    with embedded.lease(home) as backend, encrypting(tmp_path, backend) as port:
        place = own_server(
            home, port=port, host="localhost", sslmode="verify-full", sslrootcert=str(tmp_path / "ca.crt")
        )
        assert is_encrypted(place)
        for changes, reason in (
            ({"sslrootcert": str(tmp_path / "other.crt")}, "certificate verify failed"),
            ({"sslrootcert": str(tmp_path / "none.crt")}, 'none.crt" does not exist'),
            ({"host": "127.0.0.1"}, "does not match host name"),
        ):
            with pytest.raises(UserError, match="name the server's root certificate") as refused:
                is_encrypted(place.model_copy(update=changes))
            assert reason in str(refused.value)
    with embedded.lease(home) as backend, encrypting(tmp_path, backend, ask_client=True) as port:
        place = place.model_copy(update={"port": port})
        with pytest.raises(UserError, match=r"name yours in publish\.warehouse\.sslcert and sslkey"):
            is_encrypted(place)
        files = {"sslcert": str(tmp_path / "client.crt"), "sslkey": str(tmp_path / "client.key")}
        assert is_encrypted(place.model_copy(update=files))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"password_env": "HEADRACE_NO_SUCH"}, "the variable HEADRACE_NO_SUCH, which is not set: export it"),
        ({"password_env": "HEADRACE_EMPTY"}, "the variable HEADRACE_EMPTY, which is empty"),
        ({"password_file": "/nowhere/password"}, "cannot read /nowhere/password: No such file"),
        ({"password_file": "/dev/null"}, "/dev/null is empty"),
    ],
)
def test_a_password_that_is_not_there(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], message: str
) -> None:
    monkeypatch.setenv("HEADRACE_EMPTY", "")
    with pytest.raises(UserError, match=message), warehouse.connect(Warehouse(kind="postgres", **fields), ws):
        pass


def test_an_unreachable_server(ws: Workspace) -> None:
    with socket.socket() as s:  # bound, not listening: nobody answers and nobody else can take it
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        with pytest.raises(UserError) as refused, warehouse.connect(Warehouse(kind="postgres", port=port), ws):
            pass
    assert str(refused.value) == (
        f"cannot reach 127.0.0.1:{port}/headrace as user 'headrace': Connection refused; "
        "start the server, or correct publish.warehouse.host and port"
    )
    assert not ws.postgres.exists(), "a server of the user's own must not start the embedded one"


def test_no_password_no_entry(home: Workspace) -> None:
    with embedded.lease(home) as port, pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(host="127.0.0.1", port=port, user="postgres", dbname="postgres", passfile="/dev/null")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another account")
def test_programs_that_the_account_cannot_reach_are_copied(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    wheel = postgres_processes.program("psql").parents[2]
    shutil.copytree(wheel / "pginstall18", tmp_path / "site" / wheel.name / "pginstall18", symlinks=True)
    shutil.copytree(wheel.with_name(f"{wheel.name}.libs"), tmp_path / "site" / f"{wheel.name}.libs")
    programs = tmp_path / "site" / wheel.name / "pginstall18" / "bin"
    monkeypatch.setattr(postgres_processes, "program", lambda name: programs / name)
    with tempfile.TemporaryDirectory() as open_to_all:
        Path(open_to_all).chmod(0o755)
        monkeypatch.setattr(postgres_processes, "SHARED_PROGRAMS", Path(open_to_all) / "headrace")
        with warehouse.connect(Warehouse(), ws) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
            running = Path(f"/proc/{embedded.status(ws).pid}/exe").readlink()
            assert running.is_relative_to(open_to_all)
