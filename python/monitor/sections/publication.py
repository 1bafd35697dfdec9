"""What was published, what it was made from, by which settings."""

from __future__ import annotations

from typing import Any

import yaml

from headrace.monitor import facts, lineage
from headrace.monitor.blocks import Block, Section, Table, Text, Tree
from headrace.monitor.sections.day import Day, checks, not_run
from headrace.stages import ORDER

_SAMPLE_ROWS = 10
_KEY_CHARACTERS = 40


def publication(day: Day) -> Section:
    """The audit, and what a reader of the warehouse now sees."""
    if not day.planned("score"):
        return Section("published", "Publication", (Text("This pipeline scores nothing.", "dim"),))
    blocks: list[Block] = []
    found = day.facts("publish")
    if "publish" not in day.manifests and day.planned("publish"):
        blocks.append(not_run("publish"))
    checked = checks(found.get("audit"))
    if checked:
        blocks.append(Table(("Audit", ">Value", ">Limit", ""), checked, "Audit of the staged scores"))
    if left_out := day.manifests["publish"].rows.get("left_out") if "publish" in day.manifests else None:
        named = tuple(
            (column, str(value), str(key.get("reason")))
            for key in facts.records(found.get("left_out"))
            for column, value in key.items()
            if column != "reason"
        )
        title = f"{left_out:,} rows are left out: the target cannot hold their keys"
        blocks.append(Table(("Column", "Key", "Why"), tuple((c, _shortened(v), why) for c, v, why in named), title))
    sample = facts.records(found.get("sample")) or facts.records(day.facts("score").get("sample"))
    if sample:
        # What all rows share is said once: the table stays narrow.
        shared = {c: _raw(sample[0].get(c)) for c in ("ds", "model_version") if c in sample[0]}
        columns = [str(c) for c in sample[0] if c not in shared]
        right = [all(facts.number(r.get(c)) is not None for r in sample) for c in columns]
        rows = tuple(tuple(_raw(r.get(c)) for c in columns) for r in sample[:_SAMPLE_ROWS])
        headings = tuple(f">{c}" if r else c for c, r in zip(columns, right, strict=True))
        title = f"First rows of {found['table']}" if found.get("table") else "First scores"
        title += f" ({', '.join(f'{k} {v}' for k, v in shared.items())})" if shared else ""
        blocks.append(Table(headings, rows, title))
    where = found.get("warehouse")
    model = facts.mapping(day.facts("score").get("model")).get("kind")
    note = " ".join(
        [*([f"Scored by the {model} model."] if model else []), *([f"Warehouse: {where}."] if where else [])]
    )
    return Section("published", "Publication", tuple(blocks) or (not_run("score"),), note)


def _shortened(key: str) -> str:
    return key if len(key) <= _KEY_CHARACTERS else key[:_KEY_CHARACTERS] + "…"


def _raw(value: Any) -> str:
    """A value of a sample: ids without separators."""
    return facts.show(value) if isinstance(value, (float, bool)) or value is None else str(value)


def lineage_of(day: Day) -> Section:
    """From the last thing made back to the landing files."""
    last = next((m for s in reversed(ORDER[:-1]) if (m := day.manifests.get(s)) is not None), None)
    if last is None:
        return Section("lineage", "Lineage", (not_run("the day"),))
    runs = {**day.runs, **{(m.pipeline, m.ds, m.stage): m for m in day.manifests.values()}}
    return Section("lineage", "Lineage", (Tree(lineage.trace(runs, last, next(iter(last.outputs), None))),))


def settings(day: Day) -> Section:
    """The spec, folded away. Spark's free properties stay out: a page is passed around, and they are not vetted."""
    dumped = day.spec.model_dump(mode="json", by_alias=True)
    dumped["spark"].pop("properties", None)
    text = yaml.safe_dump(dumped, sort_keys=False, width=100, allow_unicode=True)
    return Section("settings", "Settings", (Text(text, title="The pipeline's spec, defaults included", pre=True),))
