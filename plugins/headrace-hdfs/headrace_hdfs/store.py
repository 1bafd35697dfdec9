"""The store in HDFS: that of objects, and what is left beside the files of writers that were killed.

A path is /AUTHORITY/PATH, with the authority of the URI: NAMENODE:PORT, or a name of hdfs-site.xml.
"""

from __future__ import annotations

from functools import partial
from pathlib import PurePosixPath
from typing import cast

from headrace.storage.objects import calls
from headrace.storage.objects.file_list import LISTS, data_prefix, final_name, is_unfinished
from headrace.storage.objects.store import ObjectStore
from headrace.storage.objects.tree import BucketTree
from headrace.storage.store import Unfinished
from headrace_hdfs.bucket import HdfsBucket


class HdfsStore(ObjectStore):
    """One or several HDFS; see the package and `Store`."""

    def __init__(self) -> None:
        super().__init__("hdfs", lambda scheme, authority: HdfsBucket(authority))

    def remove(self, path: PurePosixPath) -> None:
        """See Store. Folders, and what killed writers left, go with the files."""
        tree, key = self._resolve(path)
        owner = tree.owner(key)
        super().remove(path)
        if owner is None and key:
            for place in (key, data_prefix(key)):
                _bucket(tree).remove_folder(place)
            tree.forget(key)

    def unfinished(self, path: PurePosixPath) -> list[Unfinished]:
        """See Store."""
        tree, key = self._resolve(path)
        entries = super().unfinished(path)
        for folder, ending in ((key, ""), (f"{key}/{LISTS}".lstrip("/"), ".json")):
            folders, objects = calls.list_level(tree.bucket, folder)
            names = {*folders, *(o.key.rpartition("/")[2] for o in objects)}
            for name in sorted(n for n in names if is_unfinished(n)):
                left = _left(tree, f"{folder}/{name}".lstrip("/"), objects)
                entries.append(
                    Unfinished(
                        path / final_name(name).removesuffix(ending),
                        sum(o.size for o in left),
                        max((o.modified_ns for o in left), default=0),
                        partial(_bucket(tree).remove_partial, f"{folder}/{name}".lstrip("/")),
                    )
                )
        return entries


def _left(tree: BucketTree, key: str, objects: list[calls.Stored]) -> list[calls.Stored]:
    """Return the files of an unfinished file or folder."""
    return [o for o in objects if o.key == key] or calls.list_below(tree.bucket, key)


def _bucket(tree: BucketTree) -> HdfsBucket:
    return cast("HdfsBucket", tree.bucket)
