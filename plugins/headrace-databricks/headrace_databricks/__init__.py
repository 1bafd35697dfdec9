"""Databricks SQL as a warehouse of headrace."""
