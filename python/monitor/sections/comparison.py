"""The models of `headrace compare` side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.monitor import facts
from headrace.monitor.blocks import Block, Cell, Section, Table, Text
from headrace.monitor.sections.day import Day
from headrace.monitor.sections.quality import metric_name
from headrace.stage import identity

#: Below this a difference is marked.
_SIGNIFICANT = 0.05


def comparison(day: Day) -> Section:
    """Metrics with intervals, the difference from the reference and its p, time, memory, size; no block without any."""
    found, name = facts.records(day.facts("compare").get("models")), str(day.facts("compare").get("reference"))
    if not found:
        return Section("comparison", "Models compared", ())
    blocks: list[Block] = [] if _is_of_this_dataset(day) else [Text("Of an earlier dataset of this day.", "bad")]
    blocks += [_metrics(found, name), _costs(found)]
    note = f"p: of no difference from {name}, by a paired bootstrap over users; values below {_SIGNIFICANT} are marked."
    tested = any(facts.mapping(m.get("against")) for m in found)
    return Section("comparison", "Models compared", tuple(blocks), note if tested else "")


def _is_of_this_dataset(day: Day) -> bool:
    features = day.manifests.get("features")
    read = {i.version for i in day.manifests["compare"].inputs if i.kind == "stage" and i.name == "features"}
    return features is None or identity(features) in read


def _metrics(models: list[Mapping[str, Any]], reference: str) -> Table:
    names = list(dict.fromkeys(str(n) for m in models for n in facts.mapping(m.get("metrics"))))
    tested = any(facts.mapping(m.get("against")) for m in models)
    rows: list[tuple[Cell | str, ...]] = []
    for name in names:
        for model in models:
            value = facts.decimals(facts.mapping(model.get("metrics")).get(name))
            ends = [facts.number(v) for v in facts.sequence(facts.mapping(model.get("intervals")).get(name))]
            interval = f"[{facts.decimals(ends[0])}, {facts.decimals(ends[1])}]" if len(ends) == 2 else ""
            row: list[Cell | str] = [metric_name(name), str(model.get("name")), value, interval]
            if tested:
                row += _difference(facts.mapping(facts.mapping(model.get("against")).get(name)))
            rows.append(tuple(row))
    more = (f">minus {facts.short(reference)}", ">interval of that", ">p") if tested else ()
    return Table(("Metric", "Model", ">value", ">interval", *more), tuple(rows), "Metrics of the models", wide=True)


def _difference(found: Mapping[str, Any]) -> list[Cell | str]:
    p = facts.number(found.get("p"))
    if p is None:
        return ["", "", ""]
    ends = f"[{facts.decimals(found.get('low'))}, {facts.decimals(found.get('high'))}]"
    return [facts.decimals(found.get("value")), ends, Cell(facts.decimals(p, 3), "good" if p < _SIGNIFICANT else "")]


def _costs(models: list[Mapping[str, Any]]) -> Table:
    rows: list[tuple[Cell | str, ...]] = []
    for m in models:
        peak = max(facts.numbers(m.get("peak_memory_mib")).values(), default=None)
        told = (facts.duration(m.get("seconds")), facts.memory(peak), facts.memory(m.get("mib")))
        rows.append((str(m.get("name")), Cell(str(m.get("class")), code=True), facts.count(m.get("steps")), *told))
    headings = ("Model", "Class", ">steps", ">time", ">peak memory of a process", ">on disk")
    return Table(headings, tuple(rows), "What the models take", wide=True)
