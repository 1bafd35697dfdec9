"""Labels that wait for their horizon, and drawn negatives."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Spec, build_spec
from headrace.features.build.plan import first_day
from headrace.features.build.stage import BuildFeatures
from headrace.features.layout.files import seen_until, split_ranges
from headrace.features.table_ops.base import TrainRange
from headrace.features.table_ops.preparation import midnight
from headrace.lake.landing.stage import Ingest
from headrace.stage.manifest import fingerprint
from headrace.udfs.arrow import xxhash64_strings
from tests.arrow_table_ops import by_arrow
from tests.tables_support import (
    DAY,
    NOWHERE,
    ROW_OF_CLICKS,
    START,
    Row,
    as_table,
    assert_same_rows,
    by_identity,
    check_negatives,
    micros,
    number,
    past_of,
    perturbed,
    prepare,
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(ROW_OF_CLICKS, min_size=1, max_size=60),
    st.booleans(),
    st.sampled_from(
        [
            *({"method": "popularity", "alpha": a} for a in (0.25, 0.5, 0.75, 1.0)),
            {"method": "in_batch", "batch": 2},
            {"method": "in_batch", "batch": 8},
        ]
    ),
)
def test_negatives_keep_what_they_promise(rows: list[Row], exclude_seen: bool, drawn: dict[str, Any]) -> None:
    rows = number(rows)
    params = {
        "item": "item",
        "item_columns": ["price", "tags"],
        "user": "user",
        "exclude_seen": exclude_seen,
        "per_positive": 3,
        "tries": 3,
        **drawn,
    }
    range_ = (START + DAY / 2, START + 3 * DAY)
    p = prepare({"negatives": params}, {"trailing": {"keys": ["item"], "windows": [2]}})
    check_negatives(by_arrow(p, as_table(rows), NOWHERE, TrainRange(*map(micros, range_))), rows, params, range_)


def _many(n: int) -> list[Row]:
    """Return rows in which item i happens i + 1 times as often as item 0, all before the first click."""
    impressions = [{"user": 0, "item": f"i{i}", "ts": START, "click": 0} for i in range(5) for _ in range((i + 1) ** 2)]
    return number([*impressions, *({"user": j, "item": "i0", "ts": START + DAY, "click": 1} for j in range(n))])


def test_negatives_are_drawn_as_often_as_their_weights_say() -> None:
    rows, train = _many(4000), TrainRange(micros(START), micros(START + DAY))
    for more, weights in (
        ({"method": "uniform"}, [1, 1, 1, 1]),
        ({"method": "popularity", "alpha": 0.5}, [2, 3, 4, 5]),
        ({"method": "popularity", "alpha": 1.0}, [4, 9, 16, 25]),
    ):
        p = prepare({"negatives": {"item": "item", "per_positive": 2, "tries": 8, **more}})
        result = by_arrow(p, as_table(rows), NOWHERE, train)
        drawn = Counter(r["item"] for r in result.to_pylist() if r["__query"] is not None)
        assert sum(drawn.values()) > 7950
        for i, weight in enumerate(weights, 1):
            # Five standard deviations of a draw of 8,000; the draws are hashes, so this passes always or never.
            share = weight / sum(weights)
            assert abs(drawn[f"i{i}"] / 8000 - share) < 5 * math.sqrt(share * (1 - share) / 8000), (more, drawn)
        assert by_arrow(p, as_table(rows[::-1]), NOWHERE, train).num_rows == result.num_rows


def test_negatives_of_the_batch_are_items_of_its_positives() -> None:
    """Frequencies are those of the batch: all rows where there is one, else the rows whose hash gave the same batch."""
    clicked = [{"user": i, "item": f"i{min(i % 10, 3)}", "ts": START, "click": 1} for i in range(400)]
    later = [{"user": j, "item": "new", "ts": START + DAY, "click": 1} for j in range(2000)]
    impressions = [{"user": 0, "item": "shown", "ts": START, "click": 0}] * 50
    rows, train = number([*clicked, *impressions, *later]), TrainRange(micros(START), micros(START + DAY))
    for batch, batches in ((400, 1), (4, 100)):
        params = {"item": "item", "per_positive": 2, "tries": 8, "method": "in_batch", "batch": batch}
        result = by_arrow(prepare({"negatives": params}), as_table(rows), NOWHERE, train).to_pylist()
        pools: dict[int, Counter[str]] = {}
        for r in rows:
            if r["click"] == 1 and r["ts"] == START:
                pools.setdefault(_batch_of(r["_source_file"], r["_source_line"], batches), Counter())[r["item"]] += 1
        drawn = Counter[str]()
        for r in result:
            if r["__query"] is not None:
                source_file = r["_source_file"].split("#")[0]
                assert r["item"] in pools[_batch_of(source_file, r["_source_line"], batches)]
                drawn[r["item"]] += 1
        if batches == 1:
            assert drawn.keys() == {"i0", "i1", "i2", "i3"}
            for item, weight in pools[0].items():
                share = weight / 400
                assert abs(drawn[item] / 4000 - share) < 5 * math.sqrt(share * (1 - share) / 4000), drawn
        else:
            assert 2000 < sum(drawn.values()) < 4000  # positives whose batch is empty have none


def _batch_of(file: str, line: int, batches: int) -> int:
    return int(xxhash64_strings(pa.array([f"{file}:{line}:batch:0"]))[0]) % batches


def test_negatives_of_another_seed_are_others() -> None:
    rows, train = _many(200), TrainRange(micros(START), micros(START + DAY))
    drawn = []
    for seed in (0, 0, 1):
        p = prepare({"negatives": {"item": "item", "per_positive": 2, "seed": seed}})
        result = by_identity(by_arrow(p, as_table(rows), NOWHERE, train))
        drawn.append([r["item"] for _, r in sorted(result.items()) if r["__query"] is not None])
    assert drawn[0] == drawn[1] != drawn[2]


def test_negatives_before_the_range_ends_do_not_know_what_follows() -> None:
    """Popularity and clicks are those of the training range; nothing after it changes a negative in it."""
    rows = [{"user": i % 7, "item": f"i{i * i % 11}", "ts": START + i * DAY / 8, "click": i % 2} for i in range(60)]
    later_rows = [{**r, "user": 3, "item": "i5", "click": 1} for r in rows]
    end = START + 6 * DAY
    params = {"item": "item", "item_columns": ["price"], "user": "user", "exclude_seen": True, "method": "popularity"}
    p, train = prepare({"negatives": params}), TrainRange(micros(START), micros(end))
    now, then = perturbed(rows, later_rows, end)
    a, b = (past_of(by_arrow(p, as_table(r), NOWHERE, train), end) for r in (now, then))
    assert sum(r["__query"] is not None for r in a.values()) > 20
    assert_same_rows(a, b)


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
