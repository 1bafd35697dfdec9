"""Kinds of warehouse and format that the package adds, as the checks of a spec see them."""

from __future__ import annotations

from headrace.config.formats import FileFormat
from headrace.config.warehouse import Warehouse, WarehouseKind


class Ledger(WarehouseKind):
    """A file of SQLite, at `publish.warehouse.path`."""

    opens = "acme.ledger:open_ledger"
    needs = ("path",)

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str]:
        return "acme", label


class Pipes(FileFormat):
    """Text with a `|` between two fields, without a header and without quotes."""

    reader = "acme.pipes:PipesReader"
