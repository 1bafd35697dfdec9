"""The days up to this one: metrics of their models, verdicts, what models forget, what they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.manifest import Manifest
from headrace.monitor import facts, plots
from headrace.monitor.blocks import Block, Cell, Plot, Section, Table, Text
from headrace.monitor.sections.day import Day

#: Days that are drawn, and that the table has.
_DRAWN, _DAYS = 90, 14
_MIB = 1 << 20

Runs = Mapping[str, Mapping[str, Manifest]]


def history(day: Day) -> Section:
    """Lines over the days and a row for each of the last; nothing where this is the first day."""
    runs = _days(day)
    if sum("train" in of_day or "baseline" in of_day for of_day in runs.values()) < 2:
        return Section("history", "The days before", ())
    blocks: list[Block] = []
    of_models = (("neural", "train", plots.NEURAL), ("XGBoost", "baseline", plots.BASELINE))
    for metric, shown in (("auc", "AUC"), ("log_loss", "log loss"), ("ndcg_at_k", "NDCG@k"), ("rmse", "RMSE")):
        series = [(name, _series(runs, _metric(stage, metric)), colour) for name, stage, colour in of_models]
        series = [one for one in series if one[1]]
        if any(len(points) > 1 for _, points, _ in series):
            svg = plots.daily(series, shown, f"{shown} on the validation rows of each day")
            blocks.append(Plot(svg, f"{shown} on each day's validation rows"))
    forgetting = _series(runs, _forgetting)
    if len(forgetting) > 1:
        fixed = next((str(f.get("ds")) for f in (_told(of, "train", "forgetting") for of in runs.values()) if f), "")
        own = _series(runs, _metric("train", "auc"))
        series = [(f"rows of {fixed}", forgetting, plots.NEURAL), ("rows of the day", own, plots.MUTED)]
        svg = plots.daily(series, "AUC", "AUC of each day's model on the rows of a fixed day")
        blocks.append(Plot(svg, "What the models forget", f"Each day's model on the rows of {fixed}."))
    saved = [(ds, n / _MIB) for ds, n in _series(runs, lambda of: _told(of, "train", "saved").get("embeddings_bytes"))]
    if len(saved) > 1:
        svg = plots.daily([("saved", saved, plots.NEURAL)], "MiB", "Bytes of saved embeddings by day", from_zero=True)
        blocks.append(Plot(svg, "Saved embeddings", "A whole copy, or the rows that changed since the day before."))
    blocks.append(_table(runs))
    if forgetting:
        blocks.append(Text("XGBoost, fixed day: AUC. Saved: embeddings. Drifted: columns over a limit.", "dim"))
    else:
        blocks.append(Text("XGBoost: AUC. Drifted: columns over a limit.", "dim"))
    return Section("history", "The days before", tuple(blocks), f"Up to {day.ds}.")


def _days(day: Day) -> Runs:
    """Manifests by stage, by day, up to this one; oldest first."""
    found: dict[str, dict[str, Manifest]] = {}
    for (_, ds, stage), manifest in day.runs.items():
        if ds < day.ds:
            found.setdefault(ds, {})[stage] = manifest
    found[day.ds] = dict(day.manifests)
    return {ds: found[ds] for ds in sorted(found)[-_DRAWN:]}


def _told(of_day: Mapping[str, Manifest], stage: str, fact: str) -> Mapping[str, Any]:
    return facts.mapping(of_day[stage].facts.get(fact)) if stage in of_day else {}


def _metric(stage: str, metric: str) -> Callable[[Mapping[str, Manifest]], Any]:
    return lambda of_day: _told(of_day, stage, "metrics").get(metric)


def _forgetting(of_day: Mapping[str, Manifest]) -> Any:
    return facts.mapping(_told(of_day, "train", "forgetting").get("metrics")).get("auc")


def _series(runs: Runs, value: Callable[[Mapping[str, Manifest]], Any]) -> list[tuple[str, float]]:
    found = ((ds, facts.number(value(of_day))) for ds, of_day in runs.items())
    return [(ds, number) for ds, number in found if number is not None]


def _table(runs: Runs) -> Table:
    """The newest day first; a column that no day has anything for is left out."""
    columns: list[tuple[str, Callable[[Mapping[str, Manifest]], Cell | str]]] = [
        (">Version", lambda of: facts.show(_told(of, "train", "registered").get("version"))),
        ("Gate", _verdict),
        (">AUC", lambda of: facts.decimals(_metric("train", "auc")(of))),
        (">Log loss", lambda of: facts.decimals(_metric("train", "log_loss")(of))),
        (">XGBoost", lambda of: facts.decimals(_metric("baseline", "auc")(of))),
        (">Fixed day", lambda of: facts.decimals(_forgetting(of))),
        (">Saved", lambda of: _mib(_told(of, "train", "saved").get("embeddings_bytes"))),
        (">Events", lambda of: _count(of, "ingest", "kept")),
        (">Quarantined", lambda of: _count(of, "ingest", "quarantined")),
        (">Drifted", lambda of: _count(of, "drift", "over_limit")),
        (">Time", lambda of: facts.duration(sum(m.seconds for m in of.values()))),
        (">Core-seconds", _cores),
    ]
    shown = list(runs.items())[-_DAYS:][::-1]
    cells = {heading: [make(of_day) for _, of_day in shown] for heading, make in columns}
    used = [h for h, _ in columns if any((c if isinstance(c, str) else c.text) != "–" for c in cells[h])]
    rows = tuple((ds, *(cells[heading][i] for heading in used)) for i, (ds, _) in enumerate(shown))
    return Table(("Day", *used), rows, "By day", wide=True)


def _verdict(of_day: Mapping[str, Manifest]) -> Cell | str:
    if "gate" not in of_day:
        return "–"
    verdict = str(of_day["gate"].facts.get("verdict"))
    return Cell(verdict, "bad" if verdict == "refused" else "good")


def _count(of_day: Mapping[str, Manifest], stage: str, name: str) -> str:
    return facts.count(of_day[stage].rows.get(name)) if stage in of_day else "–"


def _mib(value: Any) -> str:
    found = facts.number(value)
    return "–" if found is None else f"{found / _MIB:,.1f} MiB"


def _cores(of_day: Mapping[str, Manifest]) -> str:
    known = [m.resources.core_seconds for m in of_day.values() if m.resources]
    return f"{sum(known):,.0f}" if known else "–"
