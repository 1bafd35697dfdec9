"""Parts of headrace's DAGs: settings, operators, triggers, callbacks.

Imported by the scheduler's processes each time they read a DAG file, so nothing heavy comes in here: no pyspark, no
torch, nothing of the package `headrace`, which lives in another environment, but for two files of it that need no
other: the list of stages and the exit codes.
"""
