"""Which object a path means: one of that key, or one that the list of a folder above names.

A folder is either plain or published, for as long as a process lives. So lists are kept, and asked for again where
somebody looks at the folder itself, or where a file is not found; a reader goes on with the files of the list it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from headrace.storage.objects import calls
from headrace.storage.objects.calls import ChangedInPlace, Stored
from headrace.storage.objects.file_list import (
    DATA,
    HIDDEN,
    LISTS,
    FileList,
    ListedFile,
    data_prefix,
    is_unfinished,
    list_key,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """A published folder as it was when its list was read."""

    folder: str
    list: FileList
    #: Of the list: what `put_if` asks for.
    revision: str

    def object_of(self, file: ListedFile) -> Stored:
        """The object that a file of the list is."""
        key = f"{data_prefix(self.folder)}/{file.key}"
        return Stored(key, file.size, file.modified_ns, file.tag, crc32=file.crc32)

    def below(self, key: str) -> dict[str, Stored]:
        """The folder's files below a key that is the folder's or a path in it; by their paths below that key."""
        start = key[len(self.folder) + 1 :]
        start += "/" if start else ""
        files = self.list.files.items()
        return {name[len(start) :]: self.object_of(file) for name, file in files if name.startswith(start)}


class Attempt(NamedTuple):
    """An attempt of this process to fill a folder."""

    #: What its file `BEGUN` has.
    id: str
    #: The revision of the list whose place it takes; None: the folder was not published.
    replaces: str | None
    #: Whether no other attempt may go on.
    alone: bool


class Found(NamedTuple):
    """A published folder, and the path in it."""

    published: Published
    name: str

    @property
    def file(self) -> Stored | None:
        """The object of that file; None: the list names none."""
        listed = self.published.list.files.get(self.name)
        return None if listed is None else self.published.object_of(listed)


class Tree:
    """The paths of one bucket."""

    def __init__(self, bucket: Any, lists: bool = True) -> None:
        """`lists`: False where no folder is a published one, so that nobody asks for its list."""
        self.bucket, self.lists = bucket, lists
        self._published: dict[str, Published] = {}
        self._plain: set[str] = set()
        #: By folder and token.
        self.attempts: dict[tuple[str, str], Attempt] = {}

    def published(self, folder: str) -> Published | None:
        """A folder's list as it is now; None where the folder is not published."""
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
        found = calls.get(self.bucket, key)
        if found is None:
            return None
        data, stored = found
        self._published[folder] = Published(folder, FileList.decoded(data, key), stored.revision)
        return self._published[folder]

    def forget(self, folder: str) -> None:
        """The next look at the folder asks the store."""
        self._published.pop(folder, None)
        self._plain -= {folder, *_above(folder)}

    def owner(self, key: str) -> Found | None:
        """The published folder that a path is in; None: it is in none."""
        for folder in _above(key):
            if folder not in self._published:
                self.published(folder)
            if (known := self._published.get(folder)) is not None:
                return Found(known, key[len(folder) + 1 :])
        return None

    def is_plain(self, key: str) -> None:
        """Note that an object of that very key is there, or was put there: no folder above it is a published one."""
        self._plain.update(_above(key))

    def look(self, key: str, ask: Callable[[Any, str], tuple[T, Stored] | None]) -> tuple[T, Stored] | None:
        """What `ask` says of the file's object; None where there is no such file.

        Raises:
            ChangedInPlace: the object is not the one that its folder's list names.
        """
        for folder in _above(key):
            if (known := self._published.get(folder)) is not None:
                found = self._ask(Found(known, key[len(folder) + 1 :]), ask)
                if found is not None:
                    return found
                # Perhaps another list has taken its place.
                if (again := self.published(folder)) is None or again is known:
                    return None
                return self._ask(Found(again, key[len(folder) + 1 :]), ask)
        direct = ask(self.bucket, key)
        if direct is not None:
            self.is_plain(key)
            return direct
        owner = self.owner(key)
        return None if owner is None else self._ask(owner, ask)

    def _ask(self, found: Found, ask: Callable[[Any, str], tuple[T, Stored] | None]) -> tuple[T, Stored] | None:
        named = found.file
        told = None if named is None else ask(self.bucket, named.key)
        if named is not None and told is not None and (told[1].tag, told[1].size) != (named.tag, named.size):
            place = calls.shown(self.bucket, named.key)
            raise ChangedInPlace(f"{place} is not the file that its folder's list names: it was changed in place")
        return None if told is None or named is None else (told[0], replace(told[1], crc32=named.crc32))

    def files(self, key: str) -> dict[str, Stored]:
        """All files below a folder, by their paths in it, as they are named now."""
        published = self.published(key)
        if published is not None:
            return published.below(key)
        owner = self._owner_now(key)
        if owner is not None:
            return owner.published.below(key)
        found: dict[str, Stored] = {}
        start = len(key) + 1 if key else 0
        for stored in calls.list_below(self.bucket, key):
            parts = stored.key[start:].split("/")
            if any(is_unfinished(part) for part in parts):
                continue
            if HIDDEN not in parts:
                found[stored.key[start:]] = stored
                continue
            at = parts.index(HIDDEN)
            if "/".join(parts[at : at + 2]) != LISTS:
                continue
            name = "/".join([*parts[:at], parts[-1].removesuffix(".json")])
            inner = self.published(f"{key}/{name}" if key else name)
            if inner is not None:
                found |= {f"{name}/{below}": file for below, file in inner.below(inner.folder).items()}
        return found

    def names(self, key: str) -> list[str]:
        """Names of the files and folders in a folder."""
        published = self.published(key)
        owner = None if published is not None else self._owner_now(key)
        if owner is not None:
            published = owner.published
        if published is not None:
            return sorted({name.partition("/")[0] for name in published.below(key)})
        folders, objects = calls.list_level(self.bucket, key)
        found = {*(f for f in folders if f != HIDDEN), *(o.key.rsplit("/", 1)[-1] for o in objects)}
        if HIDDEN in folders:
            lists = calls.list_level(self.bucket, f"{key}/{LISTS}" if key else LISTS)[1]
            found |= {o.key.rsplit("/", 1)[-1].removesuffix(".json") for o in lists}
        return sorted(name for name in found if not is_unfinished(name))

    def is_folder(self, key: str) -> bool:
        """Whether there is a published folder, or one with anything below it."""
        if not key or self.published(key) is not None:
            return True
        owner = self._owner_now(key)
        if owner is not None:
            return bool(owner.published.below(key))
        folders, objects = calls.list_level(self.bucket, key)
        # One that has nothing but what is being filled is there, too, and empty.
        return any(not is_unfinished(name) for name in (*folders, *(o.key.rsplit("/", 1)[-1] for o in objects)))

    def _owner_now(self, key: str) -> Found | None:
        """As `owner`, by the list as it is now."""
        owner = self.owner(key)
        if owner is None:
            return None
        again = self.published(owner.published.folder)
        return None if again is None else Found(again, owner.name)


def _above(key: str) -> Iterator[str]:
    """The folders above a key that may be published ones, the nearest first.

    What is above a place that is being filled, or that was published, knows nothing of what is in it.
    """
    parts = key.split("/")
    floor = max((i + 4 for i in range(len(parts) - 3) if "/".join(parts[i : i + 2]) == DATA), default=0)
    for length in range(len(parts) - 1, floor, -1):
        yield "/".join(parts[:length])
