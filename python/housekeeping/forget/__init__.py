"""Persons who are erased from a pipeline: `headrace forget`.

    persons           the values, from a file
    request           what was asked and how far it is; the list that ingest consults
    place             what was found in one place
    folders, models, uploads, tables, warehouse, host       what is erased, by place
    scan              every file of ours read again, for what may be left
    erase             all of it, in order
    proof             what was done, without the values

The request is written first, and with it the list of hashes, so that nothing comes back from then on. What follows can
be done twice: a process that is killed anywhere is followed by the same command, which does the rest.
"""
