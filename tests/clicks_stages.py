"""The stages of the pipeline that most tests run."""

from __future__ import annotations

from headrace.config import load_spec
from headrace.stages import ORDER, STAGES

#: In the day's order.
CLICKS_STAGES = tuple(name for name in ORDER if STAGES[name].applies(load_spec("clicks")))
