"""Retention of what a pipeline writes: `headrace gc`.

    workspace_state   the manifests of a pipeline, its days of retention, and the steps that remove something
    folders, tables   what can be removed: folders and models; tables and the warehouse
    collect           all steps, in order

A step that removes an output of a manifest first notes in the manifest that it is removed (`Manifest.removed`), then
removes the files. A process that is killed in between leaves files that nobody reads, and the next run finds them by
their places: it looks at the disk and at the logs of tables, never at notes of an earlier run.
"""
