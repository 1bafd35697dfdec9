"""Outcomes of earlier lists (the newest figures, their history, groups of users), and experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.quality.report import facts, plots
from headrace.quality.report.blocks import Block, Cell, Day, Plot, ReportSection, ReportTable, Text, not_run
from headrace.quality.report.quality import metric_name

#: Most rows of the tables of days and of groups.
_DAYS, _GROUPS = 14, 60
#: Metrics in the table of groups.
_COLUMNS = ("rate", "auc", "calibration")

Record = Mapping[str, Any]

#: Most days in the table of experiments.
_EXPERIMENT_DAYS = 14
_KINDS = {"better": Cell("better", "good"), "worse": Cell("worse", "bad")}


def outcomes(day: Day) -> ReportSection:
    """Show lists of earlier days beside what followed; nothing where the pipeline has no such stage."""
    title = "Outcomes of earlier lists"
    if not day.planned("outcomes"):
        return ReportSection("outcomes", title, ())
    if "outcomes" not in day.manifests:
        return ReportSection("outcomes", title, (not_run("outcomes"),))
    records = facts.records(day.facts("outcomes").get("days"))
    if not records:
        return ReportSection("outcomes", title, (Text("No list was served before this day.", "dim"),))
    alerts = facts.records(day.facts("outcomes").get("alerts"))
    summary = f"{len(alerts)} figures are beyond a limit." if len(alerts) != 1 else "One figure is beyond a limit."
    blocks: list[Block] = [Text(summary if alerts else "No figure is beyond a limit.", "bad" if alerts else "good")]
    if alerts:
        blocks.append(_alerts(alerts))
    labels = list(dict.fromkeys(str(r.get("label")) for r in records))
    for label in labels:
        past = _history(day, label)
        rates = [point for r in past if (point := _point(r)) is not None]
        if rates:
            svg = plots.rate_history(rates, label)
            note = "Hollow: provisional, events may still land; the cross is what the rate is expected to become."
            blocks.append(Plot(svg, f"Rate of {label} by served day", note))
        blocks.append(_days([r for r in records if r.get("label") == label], label))
    groups = facts.records(day.facts("outcomes").get("groups"))
    blocks += [_groups([r for r in groups if r.get("label") == label], label) for label in labels if groups]
    return ReportSection("outcomes", title, tuple(blocks), "As far as events had landed by this day.")


def _history(day: Day, label: str) -> list[Record]:
    """Return the rate of each served day, as the newest run up to this day knows it; oldest first."""
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


def _days(records: Sequence[Record], label: str) -> ReportTable:
    """Return a row a served day, the newest first."""
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
    return ReportTable(
        (*headings, *(f">{_name(name)}" for name in metrics)), tuple(rows), f"Served days: {label}", wide=True
    )


def _groups(records: Sequence[Record], label: str) -> ReportTable:
    """Return a row a group, of one served day."""
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
    return ReportTable(headings, tuple(rows), f"Groups, served on {served}: {label}", wide=True)


def _alerts(alerts: Sequence[Record]) -> ReportTable:
    rows: list[tuple[Cell | str, ...]] = []
    for r in alerts:
        group = "all" if r.get("dimension") == "all" else f"{r.get('dimension')} {r.get('value')}".replace(":", " ")
        figure = Cell(facts.show(facts.number(r.get("figure"))), "bad")
        columns = (str(r.get("served_ds")), f"{r.get('label')} {_name(str(r.get('metric')))}", facts.short(group))
        rows.append(
            (*columns, figure, f"{r.get('kind')} {facts.show(r.get('limit'))}", Cell(str(r.get("key")), code=True))
        )
    return ReportTable(("Served", "Figure", "Of", ">Value", ">Limit", "Key"), tuple(rows), "Beyond a limit", wide=True)


def _with_interval(record: Record) -> str:
    value, low, high = (facts.number(record.get(name)) for name in ("estimate", "low", "high"))
    if value is None or low is None or high is None:
        return facts.decimals(value)
    return f"{value:.4f} ({low:.4f} to {high:.4f})"


def _name(metric: str) -> str:
    return f"HR@{metric.removeprefix('hr_at_')}" if metric.startswith("hr_at_") else metric_name(metric)


def experiments(day: Day) -> ReportSection:
    """Return each experiment of the pipeline; nothing where it has none."""
    title = "Experiments"
    if not day.planned("experiments"):
        return ReportSection("experiments", title, ())
    if "experiments" not in day.manifests:
        return ReportSection("experiments", title, (not_run("experiments"),))
    blocks: list[Block] = []
    for experiment in facts.records(day.facts("experiments").get("experiments")):
        blocks += _experiment(experiment)
    return ReportSection("experiments", title, tuple(blocks), "Totals are of the days whose label is ripe.")


def _experiment(experiment: Mapping[str, Any]) -> list[Block]:
    name, now = str(experiment.get("name")), [str(arm) for arm in facts.sequence(experiment.get("stopped_now"))]
    ratio = facts.mapping(experiment.get("sample_ratio"))
    summary = f"{name}: {experiment.get('state')}; {len(facts.sequence(experiment.get('ripe_days')))} ripe days."
    blocks: list[Block] = [Text(summary)]
    if now:
        blocks.append(Text(f"Stopped by its rule from this day's lists on: {', '.join(now)}.", "bad"))
    if ratio.get("ok") is False:
        p = facts.show(facts.number(ratio.get("p")))
        blocks.append(Text(f"The users of the arms are not those that were sent there (p {p}).", "bad"))
    arms, differences = facts.mapping(experiment.get("arms")), facts.mapping(experiment.get("differences"))
    blocks.append(_arms(experiment, arms, differences))
    for arm, arm_facts in arms.items():
        if stop := facts.mapping(facts.mapping(arm_facts).get("stopped")):
            blocks.append(Text(f"{arm} was stopped: {stop.get('reason')}", "dim"))
    if by_day := facts.records(experiment.get("by_day")):
        blocks.append(_by_day(name, by_day[-_EXPERIMENT_DAYS:][::-1], list(arms), list(differences)))
    return blocks


def _arms(experiment: Mapping[str, Any], arms: Mapping[str, Any], differences: Mapping[str, Any]) -> ReportTable:
    """Return a row an arm."""
    rows: list[tuple[Cell | str, ...]] = []
    for arm, arm_facts in ((str(arm), facts.mapping(arm_facts)) for arm, arm_facts in arms.items()):
        against = facts.mapping(differences.get(arm))
        stop = facts.mapping(arm_facts.get("stopped"))
        if arm == experiment.get("control"):
            is_: Cell | str = Cell("control", "dim")
        else:
            conclusion = str(against.get("conclusion", "–"))
            is_ = _KINDS.get(conclusion, conclusion)
        rows.append(
            (
                arm,
                str(arm_facts.get("model") or "score.model"),
                facts.percent(arm_facts.get("share")),
                facts.count(arm_facts.get("users")),
                facts.count(arm_facts.get("rows")),
                facts.decimals(arm_facts.get("value")),
                _difference(against),
                _range(facts.mapping(against.get("sequential"))),
                is_,
                "" if not stop else f"from {stop.get('ds')} on, by {stop.get('by')}",
            )
        )
    value = "Rate" if experiment.get("metric") == "rate" else "Per user"
    headings = (
        "Arm",
        "Model",
        ">Share",
        ">Users",
        ">Shown",
        f">{value}",
        ">Difference",
        ">Sequential",
        "Is",
        "Stopped",
    )
    return ReportTable(headings, tuple(rows), f"Arms of {experiment.get('name')}: {experiment.get('label')}", wide=True)


def _by_day(name: str, days: list[Mapping[str, Any]], arms: list[Any], treatments: list[Any]) -> ReportTable:
    """Return a row a served day, the newest first."""
    rows: list[tuple[Cell | str, ...]] = []
    for served_day in days:
        state = Cell("ripe", "good") if served_day.get("ripe") is True else Cell("provisional", "dim")
        values, differences = facts.mapping(served_day.get("arms")), facts.mapping(served_day.get("differences"))
        rows.append(
            (
                str(served_day.get("served_ds")),
                state,
                *(facts.decimals(facts.mapping(values.get(arm)).get("value")) for arm in arms),
                *(_difference(facts.mapping(differences.get(arm))) for arm in treatments),
            )
        )
    headings = ("Served", "", *(f">{arm}" for arm in arms), *(f">{arm} - control" for arm in treatments))
    return ReportTable(headings, tuple(rows), f"Days of {name}", wide=True)


def _difference(result: Mapping[str, Any]) -> str:
    value = facts.number(result.get("estimate"))
    return "–" if value is None else f"{value:+.4f} ({_range(result)})"


def _range(result: Mapping[str, Any]) -> str:
    low, high = facts.number(result.get("low")), facts.number(result.get("high"))
    return "–" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"
