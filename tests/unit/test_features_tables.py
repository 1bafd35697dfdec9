"""Table operators by their Arrow bodies, against loops over all pairs of rows; and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.features.tables.external import Reader
from tests.tables_support import (
    PAST,
    ROWS,
    Row,
    as_table,
    by_identity,
    expected_past,
    number,
    prepare,
    same,
)

NOWHERE = Reader(Path("/nonexistent"))
PROBES = st.lists(st.sampled_from([None, None, None, "asks"]), min_size=40, max_size=40)


@settings(max_examples=150, deadline=None)
@given(ROWS, PROBES)
def test_the_past_is_what_a_loop_over_all_rows_finds(rows: list[Row], probes: list[str | None]) -> None:
    rows = [{**r, "__probe": p} for r, p in zip(number(rows), probes, strict=False)]
    found = by_identity(prepare(*PAST).arrow(as_table(rows, probe=True), NOWHERE))
    wanted = expected_past(rows)
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        for name, value in row.items():
            assert same(found[key][name], value), (key, name, found[key][name], value)
    # Rows are of one session where, and only where, the loop gives them the same user and start.
    groups: dict[Any, set[int]] = {}
    for r in rows:
        f = found[(r["_source_file"], r["_source_line"])]
        if r["user"] is None or r["ts"] is None:
            assert f["session_id"] is None
        else:
            groups.setdefault((r["user"], r["ts"].timestamp() * 1e6 - f["session_age"] * 1e6), set()).add(
                f["session_id"]
            )
    assert all(len(ids) == 1 for ids in groups.values())
    assert len({i for ids in groups.values() for i in ids}) == len(groups)
