"""Redshift as a warehouse of headrace."""
