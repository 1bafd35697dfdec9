"""HTML page about a day: one file without references, for a browser, a phone or an attachment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from headrace import __version__
from headrace.quality.report import data, evaluation, outcomes, overview, quality
from headrace.quality.report.blocks import Day, ReportSection

#: The sections of the page, in order; one without blocks is left out. A new one is a function in
#: a module of headrace.quality.report and a line here.
SECTIONS: tuple[Callable[[Day], ReportSection], ...] = (
    overview.warnings_of,
    quality.quality,
    quality.models,
    evaluation.gate,
    evaluation.evaluation,
    quality.comparison,
    overview.history,
    outcomes.outcomes,
    outcomes.experiments,
    quality.learning,
    overview.flow,
    data.data_quality,
    data.drift,
    data.features,
    overview.publication,
    overview.stages,
    overview.cost,
    overview.lineage_of,
    overview.settings,
)


def page(day: Day, written: datetime | None = None) -> str:
    """Return the report of a day as HTML text without any reference to another resource.

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
        sections=[blocks for section in SECTIONS if (blocks := section(day)).blocks],
        version=__version__,
        written=f"{written or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
