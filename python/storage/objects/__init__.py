"""Stores of objects (S3, GCS, Azure): no renames, but a PUT that is refused where its condition does not hold.

    clients     the connection to a bucket, with the credentials that the cloud's own chain finds
    calls       the calls of a store: no other module makes them; checksums of contents
    tree        which object a path means; the list of files that makes a published folder
    copies      files of the store as local files
    publish     from a filled place to a published folder
    lease       one holder on any number of hosts
    store       all of it as `headrace.storage.store.Store`

A file that is put is an object of that key. A folder that is published (`Location.new_folder`) as FOLDER/NAME is

    FOLDER/.headrace/data/NAME/TOKEN/...     its files, of one attempt to fill it
    FOLDER/.headrace/lists/NAME.json         their names, keys, sizes and entity tags: written last, on a condition

and a reader finds no file that the list does not name. So a folder appears, and another takes its place, by one PUT.
What else is below `data/` was left by writers that died, or is being written.
"""
