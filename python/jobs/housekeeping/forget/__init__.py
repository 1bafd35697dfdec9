"""Erasure of persons from a pipeline: `headrace forget`.

    persons           the values, from a file; one place that has some
    places, models    what is erased, by place: folders, tables, the warehouse, hosts; saved and uploaded models
    erase             all places, in order
    proof             the request, the search of all files for what remains, and the proof without the values

The request is written first, and with it the list of hashes that ingest consults, so that no value comes back from then
on. All later steps can be repeated: after a process that was killed, the same command does the rest.
"""
