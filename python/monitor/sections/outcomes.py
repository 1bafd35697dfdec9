"""What users did with the lists of earlier days: the newest figures, their history, and who did what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.monitor import facts, plots
from headrace.monitor.blocks import Block, Cell, Plot, Section, Table, Text
from headrace.monitor.sections.day import Day, not_run
from headrace.monitor.sections.quality import metric_name

#: Rows of a table.
_DAYS, _GROUPS = 14, 60
#: In the table of groups.
_COLUMNS = ("rate", "auc", "calibration")

Record = Mapping[str, Any]


def outcomes(day: Day) -> Section:
    """Lists of earlier days beside what followed; nothing where the pipeline has no such stage."""
    title = "Outcomes of earlier lists"
    if not day.planned("outcomes"):
        return Section("outcomes", title, ())
    if "outcomes" not in day.manifests:
        return Section("outcomes", title, (not_run("outcomes"),))
    found = facts.records(day.facts("outcomes").get("days"))
    if not found:
        return Section("outcomes", title, (Text("No list was served before this day.", "dim"),))
    alerts = facts.records(day.facts("outcomes").get("alerts"))
    told = f"{len(alerts)} figures are beyond a limit." if len(alerts) != 1 else "One figure is beyond a limit."
    blocks: list[Block] = [Text(told if alerts else "No figure is beyond a limit.", "bad" if alerts else "good")]
    if alerts:
        blocks.append(_alerts(alerts))
    labels = list(dict.fromkeys(str(r.get("label")) for r in found))
    for label in labels:
        past = _history(day, label)
        rates = [point for r in past if (point := _point(r)) is not None]
        if rates:
            svg = plots.rate_history(rates, label)
            note = "Hollow: provisional, events may still land; the cross is what the rate is expected to become."
            blocks.append(Plot(svg, f"Rate of {label} by served day", note))
        blocks.append(_days([r for r in found if r.get("label") == label], label))
    groups = facts.records(day.facts("outcomes").get("groups"))
    blocks += [_groups([r for r in groups if r.get("label") == label], label) for label in labels if groups]
    return Section("outcomes", title, tuple(blocks), "As far as events had landed by this day.")


def _history(day: Day, label: str) -> list[Record]:
    """The rate of each served day, as the newest run up to this day knows it; oldest first."""
    known: dict[str, Record] = {}
    past = {ds: m for (pipeline, ds, stage), m in day.runs.items() if stage == "outcomes" and ds <= day.ds}
    for _, manifest in sorted(({**past, day.ds: day.manifests["outcomes"]}).items()):
        for record in facts.records(manifest.facts.get("days")):
            if record.get("label") == label and record.get("metric") == "rate":
                known[str(record.get("served_ds"))] = record
    return [known[ds] for ds in sorted(known)]


def _point(record: Record) -> plots.RatePoint | None:
    rate = facts.number(record.get("estimate"))
    if rate is None:
        return None
    return plots.RatePoint(
        str(record.get("served_ds")),
        rate,
        facts.number(record.get("low")),
        facts.number(record.get("high")),
        record.get("ripe") is True,
        facts.number(record.get("expected")),
    )


def _days(records: Sequence[Record], label: str) -> Table:
    """A row a served day, the newest first."""
    metrics = list(dict.fromkeys(str(r.get("metric")) for r in records))
    by_day: dict[str, dict[str, Record]] = {}
    for record in records:
        by_day.setdefault(str(record.get("served_ds")), {})[str(record.get("metric"))] = record
    rows: list[tuple[Cell | str, ...]] = []
    for ds in sorted(by_day, reverse=True)[:_DAYS]:
        of_day = by_day[ds]
        first = next(iter(of_day.values()))
        ripe = first.get("ripe") is True
        known = facts.number(first.get("known"))
        still = "" if ripe or known is None else facts.percent(1 - known)
        rows.append(
            (
                ds,
                Cell("ripe", "good") if ripe else Cell("provisional", "dim"),
                still,
                facts.count(first.get("rows")),
                facts.count(first.get("users")),
                facts.count(first.get("positives")),
                *(_with_interval(of_day.get(name, {})) for name in metrics),
            )
        )
    headings = ("Served", "", ">Still to come", ">Shown", ">Users", f">{label}")
    return Table((*headings, *(f">{_name(name)}" for name in metrics)), tuple(rows), f"Served days: {label}", wide=True)


def _groups(records: Sequence[Record], label: str) -> Table:
    """A row a group, of one served day."""
    metrics = [name for name in _COLUMNS if any(r.get("metric") == name for r in records)]
    by_group: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        place = (str(record.get("dimension")), str(record.get("value")))
        by_group.setdefault(place, {})[str(record.get("metric"))] = record
    rows: list[tuple[Cell | str, ...]] = []
    for (dimension, value), of_group in list(by_group.items())[:_GROUPS]:
        first = next(iter(of_group.values()))
        counts = (facts.count(first.get("rows")), facts.count(first.get("users")))
        figures = [_with_interval(of_group.get(name, {})) for name in metrics]
        rows.append((dimension.replace(":", " "), facts.short(value), *counts, *figures))
    served = str(records[0].get("served_ds")) if records else ""
    headings = ("By", "Value", ">Shown", ">Users", *(f">{_name(name)}" for name in metrics))
    return Table(headings, tuple(rows), f"Groups, served on {served}: {label}", wide=True)


def _alerts(alerts: Sequence[Record]) -> Table:
    rows: list[tuple[Cell | str, ...]] = []
    for r in alerts:
        of = "all" if r.get("dimension") == "all" else f"{r.get('dimension')} {r.get('value')}".replace(":", " ")
        figure = Cell(facts.show(facts.number(r.get("figure"))), "bad")
        told = (str(r.get("served_ds")), f"{r.get('label')} {_name(str(r.get('metric')))}", facts.short(of))
        rows.append(
            (*told, figure, f"{r.get('kind')} {facts.show(r.get('limit'))}", Cell(str(r.get("key")), code=True))
        )
    return Table(("Served", "Figure", "Of", ">Value", ">Limit", "Key"), tuple(rows), "Beyond a limit", wide=True)


def _with_interval(record: Record) -> str:
    value, low, high = (facts.number(record.get(name)) for name in ("estimate", "low", "high"))
    if value is None or low is None or high is None:
        return facts.decimals(value)
    return f"{value:.4f} ({low:.4f} to {high:.4f})"


def _name(metric: str) -> str:
    return f"HR@{metric.removeprefix('hr_at_')}" if metric.startswith("hr_at_") else metric_name(metric)
