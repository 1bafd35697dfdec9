"""A pipeline over a small shop's events, as several tests take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import Spec, build_spec


def shop_spec(types: Mapping[str, str], features: Mapping[str, Any], **sections: Any) -> Spec:
    """Clicks by their time `ts`; the last day of the window is `valid`.

    Args:
        types: of the events' columns.
        features: what the section has besides label and split.
        sections: the spec's others.
    """
    return build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "jsonl", "path": "{ds}/*"},
            "table": {"columns": [{"name": k, "type": v} for k, v in types.items()], "event_time": "ts"},
            "features": {"label": "click", "split": {"by": "time", "valid_days": 1}, **features},
            **sections,
        }
    )
