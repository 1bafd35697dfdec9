"""A package of somebody else's that adds a warehouse and a format: its rows in the lake, its table after `publish`."""

from __future__ import annotations

import ast
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import RefusedError, UserError
from headrace.publish import target as contract
from headrace.publish.audit import Limits, day_checks
from headrace.publish.opening import open_target
from headrace.publish.stage import Publish
from headrace.publish.target import beyond_retention
from headrace.stage import Outcome, run_stage
from headrace.stage.manifest import Manifest, Output
from headrace.storage import LeaseLost
from tests.ingest_support import D1, make_spec, put, run, table
from tests.publish_support import holding
from tests.users_package import installed
from tests.warehouses import COLUMNS, SCHEMA, same, scores

DS, NEXT = "2026-01-10", "2026-01-11"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed(tmp_path / "site", monkeypatch):
        yield


@pytest.mark.parametrize("with_size", [False, True])
def test_a_format_of_a_package_is_read(spark: SparkSession, tmp_path: Path, with_size: bool) -> None:
    columns = [
        {"name": "id", "type": "string", "required": True},
        {"name": "hour", "type": "int"},
        {"name": "price", "type": "double"},
    ]
    if with_size:
        columns.append({"name": "size", "type": "smallint"})
    source = {"format": "acme_pipes", "path": "in/{ds}/*.pipes"}
    spec = make_spec(source, columns=columns, event_time=None)
    ws, more = Workspace(tmp_path / "home"), "|7" if with_size else ""
    lines = [f"e{i}|{i % 24}|{i / 4}{more}" for i in range(50)] + [f'"q"||{more}', f"e50|x|1{more}", "e51|1|1|2|3|4"]
    put(ws, f"in/{D1}/a.pipes", "".join(f"{line}\n" for line in lines).encode())
    outcome = run(spec, ws, D1)
    rows = [{name: row[name] for name in ("id", "hour", "price")} for row in table(spark, ws, "events")]
    expected = [{"id": f"e{i}", "hour": i % 24, "price": i / 4} for i in range(50)]
    assert rows == [*expected, {"id": '"q"', "hour": None, "price": None}]
    assert outcome.manifest.rows["quarantined"] == 2
    assert [row["_source_line"] for row in table(spark, ws, "quarantine")] == [52, 53]


def spec_of(path: Path, *more: str, kind: str = "acme_ledger") -> Spec:
    warehouse = [f"publish.warehouse.kind={kind}", f"publish.warehouse.path={path}"]
    return load_spec("clicks", ["score.top_k=4", *warehouse, *more])


def land(spark: SparkSession, ws: Workspace, frame: pd.DataFrame, ds: str) -> None:
    """Leave what the stage `score` leaves."""
    place = ws.table("clicks", "scores")
    df = spark.createDataFrame(frame, SCHEMA.format(user="bigint", item="bigint"))
    df.write.format("delta").mode("append").partitionBy("ds").save(str(place))
    version = max(int(f.stem) for f in (place.local_path() / "_delta_log").glob("*.json"))
    output = Output(kind="delta", name="lake/clicks/scores", version=str(version), rows=len(frame))
    rows = {"scores": len(frame)}
    manifest = Manifest(stage="score", pipeline="clicks", ds=ds, key=f"s{version}", spec_hash="x", rows=rows)
    manifest.model_copy(update={"outputs": (output,)}).save(ws.manifest("clicks", ds, "score"))


def stored(path: Path, relation: str = "clicks_scores") -> pd.DataFrame:
    """The rows of a table, read by SQLite alone."""
    with closing(sqlite3.connect(path)) as db:
        return pd.read_sql(f"SELECT * FROM {relation}", db).astype({"rank": "int32", "score": "float32"})


def publish(spec: Spec, ws: Workspace, ds: str) -> Outcome:
    return run_stage(Publish(), spec, ws, ds)


def test_a_warehouse_of_a_package_is_published_to(spark: SparkSession, tmp_path: Path) -> None:
    ws, path = Workspace(tmp_path / "home"), tmp_path / "ledger.db"
    spec = spec_of(path, "publish.retain_days=1")
    first, second = scores(20), scores(21, 5, NEXT)
    land(spark, ws, first, DS)
    manifest = publish(spec, ws, DS).manifest
    same(stored(path), first)
    assert manifest.output("acme_ledger") == Output(
        kind="acme_ledger", name="clicks_scores", version=manifest.key, rows=80
    )
    assert len(manifest.facts["sample"]) == 10
    assert publish(spec, ws, DS).skipped
    # The same as `module:Class` has other settings, and other rows are refused by the audit, and kept for a look.
    land(spark, ws, second.assign(score=2.0), NEXT)
    by_class = spec_of(path, "publish.retain_days=1", kind="acme.kinds:Ledger")
    with pytest.raises(RefusedError, match=f"The rows are in clicks_scores_staging_{NEXT}, to look at"):
        publish(by_class, ws, NEXT)
    same(stored(path), first)
    with open_target(by_class, ws) as target:
        assert target.drop_kept() == [f"clicks_scores_staging_{NEXT}"]
        assert target.kept_labels() == []


def test_the_example_of_the_contract_runs(spark: SparkSession, tmp_path: Path) -> None:
    """The example in the docstring of `headrace.publish.target` is executed, with the package's warehouse."""
    text = ast.get_docstring(ast.parse(Path(contract.__file__).read_text())) or ""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    with open_target("))
    end = next(i for i, line in enumerate(lines) if i > start and line and not line.startswith("    "))
    code = compile(dedent("\n".join(lines[start:end])), "headrace.publish.target", "exec")
    path, ws = tmp_path / "ledger.db", Workspace(tmp_path / "home")
    limits = Limits(
        "user_id", "item_id", required=tuple(COLUMNS), expected_rows=80, min_rows=1, top_k=4, max_row_change=None
    )
    days = {DS: scores(20), NEXT: scores(20, 5, NEXT)}
    for ds, frame in days.items():
        names: dict[str, Any] = {
            "df": spark.createDataFrame(frame, SCHEMA.format(user="bigint", item="bigint")),
            "spec": spec_of(path, "publish.retain_days=1"),
            "ws": ws,
            "lock": None,
            "ds": ds,
            "key": f"k{ds}",
            "source": "lake/clicks/scores@1",
            "limits": limits,
            "open_target": open_target,
            "day_checks": day_checks,
            "beyond_retention": beyond_retention,
        }
        exec(code, names)
        same(stored(path), frame)
    same(stored(path, "clicks_scores_current"), days[NEXT])


def test_a_warehouse_of_a_package_holds_to_the_contract(spark: SparkSession, tmp_path: Path) -> None:
    path, ws = tmp_path / "ledger.db", Workspace(tmp_path / "home")
    spec, frame = spec_of(path), scores(10)
    df = spark.createDataFrame(frame, SCHEMA.format(user="bigint", item="bigint"))
    with open_target(spec, ws) as target, pytest.raises(UserError, match="there is no table clicks_scores yet"):
        target.sample(DS, 1)
    with open_target(spec, ws, holding(1)) as target:
        target.create(df.dtypes)
        with target.stage(df, DS, "k") as staged:
            target.swap(staged, "s", [])
        assert (target.days(), target.count(DS), target.missing(DS, "k")) == ([DS], 40, None)
        assert target.missing(DS, "other") == "clicks_scores holds another run's rows for 2026-01-10"
        assert target.missing(NEXT, "k") == "clicks_scores has no publication for 2026-01-11"
        erased = [int(user) for user in frame["user_id"].unique()[:3]]
        assert target.rows_with("user_id", erased) == {DS: 12}
        assert target.erase("user_id", erased) == ""
        assert (target.count(DS), target.missing(DS, "k"), target.leftovers("user_id", erased)) == (28, None, 0)
        same(stored(path), frame[~frame["user_id"].isin(erased)])
        with pytest.raises(UserError, match="has no roles"):
            target.grant({"select": ["analyst"]})
        # A later holder of the lease has been at work: nothing changes any more.
        with open_target(spec, ws, holding(2)) as later:
            later.claim()
        with target.stage(df, DS, "k2") as staged, pytest.raises(LeaseLost):
            target.swap(staged, "s", [])
        with pytest.raises(LeaseLost):
            target.drop_days([DS])
        assert (target.days(), target.count(DS)) == ([DS], 28)
