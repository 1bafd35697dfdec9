"""Folders by name: `--home` is on a file system; `lake:`, `store:` and sources may be in any store."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.plugins import Seam
    from headrace.storage.store import Store

#: At least two letters, since one is a drive. One slash is enough: pathlib makes one of two.
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_A_PATH = "a path on a file system that every machine sees at the same path: a local disk, NFS, a mounted volume"
_TAKE_URIS = (
    "lake, store, source.path, source.complete, the paths of tables that are joined, list candidates or filter them, "
    "`headrace init` and `headrace score --input`"
)

#: Other names of a store's scheme.
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "abfss"}
#: The environment variable that names this host's scratch folder.
SCRATCH = "HEADRACE_SCRATCH"
#: Stores that headrace has itself, besides file systems.
SCHEMES = ("s3", "gs", "abfss")


def parse_uri(text: str, key: str, glob: bool = False) -> tuple[str, PurePosixPath]:
    """(scheme, path in the store) of a path, a file: URI or the URI of a bucket, of HDFS or of a folder in one.

    Args:
        text: as the user gave it.
        key: the key or variable that holds it, for the message.
        glob: whether it is a pattern: a `?` in it is one character, and begins no query.

    Raises:
        UserError: it names no place of a store that is known.
    """
    match = _URI.match(text)
    if match is None or match[1].lower() == "file":
        return "file", PurePosixPath(os.path.abspath(local_folder(text, key, glob)))
    scheme = _scheme_of(match[1])
    if not _is_known(scheme):
        raise UserError(f"{key}: headrace knows no store of {match[1]}: (known: {_known()})")
    if scheme not in SCHEMES:
        _store_kinds().find(scheme, key)
    parts = _split(f"{scheme}://{text.partition(':')[2].lstrip('/')}", glob)
    user, separator, host = parts.netloc.rpartition("@")
    # Only Azure's URIs have a part before the @: the container.
    if separator and (scheme != "abfss" or ":" in user or "@" in user):
        exception = ", but for the container" if scheme == "abfss" else ""
        raise UserError(f"{key}: a secret does not belong in a URI: leave out what is before the @{exception}")
    is_place = bool(host) and (bool(user) or scheme != "abfss") and not {"*", "?"} & {*parts.netloc}
    if not is_place or parts.query or parts.fragment or ".." in parts.path.split("/"):
        authorities = {"hdfs": "HOST:PORT", "abfss": "CONTAINER@ACCOUNT.dfs.core.windows.net"}
        raise UserError(f"{key}: write {scheme}://{authorities.get(scheme, 'BUCKET')}/FOLDER")
    return scheme, PurePosixPath("/", parts.netloc, *(p for p in parts.path.split("/") if p))


def other_schemes(scheme: str) -> list[str]:
    """Return the other names of a store's scheme."""
    return [alias for alias, canonical in _ALIASES.items() if canonical == scheme]


def is_uri(text: str) -> bool:
    """Return whether a text is a URI, not a path."""
    return _URI.match(text) is not None


def names_store(text: str) -> bool:
    """Return whether a text is a URI of a known store."""
    match = _URI.match(text)
    return match is not None and (match[1].lower() == "file" or _is_known(_scheme_of(match[1])))


def _scheme_of(text: str) -> str:
    """Return a store's scheme, of which `text` is a spelling or another name."""
    return _ALIASES.get(text.lower(), text.lower())


def _store_kinds() -> Seam[Store]:
    from headrace.storage.store import STORE_KINDS  # late: most places are on file systems

    return STORE_KINDS


def _is_known(scheme: str) -> bool:
    return scheme in SCHEMES or _store_kinds().is_name(scheme)


def _known() -> str:
    return ", ".join(("file", *SCHEMES, *_store_kinds().known()))


def stored_name(uri: str, key: str) -> tuple[str, PurePosixPath]:
    """(scheme, path in the store) of a file as a table's metadata name it: nothing in it is encoded.

    Args:
        uri: of another store than the local file system.
        key: begins the message.

    Raises:
        UserError: it is in a store that is not known, or at a place that headrace's paths cannot name.
    """
    if not names_store(uri):
        raise UserError(f"{key}: headrace knows no store of {uri} (known: {_known()})")
    written, _, rest = uri.partition(":")
    scheme = _scheme_of(written)
    authority, *parts = rest.removeprefix("//").rstrip("/").split("/")
    if not authority:
        raise UserError(f"{key}: {uri} names no {'NameNode' if scheme == 'hdfs' else 'bucket'}")
    if any(part in ("", ".", "..") for part in parts):
        raise UserError(f"{key}: {uri} has a folder without a name, '.' or '..' in it, which headrace does not read")
    return scheme, PurePosixPath("/", authority, *parts)


def local_folder(text: str, key: str, glob: bool = False) -> Path:
    """Return the folder that a path or a file: URI names.

    Args:
        text: as the user gave it.
        key: the option or key that holds it, for the message.
        glob: as of `parse_uri`.

    Raises:
        UserError: it is a URI of another scheme, or of another host's file system.
    """
    match = _URI.match(text)
    if match is None:
        if not text:
            raise UserError(f"{key} is empty: write {_A_PATH}")
        return Path(text)
    if match[1].lower() != "file":
        raise UserError(f"{key}: {uri_fault(text)}")
    parts = _split(text, glob)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise UserError(f"{key}: '{text}' names no folder of this machine: write file:///FOLDER, or a path")
    return Path(unquote(parts.path))


def _split(uri: str, glob: bool) -> SplitResult:
    """Split a URI into its parts; of a pattern all that is behind the authority is its path."""
    if not glob:
        return urlsplit(uri)
    scheme, _, rest = uri.partition(":")
    if not rest.startswith("//"):
        return SplitResult(scheme, "", rest, "", "")
    authority, slash, path = rest[2:].partition("/")
    return SplitResult(scheme, authority, f"{slash}{path}", "", "")


def uri_fault(text: str) -> str | None:
    """Return why a text cannot name a path on this machine: it is a URI. None where it is a path."""
    match = _URI.match(text)
    if match is None:
        return None
    if match[1].lower() == "file":
        return f"'{text}' is a URI: write it as a path"
    return f"'{text}' is a URI, and this takes {_A_PATH}. URIs are taken by {_TAKE_URIS}"


def server_fault(text: str) -> str | None:
    """Return what is wrong with the address of an HTTP server, or None."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "write http://HOST:PORT or https://HOST:PORT"
    if parts.username is not None or parts.password is not None:
        return "credentials are no part of an address: MLflow reads them from its own variables"
    return None
