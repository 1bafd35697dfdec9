"""Named sources: each is loaded as the main one would be, and a run that dies between two of them heals."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.landing import load
from headrace.quality.report import lineage
from headrace.stage.manifest import Manifest
from tests.ingest_support import D1, D2, jsonl, put, run, table

MAIN = {
    "source": {"format": "jsonl", "path": "in/shown/{ds}/*"},
    "table": {
        "columns": [
            {"name": "id", "type": "bigint", "required": True},
            {"name": "user", "type": "bigint"},
            {"name": "ts", "type": "timestamp"},
        ],
        "keys": ["id"],
        "event_time": "ts",
        "expectations": {"max_bad_rate": 1},
    },
}
PURCHASES = {
    "source": {"format": "jsonl", "path": "in/purchases/{ds}/*.gz", "timezone": "Asia/Tokyo"},
    "table": {
        "columns": [
            {"name": "user", "type": "bigint", "required": True},
            {"name": "amount", "type": "double"},
            {"name": "at", "type": "timestamp", "required": True},
        ],
        "keys": ["user", "at"],
        "event_time": "at",
        "expectations": {"max_bad_rate": 0.5},
    },
}
USERS = {
    "source": {"format": "csv", "path": "in/users.csv"},
    "table": {"columns": [{"name": "user", "type": "bigint"}, {"name": "country"}]},
}


def make_spec(pipeline: str = "shop", main: dict[str, Any] = MAIN, **sources: Any) -> Spec:
    label = main["table"]["columns"][0]["name"]
    features = {"label": label, "workflow": [], "split": {"by": "position"}}
    return build_spec({"pipeline": pipeline, **main, "sources": sources, "features": features})


def deliver(ws: Workspace) -> None:
    for ds in (D1, D2):
        impressions = [{"id": n, "user": n % 3, "ts": f"{ds}T10:00:00Z"} for n in (1, 2, 2, 3 if ds == D1 else 4)]
        put(ws, f"in/shown/{ds}/a.json", jsonl([*impressions, "bad"]))
        bought = [{"user": n, "amount": n / 2, "at": f"{ds}T0{n}:00:00"} for n in (1, 2, 3)]
        put(ws, f"in/purchases/{ds}/a.json.gz", jsonl([*bought, bought[0], {"user": None}]))
    put(ws, "in/users.csv", b"user,country\n1,de\n2,\n")


def test_a_named_source_becomes_what_it_would_as_the_main_one(spark: SparkSession, ws: Workspace) -> None:
    deliver(ws)
    two_sources = make_spec(purchases=PURCHASES, users=USERS)
    manifest = run(two_sources, ws, D2).manifest
    assert run(two_sources, ws, D2).skipped
    outputs = {o.name: o for o in manifest.outputs}
    for name, declared in (("purchases", PURCHASES), ("users", USERS)):
        single_manifest = run(make_spec(f"only_{name}", declared), ws, D2).manifest
        for named_table, main_table in ((name, "events"), (f"{name}_quarantine", "quarantine")):
            expected = spark.read.format("delta").load(str(ws.table(f"only_{name}", main_table))).collect()
            assert sorted(map(str, table(spark, ws, named_table))) == sorted(str(r.asDict()) for r in expected)
            of_alone = next(o for o in single_manifest.outputs if o.name == f"lake/only_{name}/{main_table}")
            named_output = outputs[f"lake/shop/{named_table}"]
            assert (named_output.kind, named_output.version, named_output.rows) == (
                of_alone.kind,
                of_alone.version,
                of_alone.rows,
            )
        assert {
            k.partition(".")[2]: n for k, n in manifest.rows.items() if k.startswith(f"{name}.")
        } == single_manifest.rows
        assert manifest.facts["sources"][name] == single_manifest.facts
        landed = {i.name.replace("only_", "shop/"): i.version for i in single_manifest.inputs}
        assert {i.name: i.version for i in manifest.inputs if f"/{name}/" in i.name} == landed
    assert len(table(spark, ws, "purchases")) == 6
    assert (manifest.rows["kept"], manifest.rows["purchases.kept"], manifest.rows["users.kept"]) == (4, 6, 2)
    # The main source's part is that of a pipeline without others.
    plain = run(make_spec("plain"), ws, D2).manifest
    assert plain.rows == {k: n for k, n in manifest.rows.items() if "." not in k}
    assert plain.facts == {k: v for k, v in manifest.facts.items() if k != "sources"}
    producing_run, output = lineage.find(lineage.load_runs(ws), "lake/shop/purchases")
    assert (producing_run.stage, output.name) == ("ingest", "lake/shop/purchases")

    # Another file of one source: that one is loaded again, the others are as they were.
    put(ws, f"in/purchases/{D1}/b.json.gz", jsonl([{"user": 9, "amount": 1, "at": f"{D1}T09:00:00"}]))
    more = run(two_sources, ws, D2).manifest
    changed = {o.name for o in more.outputs if o.version != outputs[o.name].version}
    assert changed == {"lake/shop/purchases", "lake/shop/purchases_quarantine"}
    # A day that breaks its source's expectations names the source; rows that others take away are told of it.
    put(ws, f"in/purchases/{D2}/c.json.gz", jsonl(["bad"] * 9))
    with pytest.raises(UserError, match="max_bad_rate"):
        run(two_sources, ws, D2)
    spark.sql(f"DELETE FROM delta.`{ws.table('shop', 'users')}` WHERE user = 1")
    (ws.home / f"in/purchases/{D2}/c.json.gz").unlink()
    assert "rows of lake/shop/users were deleted" in run(two_sources, ws, D2).reason


@pytest.mark.parametrize("commits", [3, 4])
def test_a_run_that_dies_between_two_sources_heals(
    spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    deliver(ws)
    spec = make_spec(purchases=PURCHASES)
    replace, done_commits = load.commit_files, 0

    def dying(*args: Any, **more: Any) -> None:
        nonlocal done_commits
        if done_commits == commits:
            raise KeyboardInterrupt
        done_commits += 1
        replace(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(load, "commit_files", dying)
        with pytest.raises(KeyboardInterrupt):
            run(spec, ws, D2)
    assert Manifest.load(ws.manifest("shop", D2, "ingest")) is None
    manifest = run(spec, ws, D2).manifest
    assert [r["id"] for r in table(spark, ws, "events")] == [1, 2, 3, 4]
    assert [(r["ds"], r["user"]) for r in table(spark, ws, "purchases")] == [
        (d, n) for d in (D1, D2) for n in (1, 2, 3)
    ]
    # Exactly what an undisturbed run says.
    assert manifest.facts["days"] == manifest.facts["sources"]["purchases"]["days"] == [D1, D2]
    assert (manifest.rows["read"], manifest.rows["purchases.read"]) == (10, 10)
    assert run(spec, ws, D2).skipped


def test_a_source_without_files_is_named(ws: Workspace) -> None:
    put(ws, f"in/shown/{D1}/a.json", jsonl([{"id": 1}]))
    with pytest.raises(UserError, match=rf"no landing files for {D1} match .*change sources\.purchases\.source\.path"):
        run(make_spec(purchases=PURCHASES), ws, D1)
