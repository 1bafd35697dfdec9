"""What a pipeline leaves, and for how long: `headrace gc`.

    workspace_state   the manifests of a pipeline, and what its days of retention mean for it
    step              one thing that can go, and how
    folders, models, tables, scratch, warehouse, manifests      what can go, by place
    collect           all of it, in order

A step that removes what a manifest names first notes in the manifest that it is removed (`Manifest.removed`), then
removes the files. A process that is killed in between leaves files that nobody reads, which the next run finds again
by their places: what can go is told from what is on the disk and in the logs of tables, never from notes of an earlier
run.
"""
