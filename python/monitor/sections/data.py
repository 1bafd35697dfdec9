"""What was wrong with the landing files, and what the dataset holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.monitor import facts, plots
from headrace.monitor.blocks import Block, Cell, Plot, Section, Table, Text
from headrace.monitor.sections.day import Day, checks, not_run

_TOP_FEATURES = 15


def features(day: Day) -> Section:
    """What the dataset holds: ranges, vocabularies, missing and unknown values; what the trees look at."""
    blocks: list[Block] = []
    found = day.facts("features")
    if "features" not in day.manifests:
        blocks.append(not_run("features"))
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
    return Section("features", "Features", tuple(blocks))


def _importance(found: Sequence[Mapping[str, Any]]) -> Iterable[Block]:
    """Gain, cover and weight of the features; of older runs, which have gains alone, nothing."""
    if not any("weight" in r for r in found):
        return
    rows: list[tuple[Cell | str, ...]] = []
    for r in found:
        means = [facts.decimals(r.get(key)) for key in ("gain", "cover")]
        rows.append((Cell(facts.short(r.get("feature")), code=True), *means, facts.count(r.get("weight"))))
    headings = ("Feature", ">mean gain of a split", ">mean cover of a split", ">splits")
    yield Table(headings, tuple(rows), "Importance of the features to XGBoost")


def _dataset_tables(day: Day) -> Iterable[Block]:
    found = day.facts("features")
    splits = facts.mapping(found.get("splits"))
    rows: list[tuple[Cell | str, ...]] = []
    for name, split in splits.items():
        s = facts.mapping(split)
        span = " to ".join(str(d) for d in facts.sequence(found.get(f"{name}_range"))) or "–"
        rows.append((name, span, *(facts.count(s.get(k)) for k in ("rows", "row_groups", "files"))))
    if rows:
        yield Table(("Split", "Days", ">Rows", ">Row groups", ">Files"), tuple(rows), "Splits")
    vocabularies = facts.mapping(found.get("vocabularies"))
    if vocabularies:
        version = facts.number(found.get("vocabulary_version"))
        title = "Vocabularies" + (f", version {version:.0f}" if version is not None else "")
        yield Table(
            ("Vocabulary", ">Ids", ">New this run"),
            tuple(
                (str(n), facts.count(facts.mapping(v).get("size")), facts.count(facts.mapping(v).get("new")))
                for n, v in vocabularies.items()
            ),
            title,
        )


def data_quality(day: Day) -> Section:
    """What was wrong with the landing files."""
    if "ingest" not in day.manifests:
        return Section("data", "Data quality", (not_run("ingest"),))
    found = day.facts("ingest")
    blocks = list(_of_source(day, found, ""))
    for name, of_source in facts.mapping(found.get("sources")).items():
        blocks += _of_source(day, facts.mapping(of_source), f" of source {facts.short(name)}")
    days = [str(d) for d in facts.sequence(found.get("days"))]
    note = f"Days loaded by this run: {_span(days)}." if days else ""
    return Section("data", "Data quality", tuple(blocks), note)


def _of_source(day: Day, found: Mapping[str, object], of: str) -> Iterable[Block]:
    """What was wrong with one source's files. `of`: ends the titles."""
    every = facts.records(found.get("expectations"))
    mine = [r for r in every if str(r.get("ds", day.ds)) == day.ds or r.get("ok") is not True]
    checked = checks(mine)
    if checked:
        title = f"Expectations{of}" + (f" of {day.ds}" if len(mine) < len(every) else "")
        yield Table(("Expectation", ">Value", ">Limit", ""), checked, title)
    if len(mine) < len(every):
        yield Text(f"Other expectations{of} held, of earlier days: {len(every) - len(mine)}.", "good", wide=False)
    reasons = facts.numbers(found.get("reasons"))
    if reasons:
        ordered = sorted(reasons.items(), key=lambda kv: -kv[1])
        top = ordered[0][1] or 1.0
        rows = tuple((n, Cell(facts.count(v), bar=max(0.0, v / top))) for n, v in ordered)
        yield Table(("Reason", ">Rows"), rows, f"Quarantine{of}")
    else:
        yield Text(f"No row{of} went to quarantine.", "good", wide=False)
    drift = tuple(
        (Cell(str(r.get("column")), code=True), str(r.get("change")), facts.show(r.get("detail")))
        for r in facts.records(found.get("drift"))
    )
    if drift:
        yield Table(("Column", "Change", "Detail"), drift, f"Schema drift{of}")
    else:
        yield Text(f"No schema drift{of}: the files have the declared columns.", "good", wide=False)


def _span(days: Sequence[str]) -> str:
    return days[0] if len(days) == 1 else f"{len(days)}, from {min(days)} to {max(days)}"
