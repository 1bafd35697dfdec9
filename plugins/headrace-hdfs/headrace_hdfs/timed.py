"""hdfs-native's client, with an end to each of its calls.

Its own waits have none that a user would wait for: 16 attempts, each as long as the socket's timeout, where a NameNode
takes connections and does not answer. And in its calls Python hears no Ctrl-C.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from headrace.storage.objects.calls import StoreAway

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
