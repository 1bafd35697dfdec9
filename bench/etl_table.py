"""The figures of the bench of features as one Markdown table, a line a part: what docs/performance.md shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.report import Figure

_TOTAL, _COPY = "fit, transform and write, ", "plain Spark copy, "
#: Heading -> the figure's name without its part, and which of its numbers.
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "fit": ("fit, ", "value"),
    "transform and write": ("transform and write, ", "value"),
    "all": (_TOTAL, "value"),
    "next day": ("the same when only one of 8 days is new, ", "value"),
    "Spark copy": (_TOTAL, "floor"),
    "ours / copy": (_TOTAL, "ratio floor"),
    "NVTabular": ("against NVTabular 23.8, ", "peer"),
    "ours / NVTabular": ("against NVTabular 23.8, ", "ratio peer"),
    "DuckDB": ("against DuckDB 2.0, ", "peer"),
    "ours / DuckDB": ("against DuckDB 2.0, ", "ratio peer"),
    "Polars": ("against Polars 2.1, ", "peer"),
    "ours / Polars": ("against Polars 2.1, ", "ratio peer"),
    "ours / join a column": ("against the textbook way (a broadcast join a column), ", "ratio peer"),
    "ours / bare decode and write": ("against pyarrow's decode and write of as many bytes, ", "ratio floor"),
    "CPU s": ("processor time, ", "value"),
    "DuckDB's CPU s": ("processor time against DuckDB 2.0, ", "peer"),
    "Polars's CPU s": ("processor time against Polars 2.1, ", "peer"),
    "peak MiB": ("peak memory of all processes, ", "value"),
    "beyond the JVM's heap": ("peak memory beyond the JVM's heap, ", "value"),
    "NVTabular's": ("peak memory against NVTabular 23.8, ", "peer"),
    "DuckDB's": ("peak memory against DuckDB 2.0, ", "peer"),
    "Polars's": ("peak memory against Polars 2.1, ", "peer"),
}


def markdown(figures: Sequence[Figure]) -> str:
    """Return a table of rows/s, ratios and MiB by part; a dash where something was left out."""
    by_name = {f.name.split("; peer: ")[0]: f for f in figures}
    parts = [name.removeprefix(_TOTAL) for name in by_name if name.startswith(_TOTAL)]
    lines = ["| | " + " | ".join(_COLUMNS) + " |", "| --- |" + " ---: |" * len(_COLUMNS)]
    for part in parts:
        cells = [_cell(by_name.get(prefix + part), kind) for prefix, kind in _COLUMNS.values()]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(figure: Figure | None, kind: str) -> str:
    if figure is None:
        return "–"
    reference = figure.floor if kind.endswith("floor") else figure.peer if kind.endswith("peer") else figure.value
    if reference is None:
        return "–"
    if not kind.startswith("ratio"):
        return f"{reference:,.0f}"
    ratio = figure.value / reference
    return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}"
