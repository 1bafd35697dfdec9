"""Versions of models and which of them is in use: MLflow, on an SQLite file by default."""

from headrace.registry.versions import Version, champion, register

__all__ = ["Version", "champion", "register"]
