"""The calls of HDFS. Each may fail, and a process may be killed between any two.

What changes a name is done by the NameNode whole or not at all, one after the other. Tests replace the calls to fail
the n-th (tests/test_hdfs.py).

What HDFS answers that is neither "not there" nor "there is one already" becomes a UserError where it is about
permissions, StoreAway where it says to come later, else a StoreError; none quotes more than the first line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.storage.objects.calls import StoreAway, StoreError

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
