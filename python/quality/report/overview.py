"""Overview of a day: its numbers, what ran and what it cost, what was published, and the days before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import yaml

from headrace.config.stages import ORDER
from headrace.quality.report import facts, lineage, plots
from headrace.quality.report.blocks import (
    Block,
    Card,
    Cell,
    Chip,
    Day,
    Plot,
    ReportSection,
    ReportTable,
    Text,
    Tree,
    checks,
    not_run,
)
from headrace.quality.report.warnings import day_warnings
from headrace.stage.manifest import Manifest

_PROCESSES = {"jvm": "JVM", "python": "Python", "children": "largest child", "rank0": "rank 0", "rank1": "rank 1"}
_MIB = 1 << 20
_SAMPLE_ROWS = 10
_KEY_CHARACTERS = 40
#: Most days in the plot, and in the table.
_DRAWN, _DAYS = 90, 14
Runs = Mapping[str, Mapping[str, Manifest]]


def chips(day: Day) -> list[Chip]:
    """Return each stage of the pipeline and its state, the report itself left out."""
    stages = (s for s in day.order if s in day.manifests or day.planned(s))
    return [Chip(stage, "done" if stage in day.manifests else "not run") for stage in stages]


def cards(day: Day) -> list[Card]:
    """Return the day in a handful of numbers."""
    ingest, score = day.rows("ingest"), day.rows("score")
    auc, share = day.metric("train", "auc"), facts.ceiling_share(day.metric("train", "auc"), day.ceiling)
    base = day.metric("baseline", "auc")
    cards_ = [
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
        cards_.append(Card("Against XGBoost", f"{gain:+.4f}", f"its AUC is {base:.4f}", "good" if gain >= 0 else "bad"))
    hr, ndcg = _ranking_metric(day, "hr"), _ranking_metric(day, "ndcg")
    if hr is not None:
        cards_.append(Card(f"HR@{day.spec.train.rank_k}", f"{hr:.4f}", f"NDCG {facts.decimals(ndcg)}"))
    if day.planned("score"):
        published = day.rows("publish").get("published", score.get("scores"))
        users = f"for {facts.count(score.get('users'))} users" if score else "score has not run"
        state = "" if "publish" in day.manifests or not score else ", not published"
        cards_.append(Card("Scores", facts.count(published), users + state))
    if day.manifests:
        peak = max((v for m in day.manifests.values() for v in m.peak_memory_mib.values()), default=None)
        total = sum(m.seconds for m in day.manifests.values())
        cards_.append(Card("Time at work", facts.duration(total), f"largest process {facts.memory(peak)}"))
    return cards_


def _ranking_metric(day: Day, kind: str) -> float | None:
    metrics = facts.numbers(day.facts("train").get("metrics"))
    names = (f"{kind}_at_k", f"{kind}_at_{day.spec.train.rank_k}", f"{kind}@{day.spec.train.rank_k}")
    return next((metrics[n] for n in names if n in metrics), None)


def warnings_of(day: Day) -> ReportSection:
    """Return the section on what makes the day's results doubtful; without blocks where nothing does."""
    ingests = {ds: m for (name, ds, stage), m in day.runs.items() if (name, stage) == (day.spec.pipeline, "ingest")}
    sentences = day_warnings(day.spec, day.manifests, ingests)
    return ReportSection("warnings", "Warnings", tuple(Text(f"{s[0].upper()}{s[1:]}.", "bad") for s in sentences))


def stages(day: Day) -> ReportSection:
    """Return the section on what ran, and on which versions."""
    rows: list[tuple[Cell | str, ...]] = []
    for chip in chips(day):
        manifest = day.manifests.get(chip.name)
        if manifest is None:
            rows.append((chip.name, Cell(chip.state, "dim"), "–", "–", "–", "–", "–"))
            continue
        peak = max(manifest.peak_memory_mib.values(), default=None)
        end = manifest.started + timedelta(seconds=manifest.seconds)
        rows.append(
            (
                chip.name,
                Cell("done", "good"),
                facts.duration(manifest.seconds),
                facts.memory(peak),
                facts.when(end),
                Cell(manifest.key, code=True),
                manifest.code_version,
            )
        )
    blocks: list[Block] = [
        ReportTable(("Stage", "State", ">Time", ">Peak memory", "Ended, UTC", "Key", "Code"), tuple(rows), wide=True)
    ]
    train = day.facts("train")
    other_stages = [stage for stage in ORDER[:-1] if stage not in day.manifests and not day.planned(stage)]
    remarks = [f"Not part of this pipeline: {', '.join(other_stages)}."] if other_stages else []
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
        blocks.append(ReportTable(("Stage", "Kind", "Made", "Version", ">Rows"), tuple(outputs), "Versions", wide=True))
    return ReportSection("ran", "What ran", tuple(blocks))


def flow(day: Day) -> ReportSection:
    """Row counts through the stages."""
    tables: list[Block] = []
    for title, names in (
        ("Events", ("ingest",)),
        ("Dataset", ("features",)),
        ("Models", ("train", "baseline", "second_stage")),
        ("Scores", ("score", "publish")),
        ("Stages of packages", tuple(day.spec.stages)),
    ):
        counts = [(s, n, v) for s in names for n, v in day.rows(s).items()]
        largest = max((v for _, _, v in counts), default=0) or 1
        rows = tuple(
            (
                f"{n.replace('_', ' ')}" if len(names) == 1 else f"{s}: {n.replace('_', ' ')}",
                Cell(facts.count(v), bar=max(0.0, v / largest)),
            )
            for s, n, v in counts
        )
        missing = [s for s in names if s not in day.manifests]
        if rows:
            stages_ = [s for s in names if s in day.manifests or day.planned(s)]
            tables.append(ReportTable((" and ".join(stages_), ">Rows"), rows, title))
        elif any(day.planned(s) for s in missing):
            tables.append(not_run(" and ".join(s for s in missing if day.planned(s)), title))
    return ReportSection("rows", "Rows through the stages", tuple(tables))


def cost(day: Day) -> ReportSection:
    """Time, processor time, bytes from and to storage, and peak memory, by stage."""
    done = [m for s in day.order if (m := day.manifests.get(s)) is not None]
    if not done:
        return ReportSection("cost", "Cost", (not_run("the day"),))
    blocks: list[Block] = [_cost_table(done)]
    blocks.append(
        Plot(plots.value_bars([(m.stage, m.seconds) for m in done], "seconds", "Seconds by stage", unit=" s"), "Time")
    )
    cores = [(m.stage, m.resources.core_seconds) for m in done if m.resources]
    if any(seconds for _, seconds in cores):
        title = "Processor time by stage"
        blocks.append(Plot(plots.value_bars(cores, "core-seconds", title, plots.CEILING, " s"), "Processor time"))
    peaks = [
        (f"{m.stage}: {_PROCESSES.get(p, p)}", v)
        for m in done
        for p, v in facts.numbers(m.peak_memory_mib).items()
        if v >= 1
    ]
    if peaks:
        svg = plots.value_bars(peaks, "MiB", "Peak memory by process", plots.BASELINE, " MiB")
        blocks.append(Plot(svg, "Peak resident memory by process"))
    note = "Bytes are those that went past the page cache: what was read before on the machine is not counted."
    return ReportSection("cost", "Cost", tuple(blocks), note if cores else "")


def _cost_table(done: Sequence[Manifest]) -> ReportTable:
    """Return a row a stage, and their sum."""
    largest = max((m.resources.core_seconds for m in done if m.resources), default=0.0) or 1.0
    rows: list[tuple[Cell | str, ...]] = []
    for m in done:
        used, peak = m.resources, max(m.peak_memory_mib.values(), default=None)
        figures: tuple[Cell | str, ...] = ("–", "–", "–", "–")
        if used is not None:
            busy = used.core_seconds / m.seconds if m.seconds else None
            share = Cell(f"{used.core_seconds:,.1f} s", bar=max(0.0, used.core_seconds / largest))
            read, written = (facts.memory(n / _MIB) for n in (used.read_bytes, used.written_bytes))
            figures = (share, facts.decimals(busy, 1), read, written)
        rows.append((m.stage, facts.duration(m.seconds), *figures, facts.memory(peak)))
    known = [m.resources for m in done if m.resources]
    if known:
        total = sum(r.core_seconds for r in known)
        both = (
            facts.memory(sum(n) / _MIB) for n in zip(*((r.read_bytes, r.written_bytes) for r in known), strict=True)
        )
        rows.append(("all", facts.duration(sum(m.seconds for m in done)), f"{total:,.1f} s", "", *both, ""))
    headings = ("Stage", ">Time", ">Core-seconds", ">Cores busy", ">Read", ">Written", ">Peak memory of a process")
    return ReportTable(headings, tuple(rows), "What the stages used", wide=True)


def publication(day: Day) -> ReportSection:
    """Return the audit, and what a reader of the warehouse now sees."""
    if not day.planned("score"):
        return ReportSection("published", "Publication", (Text("This pipeline scores nothing.", "dim"),))
    blocks: list[Block] = []
    publish_facts = day.facts("publish")
    if "publish" not in day.manifests and day.planned("publish"):
        blocks.append(not_run("publish"))
    checked = checks(publish_facts.get("audit"))
    if checked:
        blocks.append(ReportTable(("Audit", ">Value", ">Limit", ""), checked, "Audit of the staged scores"))
    if left_out := day.manifests["publish"].rows.get("left_out") if "publish" in day.manifests else None:
        named = tuple(
            (column, str(value), str(key.get("reason")))
            for key in facts.records(publish_facts.get("left_out"))
            for column, value in key.items()
            if column != "reason"
        )
        title = f"{left_out:,} rows are left out: the target cannot hold their keys"
        blocks.append(
            ReportTable(("Column", "Key", "Why"), tuple((c, _shortened(v), reason) for c, v, reason in named), title)
        )
    sample = facts.records(publish_facts.get("sample")) or facts.records(day.facts("score").get("sample"))
    if sample:
        # Values that all rows share are in the title: the table stays narrow.
        shared = {c: _raw(sample[0].get(c)) for c in ("ds", "model_version") if c in sample[0]}
        columns = [str(c) for c in sample[0] if c not in shared]
        right = [all(facts.number(r.get(c)) is not None for r in sample) for c in columns]
        rows = tuple(tuple(_raw(r.get(c)) for c in columns) for r in sample[:_SAMPLE_ROWS])
        headings = tuple(f">{c}" if r else c for c, r in zip(columns, right, strict=True))
        title = f"First rows of {publish_facts['table']}" if publish_facts.get("table") else "First scores"
        title += f" ({', '.join(f'{k} {v}' for k, v in shared.items())})" if shared else ""
        blocks.append(ReportTable(headings, rows, title))
    warehouse = publish_facts.get("warehouse")
    model = facts.mapping(day.facts("score").get("model")).get("kind")
    note = " ".join(
        [*([f"Scored by the {model} model."] if model else []), *([f"Warehouse: {warehouse}."] if warehouse else [])]
    )
    return ReportSection("published", "Publication", tuple(blocks) or (not_run("score"),), note)


def _shortened(key: str) -> str:
    return key if len(key) <= _KEY_CHARACTERS else key[:_KEY_CHARACTERS] + "…"


def _raw(value: Any) -> str:
    """Return a value of a sample: ids without separators."""
    return facts.show(value) if isinstance(value, (float, bool)) or value is None else str(value)


def lineage_of(day: Day) -> ReportSection:
    """Return the lineage from the day's last output back to the landing files."""
    last = next((m for s in reversed(ORDER[:-1]) if (m := day.manifests.get(s)) is not None), None)
    if last is None:
        return ReportSection("lineage", "Lineage", (not_run("the day"),))
    runs = {**day.runs, **{(m.pipeline, m.ds, m.stage): m for m in day.manifests.values()}}
    return ReportSection("lineage", "Lineage", (Tree(lineage.trace(runs, last, next(iter(last.outputs), None))),))


def settings(day: Day) -> ReportSection:
    """Return the spec, folded away.

    Spark's free properties stay out: a page is passed around, and they are not vetted.
    """
    dumped = day.spec.model_dump(mode="json", by_alias=True)
    dumped["spark"].pop("properties", None)
    text = yaml.safe_dump(dumped, sort_keys=False, width=100, allow_unicode=True)
    return ReportSection(
        "settings", "Settings", (Text(text, title="The pipeline's spec, defaults included", pre=True),)
    )


def history(day: Day) -> ReportSection:
    """Return lines over the days and a row for each of the last; nothing where this is the first day."""
    runs = _days(day)
    if sum("train" in of_day or "baseline" in of_day for of_day in runs.values()) < 2:
        return ReportSection("history", "The days before", ())
    blocks: list[Block] = []
    of_models = (("neural", "train", plots.NEURAL), ("XGBoost", "baseline", plots.BASELINE))
    for metric, title in (("auc", "AUC"), ("log_loss", "log loss"), ("ndcg_at_k", "NDCG@k"), ("rmse", "RMSE")):
        series = [(name, _series(runs, _metric(stage, metric)), colour) for name, stage, colour in of_models]
        series = [line for line in series if line[1]]
        if any(len(points) > 1 for _, points, _ in series):
            svg = plots.daily(series, title, f"{title} on the validation rows of each day")
            blocks.append(Plot(svg, f"{title} on each day's validation rows"))
    forgetting = _series(runs, _forgetting)
    if len(forgetting) > 1:
        fixed = next(
            (str(f.get("ds")) for f in (_stage_fact(of_day, "train", "forgetting") for of_day in runs.values()) if f),
            "",
        )
        day_auc = _series(runs, _metric("train", "auc"))
        series = [(f"rows of {fixed}", forgetting, plots.NEURAL), ("rows of the day", day_auc, plots.MUTED)]
        svg = plots.daily(series, "AUC", "AUC of each day's model on the rows of a fixed day")
        blocks.append(Plot(svg, "What the models forget", f"Each day's model on the rows of {fixed}."))
    saved = [
        (ds, n / _MIB)
        for ds, n in _series(runs, lambda of_day: _stage_fact(of_day, "train", "saved").get("embeddings_bytes"))
    ]
    if len(saved) > 1:
        svg = plots.daily([("saved", saved, plots.NEURAL)], "MiB", "Bytes of saved embeddings by day", from_zero=True)
        blocks.append(Plot(svg, "Saved embeddings", "A whole copy, or the rows that changed since the day before."))
    blocks.append(_history_table(runs))
    if forgetting:
        blocks.append(Text("XGBoost, fixed day: AUC. Saved: embeddings. Drifted: columns over a limit.", "dim"))
    else:
        blocks.append(Text("XGBoost: AUC. Drifted: columns over a limit.", "dim"))
    return ReportSection("history", "The days before", tuple(blocks), f"Up to {day.ds}.")


def _days(day: Day) -> Runs:
    """Manifests by stage, by day, up to this one; oldest first."""
    by_day: dict[str, dict[str, Manifest]] = {}
    for (_, ds, stage), manifest in day.runs.items():
        if ds < day.ds:
            by_day.setdefault(ds, {})[stage] = manifest
    by_day[day.ds] = dict(day.manifests)
    return {ds: by_day[ds] for ds in sorted(by_day)[-_DRAWN:]}


def _stage_fact(of_day: Mapping[str, Manifest], stage: str, fact: str) -> Mapping[str, Any]:
    return facts.mapping(of_day[stage].facts.get(fact)) if stage in of_day else {}


def _metric(stage: str, metric: str) -> Callable[[Mapping[str, Manifest]], Any]:
    return lambda of_day: _stage_fact(of_day, stage, "metrics").get(metric)


def _forgetting(of_day: Mapping[str, Manifest]) -> Any:
    return facts.mapping(_stage_fact(of_day, "train", "forgetting").get("metrics")).get("auc")


def _series(runs: Runs, value: Callable[[Mapping[str, Manifest]], Any]) -> list[tuple[str, float]]:
    values = ((ds, facts.number(value(of_day))) for ds, of_day in runs.items())
    return [(ds, number) for ds, number in values if number is not None]


def _history_table(runs: Runs) -> ReportTable:
    """Return the newest day first; a column that no day has anything for is left out."""
    columns: list[tuple[str, Callable[[Mapping[str, Manifest]], Cell | str]]] = [
        (">Version", lambda of_day: facts.show(_stage_fact(of_day, "train", "registered").get("version"))),
        ("Gate", _verdict),
        (">AUC", lambda of_day: facts.decimals(_metric("train", "auc")(of_day))),
        (">Log loss", lambda of_day: facts.decimals(_metric("train", "log_loss")(of_day))),
        (">XGBoost", lambda of_day: facts.decimals(_metric("baseline", "auc")(of_day))),
        (">Fixed day", lambda of_day: facts.decimals(_forgetting(of_day))),
        (">Saved", lambda of_day: _mib(_stage_fact(of_day, "train", "saved").get("embeddings_bytes"))),
        (">Events", lambda of_day: _count(of_day, "ingest", "kept")),
        (">Quarantined", lambda of_day: _count(of_day, "ingest", "quarantined")),
        (">Drifted", lambda of_day: _count(of_day, "drift", "over_limit")),
        (">Time", lambda of_day: facts.duration(sum(m.seconds for m in of_day.values()))),
        (">Core-seconds", _cores),
    ]
    newest = list(runs.items())[-_DAYS:][::-1]
    cells = {heading: [make(of_day) for _, of_day in newest] for heading, make in columns}
    used = [h for h, _ in columns if any((c if isinstance(c, str) else c.text) != "–" for c in cells[h])]
    rows = tuple((ds, *(cells[heading][i] for heading in used)) for i, (ds, _) in enumerate(newest))
    return ReportTable(("Day", *used), rows, "By day", wide=True)


def _verdict(of_day: Mapping[str, Manifest]) -> Cell | str:
    if "gate" not in of_day:
        return "–"
    verdict = str(of_day["gate"].facts.get("verdict"))
    return Cell(verdict, "bad" if verdict == "refused" else "good")


def _count(of_day: Mapping[str, Manifest], stage: str, name: str) -> str:
    return facts.count(of_day[stage].rows.get(name)) if stage in of_day else "–"


def _mib(value: Any) -> str:
    number_ = facts.number(value)
    return "–" if number_ is None else f"{number_ / _MIB:,.1f} MiB"


def _cores(of_day: Mapping[str, Manifest]) -> str:
    known = [m.resources.core_seconds for m in of_day.values() if m.resources]
    return f"{sum(known):,.0f}" if known else "–"
