"""A store that is busy or away: its requests are made again for longer than the library would by itself; where it stays
away, a command ends with one message and exit code 75."""

from __future__ import annotations

import gzip
import ssl
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.root import Group
from headrace.config import LandingSource
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError
from headrace.errors.stores import StoreError
from headrace.errors.translate import exit_message
from headrace.jobs import run_stage
from headrace.lake.landing.blocks import Part, blocks
from headrace.lake.landing.compression import UnpackTask, open_plain
from headrace.lake.landing.files import find_files
from headrace.storage import StoreAway, StoreRefused, local, location
from headrace.storage.objects import calls, clients
from headrace.storage.objects.store import ObjectStore
from tests.certificates import self_signed
from tests.storage_support import memory_home

#: The library's own are ten.
REFUSALS = 40


class Busy(BaseHTTPRequestHandler):
    """The first requests are answered 503, the others as by a store with one object everywhere."""

    protocol_version = "HTTP/1.1"
    refused = 0
    status = 503
    body = b"<Error><Code>SlowDown</Code></Error>"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if Busy.refused < REFUSALS:
            Busy.refused += 1
            self.send_response(Busy.status)
            body = Busy.body
        else:
            self.send_response(200)
            self.send_header("ETag", '"tag"')
            self.send_header("Last-Modified", "Mon, 05 Jan 2026 00:00:00 GMT")
            body = b"data"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("obstore")
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(clients, "_LONGEST_WAIT", 0.002)
    monkeypatch.setattr(Busy, "refused", 0)
    monkeypatch.setattr(Busy, "status", 503)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anything")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    try:
        yield clients.open_bucket("s3", "bucket")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    "ask",
    [
        lambda bucket: calls.get(bucket, "key"),
        lambda bucket: calls.head(bucket, "key"),
        lambda bucket: calls.put(bucket, "key", b"data"),
        lambda bucket: calls.put_new(bucket, "key", b"data"),
        lambda bucket: calls.put_if(bucket, "key", b"data", "tag"),
    ],
    ids=["get", "head", "put", "put_new", "put_if"],
)
def test_a_call_outlasts_many_refusals(bucket: Any, ask: Callable[[Any], object]) -> None:
    assert ask(bucket) is not None
    assert Busy.refused == REFUSALS


@pytest.fixture
def absent_store(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does not come back, and nobody asks it for long."""
    monkeypatch.setattr(clients, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(Busy, "refused", -1_000_000)
    monkeypatch.setitem(location.STORES, "s3", ObjectStore("s3"))


_BUSY = r"^s3://bucket/key: the store is away \(.*503 Service Unavailable\)\. Run this again later$"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_store_that_stays_busy_is_away(absent_store: None, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Busy, "status", status)
    with pytest.raises(StoreAway, match=_BUSY.replace("503 Service Unavailable", f"{status} [A-Z].*")):
        calls.get(clients.open_bucket("s3", "bucket"), "key")


def test_every_call_says_so(absent_store: None, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    bucket = clients.open_bucket("s3", "bucket")
    for ask in (
        lambda: calls.head(bucket, "key"),
        lambda: calls.get_range(bucket, "key", 0, 1),
        lambda: calls.put(bucket, "key", b""),
        lambda: calls.put_new(bucket, "key", b""),
        lambda: calls.put_if(bucket, "key", b"", "tag"),
        lambda: calls.upload(bucket, "key", tmp_path / "x"),
        lambda: calls.download(bucket, "key", tmp_path / "y"),
        lambda: calls.copy(bucket, "key", "to"),
        lambda: calls.delete(bucket, ["key"]),
        lambda: calls.list_below(bucket, "key"),
        lambda: calls.list_level(bucket, "key"),
    ):
        with pytest.raises(StoreAway, match=_BUSY):
            ask()


def test_where_nobody_listens_the_address_may_be_wrong(absent_store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    message = (
        r"GET http://127\.0\.0\.1:1/bucket/key in .*: Connection refused\)\. Run this again later; or that is not its"
    )
    with pytest.raises(StoreAway, match=message):
        calls.get(clients.open_bucket("s3", "bucket"), "key")


@pytest.mark.parametrize("status", [400, 501])
def test_what_no_later_try_mends_is_another_error(
    absent_store: None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Busy, "status", status)
    with pytest.raises(StoreError, match=rf"^s3://bucket/key: .* {status} ") as raised:
        calls.get(clients.open_bucket("s3", "bucket"), "key")
    assert type(raised.value) is StoreError


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "^the store refuses s3://bucket/key: .* 401 Unauthorized. Credentials are those of"),
        (403, "^the store refuses s3://bucket/key: .* 403 Forbidden. Credentials are those of"),
        (404, "^s3://bucket/key: there is no such bucket, and headrace makes none$"),
    ],
)
def test_a_listing_that_is_refused_is_the_users_to_mend(
    absent_store: None, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Busy, "status", status)
    for ask in (calls.list_below, calls.list_level):
        with pytest.raises(UserError, match=message):
            ask(clients.open_bucket("s3", "bucket"), "key")


def test_a_landing_file_in_no_bucket(absent_store: None, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Busy, "status", 404)
    for path in ("s3://bucket/in/a.csv", "s3://bucket/in/*.csv"):
        with pytest.raises(StoreRefused, match=r"^s3://bucket/in.*: there is no such bucket, and headrace makes none$"):
            find_files(LandingSource.model_validate({"format": "csv", "path": path}), ws, "2026-01-01")


_MALFORMED = b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is malformed; "


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            301,  # of a HEAD there is no more
            b"",
            "s3://bucket is in another region than 'us-east-1' (AWS_REGION): set AWS_REGION to the bucket's own, which "
            "`aws s3api get-bucket-location --bucket bucket` tells",
        ),
        (
            400,
            _MALFORMED + b"the region 'us-east-1' is wrong; expecting 'eu-west-1'</Message></Error>",
            "s3://bucket is in the region 'eu-west-1' and was asked for in 'us-east-1' (AWS_REGION): set "
            "AWS_REGION=eu-west-1",
        ),
    ],
)
def test_a_bucket_of_another_region(
    absent_store: None, status: int, body: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Busy, "status", status)
    monkeypatch.setattr(Busy, "body", body)
    bucket = clients.open_bucket("s3", "bucket")
    for ask in (calls.get, calls.list_below):
        with pytest.raises(StoreRefused) as raised:
            ask(bucket, "a/Received redirect without LOCATION")
        assert exit_message(raised.value) == (message, EXIT_USER_ERROR)


def test_where_no_region_is_set(absent_store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setattr(Busy, "status", 301)
    with pytest.raises(StoreRefused, match=r"another region than 'us-east-1' \(AWS_REGION is not set\)"):
        calls.head(clients.open_bucket("s3", "bucket"), "key")


def test_other_headers_that_are_malformed_say_nothing_of_a_region(
    absent_store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Busy, "status", 400)
    monkeypatch.setattr(Busy, "body", _MALFORMED + b"a non-empty Access Key must be provided</Message></Error>")
    with pytest.raises(StoreError):
        calls.get(clients.open_bucket("s3", "bucket"), "Received redirect without LOCATION")


def test_a_certificate_that_is_not_trusted_is_another_error(
    absent_store: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*self_signed(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{server.server_port}")
        with pytest.raises(StoreError) as raised:
            calls.get(clients.open_bucket("s3", "bucket"), "key")
        assert type(raised.value) is StoreError
    finally:
        server.shutdown()
        server.server_close()


def test_a_machine_without_credentials_is_the_users_to_mend(bucket: Any) -> None:
    """A machine without credentials asks the cloud's own service, which exists nowhere else."""
    from obstore.exceptions import GenericError

    url = "http://169.254.169.254/latest/api/token"
    with pytest.raises(UserError, match=r"there are no credentials for s3://bucket/key: .*docs/storage\.md"):
        with calls._errors(bucket, "key"):
            raise GenericError(f"Generic S3 error: Error performing PUT {url} in 180s - HTTP error: timeout")


@pytest.mark.parametrize(
    "reason",
    [
        "Server returned non-2xx status code: 503 Service Unavailable: busy",
        "Server returned non-2xx status code: 429 Too Many Requests: busy",
        "HTTP error: error sending request\n\nDebug source:\n HttpError { kind: Timeout, source: TimedOut }",
    ],
)
def test_a_busy_service_of_credentials_is_away(bucket: Any, reason: str) -> None:
    """The library says so of a service that answers busy, or that takes a connection and does not answer."""
    from obstore.exceptions import GenericError

    url = "http://169.254.169.254/latest/api/token"
    with pytest.raises(StoreAway, match=r"^s3://bucket/key: the store is away"), calls._errors(bucket, "key"):
        raise GenericError(f"Generic S3 error: Error performing PUT {url} in 180s - {reason}")


@pytest.mark.parametrize(
    "reason",
    [
        "Server returned non-2xx status code: 404 Not Found: no role",
        'HTTP error: x\n\n HttpError { kind: Timeout, source: Error(Connect, ConnectError("tcp connect error")) }',
    ],
)
def test_a_machine_without_an_account_has_no_credentials(bucket: Any, reason: str) -> None:
    from obstore.exceptions import GenericError

    url = "http://169.254.169.254/latest/api/token"
    with pytest.raises(UserError, match=r"there are no credentials"), calls._errors(bucket, "key"):
        raise GenericError(f"Generic S3 error: Error performing PUT {url} in 180s - {reason}")


def test_a_key_is_no_word_of_the_library(absent_store: None) -> None:
    with pytest.raises(StoreAway):
        calls.get(clients.open_bucket("s3", "bucket"), "certificates/invalid peer certificate (builder error)")


def test_what_it_is_called_in_each_cloud() -> None:
    stores = pytest.importorskip("obstore.store")
    azure = stores.AzureStore("c", account_name="a", account_key="YQ==")
    assert calls.display_name(azure, "x/y") == "abfss://c@a.dfs.core.windows.net/x/y"
    assert calls.display_name(stores.MemoryStore(), "x/y") == "x/y"


@pytest.mark.parametrize(
    ("domain", "endpoint"),
    [
        ("dfs.core.windows.net", None),
        ("dfs.core.chinacloudapi.cn", "https://a.blob.core.chinacloudapi.cn"),
        ("dfs.fabric.microsoft.com", "https://a.blob.fabric.microsoft.com"),
    ],
)
def test_an_account_is_in_the_cloud_that_its_uri_names(domain: str, endpoint: str | None) -> None:
    pytest.importorskip("obstore")
    bucket = clients.open_bucket("abfss", f"c@a.{domain}")
    assert bucket.config.get("endpoint") == endpoint
    assert calls.display_name(bucket, "x/y") == f"abfss://c@a.{domain}/x/y"


def test_a_command_and_a_job_end(
    absent_store: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    for name in ("LAKE", "STORE"):
        monkeypatch.setenv(f"HEADRACE_{name}", f"s3://bucket/{name.lower()}")
    result = CliRunner().invoke(app, ["gc", "clicks", "--home", str(tmp_path)])
    lines = result.stderr.splitlines()
    assert (result.exit_code, len(lines)) == (EXIT_INCOMPLETE, 1), result.output
    assert lines[0].startswith("error: s3://bucket/")
    assert lines[0].endswith("503 Service Unavailable). Run this again later")
    monkeypatch.setattr(run_stage, "when_parent_ends", lambda end: None)
    with pytest.raises(SystemExit) as exit_info:
        run_stage.main(["report", "clicks", "--ds", "2026-01-08", "--home", str(tmp_path)])
    assert exit_info.value.code == EXIT_INCOMPLETE
    told_by_job = capfd.readouterr().err
    assert told_by_job.startswith("error: s3://bucket/")
    assert told_by_job.count("\n") == 1


def test_a_command_of_a_group_says_it_once() -> None:
    root, group = typer.Typer(cls=Group), typer.Typer(cls=Group)

    @group.command()
    def act() -> None:
        raise StoreAway("s3://x: the store is away")

    @root.command()
    def other_command() -> None:
        """A group of one command is that command."""

    root.add_typer(group, name="group")
    group.command("other")(other_command)
    result = CliRunner().invoke(root, ["group", "act"])
    assert (result.exit_code, result.stderr) == (EXIT_INCOMPLETE, "error: s3://x: the store is away\n")


def test_a_file_that_cannot_be_read_since_its_store_is_away_is_not_damaged() -> None:
    def read(error: Exception) -> Exception:
        try:
            try:
                raise error
            except OSError as e:
                raise UserError(f"x is not a whole Parquet file ({e}): make it again") from None
        except UserError as e:
            return e

    assert exit_message(read(StoreAway("s3://x: the store is away"))) == ("s3://x: the store is away", EXIT_INCOMPLETE)
    assert exit_message(read(OSError("torn"))) == ("x is not a whole Parquet file (torn): make it again", 2)


def test_a_landing_file_whose_store_is_away_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = memory_home(monkeypatch, tmp_path / "cache")
    (home / "a.jsonl.gz").put_bytes(gzip.compress(b"{}\n"))

    def away(*args: Any) -> None:
        raise StoreAway("memory://a: the store is away")

    with pytest.raises(StoreAway), open_plain(home / "a.jsonl.gz"):
        away()
    monkeypatch.setattr(calls, "get_small", away)
    monkeypatch.setattr(calls, "head", away)
    with pytest.raises(StoreAway):
        list(blocks(Part(0, home / "a.jsonl.gz"), 1 << 20))
    with pytest.raises(StoreAway):
        list(UnpackTask(((home / "a.jsonl.bz2", 0, 1),), local(tmp_path))(0))


def test_an_error_of_a_store_is_told_without_a_trace() -> None:
    message, code = exit_message(StoreError("s3://bucket/key: 400 Bad Request")) or ("", 0)
    assert (message.startswith("s3://bucket/key: 400 Bad Request. Run this again"), code) == (True, EXIT_FAILURE)
    assert exit_message(ValueError("of ours")) is None
