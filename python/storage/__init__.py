"""The workspace's files, and the one way to read, write, publish, remove and lease them.

    system     the calls of the operating system that change a disk: no other module of headrace makes them
    store      what a store must do (a Protocol); `local` is the one for a file system
    objects    that for S3, GCS and Azure
    location   a place in a store, which is all that other packages see
    lease      who is at work on a pipeline
    host_scratch  folders of a host: of its own, and made by one of many processes
    uri        which place `--home`, paths and URIs in a spec mean

A store is added by a class beside `local.py` and a line in `location._store_of`, or by a package
(`store.STORE_KINDS`).

Callers hold a `Location` and know of no renames: they put files whole (`put_text`, `new_file`), folders whole
(`new_folder`), read what is published, and give a reader or writer that needs a real file `local_path()`, or a URI
(`uri`) to Spark. A store without renames writes below the final key and its list of files last; the calls stay the
same.

What is private to one process or one host does not come here, and uses pathlib: the checkout's own `conf/` and
libraries, /proc, /dev/shm, the data folder of the embedded PostgreSQL, Spark's local folders.
"""

from headrace.errors.stores import ChangedInPlace, StoreAway, StoreError, StoreRefused
from headrace.storage.lease import Fence, Lease, LeaseLost
from headrace.storage.location import (
    Location,
    copies_folder,
    local,
    location_named,
    location_of,
    missing,
    not_as_written,
    release_copy,
    sync_all,
    sync_files,
)
from headrace.storage.uri import is_uri, local_folder, names_store, uri_fault

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
