"""How far the newest rows are from those that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.monitor import facts, plots
from headrace.monitor.blocks import Block, Cell, Plot, Section, Table, Text
from headrace.monitor.sections.day import Day, not_run

_TOP_BARS = 15
_TOP_DRIFT = 40
#: Beyond any real one: two distributions that share no bin have about 18.
_LARGEST_PSI = 1e3


def drift(day: Day) -> Section:
    """How far the newest rows are from those that the model was trained on."""
    if not day.planned("drift"):
        return Section("drift", "Drift", (Text("This pipeline has no section `drift`.", "dim"),))
    if "drift" not in day.manifests:
        return Section("drift", "Drift", (not_run("drift"),))
    found = facts.records(day.facts("drift").get("columns"))
    if not found:
        return Section("drift", "Drift", (Text("No column was compared.", "dim"),))
    over = [r for r in found if facts.records(r.get("breaches"))]
    told = f"{len(over)} of {len(found)} columns and features are over a limit." if over else "All within their limits."
    blocks: list[Block] = [Text(told, "bad" if over else "good")]
    # Those over a limit first: a missing rate may have risen where the index has not.
    shown = [*over, *(r for r in found if not facts.records(r.get("breaches")))]
    rows = tuple(_drift_row(r) for r in shown[:_TOP_DRIFT])
    headings = ("", "Column", "Kind", ">PSI", ">KS", ">Missing", ">now", ">Unknown", ">now", ">Mean", ">now", "")
    blocks.append(Table(headings, rows, "Columns of the events, and features", wide=True))
    if len(shown) > _TOP_DRIFT:
        blocks.append(Text(f"And {len(shown) - _TOP_DRIFT} more, within their limits or less far off.", "dim"))
    bars = [
        (facts.short(f"{r.get('side')} {r.get('column')}"), min(index, _LARGEST_PSI), facts.number(r.get("max_psi")))
        for r in found
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
