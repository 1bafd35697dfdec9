"""Warehouses that are spoken to in SQL, each through its own client library."""
