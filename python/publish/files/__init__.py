"""Staging in Parquet files that Spark audits, for warehouses that load files."""
