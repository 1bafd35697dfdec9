"""Settings of BigQuery that the checks of a spec know; imports nothing of its client library."""

from __future__ import annotations

from typing import ClassVar

from headrace.config.warehouse import Warehouse, WarehouseKind


class BigQuery(WarehouseKind):
    """BigQuery."""

    opens = "headrace_bigquery.warehouse:open_bigquery"
    stage_prefix = "gs://"
    own_arguments: ClassVar = {"project": "catalog"}

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str]:
        return "bigquery", f"{warehouse.catalog}.{label}" if warehouse.catalog else label
