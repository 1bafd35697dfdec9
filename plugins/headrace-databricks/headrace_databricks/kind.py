"""Settings of Databricks SQL that the checks of a spec know; imports nothing of its client library."""

from __future__ import annotations

from typing import ClassVar

from headrace.config.warehouse import Warehouse, WarehouseKind


class Databricks(WarehouseKind):
    """Databricks."""

    opens = "headrace_databricks.warehouse:open_databricks"
    needs = ("stage",)
    own_arguments: ClassVar = {"server_hostname": "host", "staging_allowed_local_path": None}

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str]:
        return f"databricks://{warehouse.host}", label
