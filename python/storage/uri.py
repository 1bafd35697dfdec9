"""Which folder a text means. Today a workspace and what it reads are on a file system: other stores are refused."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace.errors import UserError

#: One letter is no scheme but a drive; pathlib makes one slash of two, so one is enough.
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_PATHS_WORK = (
    "what works today is the path of a folder on a file system that every machine sees at the same path: a local disk, "
    "NFS, a mounted volume"
)


def local_folder(text: str, where: str) -> Path:
    """The folder that a path or a file: URI names.

    Args:
        text: as the user gave it.
        where: the option or key that holds it, for the message.

    Raises:
        UserError: it is a URI of another scheme, or of another host's file system.
    """
    found = _URI.match(text)
    if found is None:
        if not text:
            raise UserError(f"{where} is empty: {_PATHS_WORK}")
        return Path(text)
    if found[1].lower() != "file":
        raise UserError(f"{where}: {uri_fault(text)}")
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise UserError(f"{where}: '{text}' names no folder of this machine: write file:///FOLDER, or a path")
    return Path(unquote(parts.path))


def uri_fault(text: str) -> str | None:
    """Why a text cannot be the path of something to read: it is a URI. None where it is a path."""
    found = _URI.match(text)
    if found is None:
        return None
    if found[1].lower() == "file":
        return f"'{text}' is a URI: write it as a path"
    return f"'{text}': headrace cannot keep or read files in {found[1]}: stores yet; {_PATHS_WORK}"
