"""Publication of a filled place as a folder, and changes to a published folder.

A reader, and a rerun after a kill between any two calls, sees the old list or the new one, and every file of either:
new files are there before the list that names them, old ones go after the list that does not.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from headrace.errors.stores import StoreError
from headrace.storage.lease import LeaseLost
from headrace.storage.objects import calls
from headrace.storage.objects.calls import Stored, crc32_of
from headrace.storage.objects.tree import (
    BEGUN,
    CHECKSUMS,
    DATA,
    LISTS,
    Attempt,
    BucketTree,
    FileList,
    ListedFile,
    Published,
    data_prefix,
    list_key,
    place_of,
)


def begin(tree: BucketTree, folder: str, token: str, alone: bool) -> None:
    """Make the place of an attempt empty. `alone`: what other attempts left goes, and none of them can commit."""
    keys = [o.key for o in calls.list_below(tree.bucket, data_prefix(folder, "" if alone else token))]
    # First of all, so that an earlier attempt that wakes up now sees that it has lost before its files go.
    calls.delete(tree.bucket, [key for key in keys if key.endswith(f"/{BEGUN}")])
    published = tree.published(folder)
    if published is not None and token in published.list.tokens:
        # Published files lie at this attempt's place, so they move to another one.
        published = _moved(tree, published, token)
    named = _named(published)
    calls.delete(tree.bucket, [key for key in keys if key not in named and not key.endswith(f"/{BEGUN}")])
    attempt = Attempt(uuid.uuid4().hex, None if published is None else published.revision, alone)
    calls.put(tree.bucket, _begun_key(folder, token), attempt.id.encode())
    tree.attempts[folder, token] = attempt


def commit(tree: BucketTree, folder: str, token: str) -> None:
    """Publish the files of an attempt in place of those that were when it began; by the process that began it.

    A list whose PUT was not answered may have been written, or be written yet: nothing is removed then. Of attempts
    that are not alone, which write the same, the first stays.

    Raises:
        LeaseLost: another attempt has published the folder since, or removed what this one wrote.
    """
    attempt = tree.attempts[folder, token]
    prefix = data_prefix(folder)
    place = data_prefix(folder, token)
    notes = calls.list_below(tree.bucket, f"{place}/{CHECKSUMS}")
    sums = _checksums(o.key[len(place) + len(CHECKSUMS) + 2 :] for o in notes)
    new = {
        name: ListedFile(
            key=o.key[len(prefix) + 1 :],
            size=o.size,
            tag=o.tag,
            modified_ns=o.modified_ns,
            crc32=o.crc32 or sums.get(name),
        )
        for name, o in tree.files(place).items()
    }
    begun = calls.get(tree.bucket, _begun_key(folder, token))
    if begun is None or begun[0] != attempt.id.encode():
        raise LeaseLost(f"{folder}: another run has removed what this one wrote there; run it again")
    tree.forget(folder)
    old = tree.published(folder)
    revision = None if old is None else old.revision
    data = FileList(files=new).encoded()
    if revision != attempt.replaces or not _put_list(tree, folder, data, revision):
        if attempt.alone:
            raise LeaseLost(f"{folder}: another run has published it since this one began; run it again")
        _discard(tree, folder, tree.published(folder), token)
    else:
        plain = calls.list_below(tree.bucket, folder)
        calls.delete(tree.bucket, [_begun_key(folder, token), *(o.key for o in (*notes, *plain))])
        if old is not None:
            _drop(tree, old, new)
    del tree.attempts[folder, token]


def check_open(tree: BucketTree, key: str) -> None:
    """Look whether the attempt goes on, before a file is written in its place; elsewhere nothing is done.

    A task that was lost may be writing still when another one has done its work and all is published. In most stores
    its file would be another one than the one that the list names, though its content is the same.

    Raises:
        LeaseLost: it is published, or another run has emptied its place.
    """
    place = place_of(key)
    if place is not None and calls.head(tree.bucket, f"{place[0]}/{BEGUN}") is None:
        raise LeaseLost(
            f"{calls.display_name(tree.bucket, key)}: what it belongs to is published, or was begun anew, since"
        )


def say_checksum(tree: BucketTree, key: str, crc32: str | None) -> None:
    """Have whoever publishes the place of an attempt know what was written there; elsewhere nothing is done."""
    place = place_of(key)
    if place is not None and crc32 is not None:
        calls.put(tree.bucket, f"{place[0]}/{CHECKSUMS}/{place[1]}.{crc32}", b"")


def put_in(tree: BucketTree, published: Published, name: str, content: bytes | Path) -> None:
    """Write a file of a published folder, from memory or a local file."""
    place = f"{uuid.uuid4().hex[:8]}/{name}"
    key = data_prefix(published.folder, place)
    if isinstance(content, bytes):
        calls.put(tree.bucket, key, content)
    else:
        calls.upload(tree.bucket, key, content)
    replace_in(tree, published.folder, {name: _listed(tree, key, place, crc32_of(content))}, ())


def replace_in(tree: BucketTree, folder: str, new: dict[str, ListedFile], removed: Collection[str]) -> None:
    """Have a published folder name other files; those that it names no more are removed."""

    def changed(files: dict[str, ListedFile]) -> dict[str, ListedFile]:
        return {name: f for name, f in {**files, **new}.items() if name not in removed}

    old = _write(tree, folder, changed)
    if old is not None:
        _drop(tree, old, changed(dict(old.list.files)))


def unfinished(tree: BucketTree, above: str) -> dict[tuple[str, str], list[Stored]]:
    """Return objects that no list names, by folder and token: those of dead writers and of live ones."""
    prefix = f"{above}/{DATA}" if above else DATA
    by_folder: dict[str, list[Stored]] = {}
    for stored in calls.list_below(tree.bucket, prefix):
        name = stored.key[len(prefix) + 1 :].partition("/")[0]
        by_folder.setdefault(f"{above}/{name}" if above else name, []).append(stored)
    unlisted: dict[tuple[str, str], list[Stored]] = {}
    for folder, objects in by_folder.items():
        named, start = _named(tree.published(folder)), len(data_prefix(folder)) + 1
        for left in objects:
            if left.key not in named:
                unlisted.setdefault((folder, left.key[start:].partition("/")[0]), []).append(left)
    return unlisted


def discard(tree: BucketTree, objects: Collection[Stored]) -> None:
    """Remove what `unfinished` found of an attempt: first that it goes on, so that its writer cannot publish it."""
    keys = [o.key for o in objects]
    calls.delete(tree.bucket, [key for key in keys if key.endswith(f"/{BEGUN}")])
    calls.delete(tree.bucket, [key for key in keys if not key.endswith(f"/{BEGUN}")])


def remove(tree: BucketTree, key: str) -> None:
    """Remove a file, or a folder with all below it: a published one is gone with its list, before its files are."""
    owner = tree.owner(key)
    if owner is not None:
        below = [f"{owner.name}/{name}" for name in owner.published.below(key)]
        names = {n for n in (owner.name, *below) if n in owner.published.list.files}
        if names:
            replace_in(tree, owner.published.folder, {}, names)
        return
    calls.delete(tree.bucket, [key, list_key(key)])
    tree.forget(key)
    keys = [o.key for place in (key, data_prefix(key)) for o in calls.list_below(tree.bucket, place)]
    lists = [k for k in keys if f"/{LISTS}/" in f"/{k}"]
    calls.delete(tree.bucket, lists)
    calls.delete(tree.bucket, [k for k in keys if k not in set(lists)])


def _write(
    tree: BucketTree, folder: str, change: Callable[[dict[str, ListedFile]], dict[str, ListedFile]]
) -> Published | None:
    """Write a folder's list, made of the one that is there; the one whose place it took."""
    while True:
        tree.forget(folder)
        old = tree.published(folder)
        data = FileList(files=change({} if old is None else dict(old.list.files))).encoded()
        if _put_list(tree, folder, data, None if old is None else old.revision):
            return old


def _put_list(tree: BucketTree, folder: str, data: bytes, revision: str | None) -> bool:
    """Write a folder's list in place of the one of that revision, or of none; False where another one is there."""
    key = list_key(folder)
    if revision is None:
        written = calls.put_new(tree.bucket, key, data)
    else:
        written = calls.put_if(tree.bucket, key, data, revision)
    tree.forget(folder)
    return written is not None or calls.is_there(tree.bucket, key, data)


def _named(published: Published | None) -> set[str]:
    """Return the keys of the objects that a folder's list names."""
    return set() if published is None else {published.object_of(f).key for f in published.list.files.values()}


def _begun_key(folder: str, token: str) -> str:
    return f"{data_prefix(folder, token)}/{BEGUN}"


def _discard(tree: BucketTree, folder: str, published: Published | None, token: str) -> None:
    """Remove the objects of an attempt that the folder's list does not name."""
    named = _named(published)
    keys = [o.key for o in calls.list_below(tree.bucket, data_prefix(folder, token))]
    calls.delete(tree.bucket, [key for key in keys if key not in named])


def _drop(tree: BucketTree, old: Published, files: Mapping[str, ListedFile]) -> None:
    """Remove the objects of a list that the files after it are not."""
    still = {f.key for f in files.values()}
    replaced = [old.object_of(f).key for f in old.list.files.values() if f.key not in still]
    calls.delete(tree.bucket, replaced)


def _moved(tree: BucketTree, published: Published, token: str) -> Published | None:
    """Copy the published files of one attempt to a place of their own, and have the list name them there."""
    new_token = uuid.uuid4().hex[:8]
    new: dict[str, ListedFile] = {}
    for name, file in published.list.files.items():
        if file.key.startswith(f"{token}/"):
            key = new_token + file.key[len(token) :]
            prefix = data_prefix(published.folder)
            calls.copy(tree.bucket, f"{prefix}/{file.key}", f"{prefix}/{key}")
            new[name] = _listed(tree, f"{prefix}/{key}", key, file.crc32)
    replace_in(tree, published.folder, new, ())
    return tree.published(published.folder)


def _checksums(names: Iterable[str]) -> dict[str, str]:
    """Return checksums by name, of objects NAME.CRC32; files with two different ones have none."""
    sums: dict[str, set[str]] = {}
    for text in names:
        name, _, crc32 = text.rpartition(".")
        sums.setdefault(name, set()).add(crc32)
    return {name: next(iter(of_name)) for name, of_name in sums.items() if len(of_name) == 1}


def _listed(tree: BucketTree, key: str, place: str, crc32: str | None) -> ListedFile:
    """Return the list's entry for an object that was written just now."""
    stored = calls.head(tree.bucket, key)
    if stored is None:
        raise StoreError(f"{key} is gone since it was written")
    return ListedFile(key=place, size=stored.size, tag=stored.tag, modified_ns=stored.modified_ns, crc32=crc32)
