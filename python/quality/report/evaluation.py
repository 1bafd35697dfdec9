"""The verdict on the day's model, and the model beside the champion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.quality.report import facts, plots
from headrace.quality.report.blocks import Block, Cell, Day, Plot, ReportSection, ReportTable, Text, not_run
from headrace.quality.report.quality import metric_name

_SPLITS = {
    "valid": "validation split",
    "test": "test split",
    "rank": "ranked lists",
    "valid_lists": "validation split's lists",
    "test_lists": "test split's lists",
}
#: Number of slices in the plot: those with most rows.
_TOP_SLICES = 12
_COLOUR_NAMES = {"neural": "blue", "XGBoost": "orange", "second stage": "green"}
_COLOURS = {"neural": plots.NEURAL, "XGBoost": plots.BASELINE, "second stage": plots.CEILING}
#: Facts of a split's evaluation, by the model's name.
_ByModel = Mapping[str, Mapping[str, Any]]

#: Number of slices in the table: the worst compared with the champion.
_TOP_GATE_SLICES = 30


def evaluation(day: Day) -> ReportSection:
    """Metrics of each split with their intervals, and of its slices; no block where nothing was asked for."""
    of_models = {
        name: facts.mapping(day.facts(stage).get("evaluation"))
        for name, stage in (("neural", "train"), ("XGBoost", "baseline"), ("second stage", "second_stage"))
    }
    blocks: list[Block] = []
    for split in dict.fromkeys(str(split) for results in of_models.values() for split in results):
        by_model = {name: facts.mapping(results[split]) for name, results in of_models.items() if split in results}
        title = _SPLITS.get(split, split)
        blocks += _rows_blocks(by_model, title)
        tasks = {name: facts.mapping(results.get("tasks")) for name, results in by_model.items()}
        for task in dict.fromkeys(str(task) for results in tasks.values() for task in results):
            of_task = {name: facts.mapping(results[task]) for name, results in tasks.items() if task in results}
            blocks += _rows_blocks(of_task, f"{title}, task {task}")
    return ReportSection("evaluation", "Evaluation by slice", tuple(blocks))


def _rows_blocks(by_model: _ByModel, title: str) -> list[Block]:
    """Return the blocks of all rows, and of their slices if there are any."""
    sliced = any(facts.records(result.get("slices")) for result in by_model.values())
    return [_overall(by_model, title), *_intervals(by_model, title), *([_slices(by_model, title)] if sliced else [])]


def _intervals(by_model: _ByModel, title: str) -> list[Block]:
    """Return the first metric that has intervals by slice, the slices with most rows, drawn."""
    every = [slice_ for result in by_model.values() for slice_ in facts.records(result.get("slices"))]
    metric = next((str(name) for slice_ in every for name in _fact(slice_, "intervals")), None)
    if metric is None:
        return []
    places = {
        (str(slice_.get("slice")), str(slice_.get("value"))): facts.number(slice_.get("rows")) or 0.0
        for slice_ in every
    }
    chosen = sorted(sorted(places, key=lambda place: -places[place])[:_TOP_SLICES])
    rows = []
    for place in chosen:
        for name, result in by_model.items():
            for slice_ in facts.records(result.get("slices")):
                ends = [facts.number(v) for v in facts.sequence(_fact(slice_, "intervals").get(metric))]
                value = facts.number(_fact(slice_, "metrics").get(metric))
                if (str(slice_.get("slice")), str(slice_.get("value"))) != place or value is None or len(ends) != 2:
                    continue
                low, high = ends
                if low is not None and high is not None:
                    label = facts.short(f"{place[0]} {place[1]}")
                    rows.append((label, value, low, high, _COLOURS.get(name, plots.INK)))
    if not rows:
        return []
    several = "; ".join(f"{name}: {_COLOUR_NAMES[name]}" for name in by_model if name in _COLOUR_NAMES)
    svg = plots.intervals(rows, metric_name(metric), f"{metric_name(metric)} by slice of the {title}")
    return [Plot(svg, f"{metric_name(metric)} by slice, {title}", several if len(by_model) > 1 else "")]


def _overall(by_model: _ByModel, title: str) -> ReportTable:
    """Return a row for each metric; a column for each model, and its intervals."""
    # `<metric>.<task>` stands in the task's own table.
    metrics = {
        name: {m: v for m, v in facts.mapping(result.get("metrics")).items() if "." not in str(m)}
        for name, result in by_model.items()
    }
    rows: list[tuple[Cell | str, ...]] = []
    for metric in _names(metrics.values()):
        cells = []
        for name, result in by_model.items():
            cells += [facts.decimals(metrics[name].get(metric)), _interval(_fact(result, "intervals").get(metric))]
        rows.append((metric_name(metric), *cells))
    rows.append(("rows", *(c for result in by_model.values() for c in (facts.count(result.get("rows")), ""))))
    headings = ("Metric", *(h for name in by_model for h in (f">{name}", ">interval")))
    return ReportTable(headings, tuple(rows), f"Metrics of the {title}")


def _slices(by_model: _ByModel, title: str) -> ReportTable:
    """Return a row for each value of each slice and each model."""
    slices = {name: facts.records(slice_records.get("slices")) for name, slice_records in by_model.items()}
    metric_names = _names(
        facts.mapping(slice_.get("metrics")) for slice_records in slices.values() for slice_ in slice_records
    )
    places = list(
        dict.fromkeys(
            (str(slice_.get("slice")), str(slice_.get("value")))
            for slice_records in slices.values()
            for slice_ in slice_records
        )
    )
    by_place = {
        name: {(str(slice_.get("slice")), str(slice_.get("value"))): slice_ for slice_ in slice_records}
        for name, slice_records in slices.items()
    }
    rows: list[tuple[Cell | str, ...]] = []
    for place in places:
        for name, slice_records in by_place.items():
            if place not in slice_records:
                continue
            slice_ = slice_records[place]
            metrics, intervals = _fact(slice_, "metrics"), _fact(slice_, "intervals")
            values = [f"{facts.decimals(metrics.get(n))} {_interval(intervals.get(n))}".rstrip() for n in metric_names]
            value = Cell(facts.short(slice_.get("value")), code=True)
            rows.append(
                (place[0], value, *([name] if len(by_model) > 1 else []), facts.count(slice_.get("rows")), *values)
            )
    model = ["Model"] if len(by_model) > 1 else []
    headings = ("Slice", "Value", *model, ">rows", *(f">{metric_name(n)}" for n in metric_names))
    return ReportTable(headings, tuple(rows), f"Slices of the {title}", wide=True)


def _names(metrics: Iterable[Mapping[Any, Any]]) -> list[str]:
    return list(dict.fromkeys(str(name) for named in metrics for name in named))


def _fact(result: Mapping[str, Any], key: str) -> Mapping[Any, Any]:
    return facts.mapping(result.get(key))


def _interval(value: Any) -> str:
    ends = [facts.number(v) for v in facts.sequence(value)]
    if len(ends) != 2 or None in ends:
        return ""
    return f"[{facts.decimals(ends[0])}, {facts.decimals(ends[1])}]"


def gate(day: Day) -> ReportSection:
    """Return the section on the gate: verdict, rules, both models' metrics, slices; empty without a gate."""
    if not day.planned("gate"):
        return ReportSection("gate", "Gate", ())
    if "gate" not in day.manifests:
        return ReportSection("gate", "Gate", (not_run("gate"),))
    verdict_facts, evaluated = day.facts("gate"), day.facts("evaluate")
    blocks: list[Block] = [_verdict(verdict_facts)]
    if note := str(verdict_facts.get("note") or ""):
        blocks.append(Text(f"The champion cannot predict the day's rows: {note}", "bad"))
    rules = facts.records(verdict_facts.get("rules"))
    if rules:
        headings = ("Rule", "", "Figure", ">value", ">limit", ">margin")
        blocks.append(ReportTable(headings, tuple(_rule(r) for r in rules), "Rules", wide=True))
    model, champion = (facts.mapping(evaluated.get(name)) for name in ("model", "champion"))
    if model:
        blocks.append(_models(model, champion, facts.mapping(evaluated.get("differences"))))
    slices = facts.records(evaluated.get("slices"))
    if slices:
        blocks.append(_gate_slices(slices))
    blocks += _challenger(
        facts.mapping(verdict_facts.get("challenger")), facts.mapping(evaluated.get("challenger")), model
    )
    rows = f"{facts.count(verdict_facts.get('rows'))} rows of the split {verdict_facts.get('split')}"
    note = f"Both models predict the same {rows}, each by its own workflow; intervals are paired, over users."
    return ReportSection("gate", "Gate", tuple(blocks), note)


def _verdict(verdict_facts: Mapping[str, Any]) -> Text:
    model, champion = facts.mapping(verdict_facts.get("model")), facts.mapping(verdict_facts.get("champion"))
    rules = facts.records(verdict_facts.get("rules"))
    broken = sum(r.get("passed") is False for r in rules)
    reference = f", beside version {champion.get('version')}, the champion" if champion else "; there was no champion"
    refused = verdict_facts.get("verdict") == "refused"
    rules_text = f"{broken} of {len(rules)} rules are broken" if refused else f"none of {len(rules)} rules is broken"
    text = f"Version {model.get('version')} was {verdict_facts.get('verdict')}{reference}: {rules_text}."
    return Text(text, "bad" if refused else "good")


def _challenger(judged: Mapping[str, Any], evaluated: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[Block, ...]:
    """Return the verdict on the day's challenger, the rules that it breaks, and its metrics beside the day's model."""
    if note := str(evaluated.get("note") or ""):
        return (Text(f"The challenger cannot predict the day's rows: {note}", "bad"),)
    if not judged:
        return ()
    becomes = ", and becomes champion" if judged.get("becomes_champion") else ""
    refused = judged.get("verdict") == "refused"
    text = Text(f"The challenger, version {judged.get('version')}, was {judged.get('verdict')}{becomes}.")
    unmet = [r for r in facts.records(judged.get("rules")) if r.get("passed") is False]
    headings = ("Rule", "", "Figure", ">value", ">limit", ">margin")
    title = f"Rules that the challenger {'breaks' if refused else 'does not meet'}"
    broken = (ReportTable(headings, tuple(_rule(r) for r in unmet), title, wide=True),) if unmet else ()
    metrics, model_metrics = facts.mapping(evaluated.get("metrics")), facts.mapping(model.get("metrics"))
    differences = facts.mapping(evaluated.get("beside_model"))
    rows = tuple(
        (
            metric_name(str(name)),
            facts.decimals(value),
            facts.decimals(model_metrics.get(name)),
            *_difference(facts.mapping(differences.get(name))),
        )
        for name, value in metrics.items()
    )
    columns = ("Metric", f">version {judged.get('version')}", f">version {model.get('version')}", ">difference")
    return text, *broken, ReportTable((*columns, ">interval of that"), rows, "The challenger beside the day's model")


def _rule(r: Mapping[str, Any]) -> tuple[Cell | str, ...]:
    passed = r.get("passed")
    state = Cell("not judged", "dim") if passed is None else Cell("holds", "good") if passed else Cell("broken", "bad")
    numbers = (facts.show(r.get("value")), facts.show(r.get("limit")))
    margin = Cell(facts.show(r.get("margin")), "bad" if passed is False else "")
    return Cell(str(r.get("key")), code=True), state, str(r.get("figure")), *numbers, margin


def _models(model: Mapping[str, Any], champion: Mapping[str, Any], differences: Mapping[str, Any]) -> ReportTable:
    metrics, champion_metrics = (facts.mapping(m.get("metrics")) for m in (model, champion))
    rows: list[tuple[Cell | str, ...]] = []
    for name, value in metrics.items():
        row: list[Cell | str] = [metric_name(str(name)), facts.decimals(value)]
        if champion:
            row += [facts.decimals(champion_metrics.get(name)), *_difference(facts.mapping(differences.get(name)))]
        rows.append(tuple(row))
    for label, key in (("bytes on disk", "bytes"), ("rows a second on one core", "rows_per_second")):
        more = [facts.count(champion.get(key)), "", ""] if champion else []
        rows.append((label, facts.count(model.get(key)), *more))
    champion_headings = (
        (f">version {champion.get('version')}, champion", ">difference", ">interval of that") if champion else ()
    )
    headings = ("Metric", f">version {model.get('version')}", *champion_headings)
    title = "The day's model beside the champion" if champion else "The day's model"
    return ReportTable(headings, tuple(rows), title, wide=bool(champion))


def _difference(result: Mapping[str, Any]) -> tuple[str, str]:
    value, low, high = (facts.number(result.get(name)) for name in ("value", "low", "high"))
    interval = "" if low is None or high is None else f"[{low:+.4f}, {high:+.4f}]"
    return "–" if value is None else f"{value:+.4f}", interval


def _gate_slices(slices: list[Mapping[str, Any]]) -> ReportTable:
    """Return slices by AUC, or the first metric they have; the worst in comparison with the champion first."""
    metric = next((m for m in ("auc", "rmse", "ndcg_at_k") if m in facts.mapping(slices[0].get("metrics"))), "auc")
    sign = -1 if metric == "rmse" else 1

    def ranked(s: Mapping[str, Any]) -> Mapping[str, Any]:
        return facts.mapping(facts.mapping(s.get("differences")).get(metric))

    def order(s: Mapping[str, Any]) -> float:
        value = facts.number(ranked(s).get("value"))
        return float("inf") if value is None else sign * value

    rows = tuple(
        (
            f"{s.get('slice')} = {s.get('value')}",
            facts.count(s.get("rows")),
            *(facts.decimals(facts.mapping(s.get(side)).get(metric)) for side in ("metrics", "champion")),
            *_difference(ranked(s)),
        )
        for s in sorted(slices, key=order)[:_TOP_GATE_SLICES]
    )
    headings = ("Slice", ">rows", ">model", ">champion", ">difference", ">interval of that")
    return ReportTable(
        headings, rows, f"{metric_name(metric)} by slice, the worst beside the champion first", wide=True
    )
