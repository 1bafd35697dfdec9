"""Experiments: arms beside each other as the stage has judged them, and what was stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.monitor import facts
from headrace.monitor.blocks import Block, Cell, Section, Table, Text
from headrace.monitor.sections.day import Day, not_run

#: Days of a table.
_DAYS = 14
_KINDS = {"better": Cell("better", "good"), "worse": Cell("worse", "bad")}


def experiments(day: Day) -> Section:
    """Each experiment of the pipeline; nothing where it has none."""
    title = "Experiments"
    if not day.planned("experiments"):
        return Section("experiments", title, ())
    if "experiments" not in day.manifests:
        return Section("experiments", title, (not_run("experiments"),))
    blocks: list[Block] = []
    for found in facts.records(day.facts("experiments").get("experiments")):
        blocks += _experiment(found)
    return Section("experiments", title, tuple(blocks), "Totals are of the days whose label is ripe.")


def _experiment(found: Mapping[str, Any]) -> list[Block]:
    name, now = str(found.get("name")), [str(arm) for arm in facts.sequence(found.get("stopped_now"))]
    ratio = facts.mapping(found.get("sample_ratio"))
    told = f"{name}: {found.get('state')}; {len(facts.sequence(found.get('ripe_days')))} ripe days."
    blocks: list[Block] = [Text(told)]
    if now:
        blocks.append(Text(f"Stopped by its rule from this day's lists on: {', '.join(now)}.", "bad"))
    if ratio.get("ok") is False:
        p = facts.show(facts.number(ratio.get("p")))
        blocks.append(Text(f"The users of the arms are not those that were sent there (p {p}).", "bad"))
    arms, differences = facts.mapping(found.get("arms")), facts.mapping(found.get("differences"))
    blocks.append(_arms(found, arms, differences))
    for arm, of in arms.items():
        if stop := facts.mapping(facts.mapping(of).get("stopped")):
            blocks.append(Text(f"{arm} was stopped: {stop.get('reason')}", "dim"))
    if by_day := facts.records(found.get("by_day")):
        blocks.append(_by_day(name, by_day[-_DAYS:][::-1], list(arms), list(differences)))
    return blocks


def _arms(found: Mapping[str, Any], arms: Mapping[str, Any], differences: Mapping[str, Any]) -> Table:
    """A row an arm."""
    rows: list[tuple[Cell | str, ...]] = []
    for arm, of in ((str(arm), facts.mapping(of)) for arm, of in arms.items()):
        against = facts.mapping(differences.get(arm))
        stop = facts.mapping(of.get("stopped"))
        if arm == found.get("control"):
            is_: Cell | str = Cell("control", "dim")
        else:
            said = str(against.get("conclusion", "–"))
            is_ = _KINDS.get(said, said)
        rows.append(
            (
                arm,
                str(of.get("model") or "score.model"),
                facts.percent(of.get("share")),
                facts.count(of.get("users")),
                facts.count(of.get("rows")),
                facts.decimals(of.get("value")),
                _difference(against),
                _range(facts.mapping(against.get("sequential"))),
                is_,
                "" if not stop else f"from {stop.get('ds')} on, by {stop.get('by')}",
            )
        )
    value = "Rate" if found.get("metric") == "rate" else "Per user"
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
    return Table(headings, tuple(rows), f"Arms of {found.get('name')}: {found.get('label')}", wide=True)


def _by_day(name: str, days: list[Mapping[str, Any]], arms: list[Any], treatments: list[Any]) -> Table:
    """A row a served day, the newest first."""
    rows: list[tuple[Cell | str, ...]] = []
    for of in days:
        state = Cell("ripe", "good") if of.get("ripe") is True else Cell("provisional", "dim")
        values, differences = facts.mapping(of.get("arms")), facts.mapping(of.get("differences"))
        rows.append(
            (
                str(of.get("served_ds")),
                state,
                *(facts.decimals(facts.mapping(values.get(arm)).get("value")) for arm in arms),
                *(_difference(facts.mapping(differences.get(arm))) for arm in treatments),
            )
        )
    headings = ("Served", "", *(f">{arm}" for arm in arms), *(f">{arm} - control" for arm in treatments))
    return Table(headings, tuple(rows), f"Days of {name}", wide=True)


def _difference(of: Mapping[str, Any]) -> str:
    value = facts.number(of.get("estimate"))
    return "–" if value is None else f"{value:+.4f} ({_range(of)})"


def _range(of: Mapping[str, Any]) -> str:
    low, high = facts.number(of.get("low")), facts.number(of.get("high"))
    return "–" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"
