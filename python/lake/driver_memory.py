"""What the driver's Python process may hold of what is learned: `spark.driver_python_mib`, wherever a session is."""

from __future__ import annotations

from pyspark.sql import SparkSession

from headrace.config import Spark

#: Of the session: the spec's number.
PROPERTY = "spark.headrace.driverPythonMib"


def driver_python_bytes(spark: SparkSession) -> int:
    """The bytes that `spark.driver_python_mib` allows; in a session that nobody gave it, its default."""
    default = Spark.model_fields["driver_python_mib"].default
    return int(spark.conf.get(PROPERTY, str(default)) or default) << 20
