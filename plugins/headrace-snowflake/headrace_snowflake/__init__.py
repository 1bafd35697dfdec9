"""Snowflake as a warehouse of headrace."""
