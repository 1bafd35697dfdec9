"""Lineage: from a row of the warehouse to the landing files of all days."""

from __future__ import annotations

import pytest

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.quality.report import lineage
from tests.report_support import DS, make_manifests, save


def titles(node: lineage.Node) -> list[str]:
    return [node.title, *(t for child in node.children for t in titles(child))]


def test_lineage_walks_from_the_warehouse_to_the_landing_files_of_all_days(ws: Workspace) -> None:
    yesterday = make_manifests("2026-01-07")
    save(ws, yesterday)
    today = make_manifests(warm=yesterday["train"])
    save(ws, today)
    runs = lineage.load_runs(ws)
    for name in ("clicks_scores", "public.clicks_scores", "lake/clicks/scores", "clicks/scores"):
        manifest, output = lineage.find(runs, name)
        assert manifest.ds == DS
        tree = lineage.trace(runs, manifest, output)
        labels = titles(tree)
        assert tree.title == output.name
        for stage in ("score", "features", "train", "ingest"):
            assert f"{stage} {DS}" in labels
        assert f"landing/clicks/{DS}/part-0003.json.gz" in labels
        # The warm start leads into yesterday.
        assert yesterday["train"].output("model").name in labels
        assert "train 2026-01-07" in labels
        assert "landing/clicks/2026-01-07/part-0000.json.gz" in labels


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("clicks", "train"),
        ("clicks/8", "train"),
        ("clicks-baseline", "baseline"),
        ("clicks-baseline/8", "baseline"),
        ("3c" * 8, "train"),
        ("clicks@" + "3c" * 8, "train"),
        ("2b" * 8, "features"),
        ("lake/clicks/events", "ingest"),
        ("clicks_quarantine", "ingest"),
        ("lake/clicks/published", "publish"),
    ],
)
def test_lineage_finds_tables_models_and_keys(ws: Workspace, name: str, stage: str) -> None:
    save(ws, make_manifests())
    manifest, _ = lineage.find(lineage.load_runs(ws), name)
    assert manifest.stage == stage


def test_lineage_takes_the_day_that_is_asked_for(ws: Workspace) -> None:
    for ds in ("2026-01-07", DS):
        save(ws, make_manifests(ds))
    runs = lineage.load_runs(ws)
    assert lineage.find(runs, "clicks")[0].ds == DS
    assert lineage.find(runs, "clicks", "2026-01-07")[0].ds == "2026-01-07"
    with pytest.raises(UserError, match="nothing has been made on 2026-01-06 yet"):
        lineage.find(runs, "clicks", "2026-01-06")


def test_lineage_of_an_unknown_name_offers_the_nearest(ws: Workspace) -> None:
    save(ws, make_manifests())
    with pytest.raises(UserError, match="did you mean 'lake/clicks/scores'"):
        lineage.find(lineage.load_runs(ws), "lake/clicks/score")
    with pytest.raises(UserError, match="nothing has been made yet"):
        lineage.find({}, "clicks")


def test_lineage_says_where_the_chain_is_broken(ws: Workspace) -> None:
    manifests = make_manifests()
    save(ws, manifests)
    rerun = manifests["features"].model_copy(update={"key": "77" * 8})
    rerun.save(ws.manifest("clicks", DS, "features"))
    ws.manifest("clicks", DS, "ingest").local_path().unlink()
    runs = lineage.load_runs(ws)
    tree = lineage.trace(runs, *lineage.find(runs, "clicks"))

    def warnings(node: lineage.Node) -> list[str]:
        return [f"{node.title}: {node.warning}"] * bool(node.warning) + [w for c in node.children for w in warnings(c)]

    assert warnings(tree) == [
        f"features {DS}: has been run again since with another result",
        f"ingest {DS}: its manifest is gone",
    ]
