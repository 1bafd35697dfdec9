"""Iceberg tables without Spark: which snapshots there are, and the files of one. Written to Iceberg's specification."""
