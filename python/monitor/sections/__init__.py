"""The sections of the report, each from the facts that are there; a section about a stage that did not run says so."""

from headrace.monitor.sections.data import data_quality, features
from headrace.monitor.sections.day import Day
from headrace.monitor.sections.drift import drift
from headrace.monitor.sections.overview import cards, chips, cost, flow, stages
from headrace.monitor.sections.publication import lineage_of, publication, settings
from headrace.monitor.sections.quality import learning, quality

__all__ = [
    "Day",
    "cards",
    "chips",
    "cost",
    "data_quality",
    "drift",
    "features",
    "flow",
    "learning",
    "lineage_of",
    "publication",
    "quality",
    "settings",
    "stages",
]
