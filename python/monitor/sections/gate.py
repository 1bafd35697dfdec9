"""The verdict on the day's model, and the model beside the champion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.monitor import facts
from headrace.monitor.blocks import Block, Cell, Section, Table, Text
from headrace.monitor.sections.day import Day, not_run
from headrace.monitor.sections.quality import metric_name

#: Slices that are shown; those that are worst beside the champion.
_TOP_SLICES = 30


def gate(day: Day) -> Section:
    """The verdict with every rule's figure and limit, both models' metrics, and slices; nothing without a gate."""
    if not day.planned("gate"):
        return Section("gate", "Gate", ())
    if "gate" not in day.manifests:
        return Section("gate", "Gate", (not_run("gate"),))
    found, evaluated = day.facts("gate"), day.facts("evaluate")
    blocks: list[Block] = [_verdict(found)]
    if note := str(found.get("note") or ""):
        blocks.append(Text(f"The champion cannot predict the day's rows: {note}", "bad"))
    rules = facts.records(found.get("rules"))
    if rules:
        headings = ("Rule", "", "Figure", ">value", ">limit", ">margin")
        blocks.append(Table(headings, tuple(_rule(r) for r in rules), "Rules", wide=True))
    model, champion = (facts.mapping(evaluated.get(name)) for name in ("model", "champion"))
    if model:
        blocks.append(_models(model, champion, facts.mapping(evaluated.get("differences"))))
    slices = facts.records(evaluated.get("slices"))
    if slices:
        blocks.append(_slices(slices))
    blocks += _challenger(facts.mapping(found.get("challenger")), facts.mapping(evaluated.get("challenger")), model)
    rows = f"{facts.count(found.get('rows'))} rows of the split {found.get('split')}"
    note = f"Both models predict the same {rows}, each by its own workflow; intervals are paired, over users."
    return Section("gate", "Gate", tuple(blocks), note)


def _verdict(found: Mapping[str, Any]) -> Text:
    model, champion = facts.mapping(found.get("model")), facts.mapping(found.get("champion"))
    rules = facts.records(found.get("rules"))
    broken = sum(r.get("passed") is False for r in rules)
    beside = f", beside version {champion.get('version')}, the champion" if champion else "; there was no champion"
    refused = found.get("verdict") == "refused"
    told = f"{broken} of {len(rules)} rules are broken" if refused else f"none of {len(rules)} rules is broken"
    text = f"Version {model.get('version')} was {found.get('verdict')}{beside}: {told}."
    return Text(text, "bad" if refused else "good")


def _challenger(judged: Mapping[str, Any], evaluated: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[Block, ...]:
    """The verdict on the day's challenger, the rules that it breaks, and its metrics beside the day's model."""
    if note := str(evaluated.get("note") or ""):
        return (Text(f"The challenger cannot predict the day's rows: {note}", "bad"),)
    if not judged:
        return ()
    becomes = ", and becomes champion" if judged.get("becomes_champion") else ""
    refused = judged.get("verdict") == "refused"
    text = Text(f"The challenger, version {judged.get('version')}, was {judged.get('verdict')}{becomes}.")
    told = [r for r in facts.records(judged.get("rules")) if r.get("passed") is False]
    headings = ("Rule", "", "Figure", ">value", ">limit", ">margin")
    title = f"Rules that the challenger {'breaks' if refused else 'does not meet'}"
    broken = (Table(headings, tuple(_rule(r) for r in told), title, wide=True),) if told else ()
    mine, other = facts.mapping(evaluated.get("metrics")), facts.mapping(model.get("metrics"))
    differences = facts.mapping(evaluated.get("beside_model"))
    rows = tuple(
        (
            metric_name(str(name)),
            facts.decimals(value),
            facts.decimals(other.get(name)),
            *_difference(facts.mapping(differences.get(name))),
        )
        for name, value in mine.items()
    )
    columns = ("Metric", f">version {judged.get('version')}", f">version {model.get('version')}", ">difference")
    return text, *broken, Table((*columns, ">interval of that"), rows, "The challenger beside the day's model")


def _rule(r: Mapping[str, Any]) -> tuple[Cell | str, ...]:
    passed = r.get("passed")
    state = Cell("not judged", "dim") if passed is None else Cell("holds", "good") if passed else Cell("broken", "bad")
    numbers = (facts.show(r.get("value")), facts.show(r.get("limit")))
    margin = Cell(facts.show(r.get("margin")), "bad" if passed is False else "")
    return Cell(str(r.get("key")), code=True), state, str(r.get("figure")), *numbers, margin


def _models(model: Mapping[str, Any], champion: Mapping[str, Any], differences: Mapping[str, Any]) -> Table:
    mine, other = (facts.mapping(m.get("metrics")) for m in (model, champion))
    rows: list[tuple[Cell | str, ...]] = []
    for name, value in mine.items():
        row: list[Cell | str] = [metric_name(str(name)), facts.decimals(value)]
        if champion:
            row += [facts.decimals(other.get(name)), *_difference(facts.mapping(differences.get(name)))]
        rows.append(tuple(row))
    for label, key in (("bytes on disk", "bytes"), ("rows a second on one core", "rows_per_second")):
        more = [facts.count(champion.get(key)), "", ""] if champion else []
        rows.append((label, facts.count(model.get(key)), *more))
    beside = (f">version {champion.get('version')}, champion", ">difference", ">interval of that") if champion else ()
    headings = ("Metric", f">version {model.get('version')}", *beside)
    title = "The day's model beside the champion" if champion else "The day's model"
    return Table(headings, tuple(rows), title, wide=bool(champion))


def _difference(found: Mapping[str, Any]) -> tuple[str, str]:
    value, low, high = (facts.number(found.get(name)) for name in ("value", "low", "high"))
    interval = "" if low is None or high is None else f"[{low:+.4f}, {high:+.4f}]"
    return "–" if value is None else f"{value:+.4f}", interval


def _slices(slices: list[Mapping[str, Any]]) -> Table:
    """By AUC, or the first metric there is; the worst beside the champion first."""
    metric = next((m for m in ("auc", "rmse", "ndcg_at_k") if m in facts.mapping(slices[0].get("metrics"))), "auc")
    sign = -1 if metric == "rmse" else 1

    def told(s: Mapping[str, Any]) -> Mapping[str, Any]:
        return facts.mapping(facts.mapping(s.get("differences")).get(metric))

    def order(s: Mapping[str, Any]) -> float:
        value = facts.number(told(s).get("value"))
        return float("inf") if value is None else sign * value

    rows = tuple(
        (
            f"{s.get('slice')} = {s.get('value')}",
            facts.count(s.get("rows")),
            *(facts.decimals(facts.mapping(s.get(side)).get(metric)) for side in ("metrics", "champion")),
            *_difference(told(s)),
        )
        for s in sorted(slices, key=order)[:_TOP_SLICES]
    )
    headings = ("Slice", ">rows", ">model", ">champion", ">difference", ">interval of that")
    return Table(headings, rows, f"{metric_name(metric)} by slice, the worst beside the champion first", wide=True)
