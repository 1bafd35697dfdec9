"""Model registry: versions of models and their champion, in MLflow on an SQLite file by default."""

from headrace.models.registry.versions import Version, champion, register

__all__ = ["Version", "champion", "register"]
