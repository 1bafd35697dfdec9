"""`features.append` without data: refusals, and the day on which it builds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Spec, build_spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.build.append import AppendPlan, BaseDataset, DatasetDay, base_input, link_kept, merge
from headrace.features.build.plan import checked_workflow
from headrace.features.build.stage import BuildFeatures
from headrace.features.layout.files import ColumnCounts, DatasetFile, TimeRule, WrittenDataset, day_number
from headrace.features.table_ops.preparation import row_preparation, spark_alone
from headrace.stage import Context
from headrace.stage.manifest import Manifest, Output, fingerprint
from headrace.storage import local


def clicks(append: Any = True, workflow: tuple[Any, ...] = (), **features: Any) -> Spec:
    data = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
    data["features"]["workflow"] += workflow
    data["features"] |= {"append": append} | features
    return build_spec(data)


def test_spellings() -> None:
    assert clicks(True).features.append == clicks({}).features.append
    assert clicks(True).features.append != clicks({"rebase_days": 7}).features.append
    assert clicks(False).features == clicks(None).features


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"split": {"by": "position"}}, "append does not go with split by position"),
        ({"engine": "spark"}, "append does not go with engine: spark"),
        (
            {"prepare": [{"filter": {"where": "hour > 1"}}, {"sessions": {"keys": ["user_id"]}}]},
            "does not go with prepare",
        ),
        ({"append": {"rebase_days": 0}}, "features.append.rebase_days"),
        ({"append": {"rebase": 1}}, "features.append.rebase"),
    ],
)
def test_what_does_not_go_with_it(features: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        clicks(**{"append": True, **features})


def test_operators_on_a_row_alone_go_with_it() -> None:
    steps: list[dict[str, Any]] = [
        {"filter": {"where": "hour > 1"}},
        {"dropna": {"subset": ["user_age"]}},
        {"lambda": {"add": {"late": {"expression": "hour > 20", "type": "int"}}}},
        {"rename": {"to": {"late": "at_night"}}},
    ]
    assert spark_alone(clicks(True, prepare=steps)) is None
    rows = row_preparation(clicks(True, prepare=steps))
    assert rows is not None
    assert set(rows.inputs(["at_night", "device"])) == {"hour", "user_age", "device"}
    steps[2] = {"lambda": {"add": {"late": {"expression": "length(device) > 3", "type": "int"}}}}
    assert spark_alone(clicks(True, prepare=steps)) == "features.prepare[2] (lambda)"
    assert row_preparation(clicks(True, prepare=steps)) is None


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ({"columns": ["user_country"], "ops": [{"target_encoding": {}}]}, r"\(target_encoding\): gives rows"),
        (
            {
                "columns": ["item_tags"],
                "ops": [
                    "categorify",
                    {"drop_low_cardinality": {"min_cardinality": 3}},
                    {"rename": {"suffix": "_2"}},
                    {"pad": {"length": 2}},
                ],
            },
            "drop_low",
        ),
    ],
)
def test_operators_whose_old_files_would_be_wrong(chain: dict[str, Any], message: str) -> None:
    data = [c.model_dump(mode="json") for c in clicks().features.workflow if "item_tags" not in c.columns]
    spec = load_spec("clicks").model_dump(mode="json", by_alias=True, exclude_none=True)
    spec["features"] |= {"workflow": [*data, chain], "append": True}
    checked_workflow(clicks())
    with pytest.raises(UserError, match=message):
        checked_workflow(build_spec(spec))


DAY = "2026-01-05"


@pytest.mark.parametrize(
    ("change", "ds", "facts", "is_base"),
    [
        ({}, "2026-01-06", {}, True),
        ({}, "2026-01-07", {}, False),  # not yesterday's
        ({}, "2026-01-06", {"learned": "2025-12-31"}, True),
        ({}, "2026-01-06", {"learned": "2025-12-30"}, False),  # as old as rebase_days
        ({}, "2026-01-06", {"version": 1}, False),  # an older stage's files
        ({"append": {"rebase_days": 7, "generation": 1}}, "2026-01-06", {}, False),
        ({"window_days": 9}, "2026-01-06", {}, False),
    ],
)
def test_which_day_is_built_upon(
    tmp_path: Path, change: dict[str, Any], ds: str, facts: dict[str, Any], is_base: bool
) -> None:
    stage, ws, then = BuildFeatures(), Workspace(tmp_path), clicks({"rebase_days": 7})
    now = clicks(**{"append": {"rebase_days": 7}, **change})
    assert base_input(Context(now, ws, ds), stage.spec_part(now), stage.version) is None
    Manifest(
        stage="features",
        pipeline="clicks",
        ds=DAY,
        key="k",
        spec_hash=fingerprint(stage.spec_part(then)),
        outputs=(Output(kind="dataset", name="datasets/clicks/k", version="k"),),
        facts={"append": {"version": stage.version, "learned": DAY} | facts},
    ).save(ws.manifest("clicks", DAY, "features"))
    base = base_input(Context(now, ws, ds), stage.spec_part(now), stage.version)
    assert (
        base is not None and (base.kind, base.name, base.version) == ("dataset", "datasets/clicks/k", "k")
    ) == is_base
    plain = clicks(None)
    assert base_input(Context(plain, ws, ds), stage.spec_part(plain), stage.version) is None


@pytest.mark.parametrize("links", [True, False])
def test_files_move_with_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """A day that was tested validates, one that validated trains; where there are no links, files are copied."""
    old, new = tmp_path / "old", tmp_path / "new"
    days = {}
    for split, day in (
        ("train", "2026-01-04"),
        ("valid", "2026-01-05"),
        ("test", "2026-01-06"),
        ("test", "2026-01-07"),
    ):
        name = f"{split}/day-{day}-part-00000-000.parquet"
        (old / split).mkdir(parents=True, exist_ok=True)
        (old / name).write_text(day)
        days[day] = DatasetDay("x", (DatasetFile(name, 5, 1, 10),), {"a": ColumnCounts(missing=2, coded=3)})

    def refused(*_: Any) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    plan = AppendPlan(BaseDataset(local(old), DAY, days), {}, days, [], None)  # type: ignore[arg-type]  # nothing is read of the lake
    rule = TimeRule("t", *(day_number(f"2026-01-{d:02d}") for d in (4, 6, 7, 7)))
    linked = link_kept(plan, local(new), rule)
    assert {f.name for f in linked.files} == {
        "train/day-2026-01-04-part-00000-000.parquet",
        "train/day-2026-01-05-part-00000-000.parquet",
        "valid/day-2026-01-06-part-00000-000.parquet",
        "test/day-2026-01-07-part-00000-000.parquet",
    }
    for file in linked.files:
        day = file.name.split("day-")[1][:10]
        assert (new / file.name).read_text() == day
        assert ((new / file.name).stat().st_ino == (old / days[day].files[0].name).stat().st_ino) == links
    counts = {"a": ColumnCounts(2, 0, 3)}
    assert linked.counts == {"train": {"a": ColumnCounts(4, 0, 6)}, "valid": counts, "test": counts}
    both = merge(linked, WrittenDataset([DatasetFile("valid/b", 1, 1, 1)], {"valid": {"a": ColumnCounts(missing=1)}}))
    assert both.counts["valid"]["a"] == ColumnCounts(3, 0, 3)
    assert linked.counts["valid"]["a"] == ColumnCounts(2, 0, 3)
    assert [f.name for f in both.files] == sorted(f.name for f in both.files)
