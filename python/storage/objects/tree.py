"""Objects by path: one with that very key, or one that the list of a folder above names.

The list is what makes a published folder: a file that it does not name is not in it.

A folder is either plain or published, for as long as a process lives. So lists are kept, and asked for again where
somebody looks at the folder itself, or where a file is not found; a reader goes on with the files of the list it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.errors.stores import ChangedInPlace
from headrace.storage.objects import calls
from headrace.storage.objects.calls import Stored

#: Prefix of the store's own names and folders.
HIDDEN = ".headrace"
DATA, LISTS = f"{HIDDEN}/data", f"{HIDDEN}/lists"
#: Marker at an attempt's place until it is published: nobody has emptied the place since the attempt began.
BEGUN = f"{HIDDEN}/begun"
#: Folder at an attempt's place: empty objects NAME.CRC32, by which writers of files tell the publisher their content.
CHECKSUMS = f"{HIDDEN}/crc32"
#: Suffixes of partial files in a store with renames, and of locks of conditional writes.
PARTIAL, LOCK = ".partial", ".lock"


class ListedFile(BaseModel):
    """A file of a published folder."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    #: Key of its object, below the `data/NAME/` of its folder.
    key: str
    #: Bytes.
    size: int
    #: The store's ETag of its content, by which the object is read.
    tag: str
    #: Nanoseconds since 1970.
    modified_ns: int
    #: CRC-32 of its content as it was written, in hex. None: a program wrote it that reports none (Spark), or two
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


T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """A published folder as it was when its list was read."""

    folder: str
    list: FileList
    #: Revision of the list, for `put_if`.
    revision: str

    def object_of(self, file: ListedFile) -> Stored:
        """Return the object of a listed file."""
        key = f"{data_prefix(self.folder)}/{file.key}"
        return Stored(key, file.size, file.modified_ns, file.tag, crc32=file.crc32)

    def below(self, key: str) -> dict[str, Stored]:
        """Return the folder's files below a key (the folder's own, or a path in it), by their paths below that key."""
        start = key[len(self.folder) + 1 :]
        start += "/" if start else ""
        files = self.list.files.items()
        return {name[len(start) :]: self.object_of(file) for name, file in files if name.startswith(start)}


class Attempt(NamedTuple):
    """An attempt of this process to fill a folder."""

    #: Content of its file `BEGUN`.
    id: str
    #: The revision of the list that it replaces; None: the folder was not published.
    replaces: str | None
    #: Whether it ends all other attempts.
    alone: bool


class PublishedPath(NamedTuple):
    """A published folder, and the path in it."""

    published: Published
    name: str

    @property
    def file(self) -> Stored | None:
        """The object of that file; None: the list names none."""
        listed = self.published.list.files.get(self.name)
        return None if listed is None else self.published.object_of(listed)


class BucketTree:
    """The paths of one bucket."""

    def __init__(self, bucket: Any, lists: bool = True) -> None:
        """Open the paths of a bucket.

        `lists`: False where no folder is a published one, so that no list is requested.
        """
        self.bucket, self.lists = bucket, lists
        self._published: dict[str, Published] = {}
        self._plain: set[str] = set()
        #: Attempts of this process, by folder and token.
        self.attempts: dict[tuple[str, str], Attempt] = {}

    def published(self, folder: str) -> Published | None:
        """Return a folder's current list, or None where the folder is not published."""
        if not self.lists or not folder or folder in self._plain:
            return None
        known = self._published.get(folder)
        key = list_key(folder)
        if known is not None:
            now = calls.head(self.bucket, key)
            if now is not None and now.revision == known.revision:
                return known
            self._published.pop(folder, None)
            if now is None:
                return None
        answer = calls.get(self.bucket, key)
        if answer is None:
            return None
        data, stored = answer
        self._published[folder] = Published(folder, FileList.decoded(data, key), stored.revision)
        return self._published[folder]

    def forget(self, folder: str) -> None:
        """Drop what is known of a folder, so that the next look reads the store."""
        self._published.pop(folder, None)
        self._plain -= {folder, *_above(folder)}

    def owner(self, key: str) -> PublishedPath | None:
        """Return the published folder that a path is in, or None."""
        for folder in _above(key):
            if folder not in self._published:
                self.published(folder)
            if (known := self._published.get(folder)) is not None:
                return PublishedPath(known, key[len(folder) + 1 :])
        return None

    def is_plain(self, key: str) -> None:
        """Note that an object of that very key is there, or was put there: no folder above it is a published one."""
        self._plain.update(_above(key))

    def look(self, key: str, ask: Callable[[Any, str], tuple[T, Stored] | None]) -> tuple[T, Stored] | None:
        """Call `ask` with the key of a file's object; return None where there is no such file.

        Raises:
            ChangedInPlace: the object is not the one that its folder's list names.
        """
        for folder in _above(key):
            if (known := self._published.get(folder)) is not None:
                answer = self._ask(PublishedPath(known, key[len(folder) + 1 :]), ask)
                if answer is not None:
                    return answer
                # Another list may have replaced it meanwhile.
                if (again := self.published(folder)) is None or again is known:
                    return None
                return self._ask(PublishedPath(again, key[len(folder) + 1 :]), ask)
        direct = ask(self.bucket, key)
        if direct is not None:
            self.is_plain(key)
            return direct
        owner = self.owner(key)
        return None if owner is None else self._ask(owner, ask)

    def _ask(
        self, member: PublishedPath, ask: Callable[[Any, str], tuple[T, Stored] | None]
    ) -> tuple[T, Stored] | None:
        named = member.file
        answer = None if named is None else ask(self.bucket, named.key)
        if named is not None and answer is not None and (answer[1].tag, answer[1].size) != (named.tag, named.size):
            place = calls.display_name(self.bucket, named.key)
            raise ChangedInPlace(f"{place} is not the file that its folder's list names: it was changed in place")
        return None if answer is None or named is None else (answer[0], replace(answer[1], crc32=named.crc32))

    def files(self, key: str) -> dict[str, Stored]:
        """All files below a folder, by their paths in it, as they are named now."""
        published = self.published(key)
        if published is not None:
            return published.below(key)
        owner = self._owner_now(key)
        if owner is not None:
            return owner.published.below(key)
        files: dict[str, Stored] = {}
        start = len(key) + 1 if key else 0
        for stored in calls.list_below(self.bucket, key):
            parts = stored.key[start:].split("/")
            if any(is_unfinished(part) for part in parts):
                continue
            if HIDDEN not in parts:
                files[stored.key[start:]] = stored
                continue
            index = parts.index(HIDDEN)
            if "/".join(parts[index : index + 2]) != LISTS:
                continue
            name = "/".join([*parts[:index], parts[-1].removesuffix(".json")])
            inner = self.published(f"{key}/{name}" if key else name)
            if inner is not None:
                files |= {f"{name}/{below}": file for below, file in inner.below(inner.folder).items()}
        return files

    def names(self, key: str, after: str = "") -> list[str]:
        """Names of the files and folders in a folder that sort after `after`."""
        published = self.published(key)
        owner = None if published is not None else self._owner_now(key)
        if owner is not None:
            published = owner.published
        if published is not None:
            return sorted({n for name in published.below(key) if (n := name.partition("/")[0]) > after})
        folders, objects = calls.list_level(self.bucket, key, after)
        names = {*(f for f in folders if f != HIDDEN), *(o.key.rsplit("/", 1)[-1] for o in objects)}
        if HIDDEN in folders:
            lists = calls.list_level(self.bucket, f"{key}/{LISTS}" if key else LISTS)[1]
            names |= {o.key.rsplit("/", 1)[-1].removesuffix(".json") for o in lists}
        return sorted(name for name in names if name > after and not is_unfinished(name))

    def is_folder(self, key: str) -> bool:
        """Return whether there is a published folder, or one with anything below it."""
        if not key or self.published(key) is not None:
            return True
        owner = self._owner_now(key)
        if owner is not None:
            return bool(owner.published.below(key))
        folders, objects = calls.list_level(self.bucket, key)
        # A folder with nothing but unfinished files exists, and is empty.
        return any(not is_unfinished(name) for name in (*folders, *(o.key.rsplit("/", 1)[-1] for o in objects)))

    def _owner_now(self, key: str) -> PublishedPath | None:
        """Return the owner by the folder's current list."""
        owner = self.owner(key)
        if owner is None:
            return None
        again = self.published(owner.published.folder)
        return None if again is None else PublishedPath(again, owner.name)


def _above(key: str) -> Iterator[str]:
    """Yield the folders above a key that may be published ones, the nearest first.

    What is above a place that is being filled, or that was published, knows nothing of what is in it.
    """
    parts = key.split("/")
    floor = max((i + 4 for i in range(len(parts) - 3) if "/".join(parts[i : i + 2]) == DATA), default=0)
    for length in range(len(parts) - 1, floor, -1):
        yield "/".join(parts[:length])
