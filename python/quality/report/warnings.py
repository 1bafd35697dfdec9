"""Warnings about a finished day: results that look better than they are, or that rest on few rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.config import Spec
from headrace.quality.report import facts
from headrace.stage.manifest import Manifest

#: Fewer validation rows than these give a warning.
_FEW_ROWS = 100
#: Prefixes of the metrics of lists, whose validation rows are all positive by design.
_LIST_METRICS = ("hr", "ndcg", "recall", "mrr", "map", "precision")
_MODELS = ("train", "baseline", "second_stage")


def day_warnings(spec: Spec, manifests: Mapping[str, Manifest], ingests: Mapping[str, Manifest]) -> list[str]:
    """Return a sentence for each doubt about a day, without `warning: ` before it.

    Args:
        spec: the pipeline.
        manifests: the day's manifests, by stage.
        ingests: manifests of the stage `ingest`, by day, for the days of `event_days`.
    """
    return [
        *_rows_outside_split(spec, manifests, ingests),
        *_weak_validation(manifests),
        *_perfect_champion(manifests),
        *_repeated_items(manifests),
    ]


def event_days(spec: Spec, features: Manifest | None) -> tuple[str, str] | None:
    """Return the first and the last day of the events in a split by time; None where it does not split by time."""
    if features is None or spec.features.split.by != "time":
        return None
    ranges = (facts.sequence(features.facts.get(f"{split}_range")) for split in ("train", "valid", "test"))
    days = [str(day) for split_range in ranges for day in split_range]
    return (min(days), max(days)) if days else None


def _rows_outside_split(
    spec: Spec, manifests: Mapping[str, Manifest], ingests: Mapping[str, Manifest]
) -> Iterator[str]:
    features = manifests.get("features")
    days = event_days(spec, features)
    if features is None or days is None:
        return
    loaded = [manifests["ingest"]] if not spec.source.daily and "ingest" in manifests else []
    if spec.source.daily:
        loaded = [manifest for ds, manifest in ingests.items() if days[0] <= ds <= days[1]]
    counted: set[str] = set()
    total = 0
    for manifest in loaded:
        loaded_days = {str(day) for day in facts.sequence(manifest.facts.get("days"))}
        if counted.isdisjoint(loaded_days):  # days that were loaded together have one manifest's counts
            total += manifest.rows.get("kept", 0)
            counted |= loaded_days
    rows = sum(features.rows.get(split, 0) for split in ("train", "valid", "test"))
    if rows < total / 2:
        yield (
            f"the dataset has {rows:,} of the {total:,} rows that were loaded: its split by time takes events of "
            f"{days[0]} to {days[1]} alone (features.window_days is {spec.features.window_days:,}; see also "
            f"table.event_time{' and features.prepare' if spec.features.prepare else ''})"
        )


def _weak_validation(manifests: Mapping[str, Manifest]) -> Iterator[str]:
    features = manifests.get("features")
    rows = None if features is None else features.rows.get("valid")
    if rows is not None and rows < _FEW_ROWS:
        yield f"the validation split has {rows:,} rows: metrics of fewer than {_FEW_ROWS} say little (features.split)"
    for stage in _MODELS:
        metrics = _metrics(manifests, stage)
        rate = metrics.get("base_rate")
        if rate in (0.0, 1.0) and not any(name.startswith(_LIST_METRICS) for name in metrics):
            label = "positive" if rate else "negative"
            yield f"all rows of the validation split are {label}: no metric tells models apart (features.split)"
            return


def _perfect_champion(manifests: Mapping[str, Manifest]) -> Iterator[str]:
    promoted = facts.mapping(manifests["promote"].facts.get("models")) if "promote" in manifests else {}
    for stage in _MODELS:
        registered = facts.mapping(manifests[stage].facts.get("registered")) if stage in manifests else {}
        name, version = str(registered.get("name")), registered.get("version")
        champion = facts.mapping(promoted.get(name)).get("champion")
        loss = _metrics(manifests, stage).get("log_loss")
        if loss is not None and round(loss, 4) == 0 and version is not None and str(champion) == str(version):
            yield (
                f"version {version} of {name} was promoted with a log loss of 0: mostly a feature has the label in it, "
                f"or the validation split has one class"
            )


def _repeated_items(manifests: Mapping[str, Manifest]) -> Iterator[str]:
    lists = facts.numbers(manifests["score"].facts.get("consumed")) if "score" in manifests else {}
    listed, consumed = lists.get("listed", 0), lists.get("consumed", 0)
    if consumed > listed / 2:
        share, users = consumed / listed, lists.get("users", 0)
        yield (
            f"{share:.0%} of the listed items are ones that their user had before ({users:,.0f} users were looked at): "
            f"score.exclude_seen: true leaves them out"
        )


def _metrics(manifests: Mapping[str, Manifest], stage: str) -> dict[str, float]:
    return facts.numbers(manifests[stage].facts.get("metrics")) if stage in manifests else {}
