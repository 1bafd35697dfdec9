"""Tables of files as warehouses: Delta, Iceberg, and a folder of Parquet files with a manifest."""
