"""The day in a handful of numbers, what ran, rows through the stages."""

from __future__ import annotations

from datetime import timedelta

from headrace.monitor import facts
from headrace.monitor.blocks import Block, Card, Cell, Chip, Section, Table, Text
from headrace.monitor.sections.day import Day, not_run
from headrace.stages import ORDER


def chips(day: Day) -> list[Chip]:
    """Each stage of the pipeline and its state, the report itself left out."""
    stages = (s for s in ORDER[:-1] if s in day.manifests or day.planned(s))
    return [Chip(stage, "done" if stage in day.manifests else "not run") for stage in stages]


def cards(day: Day) -> list[Card]:
    """The day in a handful of numbers."""
    ingest, score = day.rows("ingest"), day.rows("score")
    auc, share = day.metric("train", "auc"), facts.ceiling_share(day.metric("train", "auc"), day.ceiling)
    base = day.metric("baseline", "auc")
    found = [
        Card(
            "Events kept",
            facts.count(ingest.get("kept")),
            f"{facts.count(ingest.get('quarantined'))} quarantined of {facts.count(ingest.get('read'))} read"
            + (f", {facts.count(ingest.get('forgotten'))} forgotten" if ingest.get("forgotten") else "")
            if ingest
            else "ingest has not run",
        ),
        Card(
            "Validation AUC",
            facts.decimals(auc),
            f"{facts.percent(share)} of the way to the ceiling, {facts.decimals(day.ceiling)}"
            if share is not None
            else "neural model"
            if auc is not None
            else "train has not run",
            meter=share,
        ),
    ]
    if auc is not None and base is not None:
        gain = auc - base
        found.append(Card("Against XGBoost", f"{gain:+.4f}", f"its AUC is {base:.4f}", "good" if gain >= 0 else "bad"))
    hr, ndcg = _ranking_metric(day, "hr"), _ranking_metric(day, "ndcg")
    if hr is not None:
        found.append(Card(f"HR@{day.spec.train.rank_k}", f"{hr:.4f}", f"NDCG {facts.decimals(ndcg)}"))
    if day.planned("score"):
        published = day.rows("publish").get("published", score.get("scores"))
        users = f"for {facts.count(score.get('users'))} users" if score else "score has not run"
        state = "" if "publish" in day.manifests or not score else ", not published"
        found.append(Card("Scores", facts.count(published), users + state))
    if day.manifests:
        peak = max((v for m in day.manifests.values() for v in m.peak_memory_mib.values()), default=None)
        total = sum(m.seconds for m in day.manifests.values())
        found.append(Card("Time at work", facts.duration(total), f"largest process {facts.memory(peak)}"))
    return found


def _ranking_metric(day: Day, kind: str) -> float | None:
    metrics = facts.numbers(day.facts("train").get("metrics"))
    names = (f"{kind}_at_k", f"{kind}_at_{day.spec.train.rank_k}", f"{kind}@{day.spec.train.rank_k}")
    return next((metrics[n] for n in names if n in metrics), None)


def stages(day: Day) -> Section:
    """What ran, on which versions."""
    rows: list[tuple[Cell | str, ...]] = []
    for chip in chips(day):
        manifest = day.manifests.get(chip.name)
        if manifest is None:
            rows.append((chip.name, Cell(chip.state, "dim"), "–", "–", "–", "–", "–"))
            continue
        peak = max(manifest.peak_memory_mib.values(), default=None)
        ended = manifest.started + timedelta(seconds=manifest.seconds)
        rows.append(
            (
                chip.name,
                Cell("done", "good"),
                facts.duration(manifest.seconds),
                facts.memory(peak),
                facts.when(ended),
                Cell(manifest.key, code=True),
                manifest.code_version,
            )
        )
    blocks: list[Block] = [
        Table(("Stage", "State", ">Time", ">Peak memory", "Ended, UTC", "Key", "Code"), tuple(rows), wide=True)
    ]
    train = day.facts("train")
    others = [stage for stage in ORDER[:-1] if stage not in day.manifests and not day.planned(stage)]
    remarks = [f"Not part of this pipeline: {', '.join(others)}."] if others else []
    if train.get("warm_start"):
        remarks.append(f"Training started from an earlier day's model: {train['warm_start']}.")
    elif parts := facts.mapping(train.get("pretrained")):
        remarks.append(f"Training started from models of its parts: {', '.join(f'{k} {v}' for k, v in parts.items())}.")
    elif "train" in day.manifests and "warm_start" in train:
        remarks.append("Training started cold: no finished model of an earlier day was there, or none was asked for.")
    if facts.number(train.get("resumed_from_step")):
        remarks.append(f"It was interrupted and went on from step {facts.count(train.get('resumed_from_step'))}.")
    if facts.number(train.get("ranks")):
        remarks.append(f"Horovod ranks: {facts.count(train.get('ranks'))}.")
    if remarks:
        blocks.append(Text(" ".join(remarks), "dim"))
    outputs = [
        (m.stage, o.kind, Cell(o.name, code=True), Cell(o.version, code=True), facts.count(o.rows))
        for m in day.manifests.values()
        for o in m.outputs
    ]
    if outputs:
        blocks.append(Table(("Stage", "Kind", "Made", "Version", ">Rows"), tuple(outputs), "Versions", wide=True))
    return Section("ran", "What ran", tuple(blocks))


def flow(day: Day) -> Section:
    """Row counts through the stages."""
    tables: list[Block] = []
    for title, names in (
        ("Events", ("ingest",)),
        ("Dataset", ("features",)),
        ("Models", ("train", "baseline", "second_stage")),
        ("Scores", ("score", "publish")),
    ):
        found = [(s, n, v) for s in names for n, v in day.rows(s).items()]
        largest = max((v for _, _, v in found), default=0) or 1
        rows = tuple(
            (
                f"{n.replace('_', ' ')}" if len(names) == 1 else f"{s}: {n.replace('_', ' ')}",
                Cell(facts.count(v), bar=max(0.0, v / largest)),
            )
            for s, n, v in found
        )
        missing = [s for s in names if s not in day.manifests]
        if rows:
            there = [s for s in names if s in day.manifests or day.planned(s)]
            tables.append(Table((" and ".join(there), ">Rows"), rows, title))
        elif any(day.planned(s) for s in missing):
            tables.append(not_run(" and ".join(s for s in missing if day.planned(s)), title))
    return Section("rows", "Rows through the stages", tuple(tables))
