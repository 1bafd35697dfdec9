"""How good the model is, and how it learned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.monitor import facts, plots
from headrace.monitor.blocks import Block, Cell, Plot, Section, Table, Text
from headrace.monitor.sections.day import Day, not_run


def quality(day: Day) -> Section:
    """How good the model is: beside the baseline, the ceiling, and the diagonal."""
    models = [(name, stage) for name, stage in (("neural", "train"), ("XGBoost", "baseline")) if stage in day.manifests]
    if not models:
        return Section("quality", "Model quality", (not_run("train"),))
    blocks: list[Block] = [_metrics_table(day, models)]
    colours = {"train": plots.NEURAL, "baseline": plots.BASELINE}
    bars = [(name, auc, colours[stage]) for name, stage in models if (auc := day.metric(stage, "auc")) is not None]
    if day.ceiling is not None and bars:
        bars.append(("ceiling", day.ceiling, plots.CEILING))
    if bars:
        note = "The ceiling is the AUC of the probabilities from which the clicks were drawn." if day.ceiling else ""
        blocks.append(Plot(plots.auc_bars(bars), "AUC on the validation split", note))
    bins = [
        (name, found, colours[stage])
        for name, stage in models
        if (found := _bins(day.facts(stage).get("calibration_bins")))
    ]
    if bins:
        blocks.append(Plot(plots.calibration(bins), "Calibration", "Larger dots hold more rows."))
    lifts = [(name, points, colour) for name, found, colour in bins if (points := lift_of(found))]
    if lifts:
        note = "The rate of the rows with the highest predictions, in units of the average rate."
        blocks.append(Plot(plots.lift(lifts), "Lift", note))
    return Section("quality", "Model quality", tuple(blocks))


def _metrics_table(day: Day, models: Sequence[tuple[str, str]]) -> Table:
    found = {stage: facts.numbers(day.facts(stage).get("metrics")) for _, stage in models}
    names = list(dict.fromkeys(n for metrics in found.values() for n in metrics))
    ceiling = {"auc": day.ceiling, "log_loss": facts.number(day.truth.get("log_loss_floor"))}
    known = any(ceiling.get(n) is not None for n in names)
    headings = ["Metric", *(f">{name}" for name, _ in models), *([">best possible"] if known else [])]
    rows: list[tuple[Cell | str, ...]] = []
    for name in names:
        values = [facts.decimals(found[stage].get(name)) for _, stage in models]
        rows.append((metric_name(name), *values, *([facts.decimals(ceiling.get(name))] if known else [])))
    shares = [facts.ceiling_share(found[stage].get("auc"), day.ceiling) for _, stage in models]
    if known and any(s is not None for s in shares):
        rows.append(("from 0.5 to the ceiling", *(facts.percent(s) for s in shares), facts.percent(1.0)))
    for name in ("train", "valid"):
        counts = [facts.count(day.rows(stage).get(name)) for _, stage in models]
        rows.append((f"rows, {name}", *counts, *([""] if known else [])))
    return Table(tuple(headings), tuple(rows), "Metrics on the validation split")


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


def metric_name(name: str) -> str:
    """A metric for people; `auc.purchase` is one of a task (`train.tasks`)."""
    metric, _, task = name.partition(".")
    shown = _METRICS.get(metric, metric.replace("_", " "))
    return f"{shown} of {task}" if task else shown


def lift_of(bins: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """(share of rows, rate of these rows by the rate of all), highest predictions first.

    Args:
        bins: (mean predicted, observed rate, rows).
    """
    rows, positives = sum(n for _, _, n in bins), sum(rate * n for _, rate, n in bins)
    if rows <= 0 or positives <= 0:
        return []
    found, taken, hits = [], 0.0, 0.0
    for _, rate, n in sorted(bins, reverse=True):
        taken, hits = taken + n, hits + rate * n
        if taken > 0:
            found.append((taken / rows, hits / taken * rows / positives))
    return found


def _bins(value: Any) -> list[tuple[float, float, float]]:
    found = []
    for r in facts.records(value):
        predicted, observed = facts.number(r.get("predicted")), facts.number(r.get("observed"))
        if predicted is not None and observed is not None:
            found.append((predicted, observed, max(0.0, facts.number(r.get("rows")) or 0.0)))
    return found


def learning(day: Day) -> Section:
    """The learning curves."""
    train = day.facts("train")
    curve = facts.points(train.get("curve"), "step", "loss")
    evals = facts.points(train.get("evals"), "step", "auc")
    losses = facts.points(train.get("evals"), "step", "log_loss")
    if not (curve or evals or losses):
        return Section("learning", "Learning curves", (not_run("train"),))
    blocks: list[Block] = []
    if curve or losses:
        blocks.append(Plot(plots.loss_curve(curve, losses, _entropy(day.metric("train", "base_rate"))), "Loss by step"))
    if evals:
        svg = plots.auc_curve(evals, day.metric("baseline", "auc"), day.ceiling)
        blocks.append(Plot(svg, "Validation AUC by step"))
    best, steps = facts.number(train.get("best_step")), facts.number(train.get("steps"))
    if best is not None and steps is not None and best < steps:
        monitor = train.get("monitor")
        why = f"{monitor} was best" if isinstance(monitor, str) else "the validation log loss was lowest"
        told = f"The model is that of step {best:,.0f} of {steps:,.0f}: there {why}."
        blocks.append(Text(told))
    speed = facts.points(train.get("curve"), "step", "samples_per_s")
    if speed:
        median = sorted(v for _, v in speed)[len(speed) // 2]
        blocks.append(Text(f"Median speed {median:,.0f} samples/s over all ranks.", "dim"))
    blocks += _trees(day.facts("baseline"))
    blocks += _raw_ids(train.get("dynamic"))
    blocks += _cached(train.get("cached"))
    return Section("learning", "Learning curves", tuple(blocks))


def _trees(baseline: Mapping[str, Any]) -> list[Block]:
    """How XGBoost's validation went on, where it was looked at, and where it stopped."""
    validation = facts.points(baseline.get("validation_curve"), "step", "loss")
    if not validation:
        return []
    training = facts.points(baseline.get("curve"), "step", "loss")
    metric = facts.short(baseline.get("curve_metric"))
    svg = plots.tree_curve(training, validation, metric)
    trees = facts.number(baseline.get("best_step"))
    told = "" if trees is None else f"The model has {trees:,.0f} of {len(validation):,} trees, up to the best."
    return [Plot(svg, "XGBoost by tree", told)]


def _raw_ids(value: Any) -> list[Block]:
    """The tables of raw ids, where there are any."""
    tables = [(str(name), facts.mapping(told)) for name, told in facts.mapping(value).items()]
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
    return [Table(headings, rows, "Tables of raw ids", wide=True)]


def _cached(value: Any) -> list[Block]:
    """The tables in host memory whose hot rows are on GPUs, where there are any."""
    tables = [(str(name), facts.mapping(told)) for name, told in facts.mapping(value).items()]
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
    return [Table(headings, rows, "Tables larger than the GPU", wide=True)]


def _entropy(p: float | None) -> float | None:
    """Log loss of always predicting the base rate, nats."""
    if p is None or not 0 < p < 1:
        return None
    return -(p * math.log(p) + (1 - p) * math.log(1 - p))
