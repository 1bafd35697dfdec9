"""The slices and intervals of an evaluation, where the spec asks for them (`train.evaluation`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.monitor import facts, plots
from headrace.monitor.blocks import Block, Cell, Plot, Section, Table
from headrace.monitor.sections.day import Day
from headrace.monitor.sections.quality import metric_name

_SPLITS = {
    "valid": "validation split",
    "test": "test split",
    "rank": "ranked lists",
    "valid_lists": "validation split's lists",
    "test_lists": "test split's lists",
}
#: Slices that are drawn: those with most rows.
_TOP_SLICES = 12
_COLOUR_NAMES = {"neural": "blue", "XGBoost": "orange", "second stage": "green"}
_COLOURS = {"neural": plots.NEURAL, "XGBoost": plots.BASELINE, "second stage": plots.CEILING}
#: What a split's evaluation says, by the name of the model.
_Told = Mapping[str, Mapping[str, Any]]


def evaluation(day: Day) -> Section:
    """Metrics of each split with their intervals, and of its slices; no block where nothing was asked for."""
    of_models = {
        name: facts.mapping(day.facts(stage).get("evaluation"))
        for name, stage in (("neural", "train"), ("XGBoost", "baseline"), ("second stage", "second_stage"))
    }
    blocks: list[Block] = []
    for split in dict.fromkeys(str(split) for told in of_models.values() for split in told):
        found = {name: facts.mapping(told[split]) for name, told in of_models.items() if split in told}
        title = _SPLITS.get(split, split)
        blocks += _of_rows(found, title)
        tasks = {name: facts.mapping(told.get("tasks")) for name, told in found.items()}
        for task in dict.fromkeys(str(task) for told in tasks.values() for task in told):
            of_task = {name: facts.mapping(told[task]) for name, told in tasks.items() if task in told}
            blocks += _of_rows(of_task, f"{title}, task {task}")
    return Section("evaluation", "Evaluation by slice", tuple(blocks))


def _of_rows(found: _Told, title: str) -> list[Block]:
    """All rows, and their slices where there are any."""
    sliced = any(facts.records(told.get("slices")) for told in found.values())
    return [_overall(found, title), *_intervals(found, title), *([_slices(found, title)] if sliced else [])]


def _intervals(found: _Told, title: str) -> list[Block]:
    """The first metric that has intervals by slice, the slices with most rows, drawn."""
    every = [of for told in found.values() for of in facts.records(told.get("slices"))]
    metric = next((str(name) for of in every for name in _of(of, "intervals")), None)
    if metric is None:
        return []
    places = {(str(of.get("slice")), str(of.get("value"))): facts.number(of.get("rows")) or 0.0 for of in every}
    chosen = sorted(sorted(places, key=lambda place: -places[place])[:_TOP_SLICES])
    rows = []
    for place in chosen:
        for name, told in found.items():
            for of in facts.records(told.get("slices")):
                ends = [facts.number(v) for v in facts.sequence(_of(of, "intervals").get(metric))]
                value = facts.number(_of(of, "metrics").get(metric))
                if (str(of.get("slice")), str(of.get("value"))) != place or value is None or len(ends) != 2:
                    continue
                low, high = ends
                if low is not None and high is not None:
                    shown = facts.short(f"{place[0]} {place[1]}")
                    rows.append((shown, value, low, high, _COLOURS.get(name, plots.INK)))
    if not rows:
        return []
    several = "; ".join(f"{name}: {_COLOUR_NAMES[name]}" for name in found if name in _COLOUR_NAMES)
    svg = plots.intervals(rows, metric_name(metric), f"{metric_name(metric)} by slice of the {title}")
    return [Plot(svg, f"{metric_name(metric)} by slice, {title}", several if len(found) > 1 else "")]


def _overall(found: _Told, title: str) -> Table:
    """A row for each metric; a column for each model, and its intervals."""
    # `<metric>.<task>` stands in the task's own table.
    metrics = {
        name: {m: v for m, v in facts.mapping(told.get("metrics")).items() if "." not in str(m)}
        for name, told in found.items()
    }
    rows: list[tuple[Cell | str, ...]] = []
    for metric in _names(metrics.values()):
        cells = []
        for name, told in found.items():
            cells += [facts.decimals(metrics[name].get(metric)), _interval(_of(told, "intervals").get(metric))]
        rows.append((metric_name(metric), *cells))
    rows.append(("rows", *(c for told in found.values() for c in (facts.count(told.get("rows")), ""))))
    headings = ("Metric", *(h for name in found for h in (f">{name}", ">interval")))
    return Table(headings, tuple(rows), f"Metrics of the {title}")


def _slices(found: _Told, title: str) -> Table:
    """A row for each value of each slice and each model."""
    slices = {name: facts.records(told.get("slices")) for name, told in found.items()}
    shown = _names(facts.mapping(of.get("metrics")) for told in slices.values() for of in told)
    places = list(
        dict.fromkeys((str(of.get("slice")), str(of.get("value"))) for told in slices.values() for of in told)
    )
    by_place = {
        name: {(str(of.get("slice")), str(of.get("value"))): of for of in told} for name, told in slices.items()
    }
    rows: list[tuple[Cell | str, ...]] = []
    for place in places:
        for name, told in by_place.items():
            if place not in told:
                continue
            of = told[place]
            metrics, intervals = _of(of, "metrics"), _of(of, "intervals")
            values = [f"{facts.decimals(metrics.get(n))} {_interval(intervals.get(n))}".rstrip() for n in shown]
            value = Cell(facts.short(of.get("value")), code=True)
            rows.append((place[0], value, *([name] if len(found) > 1 else []), facts.count(of.get("rows")), *values))
    model = ["Model"] if len(found) > 1 else []
    headings = ("Slice", "Value", *model, ">rows", *(f">{metric_name(n)}" for n in shown))
    return Table(headings, tuple(rows), f"Slices of the {title}", wide=True)


def _names(metrics: Iterable[Mapping[Any, Any]]) -> list[str]:
    return list(dict.fromkeys(str(name) for of in metrics for name in of))


def _of(told: Mapping[str, Any], key: str) -> Mapping[Any, Any]:
    return facts.mapping(told.get(key))


def _interval(value: Any) -> str:
    ends = [facts.number(v) for v in facts.sequence(value)]
    if len(ends) != 2 or None in ends:
        return ""
    return f"[{facts.decimals(ends[0])}, {facts.decimals(ends[1])}]"
