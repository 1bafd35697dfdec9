"""Data: faults of landing files, the dataset's ranges and vocabularies, and drift."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.quality.report import facts, plots
from headrace.quality.report.blocks import Block, Cell, Day, Plot, ReportSection, ReportTable, Text, checks, not_run

_TOP_FEATURES = 15

_TOP_BARS = 15
_TOP_DRIFT = 40
#: Larger than any real PSI: two distributions that share no bin have about 18.
_LARGEST_PSI = 1e3


def features(day: Day) -> ReportSection:
    """Return the section on features: ranges, vocabularies, missing and unknown values, XGBoost's importance."""
    blocks: list[Block] = []
    dataset_facts = day.facts("features")
    if "features" not in day.manifests:
        blocks.append(not_run("features"))
    columns = []
    for r in facts.records(dataset_facts.get("columns")):
        missing, oov = facts.number(r.get("missing_rate")) or 0.0, facts.number(r.get("oov_rate")) or 0.0
        if missing > 0 or oov > 0:
            columns.append((facts.short(r.get("name")), max(0.0, missing), max(0.0, oov)))
    columns.sort(key=lambda c: (-(c[1] + c[2]), c[0]))
    if columns:
        title = "Features with most missing or unknown values"
        blocks.append(Plot(plots.rate_bars(columns[:_TOP_FEATURES]), title))
    elif facts.records(dataset_facts.get("columns")):
        blocks.append(Text("No feature has missing or out-of-vocabulary values.", "good"))
    importance = sorted(
        (
            (facts.short(r.get("feature")), gain)
            for r in facts.records(day.facts("baseline").get("importance"))
            if (gain := facts.number(r.get("gain"))) is not None
        ),
        key=lambda kv: -kv[1],
    )
    if importance:
        svg = plots.value_bars(importance[:_TOP_FEATURES], "mean gain of a split", "XGBoost importance", plots.BASELINE)
        blocks.append(Plot(svg, "What XGBoost looks at"))
        blocks += _importance(facts.records(day.facts("baseline").get("importance")))
    blocks += _dataset_tables(day)
    return ReportSection("features", "Features", tuple(blocks))


def _importance(records: Sequence[Mapping[str, Any]]) -> Iterable[Block]:
    """Gain, cover and weight of the features; of older runs, which have gains alone, nothing."""
    if not any("weight" in r for r in records):
        return
    rows: list[tuple[Cell | str, ...]] = []
    for r in records:
        means = [facts.decimals(r.get(key)) for key in ("gain", "cover")]
        rows.append((Cell(facts.short(r.get("feature")), code=True), *means, facts.count(r.get("weight"))))
    headings = ("Feature", ">mean gain of a split", ">mean cover of a split", ">splits")
    yield ReportTable(headings, tuple(rows), "Importance of the features to XGBoost")


def _dataset_tables(day: Day) -> Iterable[Block]:
    dataset_facts = day.facts("features")
    splits = facts.mapping(dataset_facts.get("splits"))
    rows: list[tuple[Cell | str, ...]] = []
    for name, split in splits.items():
        s = facts.mapping(split)
        span = " to ".join(str(d) for d in facts.sequence(dataset_facts.get(f"{name}_range"))) or "–"
        rows.append((name, span, *(facts.count(s.get(k)) for k in ("rows", "row_groups", "files"))))
    if rows:
        yield ReportTable(("Split", "Days", ">Rows", ">Row groups", ">Files"), tuple(rows), "Splits")
    vocabularies = facts.mapping(dataset_facts.get("vocabularies"))
    if vocabularies:
        version = facts.number(dataset_facts.get("vocabulary_version"))
        title = "Vocabularies" + (f", version {version:.0f}" if version is not None else "")
        yield ReportTable(
            ("Vocabulary", ">Ids", ">New this run"),
            tuple(
                (str(n), facts.count(facts.mapping(v).get("size")), facts.count(facts.mapping(v).get("new")))
                for n, v in vocabularies.items()
            ),
            title,
        )


def data_quality(day: Day) -> ReportSection:
    """Return the section on faults of the landing files."""
    if "ingest" not in day.manifests:
        return ReportSection("data", "Data quality", (not_run("ingest"),))
    ingest_facts = day.facts("ingest")
    blocks = list(_source_blocks(day, ingest_facts, ""))
    for name, of_source in facts.mapping(ingest_facts.get("sources")).items():
        blocks += _source_blocks(day, facts.mapping(of_source), f" of source {facts.short(name)}")
    days = [str(d) for d in facts.sequence(ingest_facts.get("days"))]
    note = f"Days loaded by this run: {_span(days)}." if days else ""
    return ReportSection("data", "Data quality", tuple(blocks), note)


def _source_blocks(day: Day, source_facts: Mapping[str, object], suffix: str) -> Iterable[Block]:
    """Yield the faults of one source's files. `suffix`: ends the titles."""
    every = facts.records(source_facts.get("expectations"))
    checked_records = [r for r in every if str(r.get("ds", day.ds)) == day.ds or r.get("ok") is not True]
    checked = checks(checked_records)
    if checked:
        title = f"Expectations{suffix}" + (f" of {day.ds}" if len(checked_records) < len(every) else "")
        yield ReportTable(("Expectation", ">Value", ">Limit", ""), checked, title)
    if len(checked_records) < len(every):
        yield Text(
            f"Other expectations{suffix} held, of earlier days: {len(every) - len(checked_records)}.",
            "good",
            wide=False,
        )
    reasons = facts.numbers(source_facts.get("reasons"))
    if reasons:
        ordered = sorted(reasons.items(), key=lambda kv: -kv[1])
        top = ordered[0][1] or 1.0
        rows = tuple((n, Cell(facts.count(v), bar=max(0.0, v / top))) for n, v in ordered)
        yield ReportTable(("Reason", ">Rows"), rows, f"Quarantine{suffix}")
    else:
        yield Text(f"No row{suffix} went to quarantine.", "good", wide=False)
    bad_files = tuple(
        (str(r.get("ds")), Cell(str(r.get("file")), code=True), facts.show(r.get("reason")))
        for r in facts.records(source_facts.get("bad_files"))
    )
    if bad_files:
        yield ReportTable(("Day", "File", "Reason"), bad_files, f"Files left out{suffix}")
    drift = tuple(
        (Cell(str(r.get("column")), code=True), str(r.get("change")), facts.show(r.get("detail")))
        for r in facts.records(source_facts.get("drift"))
    )
    if drift:
        yield ReportTable(("Column", "Change", "Detail"), drift, f"Schema drift{suffix}")
    else:
        yield Text(f"No schema drift{suffix}: the files have the declared columns.", "good", wide=False)


def _span(days: Sequence[str]) -> str:
    return days[0] if len(days) == 1 else f"{len(days)}, from {min(days)} to {max(days)}"


def drift(day: Day) -> ReportSection:
    """Return the section on drift: the newest rows compared with those that the model was trained on."""
    if not day.planned("drift"):
        return ReportSection("drift", "Drift", (Text("This pipeline has no section `drift`.", "dim"),))
    if "drift" not in day.manifests:
        return ReportSection("drift", "Drift", (not_run("drift"),))
    columns = facts.records(day.facts("drift").get("columns"))
    if not columns:
        return ReportSection("drift", "Drift", (Text("No column was compared.", "dim"),))
    over = [r for r in columns if facts.records(r.get("breaches"))]
    summary = (
        f"{len(over)} of {len(columns)} columns and features are over a limit." if over else "All within their limits."
    )
    blocks: list[Block] = [Text(summary, "bad" if over else "good")]
    # Those over a limit first: a missing rate may have risen where the index has not.
    ordered = [*over, *(r for r in columns if not facts.records(r.get("breaches")))]
    rows = tuple(_drift_row(r) for r in ordered[:_TOP_DRIFT])
    headings = ("", "Column", "Kind", ">PSI", ">KS", ">Missing", ">now", ">Unknown", ">now", ">Mean", ">now", "")
    blocks.append(ReportTable(headings, rows, "Columns of the events, and features", wide=True))
    if len(ordered) > _TOP_DRIFT:
        blocks.append(Text(f"And {len(ordered) - _TOP_DRIFT} more, within their limits or less far off.", "dim"))
    bars = [
        (facts.short(f"{r.get('side')} {r.get('column')}"), min(index, _LARGEST_PSI), facts.number(r.get("max_psi")))
        for r in columns
        if (index := facts.number(r.get("psi"))) is not None
    ]
    if bars:
        svg = plots.drift_bars(bars[:_TOP_BARS])
        blocks.append(Plot(svg, "Largest population stability index", "The tick is the limit.", wide=False))
    blocks.append(_drift_limits(day))
    ranges = [
        " to ".join(dict.fromkeys(str(d) for d in facts.sequence(day.facts("features").get(f"{s}_range"))))
        for s in ("valid", "train")
    ]
    note = f"{ranges[0]} beside the training range, {ranges[1]}." if all(ranges) else ""
    return ReportSection("drift", "Drift", tuple(blocks), note)


def _mean(value: Any) -> str:
    """Three digits; what rounding left of a normalized column's mean is 0."""
    number_ = facts.number(value)
    return (
        "–"
        if number_ is None
        else "0"
        if abs(number_) < 1e-6
        else f"{number_:,.3g}"
        if abs(number_) < 1e3
        else f"{number_:,.0f}"
    )


def _drift_limits(day: Day) -> ReportTable:
    limits = day.spec.drift
    assert limits is not None
    rows: list[tuple[Cell | str, ...]] = [
        ("PSI", "all" if not limits.columns else "all others", facts.show(limits.max_psi), limits.action),
        ("change of the missing rate", "", facts.percent(limits.max_missing_change), ""),
        ("unknown values", "", facts.percent(limits.max_oov_rate), ""),
    ]
    for name, column_limits in limits.columns.items():
        limit_texts = [facts.show(column_limits.max_psi)] if column_limits.max_psi is not None else []
        limit_texts += (
            [f"missing {facts.percent(column_limits.max_missing_change)}"]
            if column_limits.max_missing_change is not None
            else []
        )
        limit_texts += (
            [f"unknown {facts.percent(column_limits.max_oov_rate)}"] if column_limits.max_oov_rate is not None else []
        )
        rows.append(
            (
                "PSI" if column_limits.max_psi is not None else "",
                name,
                ", ".join(limit_texts) or "–",
                column_limits.action or limits.action,
            )
        )
    return ReportTable(("Limit of", "Column", ">Value", "Then"), tuple(rows), "Limits")


def _drift_row(r: Mapping[str, Any]) -> tuple[Cell | str, ...]:
    broken = {str(b.get("what")): b for b in facts.records(r.get("breaches"))}
    stops = any(b.get("action") == "stop" for b in broken.values())

    def figure(name: str, text: str) -> Cell:
        return Cell(text, "bad" if name in broken else "")

    def pair(name: str) -> tuple[Any, Any]:
        values = facts.sequence(r.get(name))
        return (values[0], values[1]) if len(values) == 2 else (None, None)

    missing, oov, mean = pair("missing"), pair("oov"), pair("mean")
    index, limit = facts.number(r.get("psi")), facts.number(r.get("max_psi"))
    state = (
        Cell("stops" if stops else "over", "bad")
        if broken
        else Cell("ok" if limit is not None or index is None else "not judged", "good" if limit is not None else "dim")
    )
    return (
        str(r.get("side")),
        facts.short(r.get("column")),
        str(r.get("kind")),
        figure("psi", facts.decimals(index, 3)),
        facts.decimals(r.get("ks"), 3),
        facts.percent(missing[0]),
        figure("missing", facts.percent(missing[1])),
        facts.percent(oov[0]),
        figure("oov", facts.percent(oov[1])),
        _mean(mean[0]),
        _mean(mean[1]),
        state,
    )
