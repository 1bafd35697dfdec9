"""`headrace ...` for people. Each command imports what it needs when it is called, so that help answers at once.

The modules are in the order in which help lists their commands.
"""
# ruff: noqa: F401, I001

from headrace.cli import data, stages, registry, score, experiment, inspect, tune, compare, submitters, warehouse
from headrace.cli import housekeeping, export, serve, repository
from headrace.cli.root import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the console script."""
    app(prog_name="headrace")
