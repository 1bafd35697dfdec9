"""The page about a day: one HTML file with everything in it, for a browser, a phone or an attachment."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from headrace import __version__
from headrace.monitor import sections
from headrace.monitor.sections import Day

__all__ = ["Day", "page"]


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
    parts = [
        sections.quality(day),
        sections.learning(day),
        sections.flow(day),
        sections.data_quality(day),
        sections.drift(day),
        sections.features(day),
        sections.publication(day),
        sections.stages(day),
        sections.cost(day),
        sections.lineage_of(day),
        sections.settings(day),
    ]
    return environment.get_template("report.html.j2").render(
        pipeline=day.spec.pipeline,
        description=day.spec.description,
        ds=day.ds,
        chips=sections.chips(day),
        cards=sections.cards(day),
        sections=parts,
        version=__version__,
        written=f"{written or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
