"""Rows of embedding tables that Spark joins in by id, where no host has the whole table."""
