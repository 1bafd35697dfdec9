"""Settings of Snowflake that the checks of a spec know; imports nothing of its client library."""

from __future__ import annotations

from typing import ClassVar

from headrace.config.warehouse import Warehouse, WarehouseKind


class Snowflake(WarehouseKind):
    """Snowflake."""

    opens = "headrace_snowflake.warehouse:open_snowflake"
    own_arguments: ClassVar = {"user": "user", "database": "database", "schema": "schema", "autocommit": None}

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str]:
        name = label if label.count(".") > 1 else f"{warehouse.database}.{label}"
        return f"snowflake://{warehouse.options.get('account', warehouse.host)}", name
