"""Plots of the report as inline SVG, which take their colours from the page, also in dark mode.

Matplotlib draws with sentinel colours; in the SVG's text each becomes a CSS variable of the page. Text stays text: the
page's font, selectable, small. No pyplot: figures are plain objects, so nothing global is touched.
"""

from __future__ import annotations

import functools
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

INK, MUTED, GRID = "#010101", "#020202", "#030303"
NEURAL, BASELINE, CEILING, BAD = "#040404", "#050505", "#060606", "#070707"
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    NEURAL: "var(--neural)",
    BASELINE: "var(--baseline)",
    CEILING: "var(--ceiling)",
    BAD: "var(--bad)",
}

#: Inches; the SVG scales to its column, and at a phone's width this is about 1:1.
_WIDTH, _HEIGHT = 5.2, 3.0
#: Longer curves are averaged down to this many points: the page stays small.
_MAX_POINTS = 400
#: Characters of a name beside a bar: a longer one would leave no room for the bars.
_MAX_NAME = 48

Point = tuple[float, float]
P = ParamSpec("P")

_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.labelsize": 9.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "text.color": INK,
    # A `$` in a feature's name is no formula.
    "text.parse_math": False,
}


def _styled(draw: Callable[P, Markup]) -> Callable[P, Markup]:
    """Draw with the report's style, whatever the process' own settings are."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Markup:
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            # Text stays text in the SVG, in the page's font: Matplotlib's font only measures it.
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
            return draw(*args, **kwargs)

    return styled


@_styled
def loss_curve(train: Sequence[Point], log_loss: Sequence[Point], base: float | None = None) -> Markup:
    """Plot training loss by step (thin: as it was; thick: smoothed), validation log loss, and that of the base rate.

    Args:
        train: (step, loss).
        log_loss: (step, validation log loss).
        base: log loss of always predicting the base rate, nats a row.
    """
    figure, axes = _axes("step", "log loss")
    points = _thin(train)
    steps, losses = [p[0] for p in points], [p[1] for p in points]
    if len(points) > 20:
        axes.plot(steps, losses, color=NEURAL, alpha=0.3, linewidth=0.8)
        axes.plot(steps, _smooth(losses), color=NEURAL, linewidth=1.8, label="training (smoothed)")
    elif points:
        axes.plot(steps, losses, color=NEURAL, linewidth=1.8, marker="o", markersize=3, label="training")
    if log_loss:
        axes.plot(*_columns(log_loss), color=BASELINE, linewidth=1.6, marker="o", markersize=4, label="validation")
    if base is not None:
        axes.axhline(base, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)), label="always the base rate")
    axes.margins(y=0.15)
    axes.legend(loc="best")
    return _svg(figure, "Learning curve: loss by step")


@_styled
def auc_curve(evals: Sequence[Point], baseline: float | None = None, ceiling: float | None = None) -> Markup:
    """Plot validation AUC at each evaluation, beside the baseline's and the ceiling."""
    figure, axes = _axes("step", "validation AUC")
    axes.plot(*_columns(evals), color=NEURAL, linewidth=1.8, marker="o", markersize=4, label="neural")
    if baseline is not None:
        axes.axhline(baseline, color=BASELINE, linewidth=1.3, linestyle=(0, (4, 3)), label="XGBoost")
    if ceiling is not None:
        axes.axhline(ceiling, color=CEILING, linewidth=1.3, linestyle=(0, (1, 2)), label="ceiling")
    axes.margins(y=0.12)
    axes.legend(loc="best")
    return _svg(figure, "AUC on the validation split by evaluation")


@_styled
def tree_curve(training: Sequence[Point], validation: Sequence[Point], metric: str) -> Markup:
    """Plot XGBoost's metric of training and validation by tree. Points: (tree, metric)."""
    figure, axes = _axes("tree", metric)
    if training:
        axes.plot(*_columns(_thin(training)), color=BASELINE, alpha=0.5, linewidth=1.2, label="training")
    axes.plot(*_columns(_thin(validation)), color=BASELINE, linewidth=1.8, label="validation")
    axes.margins(y=0.12)
    axes.legend(loc="best")
    return _svg(figure, "XGBoost's metric by tree")


@_styled
def auc_bars(rows: Sequence[tuple[str, float, str]]) -> Markup:
    """Plot AUCs as bars from 0.5, where a coin stands. `rows`: (name, AUC, sentinel colour)."""
    figure, axes = _axes("AUC (0.5 is a coin)", "", height=0.62 + 0.42 * len(rows))
    values = [r[1] for r in rows]
    axes.barh(range(len(rows)), [v - 0.5 for v in values], left=0.5, color=[r[2] for r in rows], height=0.6)
    for y, value in enumerate(values):
        axes.annotate(
            f"{value:.4f}" if abs(value) < 10 else _short_number(value),
            (max(value, 0.5), y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    low, high = min(0.5, *values), max(0.5, *values)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.set_xlim(low, high + 0.16 * max(high - low, 0.01))
    _name_bars(axes, [r[0] for r in rows])
    return _svg(figure, "AUC of the models beside the ceiling")


@_styled
def calibration(models: Sequence[tuple[str, Sequence[tuple[float, float, float]], str]]) -> Markup:
    """Plot observed click rate by predicted: on the diagonal a model's probabilities mean what they say.

    Args:
        models: (name, [(mean predicted, observed rate, rows)], sentinel colour); area of a dot: rows.
    """
    figure, axes = _axes("predicted probability", "observed rate", height=3.6)
    top = max((max(p, o) for _, bins, _ in models for p, o, _ in bins), default=1.0) * 1.06
    axes.plot([0, top], [0, top], color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)), label="perfectly calibrated")
    for name, bins, colour in models:
        largest = max((n for _, _, n in bins), default=1.0) or 1.0
        predicted, observed = [b[0] for b in bins], [b[1] for b in bins]
        axes.plot(predicted, observed, color=colour, linewidth=1.2, label=name)
        axes.scatter(predicted, observed, s=[8 + 40 * n / largest for _, _, n in bins], color=colour, alpha=0.75)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.legend(loc="upper left")
    return _svg(figure, "Calibration: observed rate by predicted probability")


@_styled
def lift(models: Sequence[tuple[str, Sequence[Point], str]]) -> Markup:
    """Plot lift: the rate of positives among the rows with the highest predictions over the average rate.

    Args:
        models: (name, [(share of rows, lift)], sentinel colour), the smallest share first.
    """
    figure, axes = _axes("share of rows, highest predictions first", "lift", height=3.6)
    axes.axhline(1.0, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)), label="rows at random")
    for name, points, colour in models:
        axes.plot(*_columns(points), color=colour, linewidth=1.6, marker="o", markersize=3, label=name)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    axes.set_xlim(0, 1.02)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    return _svg(figure, "Lift of the rows with the highest predictions")


@_styled
def intervals(rows: Sequence[tuple[str, float, float, float, str]], label: str, title: str) -> Markup:
    """Plot a value a line with its interval, first on top. `rows`: (name, value, low, high, sentinel colour)."""
    figure, axes = _axes(label, "", height=0.7 + 0.26 * len(rows))
    for y, (_, value, low, high, colour) in enumerate(rows):
        axes.hlines(y, low, high, color=colour, linewidth=1.6, alpha=0.6)
        axes.plot(value, y, marker="o", markersize=4, color=colour)
    axes.margins(x=0.08)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    _name_bars(axes, [r[0] for r in rows])
    return _svg(figure, title)


@_styled
def daily(
    series: Sequence[tuple[str, Sequence[tuple[str, float]], str]], label: str, title: str, from_zero: bool = False
) -> Markup:
    """Plot lines over the days.

    Args:
        series: (name, [(day, value)], sentinel colour); a line is broken where a day has no value.
        label: of the values.
        title: for those who cannot see it.
        from_zero: whether the axis of values begins there.
    """
    figure, axes = _axes("", label)
    days = sorted({day for _, points, _ in series for day, _ in points})
    places = {day: x for x, day in enumerate(days)}
    for name, points, colour in series:
        values = dict(points)
        line = [values.get(day, math.nan) for day in days]
        size = 4 if len(days) <= 40 else 0
        axes.plot(range(len(days)), line, color=colour, linewidth=1.5, marker="o", markersize=size, label=name)
    step = -(-len(days) // 7) or 1
    axes.xaxis.set_major_locator(FixedLocator(list(places.values())[::step]))
    axes.set_xticklabels([day[5:] for day in days[::step]])
    axes.margins(y=0.15)
    if from_zero:
        axes.set_ylim(bottom=0)
    if len(series) > 1:
        axes.legend(loc="best")
    return _svg(figure, title)


@_styled
def rate_bars(rows: Sequence[tuple[str, float, float]]) -> Markup:
    """Plot missing and unknown rates by feature, worst first. `rows`: (feature, missing, oov), shares of 1."""
    figure, axes = _axes("share of rows", "", height=0.75 + 0.26 * len(rows))
    missing, oov = [r[1] for r in rows], [r[2] for r in rows]
    axes.barh(range(len(rows)), missing, color=NEURAL, height=0.62, label="missing")
    axes.barh(range(len(rows)), oov, left=missing, color=BASELINE, height=0.62, label="out of vocabulary")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    axes.set_xlim(0, max([m + o for m, o in zip(missing, oov, strict=True)] + [0.01]) * 1.05)
    axes.legend(loc="lower right")
    _name_bars(axes, [r[0] for r in rows])
    return _svg(figure, "Features by missing and out-of-vocabulary rate")


@_styled
def value_bars(
    rows: Sequence[tuple[str, float]], label: str, title: str, colour: str = NEURAL, unit: str = ""
) -> Markup:
    """Plot one bar a name, first on top, its value beside it."""
    figure, axes = _axes(label, "", height=0.62 + 0.28 * len(rows))
    values = [r[1] for r in rows]
    axes.barh(range(len(rows)), values, color=colour, height=0.62)
    for y, value in enumerate(values):
        _annotate(axes, f"{_short_number(value)}{unit}", value, y)
    axes.set_xlim(0, max([*values, 1e-9]) * 1.2)
    _name_bars(axes, [r[0] for r in rows])
    return _svg(figure, title)


@_styled
def drift_bars(rows: Sequence[tuple[str, float, float | None]]) -> Markup:
    """Plot population stability index by column, its limit as a tick; a bar above it is red.

    Args:
        rows: (column, PSI, limit or None), largest first.
    """
    figure, axes = _axes("population stability index", "", height=0.62 + 0.28 * len(rows))
    for y, (_, value, limit) in enumerate(rows):
        over = limit is not None and value > limit
        axes.barh(y, value, color=BAD if over else NEURAL, height=0.62)
        if limit is not None:
            axes.plot([limit, limit], [y - 0.42, y + 0.42], color=INK, linewidth=1.2)
        _annotate(axes, f"{value:.3g}", value, y)
    top = max((max(value, limit or 0.0) for _, value, limit in rows), default=0.0)
    axes.set_xlim(0, max(top, 1e-9) * 1.15)
    _name_bars(axes, [r[0] for r in rows])
    return _svg(figure, "Drift: population stability index by column")


@dataclass(frozen=True)
class RatePoint:
    """A rate of a day; provisional ones may have an expectation of what they become."""

    day: str
    rate: float
    low: float | None = None
    high: float | None = None
    ripe: bool = True
    expected: float | None = None


@_styled
def rate_history(points: Sequence[RatePoint], label: str) -> Markup:
    """Plot a rate by day with its interval.

    Final days as dots, provisional ones hollow, beside what they are to become.
    """
    figure, axes = _axes("", f"rate of {label}")
    places = range(len(points))
    axes.plot(places, [p.rate for p in points], color=NEURAL, linewidth=1.4)
    bounds = [(x, p.low, p.high) for x, p in enumerate(points) if p.low is not None and p.high is not None]
    if bounds:
        axes.vlines([b[0] for b in bounds], [b[1] for b in bounds], [b[2] for b in bounds], color=NEURAL, alpha=0.5)
    for x, point in enumerate(points):
        filled = NEURAL if point.ripe else "none"
        axes.plot(x, point.rate, marker="o", markersize=5, color=NEURAL, markerfacecolor=filled)
        if not point.ripe and point.expected is not None:
            axes.plot(x, point.expected, marker="x", markersize=5, color=BASELINE)
    step = -(-len(points) // 7) or 1
    axes.xaxis.set_major_locator(FixedLocator(list(places[::step])))
    axes.set_xticklabels([points[x].day[5:] for x in places[::step]])
    axes.margins(y=0.15)
    return _svg(figure, f"Rate of {label} by served day")


def _axes(xlabel: str, ylabel: str, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel, color=MUTED)
    axes.set_ylabel(ylabel, color=MUTED)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(color=GRID, labelcolor=INK, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    return figure, axes


def _annotate(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", color=INK)


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Bars at 0, 1, ... get their names, the first on top. By position: two of the same name stay two."""
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    labels = [n if len(n) <= _MAX_NAME else f"{n[: _MAX_NAME - 1]}…" for n in names]
    axes.set_yticks(range(len(names)), labels)
    axes.invert_yaxis()


def _short_number(value: float) -> str:
    """At most about a dozen characters, however large the value: Matplotlib has no room for more beside a bar."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [p[0] for p in points], [p[1] for p in points]


def _thin(points: Sequence[Point]) -> list[Point]:
    """Means of equal runs of points, at most `_MAX_POINTS` of them."""
    size = -(-len(points) // _MAX_POINTS) or 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(p[0] for p in g) / len(g), sum(p[1] for p in g) / len(g)) for g in groups]


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average over about a twentieth of the curve, so that it follows short ones, too.

    Corrected for its start as in Adam (Kingma and Ba, 2015).
    """
    weight = 1 - 1 / max(2.0, len(values) / 20)
    mean, power, smoothed = 0.0, 1.0, []
    for value in values:
        mean, power = weight * mean + (1 - weight) * value, power * weight
        smoothed.append(mean / (1 - power))
    return smoothed


def _svg(figure: Figure, title: str) -> Markup:
    """Return the figure as an `<svg>` element for inlining: page colours, page font, ids unique by title, no date."""
    buffer = io.StringIO()
    # Ids of clip paths and markers are hashes: the salt keeps those of two plots on a page apart.
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Matplotlib's stroke-linejoin rule would hold for the whole page; the page has it once, for its plots.
    text = re.sub(r"<defs>\s*<style type=\"text/css\">.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    # Group ids (figure_1, axes_1, ...) repeat from plot to plot, and nothing refers to them.
    text = re.sub(r' id="[A-Za-z_.0-9]*_\d+"', "", text)
    text = re.sub(r"(font(?:-family)?: ?[^;\"]*?)'DejaVu Sans'[^;\"]*", r"\1inherit", text)
    for sentinel, variable in _VARIABLES.items():
        text = text.replace(sentinel, variable)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", text, count=1)
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1))
