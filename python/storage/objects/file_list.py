"""The list of a published folder's files. It is what makes the folder: a file that it does not name is not in it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

#: Of names and folders that are the store's own.
HIDDEN = ".headrace"
DATA, LISTS = f"{HIDDEN}/data", f"{HIDDEN}/lists"
#: In the place of an attempt, until it is published: that nobody has emptied the place since the attempt began.
BEGUN = f"{HIDDEN}/begun"
#: There, too: empty objects NAME.CRC32, by which whoever writes a file says what is in it to whoever publishes all.
CHECKSUMS = f"{HIDDEN}/crc32"
#: What is on its way to its name in a store that has renames, and who replaces a file on a condition.
PARTIAL, LOCK = ".partial", ".lock"


class ListedFile(BaseModel):
    """A file of a published folder."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    #: Of its object, below the `data/NAME/` of its folder.
    key: str
    #: Bytes.
    size: int
    #: The store's name of its content: what the object is asked for by.
    tag: str
    #: Nanoseconds since 1970.
    modified_ns: int
    #: Of its content as it was written, in hex. None: a program wrote it that says nothing of this (Spark), or two
    #: attempts wrote different files.
    crc32: str | None = None


class FileList(BaseModel):
    """All files of a published folder by their paths in it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    files: Mapping[str, ListedFile]

    @property
    def tokens(self) -> set[str]:
        """Tokens of the attempts whose files are listed."""
        return {f.key.partition("/")[0] for f in self.files.values()}

    def encoded(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()

    @staticmethod
    def decoded(data: bytes, key: str) -> FileList:
        """Parse a list. Raises OSError where it is damaged; headrace writes no such list."""
        try:
            return FileList.model_validate_json(data)
        except ValidationError:
            raise OSError(f"{key} is no list of a folder's files") from None


def list_key(folder: str) -> str:
    """Return the key of a folder's list."""
    above, _, name = folder.rpartition("/")
    return f"{_in(above)}{LISTS}/{name}.json"


def data_prefix(folder: str, token: str = "") -> str:
    """Return the prefix of a folder's files, of all attempts to fill it or of one."""
    above, _, name = folder.rpartition("/")
    return f"{_in(above)}{DATA}/{name}" + (f"/{token}" if token else "")


def place_of(key: str) -> tuple[str, str] | None:
    """Return the place of the attempt that a file belongs to and its name there, or None."""
    parts = key.split("/")
    starts = [i + 4 for i in range(len(parts) - 4) if "/".join(parts[i : i + 2]) == DATA]
    return ("/".join(parts[: starts[-1]]), "/".join(parts[starts[-1] :])) if starts else None


def is_unfinished(name: str) -> bool:
    """Return whether a name is of an unfinished write, which its writer renames or removes at the end."""
    return name.startswith(".") and name.endswith((PARTIAL, LOCK))


def final_name(name: str) -> str:
    """Return the NAME of `.NAME.TOKEN.partial` and of `.NAME.lock`."""
    if name.endswith(LOCK):
        return name[1:].removesuffix(LOCK)
    return name[1:].removesuffix(PARTIAL).rpartition(".")[0]


def _in(folder: str) -> str:
    return f"{folder}/" if folder else ""
