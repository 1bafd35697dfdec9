"""The day's models side by side: each as its training measured it, and those that were asked about the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.monitor import facts, plots
from headrace.monitor.blocks import Block, Cell, Plot, Section, Table
from headrace.monitor.sections.day import Day
from headrace.monitor.sections.quality import metric_name

#: What trains models, by what a reader calls them.
_TRAINED = {"train": "neural", "baseline": "XGBoost", "second_stage": "second stage", "challenger": "challenger"}
#: The models that the stage `evaluate` asks.
_ASKED = {"model": "the day's", "champion": "champion", "challenger": "challenger"}
_COLOURS = {"model": plots.NEURAL, "champion": plots.CEILING, "challenger": plots.BASELINE}


def models(day: Day) -> Section:
    """A column for each model; nothing where there is one alone."""
    trained = [
        stage
        for stage in _TRAINED
        if stage in day.manifests and any(output.kind == "model" for output in day.manifests[stage].outputs)
    ]
    asked = {role: facts.mapping(day.facts("evaluate").get(role)) for role in _ASKED}
    asked = {role: of for role, of in asked.items() if facts.mapping(of.get("metrics"))}
    blocks: list[Block] = []
    if len(trained) > 1:
        blocks.append(_trained(day, trained))
    if len(asked) > 1:
        blocks += [_asked(asked), *_drawn(asked)]
    note = "What is measured on the same rows can be compared; two trainings may have validated on different ones."
    return Section("models", "Models side by side", tuple(blocks), note if blocks else "")


def _trained(day: Day, stages: list[str]) -> Table:
    """Of each the registered version, its metrics on its own validation rows, and what it took."""
    metrics = {stage: facts.numbers(day.facts(stage).get("metrics")) for stage in stages}
    scored = facts.mapping(day.facts("score").get("model")).get("version")
    rows: list[tuple[Cell | str, ...]] = [
        ("version", *(_version(day, stage) for stage in stages)),
        *_metric_rows([metrics[stage] for stage in stages]),
        ("trained in", *(facts.duration(day.manifests[stage].seconds) for stage in stages)),
        ("peak memory of a process", *(_peak(day, stage) for stage in stages)),
        ("core-seconds", *(_core_seconds(day, stage) for stage in stages)),
    ]
    if any(scored == day.manifests[stage].key for stage in stages):
        rows.append(("scored the day", *("yes" if day.manifests[s].key == scored else "" for s in stages)))
    headings = ("", *(f">{_TRAINED[stage]}" for stage in stages))
    return Table(headings, tuple(rows), "As each was trained, on its own validation rows")


def _asked(asked: Mapping[str, Mapping[str, Any]]) -> Table:
    """On the rows that all of them were asked about."""
    found = list(asked.values())
    rows: list[tuple[Cell | str, ...]] = [
        ("version", *(str(of.get("version", "–")) for of in found)),
        *_metric_rows([facts.numbers(of.get("metrics")) for of in found]),
        ("bytes on disk", *(facts.count(of.get("bytes")) for of in found)),
        ("rows a second on one core", *(facts.count(of.get("rows_per_second")) for of in found)),
    ]
    return Table(("", *(f">{_ASKED[role]}" for role in asked)), tuple(rows), "On the same rows, by the gate")


def _drawn(asked: Mapping[str, Mapping[str, Any]]) -> list[Plot]:
    """The first metric that has intervals of all."""
    intervals = {role: facts.mapping(of.get("intervals")) for role, of in asked.items()}
    metrics = {role: facts.numbers(of.get("metrics")) for role, of in asked.items()}
    for metric in dict.fromkeys(str(name) for of in intervals.values() for name in of):
        rows = []
        for role in asked:
            ends = [facts.number(v) for v in facts.sequence(intervals[role].get(metric))]
            value = metrics[role].get(metric)
            if value is not None and len(ends) == 2 and ends[0] is not None and ends[1] is not None:
                rows.append((_ASKED[role], value, ends[0], ends[1], _COLOURS[role]))
        if len(rows) == len(asked):
            title = f"{metric_name(metric)} of the models on the same rows"
            return [Plot(plots.intervals(rows, metric_name(metric), title), title)]
    return []


def _metric_rows(found: list[Mapping[str, float]]) -> list[tuple[str, ...]]:
    names = dict.fromkeys(name for of in found for name in of)
    return [(metric_name(name), *(facts.decimals(of.get(name)) for of in found)) for name in names]


def _version(day: Day, stage: str) -> str:
    version = facts.mapping(day.facts(stage).get("registered")).get("version")
    return "–" if version is None else str(version)


def _peak(day: Day, stage: str) -> str:
    return facts.memory(max(day.manifests[stage].peak_memory_mib.values(), default=None))


def _core_seconds(day: Day, stage: str) -> str:
    used = day.manifests[stage].resources
    return "–" if used is None else f"{used.core_seconds:,.1f}"
