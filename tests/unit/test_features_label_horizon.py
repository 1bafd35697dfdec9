"""Last day of a dataset whose labels come from another source."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import Spec, build_spec
from headrace.features.build.plan import first_day
from headrace.features.build.stage import BuildFeatures
from headrace.features.layout.split_rule import seen_until, split_ranges
from headrace.features.table_ops.preparation import midnight
from headrace.lake.landing.stage import Ingest
from headrace.manifest import fingerprint


def shop_spec(timezone: str = "UTC", path: str = "{ds}/clicks", **label: Any) -> Spec:
    columns = [{"name": "id", "type": "bigint"}, {"name": "at", "type": "timestamp"}]
    table = {"columns": columns, "event_time": "at"}
    return build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "jsonl", "path": "{ds}/shown"},
            "table": table,
            "sources": {"clicks": {"source": {"format": "jsonl", "path": path, "timezone": timezone}, "table": table}},
            "features": {
                "label": "clicked",
                "window_days": 3,
                "split": {"by": "time"},
                "prepare": [{"attribution": {"from": "clicks", "keys": ["id"], "add": "clicked", **label}}],
                "workflow": [{"columns": ["id"], "ops": ["raw_id"]}],
            },
        }
    )


@pytest.mark.parametrize(
    ("spec", "valid", "until"),
    [
        # Ends within the last day: that day is valid, without its last half hour.
        (shop_spec(within="30 minutes"), "2026-01-20", midnight("2026-01-21")),
        (shop_spec(within="1 day"), "2026-01-19", midnight("2026-01-21")),
        (shop_spec(within="7 days"), "2026-01-13", midnight("2026-01-21")),
        (shop_spec(within="7 days", wait="1 day"), "2026-01-12", midnight("2026-01-21")),
        # The day of the clicks ends nine hours before UTC's, or five after it.
        (shop_spec("Asia/Tokyo", within="14 hours"), "2026-01-20", midnight("2026-01-21") - 9 * 3_600_000_000),
        (shop_spec("Asia/Tokyo", within="15 hours"), "2026-01-19", midnight("2026-01-21") - 9 * 3_600_000_000),
        (shop_spec("America/New_York", within="1 hour"), "2026-01-20", midnight("2026-01-21")),
        # Of a snapshot, its newest row says how far it goes.
        (shop_spec(path="clicks", within="7 days"), "2026-01-13", None),
    ],
)
def test_the_ranges_end_when_labels_are_known(spec: Spec, valid: str, until: int | None) -> None:
    train, validation = split_ranges(spec, "2026-01-20")
    assert validation == (valid, valid)
    assert train[1] < valid
    assert seen_until(spec, "2026-01-20") == until
    assert first_day(spec, "2026-01-20") == train[0]


def test_first_touch_looks_back() -> None:
    spec = shop_spec(within="7 days", credit="first")
    assert split_ranges(spec, "2026-01-20")[0][0] == "2026-01-10"
    assert first_day(spec, "2026-01-20") == "2026-01-03"


def test_a_pipeline_of_one_source_is_what_it_was() -> None:
    """Another fingerprint, and everything would be made again."""
    spec = shop_spec(within="1 day")
    plain = spec.model_copy(update={"sources": {}, "features": spec.features.model_copy(update={"prepare": ()})})
    assert set(Ingest().spec_part(plain)) == {"source", "table"}
    assert set(BuildFeatures().spec_part(plain)) == {"features", "columns", "event_time", "daily"}
    assert fingerprint(Ingest().spec_part(plain)) != fingerprint(Ingest().spec_part(spec))
    assert set(BuildFeatures().spec_part(spec)["sources"]) == {"clicks"}
