"""A NameNode that is away: calls end, and so does the command, with one message and exit code 75."""

from __future__ import annotations

import gc
import io
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli import export
from headrace.cli import export as export_triton
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_INCOMPLETE, UserError
from headrace.errors.stores import StoreError
from headrace.export.triton.config import Options
from headrace.jobs import run_stage
from headrace.jobs.housekeeping.forget import proof
from headrace.storage import StoreAway, local, location
from headrace_hdfs import rpc
from headrace_hdfs.rpc import TimedClient
from headrace_hdfs.store import HdfsStore, connect


@pytest.fixture(params=["refuses", "says nothing"])
def authority(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of no NameNode: a port where none listens, or one that takes connections and never answers."""
    pytest.importorskip("hdfs_native")
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.setattr(rpc, "FIRST_SECONDS", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if request.param == "says nothing":
            taken.listen(8)
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_command_ends(authority: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setitem(location.STORES, "hdfs", HdfsStore())
    for name in ("LAKE", "STORE"):
        monkeypatch.setenv(f"HEADRACE_{name}", f"hdfs://{authority}/{name}")
    monkeypatch.setattr(run_stage, "when_parent_ends", lambda end: None)
    with pytest.raises(SystemExit) as raised:
        run_stage.main(["report", "clicks", "--ds", "2026-01-08", "--home", str(tmp_path)])
    assert raised.value.code == EXIT_INCOMPLETE
    stderr = capfd.readouterr().err
    assert f"hdfs://{authority} has not answered for 0.3 s. Its NameNode is away: run this again later; or" in stderr
    assert "Traceback" not in stderr


def test_a_connection_is_of_use_afterwards(authority: str) -> None:
    client = connect(authority)
    for _ in range(2):
        with pytest.raises(StoreAway, match=f"hdfs://{authority}"):
            rpc.status(client, "/a")


def node(client: Any) -> rpc.NameNode:
    return rpc.NameNode("hdfs://name", TimedClient(client, "name"))


def test_a_connection_that_fails_is_no_answer() -> None:
    """hdfs-native reports the fault after its own last try."""

    class Refused:
        def get_file_info(self, path: str) -> None:
            raise OSError("Connection refused (os error 111)")

    with pytest.raises(StoreAway, match=r"hdfs://name cannot be reached \(Connection refused .*\)\. Its NameNode is"):
        rpc.status(node(Refused()), "/a")


class RefusingClient:
    """A client whose DataNodes say what they say."""

    def __init__(self, fault: Exception) -> None:
        self.fault = fault

    def read(self, path: str) -> RefusingClient:
        return self

    def create(self, path: str, options: Any) -> RefusingClient:
        return self

    def refuse(self, *args: Any) -> None:
        raise self.fault

    read_range = read_range_stream = write = close = refuse


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        (OSError("Connection refused (os error 111)"), r"Connection refused \(os error 111\)"),
        (RuntimeError('DataTransferError("All DataNodes failed: [DatanodeInfo { id: 1 }]")'), "All DataNodes failed"),
        (RuntimeError('DataTransferError("All nodes failed for write")'), "All nodes failed for write"),
        (
            RuntimeError(
                'RPCError("java.io.IOException", "File /a could only be written to 0 of the 1 minReplication nodes. '
                'There are 0 datanode(s) running and no node(s) are excluded in this operation.\\n\\tat x")'
            ),
            r"There are 0 datanode\(s\) running",
        ),
    ],
)
def test_datanodes_that_are_away(tmp_path: Path, fault: Exception, detail: str) -> None:
    for call in (
        lambda: rpc.read(node(RefusingClient(fault)), "/a", 0, 1),
        lambda: rpc.read_to(node(RefusingClient(fault)), "/a", tmp_path / "a", 1),
        lambda: rpc.create(node(RefusingClient(fault)), "/a", [b"x"]),
        lambda: rpc.create(node(RefusingClient(fault)), "/a", []),
    ):
        with pytest.raises(StoreAway, match=rf"^hdfs://name/a: no DataNode serves it \({detail}\)\. Run this again"):
            call()


@pytest.mark.parametrize(
    "message",
    [
        "ChecksumError",
        'DataTransferError("Received unknown seqno for successful ack")',
        'RPCError("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", "The DiskSpace quota of /a is exceeded")',
    ],
)
def test_what_datanodes_say_otherwise_is_a_fault_of_the_file(message: str) -> None:
    with pytest.raises(StoreError, match=r"^hdfs://name/a: ") as raised:
        rpc.read(node(RefusingClient(RuntimeError(message))), "/a", 0, 1)
    assert type(raised.value) is StoreError


def test_a_search_for_persons_ends_where_a_datanode_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is not one that cannot be read, which people are told to restore."""

    def read(file: Any, persons: Any) -> bool:
        return bool(rpc.read(node(RefusingClient(file.fault)), "/a", 0, 1))

    monkeypatch.setattr(proof, "_in_bytes", read)
    state: Any = SimpleNamespace(ws=SimpleNamespace(name_of=lambda file: "a"))

    def search(fault: Exception) -> proof.Scan:
        file: Any = SimpleNamespace(suffix=".json", size=lambda: 1, fault=fault)
        file.local_path = lambda: file
        persons: Any = None
        return proof._search([file], state, persons, proof.Scan())

    assert search(RuntimeError("ChecksumError")).unread == ["a"]
    with pytest.raises(StoreAway):
        search(OSError("Connection refused (os error 111)"))


def test_a_host_that_is_not_there_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hdfs_native")
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)

    def unknown(number: int) -> Any:
        def look_up(host: str, port: int) -> None:
            assert (host, port) == ("nowhere", 8020)
            raise socket.gaierror(number, "said")

        return look_up

    monkeypatch.setattr(socket, "getaddrinfo", unknown(socket.EAI_NONAME))
    with pytest.raises(UserError, match=r"hdfs://nowhere:8020: there is no such NameNode \(.*said\): write"):
        connect("nowhere:8020")
    # Who tells names is away.
    monkeypatch.setattr(socket, "getaddrinfo", unknown(socket.EAI_AGAIN))
    assert connect("nowhere:8020").url == "hdfs://nowhere:8020"


def test_exports_say_that_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*args: Any) -> None:
        raise StoreAway("is away")

    ws, to = Workspace(tmp_path), local(tmp_path / "export")
    for module in (export, export_triton):
        monkeypatch.setattr(module, "model_version", lambda *args: ("clicks", SimpleNamespace(version="1")))
        monkeypatch.setattr(module, "write_export", away)
    with pytest.raises(StoreAway, match=r"^is away$"):
        export.export_model(ws, "clicks", "1", to, "fp32")
    pytest.importorskip("onnx")
    with pytest.raises(StoreAway, match=r"^is away$"):
        export_triton.export_triton(ws, "clicks", "1", to, "fp32", Options())


class Sleeping:
    """A client, reader and writer whose calls end when they are told to."""

    def __init__(self) -> None:
        self.awake, self.closed = Event(), Event()
        self.awake.set()

    def get_file_info(self, path: str) -> str:
        self.awake.wait()
        return path

    def create(self, path: str, options: Any) -> Any:
        return self

    def write(self, block: bytes) -> None:
        self.awake.wait()

    def close(self) -> None:
        self.closed.set()


def test_a_file_that_was_not_written_whole_is_not_closed() -> None:
    """Python would close it when the object is dropped, with no time limit."""
    closed = []

    class Writer(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, block: Any) -> int:
            return len(block)

        def close(self) -> None:
            closed.append(self)

    class Client:
        def create(self, path: str, options: Any) -> Writer:
            return Writer()

    def blocks() -> Iterator[bytes]:
        yield b"x"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rpc.create(node(Client()), "/a", blocks())
    gc.collect()
    assert not closed
    rpc.create(node(Client()), "/a", [b"x"])
    gc.collect()
    assert len(closed) == 1


def test_later_calls_have_longer_and_nothing_is_closed_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "FIRST_SECONDS", 60.0)
    inner = Sleeping()
    client = node(inner)
    assert rpc.status(client, "/a") == "/a"

    def blocks() -> Iterator[bytes]:
        inner.awake.clear()
        monkeypatch.setattr(rpc, "CALL_SECONDS", 0.01)
        yield b"x"

    with pytest.raises(StoreAway, match=r"hdfs://name has not answered for 0\.01 s\. Its NameNode, or a DataNode"):
        rpc.create(client, "/a", blocks())
    inner.close()  # as Python does with what it drops
    assert not inner.closed.is_set()
    # It may have been a DataNode: calls of the NameNode have as long as before.
    monkeypatch.setattr(rpc, "CALL_SECONDS", 0.02)
    with pytest.raises(StoreAway, match=r"for 0\.02 s"):
        rpc.status(client, "/a")
    inner.awake.set()
    monkeypatch.setattr(rpc, "FIRST_SECONDS", 60.0)
    assert rpc.status(client, "/a") == "/a"


def test_after_an_outage_a_call_is_as_the_first() -> None:
    inner = Sleeping()
    client = TimedClient(inner, "name")
    client.get_file_info("/a")
    inner.awake.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc, "CALL_SECONDS", 0.01)
        with pytest.raises(StoreAway, match=r"for 0\.01 s\. Its NameNode is away: run this again later$"):
            client.get_file_info("/a")
        patch.setattr(rpc, "CALL_SECONDS", 60.0)
        patch.setattr(rpc, "FIRST_SECONDS", 0.02)
        with pytest.raises(StoreAway, match=r"for 0\.02 s\. .* or that is not its address"):
            client.get_file_info("/a")
    inner.awake.set()
    assert client.get_file_info("/a") == "/a"
