"""The sections of the report, each from the facts that are there; a section about a stage that did not run says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import yaml

from headrace.config import Spec
from headrace.manifest import Manifest
from headrace.monitor import facts, lineage, plots
from headrace.monitor.blocks import Block, Card, Cell, Chip, Plot, Section, Table, Text, Tree
from headrace.stage import ORDER

_TOP_FEATURES = 15
_TOP_DRIFT = 40
#: Beyond any real one: two distributions that share no bin have about 18.
_LARGEST_PSI = 1e3
_SAMPLE_ROWS = 10


@dataclass(frozen=True)
class Day:
    """All that a page is made from."""

    spec: Spec
    ds: str
    #: The day's manifests by stage; any subset.
    manifests: Mapping[str, Manifest]
    #: What the generator knows of the day; empty for real data.
    truth: Mapping[str, Any] = field(default_factory=dict)
    #: All manifests of the pipeline, for lineage.
    runs: lineage.Runs = field(default_factory=dict)

    def facts(self, stage: str) -> Mapping[str, Any]:
        return self.manifests[stage].facts if stage in self.manifests else {}

    def rows(self, stage: str) -> Mapping[str, int]:
        return self.manifests[stage].rows if stage in self.manifests else {}

    def metric(self, stage: str, name: str) -> float | None:
        return facts.number(facts.mapping(self.facts(stage).get("metrics")).get(name))

    @property
    def ceiling(self) -> float | None:
        return facts.number(self.truth.get("auc_ceiling"))

    def planned(self, stage: str) -> bool:
        """Whether the pipeline has the stage."""
        return {
            "drift": self.spec.drift,
            "baseline": self.spec.baseline,
            "score": self.spec.score,
            "publish": self.spec.publish,
        }.get(stage, self.spec) is not None


def chips(day: Day) -> list[Chip]:
    """Each stage and its state, the report itself left out."""
    found = []
    for stage in ORDER[:-1]:
        state = "done" if stage in day.manifests else "not run" if day.planned(stage) else "not part of this pipeline"
        found.append(Chip(stage, state))  # type: ignore[arg-type]
    return found


def cards(day: Day) -> list[Card]:
    """The day in a handful of numbers."""
    ingest, score = day.rows("ingest"), day.rows("score")
    auc, share = day.metric("train", "auc"), facts.ceiling_share(day.metric("train", "auc"), day.ceiling)
    base = day.metric("baseline", "auc")
    found = [
        Card("Events kept", facts.count(ingest.get("kept")),
             f"{facts.count(ingest.get('quarantined'))} quarantined of {facts.count(ingest.get('read'))} read"
             if ingest else "ingest has not run"),
        Card("Validation AUC", facts.decimals(auc),
             f"{facts.percent(share)} of the way to the ceiling, {facts.decimals(day.ceiling)}" if share is not None
             else "neural model" if auc is not None else "train has not run", meter=share),
    ]  # fmt: skip
    if auc is not None and base is not None:
        gain = auc - base
        found.append(
            Card("Against XGBoost", f"{gain:+.4f}", f"its AUC is {base:.4f}", "good" if gain >= 0 else "bad")
        )  # fmt: skip
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
            (chip.name, Cell("done", "good"), facts.duration(manifest.seconds), facts.memory(peak), facts.when(ended),
             Cell(manifest.key, code=True), manifest.code_version)
        )  # fmt: skip
    blocks: list[Block] = [
        Table(("Stage", "State", ">Time", ">Peak memory", "Ended, UTC", "Key", "Code"), tuple(rows), wide=True)
    ]
    train = day.facts("train")
    remarks = []
    if train.get("warm_start"):
        remarks.append(f"Training started from an earlier day's model: {train['warm_start']}.")
    if "train" in day.manifests and train.get("warm_start") is None and "warm_start" in train:
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
        ("Models", ("train", "baseline")),
        ("Scores", ("score", "publish")),
    ):
        found = [(s, n, v) for s in names for n, v in day.rows(s).items()]
        largest = max((v for _, _, v in found), default=0) or 1
        rows = tuple(
            (f"{n.replace('_', ' ')}" if len(names) == 1 else f"{s}: {n.replace('_', ' ')}",
             Cell(facts.count(v), bar=max(0.0, v / largest)))
            for s, n, v in found
        )  # fmt: skip
        missing = [s for s in names if s not in day.manifests]
        if rows:
            tables.append(Table((" and ".join(names), ">Rows"), rows, title))
        elif any(day.planned(s) for s in missing):
            tables.append(_not_run(" and ".join(missing), title))
    return Section("rows", "Rows through the stages", tuple(tables))


def quality(day: Day) -> Section:
    """How good the model is: beside the baseline, the ceiling, and the diagonal."""
    models = [(name, stage) for name, stage in (("neural", "train"), ("XGBoost", "baseline"))
              if stage in day.manifests]  # fmt: skip
    if not models:
        return Section("quality", "Model quality", (_not_run("train"),))
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
        rows.append((_metric_name(name), *values, *([facts.decimals(ceiling.get(name))] if known else [])))
    shares = [facts.ceiling_share(found[stage].get("auc"), day.ceiling) for _, stage in models]
    if known and any(s is not None for s in shares):
        rows.append(("from 0.5 to the ceiling", *(facts.percent(s) for s in shares), facts.percent(1.0)))
    for name in ("train", "valid"):
        counts = [facts.count(day.rows(stage).get(name)) for _, stage in models]
        rows.append((f"rows, {name}", *counts, *([""] if known else [])))
    return Table(tuple(headings), tuple(rows), "Metrics on the validation split")


_METRICS = {
    "auc": "AUC", "log_loss": "log loss", "calibration": "predicted / observed", "base_rate": "base rate",
    "hr_at_k": "HR@k", "ndcg_at_k": "NDCG@k",
}  # fmt: skip


def _metric_name(name: str) -> str:
    return _METRICS.get(name, name.replace("_", " "))


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
        return Section("learning", "Learning curves", (_not_run("train"),))
    blocks: list[Block] = []
    if curve or losses:
        blocks.append(Plot(plots.loss_curve(curve, losses, _entropy(day.metric("train", "base_rate"))), "Loss by step"))
    if evals:
        svg = plots.auc_curve(evals, day.metric("baseline", "auc"), day.ceiling)
        blocks.append(Plot(svg, "Validation AUC by step"))
    best, steps = facts.number(train.get("best_step")), facts.number(train.get("steps"))
    if best is not None and steps is not None and best < steps:
        told = f"The model is that of step {best:,.0f} of {steps:,.0f}: there the validation log loss was lowest."
        blocks.append(Text(told))
    speed = facts.points(train.get("curve"), "step", "samples_per_s")
    if speed:
        median = sorted(v for _, v in speed)[len(speed) // 2]
        blocks.append(Text(f"Median speed {median:,.0f} samples/s over all ranks.", "dim"))
    return Section("learning", "Learning curves", tuple(blocks))


def _entropy(p: float | None) -> float | None:
    """Log loss of always predicting the base rate, nats."""
    if p is None or not 0 < p < 1:
        return None
    return -(p * math.log(p) + (1 - p) * math.log(1 - p))


def drift(day: Day) -> Section:
    """How far the newest rows are from those that the model was trained on."""
    if not day.planned("drift"):
        return Section("drift", "Drift", (Text("This pipeline has no section `drift`.", "dim"),))
    if "drift" not in day.manifests:
        return Section("drift", "Drift", (_not_run("drift"),))
    found = facts.records(day.facts("drift").get("columns"))
    if not found:
        return Section("drift", "Drift", (Text("No column was compared.", "dim"),))
    over = [r for r in found if facts.records(r.get("breaches"))]
    told = f"{len(over)} of {len(found)} columns and features are over a limit." if over else "All within their limits."
    blocks: list[Block] = [Text(told, "bad" if over else "good")]
    # Those over a limit first: a missing rate may have risen where the index has not.
    shown = [*over, *(r for r in found if not facts.records(r.get("breaches")))]
    rows = tuple(_drift_row(r) for r in shown[:_TOP_DRIFT])
    headings = ("", "Column", "Kind", ">PSI", ">KS", ">Missing", ">now", ">Unknown", ">now",
                ">Mean", ">now", "")  # fmt: skip
    blocks.append(Table(headings, rows, "Columns of the events, and features", wide=True))
    if len(shown) > _TOP_DRIFT:
        blocks.append(Text(f"And {len(shown) - _TOP_DRIFT} more, within their limits or less far off.", "dim"))
    bars = [
        (facts.short(f"{r.get('side')} {r.get('column')}"), min(index, _LARGEST_PSI), facts.number(r.get("max_psi")))
        for r in found
        if (index := facts.number(r.get("psi"))) is not None
    ]
    if bars:
        svg = plots.drift_bars(bars[:_TOP_FEATURES])
        blocks.append(Plot(svg, "Largest population stability index", "The tick is the limit.", wide=False))
    blocks.append(_drift_limits(day))
    ranges = [" to ".join(dict.fromkeys(str(d) for d in facts.sequence(day.facts("features").get(f"{s}_range"))))
              for s in ("valid", "train")]  # fmt: skip
    note = f"{ranges[0]} beside the training range, {ranges[1]}." if all(ranges) else ""
    return Section("drift", "Drift", tuple(blocks), note)


def _mean(value: Any) -> str:
    """Three digits; what rounding left of a normalized column's mean is 0."""
    found = facts.number(value)
    return (
        "–" if found is None else "0" if abs(found) < 1e-6 else f"{found:,.3g}" if abs(found) < 1e3 else f"{found:,.0f}"
    )


def _drift_limits(day: Day) -> Table:
    limits = day.spec.drift
    assert limits is not None
    rows: list[tuple[Cell | str, ...]] = [
        ("PSI", "all" if not limits.columns else "all others", facts.show(limits.max_psi), limits.action),
        ("change of the missing rate", "", facts.percent(limits.max_missing_change), ""),
        ("unknown values", "", facts.percent(limits.max_oov_rate), ""),
    ]
    for name, own in limits.columns.items():
        told = [facts.show(own.max_psi)] if own.max_psi is not None else []
        told += [f"missing {facts.percent(own.max_missing_change)}"] if own.max_missing_change is not None else []
        told += [f"unknown {facts.percent(own.max_oov_rate)}"] if own.max_oov_rate is not None else []
        rows.append(
            ("PSI" if own.max_psi is not None else "", name, ", ".join(told) or "–", own.action or limits.action)
        )
    return Table(("Limit of", "Column", ">Value", "Then"), tuple(rows), "Limits")


def _drift_row(r: Mapping[str, Any]) -> tuple[Cell | str, ...]:
    broken = {str(b.get("what")): b for b in facts.records(r.get("breaches"))}
    stops = any(b.get("action") == "stop" for b in broken.values())

    def figure(what: str, text: str) -> Cell:
        return Cell(text, "bad" if what in broken else "")

    def pair(name: str) -> tuple[Any, Any]:
        found = facts.sequence(r.get(name))
        return (found[0], found[1]) if len(found) == 2 else (None, None)

    missing, oov, mean = pair("missing"), pair("oov"), pair("mean")
    index, limit = facts.number(r.get("psi")), facts.number(r.get("max_psi"))
    state = Cell("stops" if stops else "over", "bad") if broken else Cell(
        "ok" if limit is not None or index is None else "not judged", "good" if limit is not None else "dim"
    )  # fmt: skip
    return (
        str(r.get("side")), facts.short(r.get("column")), str(r.get("kind")), figure("psi", facts.decimals(index, 3)),
        facts.decimals(r.get("ks"), 3), facts.percent(missing[0]), figure("missing", facts.percent(missing[1])),
        facts.percent(oov[0]), figure("oov", facts.percent(oov[1])), _mean(mean[0]), _mean(mean[1]), state,
    )  # fmt: skip


def features(day: Day) -> Section:
    """What the dataset holds: ranges, vocabularies, missing and unknown values; what the trees look at."""
    blocks: list[Block] = []
    found = day.facts("features")
    if "features" not in day.manifests:
        blocks.append(_not_run("features"))
    columns = []
    for r in facts.records(found.get("columns")):
        missing, oov = facts.number(r.get("missing_rate")) or 0.0, facts.number(r.get("oov_rate")) or 0.0
        if missing > 0 or oov > 0:
            columns.append((facts.short(r.get("name")), max(0.0, missing), max(0.0, oov)))
    columns.sort(key=lambda c: (-(c[1] + c[2]), c[0]))
    if columns:
        title = "Features with most missing or unknown values"
        blocks.append(Plot(plots.rate_bars(columns[:_TOP_FEATURES]), title))
    elif facts.records(found.get("columns")):
        blocks.append(Text("No feature has missing or out-of-vocabulary values.", "good"))
    importance = sorted(
        ((facts.short(r.get("feature")), gain) for r in facts.records(day.facts("baseline").get("importance"))
         if (gain := facts.number(r.get("gain"))) is not None),
        key=lambda kv: -kv[1],
    )  # fmt: skip
    if importance:
        svg = plots.value_bars(importance[:_TOP_FEATURES], "mean gain of a split", "XGBoost importance", plots.BASELINE)
        blocks.append(Plot(svg, "What XGBoost looks at"))
    blocks += _dataset_tables(day)
    return Section("features", "Features", tuple(blocks))


def _dataset_tables(day: Day) -> Iterable[Block]:
    found = day.facts("features")
    splits = facts.mapping(found.get("splits"))
    ranges = {"train": found.get("train_range"), "valid": found.get("valid_range")}
    rows: list[tuple[Cell | str, ...]] = []
    for name, split in splits.items():
        s = facts.mapping(split)
        span = " to ".join(str(d) for d in facts.sequence(ranges.get(name))) or "–"
        rows.append((name, span, *(facts.count(s.get(k)) for k in ("rows", "row_groups", "files"))))
    if rows:
        yield Table(("Split", "Days", ">Rows", ">Row groups", ">Files"), tuple(rows), "Splits")
    vocabularies = facts.mapping(found.get("vocabularies"))
    if vocabularies:
        version = facts.number(found.get("vocabulary_version"))
        title = "Vocabularies" + (f", version {version:.0f}" if version is not None else "")
        yield Table(
            ("Vocabulary", ">Ids", ">New this run"),
            tuple((str(n), facts.count(facts.mapping(v).get("size")), facts.count(facts.mapping(v).get("new")))
                  for n, v in vocabularies.items()),
            title,
        )  # fmt: skip


def data_quality(day: Day) -> Section:
    """What was wrong with the landing files."""
    if "ingest" not in day.manifests:
        return Section("data", "Data quality", (_not_run("ingest"),))
    found = day.facts("ingest")
    blocks: list[Block] = []
    every = facts.records(found.get("expectations"))
    mine = [r for r in every if str(r.get("ds", day.ds)) == day.ds or r.get("ok") is not True]
    checks = _checks(mine)
    if checks:
        title = "Expectations" + (f" of {day.ds}" if len(mine) < len(every) else "")
        blocks.append(Table(("Expectation", ">Value", ">Limit", ""), checks, title))
    if len(mine) < len(every):
        blocks.append(Text(f"Other expectations held, of earlier days: {len(every) - len(mine)}.", "good", wide=False))
    reasons = facts.numbers(found.get("reasons"))
    if reasons:
        ordered = sorted(reasons.items(), key=lambda kv: -kv[1])
        top = ordered[0][1] or 1.0
        rows = tuple((n, Cell(facts.count(v), bar=max(0.0, v / top))) for n, v in ordered)
        blocks.append(Table(("Reason", ">Rows"), rows, "Quarantine"))
    else:
        blocks.append(Text("No row went to quarantine.", "good", wide=False))
    drift = tuple(
        (Cell(str(r.get("column")), code=True), str(r.get("change")), facts.show(r.get("detail")))
        for r in facts.records(found.get("drift"))
    )
    if drift:
        blocks.append(Table(("Column", "Change", "Detail"), drift, "Schema drift"))
    else:
        blocks.append(Text("No schema drift: the files have the declared columns.", "good", wide=False))
    days = [str(d) for d in facts.sequence(found.get("days"))]
    note = f"Days loaded by this run: {_span(days)}." if days else ""
    return Section("data", "Data quality", tuple(blocks), note)


def _span(days: Sequence[str]) -> str:
    return days[0] if len(days) == 1 else f"{len(days)}, from {min(days)} to {max(days)}"


def _checks(value: Any) -> tuple[tuple[Cell | str, ...], ...]:
    """Rows of {"name", "value", "limit", "ok"}."""
    rows: list[tuple[Cell | str, ...]] = []
    for r in facts.records(value):
        ok = r.get("ok")
        state = Cell("ok", "good") if ok is True else Cell("failed", "bad") if ok is False else Cell("–", "dim")
        rows.append((str(r.get("name")), facts.show(r.get("value")), facts.show(r.get("limit")), state))
    return tuple(rows)


def cost(day: Day) -> Section:
    """Time and peak memory."""
    done = [m for s in ORDER if (m := day.manifests.get(s)) is not None and s != "report"]
    if not done:
        return Section("cost", "Time and memory", (_not_run("the day"),))
    blocks: list[Block] = [
        Plot(plots.value_bars([(m.stage, m.seconds) for m in done], "seconds", "Seconds by stage", unit=" s"), "Time")
    ]
    peaks = [
        (f"{m.stage}: {_PROCESSES.get(p, p)}", v)
        for m in done
        for p, v in facts.numbers(m.peak_memory_mib).items()
        if v >= 1
    ]
    if peaks:
        svg = plots.value_bars(peaks, "MiB", "Peak memory by process", plots.BASELINE, " MiB")
        blocks.append(Plot(svg, "Peak resident memory by process"))
    return Section("cost", "Time and memory", tuple(blocks))


_PROCESSES = {"jvm": "JVM", "python": "Python", "children": "largest child", "rank0": "rank 0", "rank1": "rank 1"}


def publication(day: Day) -> Section:
    """The audit, and what a reader of the warehouse now sees."""
    if not day.planned("score"):
        return Section("published", "Publication", (Text("This pipeline scores nothing.", "dim"),))
    blocks: list[Block] = []
    found = day.facts("publish")
    if "publish" not in day.manifests and day.planned("publish"):
        blocks.append(_not_run("publish"))
    checks = _checks(found.get("audit"))
    if checks:
        blocks.append(Table(("Audit", ">Value", ">Limit", ""), checks, "Audit of the staged scores"))
    sample = facts.records(found.get("sample")) or facts.records(day.facts("score").get("sample"))
    if sample:
        # What all rows share is said once: the table stays narrow.
        shared = {c: _raw(sample[0].get(c)) for c in ("ds", "model_version") if c in sample[0]}
        columns = [str(c) for c in sample[0] if c not in shared]
        right = [all(facts.number(r.get(c)) is not None for r in sample) for c in columns]
        rows = tuple(tuple(_raw(r.get(c)) for c in columns) for r in sample[:_SAMPLE_ROWS])
        headings = tuple(f">{c}" if r else c for c, r in zip(columns, right, strict=True))
        title = f"First rows of {found['table']}" if found.get("table") else "First scores"
        title += f" ({', '.join(f'{k} {v}' for k, v in shared.items())})" if shared else ""
        blocks.append(Table(headings, rows, title))
    where = found.get("warehouse")
    model = facts.mapping(day.facts("score").get("model")).get("kind")
    note = " ".join(
        [*([f"Scored by the {model} model."] if model else []), *([f"Warehouse: {where}."] if where else [])]
    )
    return Section("published", "Publication", tuple(blocks) or (_not_run("score"),), note)


def _raw(value: Any) -> str:
    """A value of a sample: ids without separators."""
    return facts.show(value) if isinstance(value, (float, bool)) or value is None else str(value)


def lineage_of(day: Day) -> Section:
    """From the last thing made back to the landing files."""
    last = next((m for s in reversed(ORDER[:-1]) if (m := day.manifests.get(s)) is not None), None)
    if last is None:
        return Section("lineage", "Lineage", (_not_run("the day"),))
    runs = {**day.runs, **{(m.pipeline, m.ds, m.stage): m for m in day.manifests.values()}}
    return Section("lineage", "Lineage", (Tree(lineage.trace(runs, last, next(iter(last.outputs), None))),))


def settings(day: Day) -> Section:
    """The spec, folded away. Spark's free properties stay out: a page is passed around, and they are not vetted."""
    dumped = day.spec.model_dump(mode="json", by_alias=True)
    dumped["spark"].pop("properties", None)
    text = yaml.safe_dump(dumped, sort_keys=False, width=100, allow_unicode=True)
    return Section("settings", "Settings", (Text(text, title="The pipeline's spec, defaults included", pre=True),))


def _not_run(what: str, title: str = "") -> Text:
    return Text(f"Not run: {what}.", "dim", title, wide=not title)
