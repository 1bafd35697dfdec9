"""Plots of the report: well-formed, in the colours of the page, of numbers and names of any size."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from headrace.quality.report import plots


def test_names_that_the_plots_font_has_not_stay_text() -> None:
    assert "売上\U0004f675" in plots.tree_curve([], [(1.0, 0.5), (2.0, 0.6)], "売上\U0004f675")


@pytest.mark.parametrize("value", [-2.3e106, 1e300, 1e-300, 1e12])
def test_numbers_and_names_of_any_size_leave_room_for_the_bars(value: float) -> None:
    for svg in (
        plots.auc_bars([("neural", value, plots.NEURAL), ("ceiling", 0.5, plots.CEILING)]),
        plots.value_bars([("a", value), ("b" * 300, 1.0)], "seconds", "Stages"),
        plots.drift_bars([("a", value, None), ("b" * 300, 1.0, value)]),
        plots.intervals([("a", value, value, value, plots.NEURAL), ("b" * 300, 1, 0, 2, plots.NEURAL)], "AUC", "S"),
        plots.daily([("a", [("2026-01-01", value), ("2026-01-02", 1.0)], plots.NEURAL)], "AUC", "D"),
    ):
        ElementTree.fromstring(str(svg))
        assert "0" * 20 not in svg


def test_plots_are_wellformed_and_take_their_colours_from_the_page() -> None:
    svg = plots.loss_curve([(float(i), 1.0 / (1 + i)) for i in range(5000)], [(10.0, 0.5)], 0.6)
    ElementTree.fromstring(str(svg))
    assert not re.findall(r"#[0-9a-f]{6}\b", svg)
    assert "var(--neural)" in svg
    assert "var(--baseline)" in svg
    assert len(svg) < 60_000, "5,000 points are averaged down"
    assert svg == plots.loss_curve([(float(i), 1.0 / (1 + i)) for i in range(5000)], [(10.0, 0.5)], 0.6)


def test_the_smoothed_curve_of_a_constant_is_that_constant() -> None:
    assert plots._smooth([0.7] * 50) == pytest.approx([0.7] * 50)
