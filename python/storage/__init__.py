"""The workspace's files, and the one way to read, write, publish, remove and lease them.

    system     the calls of the operating system that change a disk: no other module of headrace makes them
    store      what a store must do (a Protocol); `local_store` is that of a file system
    objects    that for S3, GCS and Azure
    location   a place in a store, which is all that other packages see
    lease      who is at work on a pipeline
    host_scratch  folders of a host: of its own, and made by one of many processes
    uri        which place `--home`, paths and URIs in a spec mean

A store is added by a class beside `local_store.py` and a line in `location._store_of`, or by a package
(`store.STORE_KINDS`).

Callers hold a `Location` and know of no renames: they put files whole (`put_text`, `new_file`), folders whole
(`new_folder`), read what is published, and give a reader or writer that needs a real file `local_path()`, or a URI
(`uri`) to Spark. A store without renames writes below the final key and its list of files last; the calls stay the
same.

What is private to one process or one host does not come here, and uses pathlib: the checkout's own `conf/` and
libraries, /proc, /dev/shm, the data folder of the embedded PostgreSQL, Spark's local folders.

A name's module is imported at first use, so that checks of paths in a spec import no store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import lazy_names

if TYPE_CHECKING:
    from headrace.errors.stores import ChangedInPlace as ChangedInPlace
    from headrace.errors.stores import StoreAway as StoreAway
    from headrace.errors.stores import StoreError as StoreError
    from headrace.errors.stores import StoreRefused as StoreRefused
    from headrace.storage.lease import Fence as Fence
    from headrace.storage.lease import Lease as Lease
    from headrace.storage.lease import LeaseLost as LeaseLost
    from headrace.storage.location import Location as Location
    from headrace.storage.location import copies_folder as copies_folder
    from headrace.storage.location import local as local
    from headrace.storage.location import location_named as location_named
    from headrace.storage.location import location_of as location_of
    from headrace.storage.location import missing as missing
    from headrace.storage.location import not_as_written as not_as_written
    from headrace.storage.location import release_copy as release_copy
    from headrace.storage.location import sync_all as sync_all
    from headrace.storage.location import sync_files as sync_files
    from headrace.storage.uri import is_uri as is_uri
    from headrace.storage.uri import local_folder as local_folder
    from headrace.storage.uri import names_store as names_store
    from headrace.storage.uri import uri_fault as uri_fault

__getattr__ = lazy_names(
    __name__,
    {
        ".lease": ("Fence", "Lease", "LeaseLost"),
        ".location": (
            "Location",
            "copies_folder",
            "local",
            "location_named",
            "location_of",
            "missing",
            "not_as_written",
            "release_copy",
            "sync_all",
            "sync_files",
        ),
        ".uri": ("is_uri", "local_folder", "names_store", "uri_fault"),
        "headrace.errors.stores": ("ChangedInPlace", "StoreAway", "StoreError", "StoreRefused"),
    },
)
__all__ = [
    "ChangedInPlace",
    "Fence",
    "Lease",
    "LeaseLost",
    "Location",
    "StoreAway",
    "StoreError",
    "StoreRefused",
    "copies_folder",
    "is_uri",
    "local",
    "local_folder",
    "location_named",
    "location_of",
    "missing",
    "names_store",
    "not_as_written",
    "release_copy",
    "sync_all",
    "sync_files",
    "uri_fault",
]
