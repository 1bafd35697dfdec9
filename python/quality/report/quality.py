"""Model quality: metrics, plots and learning curves, the day's models side by side, and `headrace compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.quality.report import facts, plots
from headrace.quality.report.blocks import Block, Cell, Day, Plot, ReportSection, ReportTable, Text, not_run
from headrace.stage import identity

_METRICS = {
    "auc": "AUC",
    "log_loss": "log loss",
    "calibration": "predicted / observed",
    "base_rate": "base rate",
    "hr_at_k": "HR@k",
    "ndcg_at_k": "NDCG@k",
    "recall_at_k": "recall@k",
    "mrr_at_k": "MRR@k",
    "map_at_k": "MAP@k",
    "popularity_at_k": "popularity@k",
    "popularity_lift_at_k": "popularity lift@k",
    "novelty_at_k": "novelty@k, bits",
    "coverage_at_k": "coverage@k",
    "pr_auc": "PR-AUC",
    "gauc": "GAUC",
    "user_auc": "AUC, mean of users",
    "logged_value": "value of the logging policy",
    "ips": "value as a policy, IPS",
    "snips": "value as a policy, SNIPS",
    "dm": "value as a policy, direct method",
    "dr": "value as a policy, doubly robust",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
}
#: Stages that train models -> their names on the page.
_TRAINED = {"train": "neural", "baseline": "XGBoost", "second_stage": "second stage", "challenger": "challenger"}
#: The models that the stage `evaluate` measures -> their names on the page.
_COMPARED = {"model": "the day's", "champion": "champion", "challenger": "challenger"}
_COLOURS = {"model": plots.NEURAL, "champion": plots.CEILING, "challenger": plots.BASELINE}
#: P-value below which a difference is marked.
_SIGNIFICANT = 0.05


def quality(day: Day) -> ReportSection:
    """Return the section on quality: metrics with the baseline's and the ceiling, calibration, lift."""
    models = [(name, stage) for name, stage in (("neural", "train"), ("XGBoost", "baseline")) if stage in day.manifests]
    if not models:
        return ReportSection("quality", "Model quality", (not_run("train"),))
    blocks: list[Block] = [_metrics_table(day, models)]
    colours = {"train": plots.NEURAL, "baseline": plots.BASELINE}
    bars = [(name, auc, colours[stage]) for name, stage in models if (auc := day.metric(stage, "auc")) is not None]
    if day.ceiling is not None and bars:
        bars.append(("ceiling", day.ceiling, plots.CEILING))
    if bars:
        note = "The ceiling is the AUC of the probabilities from which the clicks were drawn." if day.ceiling else ""
        blocks.append(Plot(plots.auc_bars(bars), "AUC on the validation split", note))
    bins = [
        (name, points_, colours[stage])
        for name, stage in models
        if (points_ := _bins(day.facts(stage).get("calibration_bins")))
    ]
    if bins:
        blocks.append(Plot(plots.calibration(bins), "Calibration", "Larger dots hold more rows."))
    lifts = [(name, points, colour) for name, points_, colour in bins if (points := lift_of(points_))]
    if lifts:
        note = "The rate of the rows with the highest predictions, in units of the average rate."
        blocks.append(Plot(plots.lift(lifts), "Lift", note))
    return ReportSection("quality", "Model quality", tuple(blocks))


def _metrics_table(day: Day, models: Sequence[tuple[str, str]]) -> ReportTable:
    metrics_of = {stage: facts.numbers(day.facts(stage).get("metrics")) for _, stage in models}
    names = list(dict.fromkeys(n for metrics in metrics_of.values() for n in metrics))
    ceiling = {"auc": day.ceiling, "log_loss": facts.number(day.truth.get("log_loss_floor"))}
    known = any(ceiling.get(n) is not None for n in names)
    headings = ["Metric", *(f">{name}" for name, _ in models), *([">best possible"] if known else [])]
    rows: list[tuple[Cell | str, ...]] = []
    for name in names:
        values = [facts.decimals(metrics_of[stage].get(name)) for _, stage in models]
        rows.append((metric_name(name), *values, *([facts.decimals(ceiling.get(name))] if known else [])))
    shares = [facts.ceiling_share(metrics_of[stage].get("auc"), day.ceiling) for _, stage in models]
    if known and any(s is not None for s in shares):
        rows.append(("from 0.5 to the ceiling", *(facts.percent(s) for s in shares), facts.percent(1.0)))
    for name in ("train", "valid"):
        counts = [facts.count(day.rows(stage).get(name)) for _, stage in models]
        rows.append((f"rows, {name}", *counts, *([""] if known else [])))
    return ReportTable(tuple(headings), tuple(rows), "Metrics on the validation split")


def metric_name(name: str) -> str:
    """Return a metric for people; `auc.purchase` is one of a task (`train.tasks`)."""
    metric, _, task = name.partition(".")
    title = _METRICS.get(metric, metric.replace("_", " "))
    return f"{title} of {task}" if task else title


def lift_of(bins: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """(share of rows, rate of these rows by the rate of all), highest predictions first.

    Args:
        bins: (mean predicted, observed rate, rows).
    """
    rows, positives = sum(n for _, _, n in bins), sum(rate * n for _, rate, n in bins)
    if rows <= 0 or positives <= 0:
        return []
    points, taken, hits = [], 0.0, 0.0
    for _, rate, n in sorted(bins, reverse=True):
        taken, hits = taken + n, hits + rate * n
        if taken > 0:
            points.append((taken / rows, hits / taken * rows / positives))
    return points


def _bins(value: Any) -> list[tuple[float, float, float]]:
    bins = []
    for r in facts.records(value):
        predicted, observed = facts.number(r.get("predicted")), facts.number(r.get("observed"))
        if predicted is not None and observed is not None:
            bins.append((predicted, observed, max(0.0, facts.number(r.get("rows")) or 0.0)))
    return bins


def learning(day: Day) -> ReportSection:
    """Return the learning curves."""
    train = day.facts("train")
    curve = facts.points(train.get("curve"), "step", "loss")
    evals = facts.points(train.get("evals"), "step", "auc")
    losses = facts.points(train.get("evals"), "step", "log_loss")
    if not (curve or evals or losses):
        return ReportSection("learning", "Learning curves", (not_run("train"),))
    blocks: list[Block] = []
    if curve or losses:
        blocks.append(Plot(plots.loss_curve(curve, losses, _entropy(day.metric("train", "base_rate"))), "Loss by step"))
    if evals:
        svg = plots.auc_curve(evals, day.metric("baseline", "auc"), day.ceiling)
        blocks.append(Plot(svg, "Validation AUC by step"))
    best, steps = facts.number(train.get("best_step")), facts.number(train.get("steps"))
    if best is not None and steps is not None and best < steps:
        monitor = train.get("monitor")
        reason = f"{monitor} was best" if isinstance(monitor, str) else "the validation log loss was lowest"
        text = f"The model is that of step {best:,.0f} of {steps:,.0f}: there {reason}."
        blocks.append(Text(text))
    speed = facts.points(train.get("curve"), "step", "samples_per_s")
    if speed:
        median = sorted(v for _, v in speed)[len(speed) // 2]
        blocks.append(Text(f"Median speed {median:,.0f} samples/s over all ranks.", "dim"))
    blocks += _trees(day.facts("baseline"))
    blocks += _raw_ids(train.get("dynamic"))
    blocks += _cached(train.get("cached"))
    return ReportSection("learning", "Learning curves", tuple(blocks))


def _trees(baseline: Mapping[str, Any]) -> list[Block]:
    """Plot XGBoost's validation metric by tree, if it was measured."""
    validation = facts.points(baseline.get("validation_curve"), "step", "loss")
    if not validation:
        return []
    training = facts.points(baseline.get("curve"), "step", "loss")
    metric = facts.short(baseline.get("curve_metric"))
    svg = plots.tree_curve(training, validation, metric)
    trees = facts.number(baseline.get("best_step"))
    note = "" if trees is None else f"The model has {trees:,.0f} of {len(validation):,} trees, up to the best."
    return [Plot(svg, "XGBoost by tree", note)]


def _raw_ids(value: Any) -> list[Block]:
    """Return the tables of raw ids, where there are any."""
    tables = [(str(name), facts.mapping(table_facts)) for name, table_facts in facts.mapping(value).items()]
    if not tables:
        return []
    rows = tuple(
        (
            Cell(name, code=True),
            facts.count(t.get("rows")),
            facts.percent(t.get("load")),
            facts.count(t.get("admitted")),
            facts.count(t.get("evicted")),
            facts.count(t.get("waiting")),
            facts.percent(t.get("hit_share")),
            facts.percent(t.get("oov_share")),
        )
        for name, t in tables
    )
    headings = (
        "feature",
        ">rows",
        ">places taken",
        ">admitted",
        ">evicted",
        ">waiting",
        ">found in training",
        ">without a row in valid",
    )
    return [ReportTable(headings, rows, "Tables of raw ids", wide=True)]


def _cached(value: Any) -> list[Block]:
    """Return the tables in host memory whose hot rows are on GPUs, where there are any."""
    tables = [(str(name), facts.mapping(table_facts)) for name, table_facts in facts.mapping(value).items()]
    if not tables:
        return []
    rows = tuple(
        (
            Cell(name, code=True),
            facts.count(t.get("rows")),
            facts.percent(t.get("share")),
            facts.count(t.get("lookups")),
            facts.percent(t.get("hit_share")),
        )
        for name, t in tables
    )
    headings = ("table", ">rows", ">on the GPU", ">lookups in training", ">found there")
    return [ReportTable(headings, rows, "Tables larger than the GPU", wide=True)]


def _entropy(p: float | None) -> float | None:
    """Log loss of always predicting the base rate, nats."""
    if p is None or not 0 < p < 1:
        return None
    return -(p * math.log(p) + (1 - p) * math.log(1 - p))


def models(day: Day) -> ReportSection:
    """Return a column for each model; nothing where there is one alone."""
    trained = [
        stage
        for stage in _TRAINED
        if stage in day.manifests and any(output.kind == "model" for output in day.manifests[stage].outputs)
    ]
    compared = {role: facts.mapping(day.facts("evaluate").get(role)) for role in _COMPARED}
    compared = {role: model for role, model in compared.items() if facts.mapping(model.get("metrics"))}
    blocks: list[Block] = []
    if len(trained) > 1:
        blocks.append(_trained(day, trained))
    if len(compared) > 1:
        blocks += [_compared_table(compared), *_drawn(compared)]
    note = "What is measured on the same rows can be compared; two trainings may have validated on different ones."
    return ReportSection("models", "Models side by side", tuple(blocks), note if blocks else "")


def _trained(day: Day, stages: list[str]) -> ReportTable:
    """Return the registered version of each, its metrics on its own validation rows, its time and memory."""
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
    return ReportTable(headings, tuple(rows), "As each was trained, on its own validation rows")


def _compared_table(compared: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    """Return the metrics of all models on the same rows."""
    models = list(compared.values())
    rows: list[tuple[Cell | str, ...]] = [
        ("version", *(str(model.get("version", "–")) for model in models)),
        *_metric_rows([facts.numbers(model.get("metrics")) for model in models]),
        ("bytes on disk", *(facts.count(model.get("bytes")) for model in models)),
        ("rows a second on one core", *(facts.count(model.get("rows_per_second")) for model in models)),
    ]
    return ReportTable(
        ("", *(f">{_COMPARED[role]}" for role in compared)), tuple(rows), "On the same rows, by the gate"
    )


def _drawn(compared: Mapping[str, Mapping[str, Any]]) -> list[Plot]:
    """Return the first metric that has intervals of all."""
    intervals = {role: facts.mapping(model.get("intervals")) for role, model in compared.items()}
    metrics = {role: facts.numbers(model.get("metrics")) for role, model in compared.items()}
    for metric in dict.fromkeys(str(name) for model in intervals.values() for name in model):
        rows = []
        for role in compared:
            ends = [facts.number(v) for v in facts.sequence(intervals[role].get(metric))]
            value = metrics[role].get(metric)
            if value is not None and len(ends) == 2 and ends[0] is not None and ends[1] is not None:
                rows.append((_COMPARED[role], value, ends[0], ends[1], _COLOURS[role]))
        if len(rows) == len(compared):
            title = f"{metric_name(metric)} of the models on the same rows"
            return [Plot(plots.intervals(rows, metric_name(metric), title), title)]
    return []


def _metric_rows(models: list[Mapping[str, float]]) -> list[tuple[str, ...]]:
    names = dict.fromkeys(name for model in models for name in model)
    return [(metric_name(name), *(facts.decimals(model.get(name)) for model in models)) for name in names]


def _version(day: Day, stage: str) -> str:
    version = facts.mapping(day.facts(stage).get("registered")).get("version")
    return "–" if version is None else str(version)


def _peak(day: Day, stage: str) -> str:
    return facts.memory(max(day.manifests[stage].peak_memory_mib.values(), default=None))


def _core_seconds(day: Day, stage: str) -> str:
    used = day.manifests[stage].resources
    return "–" if used is None else f"{used.core_seconds:,.1f}"


def comparison(day: Day) -> ReportSection:
    """Metrics with intervals, the difference from the reference and its p, time, memory, size; no block without any."""
    models, name = facts.records(day.facts("compare").get("models")), str(day.facts("compare").get("reference"))
    if not models:
        return ReportSection("comparison", "Models compared", ())
    blocks: list[Block] = [] if _is_of_this_dataset(day) else [Text("Of an earlier dataset of this day.", "bad")]
    blocks += [_metrics(models, name), _costs(models)]
    note = f"p: of no difference from {name}, by a paired bootstrap over users; values below {_SIGNIFICANT} are marked."
    tested = any(facts.mapping(m.get("against")) for m in models)
    return ReportSection("comparison", "Models compared", tuple(blocks), note if tested else "")


def _is_of_this_dataset(day: Day) -> bool:
    features = day.manifests.get("features")
    read = {i.version for i in day.manifests["compare"].inputs if i.kind == "stage" and i.name == "features"}
    return features is None or identity(features) in read


def _metrics(models: list[Mapping[str, Any]], reference: str) -> ReportTable:
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
    return ReportTable(
        ("Metric", "Model", ">value", ">interval", *more), tuple(rows), "Metrics of the models", wide=True
    )


def _difference(result: Mapping[str, Any]) -> list[Cell | str]:
    p = facts.number(result.get("p"))
    if p is None:
        return ["", "", ""]
    ends = f"[{facts.decimals(result.get('low'))}, {facts.decimals(result.get('high'))}]"
    return [facts.decimals(result.get("value")), ends, Cell(facts.decimals(p, 3), "good" if p < _SIGNIFICANT else "")]


def _costs(models: list[Mapping[str, Any]]) -> ReportTable:
    rows: list[tuple[Cell | str, ...]] = []
    for m in models:
        peak = max(facts.numbers(m.get("peak_memory_mib")).values(), default=None)
        figures = (facts.duration(m.get("seconds")), facts.memory(peak), facts.memory(m.get("mib")))
        rows.append((str(m.get("name")), Cell(str(m.get("class")), code=True), facts.count(m.get("steps")), *figures))
    headings = ("Model", "Class", ">steps", ">time", ">peak memory of a process", ">on disk")
    return ReportTable(headings, tuple(rows), "What the models take", wide=True)
