"""Names of files where a cloud warehouse loads them from."""

from __future__ import annotations

import uuid


def load_folder(stage: str) -> str:
    """A new folder below the place that a spec names, for one load."""
    return f"{stage.rstrip('/')}/headrace_{uuid.uuid4().hex[:12]}"


def literal(text: str) -> str:
    """A text as a literal of the SQL of Snowflake, BigQuery, Databricks and Redshift.

    A quotation mark has a backslash before it, as all of them read it: two of them end one literal and begin another in
    Databricks, and are none in BigQuery.
    """
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
