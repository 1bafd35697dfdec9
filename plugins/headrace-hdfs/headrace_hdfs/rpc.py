"""The calls of HDFS. Each may fail, and a process may be killed between any two.

What changes a name is done by the NameNode whole or not at all, one after the other. Tests replace the calls to fail
the n-th (tests/test_hdfs.py).

What HDFS answers that is neither "not there" nor "there is one already" becomes a UserError where it is about
permissions, StoreAway where it says to come later, else a StoreError; none quotes more than the first line.

Each call ends. hdfs-native's own waits have no end that a user would wait for: 16 attempts, each as long as the
socket's timeout, where a NameNode takes connections and does not answer. And in its calls Python hears no Ctrl-C.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from headrace.errors import UserError
from headrace.errors.stores import StoreAway, StoreError

_LOG = logging.getLogger("headrace.storage")

#: Seconds that a NameNode has for its first answer to a process, and then for each: as long as stores of objects are
#: asked again.
FIRST_SECONDS, CALL_SECONDS = 30.0, 180.0
#: After these it is said what is waited for.
_SAY_SECONDS = 10.0
#: How the client (hdfs-native 0.14) says that none of a block's DataNodes has served it, and how the NameNode that it
#: knows of none. Whether they refuse connections or have no good copy the client tells its own log alone.
_NO_DATANODE = re.compile(
    r'^DataTransferError\("((?:All (?:Data)?[Nn]odes failed|Failed to add a datanode|Insufficient blocks succeeded)'
    r"[\w ]*)|(There are 0 datanode\(s\) running)"
)

T = TypeVar("T")


class TimedClient:
    """The calls of `hdfs_native.Client` that are used here; threads may call at once.

    A call that has not ended in time raises StoreAway, and goes on in a thread of its own: what it asks for may be done
    later, as where a request was sent and its answer lost. A connection to the NameNode that fails is a StoreAway, too,
    and so is a file of which no DataNode gives, or takes, a block.
    """

    def __init__(self, client: Any, authority: str) -> None:
        self._client, self._url = client, f"hdfs://{authority}"
        self._answered = False

    def get_file_info(self, path: str) -> Any:
        return self._call(lambda: self._client.get_file_info(path))

    def list_status(self, path: str, recursive: bool) -> list[Any]:
        return self._call(lambda: list(self._client.list_status(path, recursive)))

    def mkdirs(self, path: str, create_parent: bool) -> None:
        self._call(lambda: self._client.mkdirs(path, create_parent=create_parent))

    def set_times(self, path: str, modified: int, accessed: int) -> None:
        self._call(lambda: self._client.set_times(path, modified, accessed))

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        self._call(lambda: self._client.rename(source, target, overwrite))

    def delete(self, path: str, recursive: bool) -> bool:
        return self._call(lambda: bool(self._client.delete(path, recursive)))

    def read(self, path: str) -> TimedReader:
        return TimedReader(self._call(lambda: self._client.read(path)), partial(self._call_data, path))

    def create(self, path: str, options: Any) -> TimedWriter:
        return self._call(lambda: TimedWriter(self._client.create(path, options), partial(self._call_data, path)))

    def _call(self, call: Callable[[], T]) -> T:
        """Make a call of the NameNode alone."""
        try:
            value, fault = self._outcome(call, CALL_SECONDS if self._answered else FIRST_SECONDS)
        except _TooLong as e:
            raise self._away(str(e)) from None
        if type(fault) is OSError:  # of a connection; what a server answers has classes of its own
            raise self._away(f"cannot be reached ({fault})")
        self._answered = True
        if fault is not None:
            raise fault
        result: T = value
        return result

    def _call_data(self, path: str, call: Callable[[], T]) -> T:
        """Make a call of DataNodes, maybe with some of the NameNode. Its errors say nothing of the NameNode."""
        try:
            value, fault = self._outcome(call, CALL_SECONDS)
        except _TooLong as e:
            advice = "Its NameNode, or a DataNode, is away: run this again later"
            raise StoreAway(f"{self._url} {e}. {advice}") from None
        if fault is not None:
            if (detail := _no_datanode(fault)) is not None:
                raise StoreAway(
                    f"{self._url}{path}: no DataNode serves it ({detail}). Run this again later; if it stays, see what "
                    f"`hdfs fsck {path}` says"
                )
            raise fault
        result: T = value
        return result

    def _outcome(self, call: Callable[[], Any], limit: float) -> tuple[Any, BaseException | None]:
        """Return the result of a call, or its error. Raises _TooLong."""
        outcomes: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                outcomes.put((call(), None))
            except BaseException as e:
                outcomes.put((None, e))

        # A daemon: one that never ends does not keep the process.
        Thread(target=run, name="hdfs", daemon=True).start()
        try:
            return outcomes.get(timeout=min(_SAY_SECONDS, limit))
        except Empty:
            _LOG.warning("%s does not answer: waiting for it, %.0f s at most", self._url, limit)
        try:
            return outcomes.get(timeout=max(limit - _SAY_SECONDS, 0.0))
        except Empty:
            raise _TooLong(f"has not answered for {limit:g} s") from None

    def _away(self, how: str) -> StoreAway:
        advice = "Its NameNode is away: run this again later"
        if not self._answered:
            advice += "; or that is not its address: see `lake` and `store`"
        # What is tidied up on the way out need not wait as long again.
        self._answered = False
        return StoreAway(f"{self._url} {how}. {advice}")


def _no_datanode(fault: BaseException) -> str | None:
    """Return the message of an error that says that no DataNode was reached; None: it says something else."""
    if type(fault) is OSError:  # of a connection; what a server answers has classes of its own
        return str(fault)
    match = _NO_DATANODE.search(str(fault))
    return None if match is None else match[1] or match[2]


class _TooLong(Exception):
    """A call has not ended in time."""


class TimedReader:
    """A file that is read."""

    def __init__(self, reader: Any, call: Callable[[Callable[[], Any]], Any]) -> None:
        self._reader, self._call = reader, call

    def read_range(self, start: int, size: int) -> bytes:
        return bytes(self._call(lambda: self._reader.read_range(start, size)))

    def read_range_stream(self, start: int, size: int) -> Iterator[bytes]:
        blocks = self._call(lambda: iter(self._reader.read_range_stream(start, size)))
        while (block := self._call(lambda: next(blocks, None))) is not None:
            yield block


class TimedWriter:
    """A file that is written. One that is dropped before `close` is not closed."""

    def __init__(self, writer: Any, call: Callable[[Callable[[], Any]], Any]) -> None:
        self._writer, self._close, self._call = writer, writer.close, call
        # Python closes the files that it drops, and would wait for that without an end.
        writer.close = lambda: None

    def write(self, block: bytes) -> None:
        self._call(lambda: self._writer.write(block))

    def close(self) -> None:
        self._call(self._close)


#: Of setTimes: leave that time as it is (Java's -1).
_AS_IT_IS = (1 << 64) - 1
#: How the client tells an exception of the server: its class, and its message with the server's stack behind it.
_ANSWER = re.compile(r'(?:Fatal)?RPCError\("(?:[\w$]+\.)*([\w$]+)", "(.*?)(?:\\n|"\)|$)', re.DOTALL)
_NOT_EMPTY = "PathIsNotEmptyDirectoryException"
#: Below a file there is nothing, which the server tells in two ways.
_BELOW_A_FILE = ("ParentNotDirectoryException", "(is not a directory)")
_REFUSED = {"AccessControlException", "AuthorizationException"}
#: Of a NameNode that has just started, is about to take over, or has too much to do.
_LATER = {"SafeModeException", "RetriableException", "StandbyException"}
_NO_TICKET = ("SASLError", "GSSAPIError", "NoSASLMechanism")


@dataclass(frozen=True)
class NameNode:
    """A connection, and how messages name it."""

    #: hdfs://HOST:PORT, or a name of hdfs-site.xml there.
    url: str
    #: Of hdfs-native.
    client: Any


def status(node: NameNode, path: str) -> Any | None:
    """Return what the NameNode knows of a file or a folder (Hadoop's FileStatus); None where there is none."""
    with _errors(node, path):
        try:
            return node.client.get_file_info(path)
        except FileNotFoundError:
            return None
        except RuntimeError as e:
            if _is_below_a_file(e):
                return None
            raise


def level(node: NameNode, path: str) -> list[Any]:
    """Return the entries of a folder (Hadoop's FileStatus), by name, or the file itself.

    Empty where there is neither.
    """
    with _errors(node, path):
        try:
            return sorted(node.client.list_status(path, False), key=lambda s: str(s.path))
        except FileNotFoundError:
            return []
        except RuntimeError as e:
            if _is_below_a_file(e):
                return []
            raise


def below(node: NameNode, path: str) -> list[Any]:
    """Return the files (FileStatus) in a folder and in those below it, one call for each folder, or the file itself.

    Folder by folder, and not by the client's own way down, which ends with FileNotFoundError where one of them goes
    meanwhile: nothing of the others would be known.
    """
    files, folders = list[Any](), [path]
    while folders:
        for entry in level(node, folders.pop()):
            if entry.isdir:
                folders.append("/" + str(entry.path).lstrip("/"))
            else:
                files.append(entry)
    return sorted(files, key=lambda s: str(s.path))


def read(node: NameNode, path: str, start: int, size: int) -> bytes:
    """Read some bytes of a file. Raises FileNotFoundError."""
    with _errors(node, path):
        return bytes(node.client.read(path).read_range(start, size))


def read_to(node: NameNode, path: str, file: Path, size: int) -> None:
    """Write the first bytes of a file to a local one, which may be there. Raises FileNotFoundError."""
    with _errors(node, path):
        blocks = node.client.read(path).read_range_stream(0, size)
        with open(file, "wb") as out:
            for block in blocks:
                out.write(block)


def create(node: NameNode, path: str, blocks: Iterable[bytes]) -> None:
    """Write a file; folders above it are made. A reader of `path` may see a part of it, or another one's before."""
    from hdfs_native import WriteOptions

    with _errors(node, path):
        writer = node.client.create(path, WriteOptions(overwrite=True, create_parent=True))
        for block in blocks:
            writer.write(block)
        writer.close()


def make_folder(node: NameNode, path: str) -> None:
    """Make a folder, and those above it; it may be there."""
    with _errors(node, path):
        node.client.mkdirs(path, create_parent=True)


def set_modified(node: NameNode, path: str, milliseconds: int) -> None:
    """Say when a file was written. Raises FileNotFoundError."""
    with _errors(node, path):
        node.client.set_times(path, milliseconds, _AS_IT_IS)


def rename_new(node: NameNode, source: str, target: str) -> bool:
    """Rename a file or a folder in one step; False, and nothing done, where there is something at `target`.

    Raises:
        FileNotFoundError: there is nothing at `source`. The client sends a call again that was not answered: it may
            have done this before.
    """
    with _errors(node, target):
        try:
            node.client.rename(source, target, False)
        except FileExistsError:
            return False
        return True


def rename_over(node: NameNode, source: str, target: str) -> None:
    """Rename a file in one step; one that is at `target` is replaced. Raises FileNotFoundError, as `rename_new`."""
    with _errors(node, target):
        node.client.rename(source, target, True)


def delete(node: NameNode, path: str) -> bool:
    """Remove a file, or a folder that is empty, in one step; False where it is a folder that is not, and stays."""
    with _errors(node, path):
        try:
            node.client.delete(path, False)
        except FileNotFoundError:
            return True
        except RuntimeError as e:
            if _answer(e)[0] == _NOT_EMPTY:
                return False
            if not _is_below_a_file(e):
                raise
        return True


def delete_tree(node: NameNode, path: str) -> None:
    """Remove a file, or a folder and all below it, in one step. Nothing where there is none."""
    with _errors(node, path):
        try:
            node.client.delete(path, True)
        except FileNotFoundError:
            return
        except RuntimeError as e:
            if not _is_below_a_file(e):
                raise


def _answer(error: Exception) -> tuple[str, str]:
    """Return the name of the server's exception, without its package, and the first line of its message; ("", "")."""
    match = _ANSWER.match(str(error))
    return (match[1], match[2].replace('\\"', '"')) if match else ("", "")


def _is_below_a_file(error: Exception) -> bool:
    name, message = _answer(error)
    return name == _BELOW_A_FILE[0] or message.endswith(_BELOW_A_FILE[1])


@contextmanager
def _errors(node: NameNode, path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, StoreError):
        raise
    except (OSError, RuntimeError, NotImplementedError) as e:
        name, message = _answer(e)
        detail = f"{name}: {message}" if name else str(e).partition("\n")[0].strip()
        if name in _REFUSED or detail.startswith(_NO_TICKET):
            raise UserError(
                f"HDFS refuses {node.url}{path}: {detail}. The user is HADOOP_USER_NAME, or with Kerberos that of "
                f"kinit's ticket (docs/storage.md); it must be allowed to read, write, rename and delete there"
            ) from None
        if name in _LATER:
            raise StoreAway(f"{node.url}{path}: the NameNode is not ready ({detail}). Run this again later") from None
        raise StoreError(f"{node.url}{path}: {detail}") from None
