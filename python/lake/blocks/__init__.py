"""Landing files by Arrow: blocks of lines to typed columns. A row that Arrow gives is one that Spark's rules
(headrace.lake.ingest.typed_rows) would call good, with the same values; every other line is left to them.
"""
