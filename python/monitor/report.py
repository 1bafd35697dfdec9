"""The page about a day: one HTML file with everything in it, for a browser, a phone or an attachment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from headrace import __version__
from headrace.monitor.blocks import Section
from headrace.monitor.sections import (
    comparison,
    cost,
    data,
    drift,
    evaluation,
    experiments,
    gate,
    history,
    models,
    outcomes,
    overview,
    publication,
    quality,
)
from headrace.monitor.sections.day import Day

#: The sections of the page, in order; one without blocks is left out. A new one is a function in
#: headrace.monitor.sections and a line here.
SECTIONS: tuple[Callable[[Day], Section], ...] = (
    quality.quality,
    models.models,
    gate.gate,
    evaluation.evaluation,
    comparison.comparison,
    history.history,
    outcomes.outcomes,
    experiments.experiments,
    quality.learning,
    overview.flow,
    data.data_quality,
    drift.drift,
    data.features,
    publication.publication,
    overview.stages,
    cost.cost,
    publication.lineage_of,
    publication.settings,
)


def page(day: Day, written: datetime | None = None) -> str:
    """The report of a day as HTML text without any reference to another resource.

    Args:
        day: the spec and whatever manifests there are; what is missing is shown as not run.
        written: the time that the page states, UTC; default: now.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        pipeline=day.spec.pipeline,
        description=day.spec.description,
        ds=day.ds,
        chips=overview.chips(day),
        cards=overview.cards(day),
        sections=[found for section in SECTIONS if (found := section(day)).blocks],
        version=__version__,
        written=f"{written or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
