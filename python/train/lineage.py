"""What a registered model says of the data that it was trained on."""

from __future__ import annotations

from headrace.stage import Context


def lineage_of(ctx: Context) -> dict[str, str | None]:
    """The dataset's key, its place, and the days that it trains on (first/last, UTC; None where it has no days)."""
    features = ctx.upstream["features"]
    dataset = features.output("dataset")
    days = features.facts.get("train_range")
    return {"dataset": dataset.version, "dataset_name": dataset.name, "train_days": "/".join(days) if days else None}
