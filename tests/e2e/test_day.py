"""A whole day by the command line: what it prints, what it leaves, and what running again changes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.comm.base import LocalCollective
from headrace.config import Warehouse
from headrace.config.load import flow
from headrace.config.stages import STAGES
from headrace.config.workspace import Workspace
from headrace.lake.generate import DayTruth, truth_path
from headrace.models.predictor import read_meta
from headrace.models.saved import read_card, restore
from headrace.models.sharded_model import ShardedModel
from headrace.publish.postgres.server import connect
from headrace.stage.manifest import Manifest
from headrace.storage import local
from tests.support import (
    CLICKS_STAGES,
    DAY,
    NEXT_DAY,
    SMALL,
    Run,
    assert_same,
    everything,
    headrace,
    manifests,
    read_delta,
)
from tests.users_package import model_of

#: A class of the user's in place of the DLRM.
OWN_MODEL = {
    **SMALL,
    **{f"model.{key}": flow(value) for key, value in model_of("user_id", "item_id", "item_tags").items()},
}

#: Tables of the lake with one row for each event, or user and item.
WITH_USERS = ("events", "scores", "published")


@pytest.fixture(scope="module")
def two_days(
    finished_day: tuple[Path, Run], my_package: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Manifest]]]:
    """A copy of the finished day's workspace in which the next day has run too, as far as it is asked about.

    Then both days are trained with a class of the user's, whose scores of the next day are published. Beside the
    workspace, what was made of the next day before that.
    """
    home = tmp_path_factory.mktemp("two") / "home"
    shutil.copytree(finished_day[0], home, ignore=shutil.ignore_patterns("postgres"))

    def run(ds: str, first: str, last: str, settings: Mapping[str, Any]) -> None:
        words = ("--ds", ds, "--until", NEXT_DAY, "--from", first, "--to", last)
        completed = headrace(home, "run", "clicks", *words, settings=settings)
        assert completed.code == 0, completed.output

    try:
        run(NEXT_DAY, "ingest", "train", SMALL)
        earlier_manifests = manifests(home, NEXT_DAY)
        run(DAY, "train", "train", OWN_MODEL)
        run(NEXT_DAY, "score", "publish", OWN_MODEL)  # without XGBoost and the report
        yield home, earlier_manifests
    finally:
        headrace(home, "warehouse", "stop", settings={})


def test_every_stage_is_done_and_shown(finished_day: tuple[Path, Run]) -> None:
    home, run = finished_day
    assert list(manifests(home)) == list(CLICKS_STAGES)
    for word in (*CLICKS_STAGES, "ceiling", "AUC", str(Workspace(home).report("clicks", DAY)), "user_id"):
        assert word in run.output, f"{word!r} is not in:\n{run.output}"


def test_row_counts_equal_the_generators(finished_day: tuple[Path, Run], spark: SparkSession) -> None:
    home, _ = finished_day
    ws = Workspace(home)
    days = ["2026-01-01", "2026-01-02", DAY]
    truths = [DayTruth.load(truth_path(ws.landing("clicks"), ds)) for ds in days]
    events = read_delta(spark, ws.table("clicks", "events"))
    row_counts = events.groupby("ds").size()
    assert row_counts.to_dict() == {t.ds: t.rows for t in truths if t}
    assert not events.duplicated("event_id").any()
    rows = manifests(home)["ingest"].rows
    assert rows["read"] == sum(t.lines for t in truths if t)
    assert rows["read"] == rows["kept"] + rows["quarantined"] + rows["duplicates"]


def test_running_again_changes_nothing(finished_day: tuple[Path, Run], spark: SparkSession) -> None:
    home, _ = finished_day
    manifests_before = {stage: m.model_dump() for stage, m in manifests(home).items()}
    everything_before = everything(spark, home)
    rerun = headrace(home, "run", "clicks", "--ds", DAY)
    assert rerun.code == 0, rerun.output
    assert {stage: m.model_dump() for stage, m in manifests(home).items()} == manifests_before
    assert_same(everything_before, everything(spark, home))


def test_the_next_day_keeps_codes_and_starts_warm(
    finished_day: tuple[Path, Run], two_days: tuple[Path, dict[str, Manifest]], spark: SparkSession
) -> None:
    keys = ["name", "value"]
    old = read_delta(spark, Workspace(finished_day[0]).table("clicks", "vocabulary")).set_index(keys)["code"]
    new = read_delta(spark, Workspace(two_days[0]).table("clicks", "vocabulary")).set_index(keys)["code"]
    assert len(new) > len(old)
    pd.testing.assert_series_equal(new.loc[old.index], old)
    train = two_days[1]["train"].facts
    assert train["warm_start"] == manifests(finished_day[0], DAY)["train"].output("model").name


def test_a_class_of_the_users_trains_starts_warm_and_is_published(
    two_days: tuple[Path, dict[str, Manifest]], spark: SparkSession
) -> None:
    home, earlier = two_days
    retrained = manifests(home, NEXT_DAY)
    first = manifests(home, DAY)["train"]
    assert retrained["train"].facts["warm_start"] == first.output("model").name
    assert (retrained["train"].facts["ranks"], first.facts["warm_start"]) == (2, None)
    assert retrained["train"].facts["metrics"]["auc"] > 0.55
    assert retrained["train"].key != earlier["train"].key
    assert read_meta(local(home / retrained["train"].output("model").name))["kind"] == "my_package.nets:MyNet"
    assert retrained["score"].facts["model"]["version"] == retrained["train"].key
    published = read_delta(spark, Workspace(home).table("clicks", "published"))
    assert set(published["ds"].astype(str)) >= {NEXT_DAY}
    assert not published.duplicated(["ds", "user_id", "rank"]).any()
    newest = published[published["ds"].astype(str) == NEXT_DAY]
    assert set(newest["model_version"]) == {retrained["train"].key}


def test_status_and_lineage(finished_day: tuple[Path, Run]) -> None:
    home, _ = finished_day
    status = headrace(home, "status", "clicks", settings={})
    assert status.code == 0
    assert all(stage in status.output for stage in CLICKS_STAGES)
    lineage = headrace(home, "lineage", "clicks_scores", settings={})
    assert lineage.code == 0, lineage.output
    day_manifests = manifests(home)
    # Where `run --dry-run` says that a stage writes is where it wrote.
    for stage, manifest in day_manifests.items():
        words = {"pipeline": "clicks", "ds": DAY, "key": manifest.key, "scores": "public.clicks_scores"}
        places = [place.format(**words).removesuffix(" in the warehouse") for place in STAGES[stage].writes]
        assert all(o.name.startswith(tuple(places)) for o in manifest.outputs), (stage, manifest.outputs)
    for piece in (day_manifests["train"].key, day_manifests["features"].key, f"landing/clicks/{DAY}"):
        assert piece in lineage.output, f"{piece!r} is not in:\n{lineage.output}"


def test_malformed_commands_exit_with_2(finished_day: tuple[Path, Run]) -> None:
    home, _ = finished_day
    for words, message in [
        (("run", "clikcs", "--ds", DAY), "did you mean 'clicks'"),
        (("run", "clicks", "--ds", "2026-1-3"), "is not a date"),
        (("run", "clicks", "--ds", DAY, "--set", "train.epoch=1"), "did you mean 'epochs'"),
        (("run", "clicks", "--ds", DAY, "--from", "trian"), "train"),
        (("run", "clicks", "--ds", "2030-01-01"), "landing/clicks/2030-01-01"),
    ]:
        run = headrace(home, *words)
        assert run.code == 2, f"{words}: {run.output}"
        assert message in run.output
        assert "Traceback" not in run.output


def test_persons_are_forgotten_in_all_that_two_days_left(
    two_days: tuple[Path, dict[str, Manifest]], spark: SparkSession, tmp_path: Path
) -> None:
    """Look for persons by other means than the command's: every Parquet file, the logs, the models, PostgreSQL.

    This is the last test of this workspace.
    """
    home, _ = two_days
    ws = Workspace(home)
    events = read_delta(spark, ws.table("clicks", "events"))
    logged_users = [
        int(match.group(1))
        for raw in read_delta(spark, ws.table("clicks", "quarantine"))["_raw"]
        if (match := re.search(r'"?user_id"?\W+(\d+)', raw))
    ]
    users, served = events["user_id"], published(home)
    logged_users = [user for user in logged_users if user in {row[1] for row in served}]
    # The bounds of files' statistics have the first two; the third has most rows; the fourth has bad rows, too.
    forgotten = sorted({int(users.min()), int(users.max()), int(users.value_counts().index[0]), *logged_users[:1]})
    tables_before = {name: read_delta(spark, ws.table("clicks", name)) for name in WITH_USERS}
    codes = read_delta(spark, ws.table("clicks", "vocabulary"), "name", "code")
    forgotten_codes = codes[(codes["name"] == "user_id") & codes["value"].isin(map(str, forgotten))]["code"].tolist()
    assert len(forgotten_codes) >= 2
    models = {folder: embeddings(folder) for folder in models_of(home)}
    assert {ds.name for ds in (home / "models" / "clicks").iterdir()} == {DAY, NEXT_DAY}
    assert {row[1] for row in served} >= {*forgotten}
    assert with_users(home, forgotten)

    values = tmp_path / "persons.txt"
    values.write_text("".join(f"{user}\n" for user in forgotten))
    words = ("forget", "clicks", "--column", "user_id", "--values", str(values), "--delete")
    completed = headrace(home, *words)
    assert completed.code == 0, completed.output

    assert with_users(home, forgotten) == []
    for name, rows in tables_before.items():
        remaining = rows[~rows["user_id"].isin(forgotten)].reset_index(drop=True)
        assert len(remaining) < len(rows)
        pd.testing.assert_frame_equal(read_delta(spark, ws.table("clicks", name)), remaining, obj=name)
    bad = read_delta(spark, ws.table("clicks", "quarantine"))
    assert not [raw for raw in bad["_raw"] if {*re.findall(r"\d+", raw)} & {*map(str, forgotten)}]
    vocabulary = read_delta(spark, ws.table("clicks", "vocabulary"), "name", "code")
    assert vocabulary["code"].tolist() == codes["code"].tolist()
    changed = vocabulary[vocabulary["value"] != codes["value"]]
    assert (set(changed["name"]), changed["code"].tolist()) == ({"user_id"}, forgotten_codes)
    assert published(home) == [row for row in served if row[1] not in forgotten]
    for folder, tables in models.items():
        changed_rows = 0
        for old, new in zip(tables, embeddings(folder), strict=True):
            differ = np.flatnonzero((old != new).any(axis=1)).tolist()
            assert {*differ} <= {*forgotten_codes}, folder
            assert not new[differ].any()
            changed_rows += len(differ)
        assert changed_rows, folder
    assert not any(f.is_file() for f in (home / "datasets" / "clicks").rglob("*"))
    (proof,) = (home / "forgotten" / "clicks").glob("*/proof.json")
    (run_record,) = json.loads(proof.read_text())["runs"]
    assert (run_record["second_look"], run_record["search"]["found"]) == ([], [])
    assert {"events", "quarantine", "vocabulary", "warehouse", "model", "dataset"} <= {
        p["kind"] for p in run_record["places"]
    }


def with_users(home: Path, users: list[int]) -> list[str]:
    """Files that have one of the users: rows of Parquet files, bounds in logs of Delta tables. Landing files are left
    out, which are not the pipeline's.
    """
    paths = []
    for file in sorted(home.rglob("*.parquet")):
        if "landing" not in file.parts and "user_id" in pq.read_schema(file).names:
            column = pq.ParquetFile(file).read(columns=["user_id"])["user_id"]
            if "datasets" not in file.parts and pc.any(pc.is_in(column, pa.array(users, column.type))).as_py():
                paths.append(str(file))
    for file in sorted(home.glob("lake/clicks/*/_delta_log/*.json")):
        for line in file.read_text().splitlines():
            action = json.loads(line)
            stats = json.loads((action.get("add") or action.get("remove") or {}).get("stats") or "{}")
            bounds = {stats.get(bound, {}).get("user_id") for bound in ("minValues", "maxValues")}
            if bounds & {*users}:
                paths.append(str(file))
    return paths


def models_of(home: Path) -> list[Path]:
    """Saved models with embeddings."""
    return sorted(f.parent.parent for f in home.glob("models/clicks/*/*/model/embeddings/index.json"))


def embeddings(folder: Path) -> list[Any]:
    """Each table of a saved model, all rows."""
    card = read_card(local(folder))
    model = ShardedModel(card.dataset_schema, card.model, LocalCollective(), 1)
    restore(model, local(folder), with_optimizer=False)
    return [weights.detach().numpy().copy() for weights in model.embeddings.weights]


def published(home: Path) -> list[Any]:
    with connect(Warehouse(), Workspace(home)) as db:
        columns = "ds::text, user_id, item_id, rank, score"
        return db.execute(f"SELECT {columns} FROM clicks_scores ORDER BY ds, user_id, rank").fetchall()
