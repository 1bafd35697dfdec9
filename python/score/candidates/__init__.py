"""Candidates of a user: their sources, the filters on them, and their union."""
