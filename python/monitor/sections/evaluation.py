"""The slices and intervals of an evaluation, where the spec asks for them (`train.evaluation`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.monitor import facts
from headrace.monitor.blocks import Block, Cell, Section, Table
from headrace.monitor.sections.day import Day
from headrace.monitor.sections.quality import metric_name

_SPLITS = {"valid": "validation split", "test": "test split", "rank": "ranked lists"}


def evaluation(day: Day) -> Section:
    """Metrics of each split with their intervals, and of its slices; no block where nothing was asked for."""
    blocks: list[Block] = []
    for split, told in facts.mapping(day.facts("train").get("evaluation")).items():
        found = facts.mapping(told)
        title = _SPLITS.get(str(split), str(split))
        blocks.append(_overall(found, title))
        if slices := facts.records(found.get("slices")):
            blocks.append(_slices(slices, list(facts.mapping(found.get("metrics"))), title))
    return Section("evaluation", "Evaluation by slice", tuple(blocks))


def _overall(found: Mapping[str, Any], title: str) -> Table:
    intervals = facts.mapping(found.get("intervals"))
    rows: list[tuple[Cell | str, ...]] = []
    for name, value in facts.mapping(found.get("metrics")).items():
        rows.append((metric_name(str(name)), facts.decimals(value), _interval(intervals.get(name))))
    rows.append(("rows", facts.count(found.get("rows")), ""))
    return Table(("Metric", ">neural", ">interval"), tuple(rows), f"Metrics of the {title}")


def _slices(slices: list[Mapping[str, Any]], names: list[str], title: str) -> Table:
    """A row for each value of each slice."""
    shown = [n for n in names if any(n in facts.mapping(s.get("metrics")) for s in slices)]
    rows: list[tuple[Cell | str, ...]] = []
    for found in slices:
        metrics, intervals = facts.mapping(found.get("metrics")), facts.mapping(found.get("intervals"))
        values = [f"{facts.decimals(metrics.get(n))} {_interval(intervals.get(n))}".rstrip() for n in shown]
        value = Cell(facts.short(found.get("value")), code=True)
        rows.append((str(found.get("slice")), value, facts.count(found.get("rows")), *values))
    headings = ("Slice", "Value", ">rows", *(f">{metric_name(n)}" for n in shown))
    return Table(headings, tuple(rows), f"Slices of the {title}", wide=True)


def _interval(value: Any) -> str:
    ends = [facts.number(v) for v in facts.sequence(value)]
    if len(ends) != 2 or None in ends:
        return ""
    return f"[{facts.decimals(ends[0])}, {facts.decimals(ends[1])}]"
