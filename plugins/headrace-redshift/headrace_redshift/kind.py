"""Settings of Redshift that the checks of a spec know; imports nothing of its client library."""

from __future__ import annotations

from typing import ClassVar

from headrace.config.warehouse import Warehouse, WarehouseKind


class Redshift(WarehouseKind):
    """Redshift."""

    opens = "headrace_redshift.warehouse:open_redshift"
    needs = ("stage",)
    stage_prefix = "s3://"
    own_arguments: ClassVar = {"host": "host", "port": "port", "database": "database", "user": "user"}

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str]:
        # CLUSTER.ACCOUNT.REGION.redshift.amazonaws.com
        parts = warehouse.host.split(".")
        is_aws = warehouse.host.endswith(".redshift.amazonaws.com")
        cluster = f"{parts[0]}.{parts[2]}" if is_aws else warehouse.host
        return f"redshift://{cluster}:{warehouse.port or 5439}", f"{warehouse.database}.{label}"
