"""`headrace ...` for people. Each command imports what it needs when it is called, so that help answers at once.

The modules are in the order in which help lists their commands, within its panels (`headrace.cli.root.Panel`).
"""
# ruff: noqa: F401, I001

from headrace.cli import (
    init,
    new,
    generate,
    reference,
    run,
    features,
    registry,
    score,
    experiment,
    status,
    lineage,
    plan,
)
from headrace.cli import doctor, tune, compare, submitters, warehouse, housekeeping, export, serve, repository
from headrace.cli.root import app, main

__all__ = ["app", "main"]
