"""OpenLineage: events of runs at a real receiver, checked by the client's own classes; receivers that are down."""

from __future__ import annotations

import http.server
import importlib
import json
import logging
import os
import pkgutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import attr
import pytest
from openlineage.client import event_v2
from openlineage.client.generated import base

from headrace.config import OpenLineage, Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import RefusedError, UserError
from headrace.jobs.observe.application import Observation, observed_run
from headrace.jobs.observe.openlineage.names import (
    DatasetName,
    ParentRun,
    name_of,
    new_run_id,
    of_location,
    of_warehouse,
)
from headrace.jobs.observe.openlineage.runs import is_enabled
from headrace.stage import Context, Result, run_stage
from headrace.stage.manifest import Input, Manifest, Output
from tests.report_support import DS, make_manifests

#: By the address of its schema, the class of each facet that the client knows.
FACETS: dict[str, type[Any]] = {}
generated = importlib.import_module("openlineage.client.generated")
for module in pkgutil.iter_modules(generated.__path__):
    for cls in vars(importlib.import_module(f"openlineage.client.generated.{module.name}")).values():
        if isinstance(cls, type) and issubclass(cls, base.BaseFacet):
            FACETS[cls._get_schema()] = cls


def check_facet(facet: dict[str, Any]) -> None:
    """Check a facet against its schema's class: no field that is unknown there, none missing that it requires."""
    cls = FACETS[facet["_schemaURL"]]
    assert facet["_producer"].startswith("https://")
    fields = {name: value for name, value in facet.items() if name not in ("_producer", "_schemaURL", "_deleted")}
    assert fields.keys() <= {f.name for f in attr.fields(cls)}
    cls(**fields)


def check_event(event: dict[str, Any]) -> None:
    """The same of a whole event: what the specification requires, and no facet that it does not have."""
    event_v2.RunEvent(
        eventType=event_v2.RunState(event["eventType"]),
        eventTime=event["eventTime"],
        run=event_v2.Run(event["run"]["runId"]),
        job=event_v2.Job(event["job"]["namespace"], event["job"]["name"]),
        producer=event["producer"],
    )
    assert event["schemaURL"] == event_v2.RunEvent._get_schema()
    facets = [*event["run"]["facets"].values(), *event["job"]["facets"].values()]
    for dataset in (*event["inputs"], *event["outputs"]):
        assert dataset["namespace"]
        assert dataset["name"]
        facets += dataset["facets"].values()
        facets += (dataset.get("inputFacets") or dataset.get("outputFacets") or {}).values()
    for facet in facets:
        check_facet(facet)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Return the list into which a receiver at OPENLINEAGE_URL puts its events."""
    events: list[dict[str, Any]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/api/v1/lineage"
            events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{server.server_address[1]}")
        yield events
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Hide the user's configuration files, and remove what the client puts into the environment."""
    environment = dict(os.environ)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE") and name not in environment]:
        del os.environ[name]


class FinishedStage:
    """A stage with the manifest that the real one would write."""

    version = 1

    def __init__(self, name: str, manifest: Manifest, error: Exception | None = None) -> None:
        self.name, self.manifest, self.error = name, manifest, error
        self.needs = tuple(i.name for i in manifest.inputs if i.kind == "stage")

    def spec_part(self, spec: Spec) -> dict[str, Any]:
        return {}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        return tuple(i for i in self.manifest.inputs if i.kind != "stage")

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        return None

    def run(self, ctx: Context) -> Result:
        if self.error:
            raise self.error
        m = self.manifest
        return Result(m.outputs, m.rows, m.facts, m.dataset_schema)


def observe(ws: Workspace, spec: Spec, stage: FinishedStage) -> None:
    observation = Observation(spec, ws)
    try:
        with observation.stage(stage.name, DS) as run:
            run.done(run_stage(stage, spec, ws, DS, run.begin).manifest)
    finally:
        observation.close()


def event_of(events: list[dict[str, Any]], kind: str, job: str) -> dict[str, Any]:
    (event,) = [e for e in events if e["eventType"] == kind and e["job"]["name"] == job]
    return event


def test_a_day_is_told_in_valid_events_that_hang_together(ws: Workspace, received: list[dict[str, Any]]) -> None:
    spec = load_spec("clicks")
    manifests = make_manifests()
    table = ws.table("clicks", "events").local_path()
    (table / "_delta_log").mkdir(parents=True)
    fields = [{"name": "user_id", "type": "long"}, {"name": "tags", "type": {"type": "array", "elementType": "string"}}]
    actions: list[dict[str, Any]] = [
        {"metaData": {"schemaString": json.dumps({"fields": fields}), "partitionColumns": []}},
        {"add": {"path": "a", "size": 700, "partitionValues": {}}},
        {"add": {"path": "b", "size": 77, "partitionValues": {}}},
    ]
    for version in range(9):  # the run's commit is version 8
        lines = actions if version in (0, 8) else [{"commitInfo": {}}]
        (table / "_delta_log" / f"{version:020d}.json").write_text("".join(json.dumps(a) + "\n" for a in lines))
    with observed_run(spec, ws, DS) as run:
        run.start()
        for name in ("ingest", "features", "drift", "train"):
            observe(ws, spec, FinishedStage(name, manifests[name]))
    for event in received:
        check_event(event)
    jobs = ("clicks", *(f"clicks.{s}" for s in ("ingest", "features", "drift", "train")))
    lifecycle = [(e["job"]["name"], e["eventType"]) for e in received]
    assert sorted(lifecycle) == sorted((job, kind) for job in jobs for kind in ("START", "COMPLETE"))
    assert lifecycle[-1] == ("clicks", "COMPLETE")
    assert min(e["eventTime"] for e in received) == event_of(received, "START", "clicks")["eventTime"]
    assert {e["job"]["namespace"] for e in received} == {"headrace"}
    run_id = event_of(received, "START", "clicks")["run"]["runId"]
    assert event_of(received, "COMPLETE", "clicks")["run"]["runId"] == run_id
    for name in ("ingest", "features", "drift", "train"):
        start, end = event_of(received, "START", f"clicks.{name}"), event_of(received, "COMPLETE", f"clicks.{name}")
        assert start["run"]["runId"] == end["run"]["runId"] != run_id
        parent = end["run"]["facets"]["parent"]
        assert (parent["run"]["runId"], parent["job"]["namespace"], parent["job"]["name"]) == (
            run_id,
            "headrace",
            "clicks",
        )
        assert parent["root"]["run"]["runId"] == run_id
        assert end["run"]["facets"]["nominalTime"]["nominalStartTime"] == f"{DS}T00:00:00Z"
        assert start["eventTime"] <= end["eventTime"]

    ingest = event_of(received, "COMPLETE", "clicks.ingest")
    landing = str(ws.home / "landing" / "clicks" / DS)
    assert [(i["namespace"], i["name"].rpartition("/")[0]) for i in ingest["inputs"]] == [("file", landing)] * 4
    events = ingest["outputs"][0]
    assert (events["namespace"], events["name"]) == ("file", str(ws.home / "lake" / "clicks" / "events"))
    assert events["facets"]["version"]["datasetVersion"] == "8"
    assert events["facets"]["storage"]["storageLayer"] == "delta"
    schema = [(f["name"], f["type"], f["ordinal_position"]) for f in events["facets"]["schema"]["fields"]]
    assert schema == [("user_id", "long", 1), ("tags", "array", 2)]
    statistics = events["outputFacets"]["outputStatistics"]
    assert (statistics["rowCount"], statistics["size"], statistics["fileCount"]) == (60_012, 777, 2)
    checks = ingest["inputs"][-1]["inputFacets"]
    asserted = {(a["assertion"], a["success"], a["actual"]) for a in checks["dataQualityAssertions"]["assertions"]}
    assert asserted >= {("rows", True, "60,012"), ("a breach of another day", False, "1")}
    assert checks["dataQualityMetrics"]["rowCount"] == 60_402

    features = event_of(received, "COMPLETE", "clicks.features")
    assert events["name"] in {i["name"] for i in features["inputs"]}
    metrics = features["outputs"][0]["facets"]["dataQualityMetrics"]
    assert metrics["columnMetrics"]["user_age"]["nullCount"] == round(0.02 * (420_300 + 59_400))
    psi = event_of(received, "COMPLETE", "clicks.drift")["inputs"][0]["inputFacets"]["dataQualityAssertions"][
        "assertions"
    ]
    assert [(a["column"], a["assertion"], a["success"]) for a in psi] == [
        ("item_price", "psi", False),
        ("user_id", "psi", True),
    ]
    model = event_of(received, "COMPLETE", "clicks.train")["outputs"][0]
    assert model["facets"]["datasetType"]["datasetType"] == "MODEL"


@pytest.mark.parametrize("error", [RefusedError("audit: rows 3, limit 5"), RuntimeError("Bearer abcdef0123456789 no")])
def test_a_failure_is_told_with_its_message_and_no_secret(
    ws: Workspace, received: list[dict[str, Any]], error: Exception
) -> None:
    stage = FinishedStage("ingest", make_manifests()["ingest"], error)
    with pytest.raises(type(error)):
        observe(ws, load_spec("clicks"), stage)
    for event in received:
        check_event(event)
    failed = event_of(received, "FAIL", "clicks.ingest")
    assert failed["run"]["runId"] == event_of(received, "START", "clicks.ingest")["run"]["runId"]
    message_facet = failed["run"]["facets"]["errorMessage"]
    assert message_facet["message"] == str(error).replace("abcdef0123456789", "***")
    assert ("stackTrace" in message_facet) == (not isinstance(error, UserError))
    assert "abcdef" not in json.dumps(failed)


def test_a_killed_stage_is_told_by_its_parent(ws: Workspace, received: list[dict[str, Any]]) -> None:
    spec = load_spec("clicks")
    killed = new_run_id()
    with observed_run(spec, ws, DS) as run:
        run.start()
        run.fail("train did not finish: killed by signal 9")
        run.fail_stage("train", DS, killed, "killed by signal 9")
    for event in received:
        check_event(event)
    stage, pipeline_event = event_of(received, "FAIL", "clicks.train"), event_of(received, "FAIL", "clicks")
    assert stage["run"]["runId"] == killed
    assert stage["run"]["facets"]["parent"]["run"]["runId"] == pipeline_event["run"]["runId"]


def test_airflows_run_is_the_parent(
    ws: Workspace, received: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, root = (ParentRun("airflow", job, new_run_id()) for job in ("retrain.train", "retrain"))
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", str(parent))
    monkeypatch.setenv("OPENLINEAGE_ROOT_PARENT_ID", str(root))
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "shop")
    observe(ws, load_spec("clicks"), FinishedStage("ingest", make_manifests()["ingest"]))
    event = event_of(received, "COMPLETE", "clicks.ingest")
    facet = event["run"]["facets"]["parent"]
    assert event["job"]["namespace"] == "shop"
    assert (facet["run"]["runId"], facet["job"]["name"]) == (parent.run_id, "retrain.train")
    assert (facet["root"]["run"]["runId"], facet["root"]["job"]["name"]) == (root.run_id, "retrain")


def test_a_file_by_the_spec_and_nothing_without_a_word(ws: Workspace, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    conf = f"observe.openlineage.transport={{type: file, log_file_path: {file}, append: true}}"
    observe(ws, load_spec("clicks", [conf]), FinishedStage("ingest", make_manifests()["ingest"]))
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [e["eventType"] for e in events] == ["START", "COMPLETE"]
    for event in events:
        check_event(event)
    quiet = Observation(load_spec("clicks"), ws)
    assert "openlineage" not in [t.name for t in threading.enumerate()]
    quiet.close()


def unreachable() -> str:
    return "http://127.0.0.1:9"


@pytest.fixture
def silent() -> Iterator[Callable[[], str]]:
    """A receiver that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield lambda: f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("failure", ["down", "silent"])
def test_a_receiver_that_is_down_neither_fails_nor_stops_a_stage(
    ws: Workspace,
    failure: str,
    silent: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", unreachable() if failure == "down" else silent())
    spec = load_spec("clicks", ["observe.openlineage.wait_seconds=0.5"])
    observation, manifests = Observation(spec, ws), make_manifests()
    finished = threading.Event()

    def work() -> None:
        for name in ("ingest", "features"):
            with observation.stage(name, DS) as run:
                run.done(run_stage(FinishedStage(name, manifests[name]), spec, ws, DS, run.begin).manifest)
        observation.close()
        finished.set()

    with caplog.at_level(logging.WARNING):
        threading.Thread(target=work, daemon=True).start()
        # The client itself would try for half a minute; this only ends a test that hangs.
        assert finished.wait(20)
    assert Manifest.load(ws.manifest("clicks", DS, "features")) is not None
    records = [r for r in caplog.records if r.name == "headrace.observe"]
    assert len(records) == 1
    assert "stages go on without" in records[0].getMessage()
    assert not [r for r in caplog.records if r.name.startswith(("urllib3", "openlineage"))]


def test_no_secret_is_taken_from_a_spec() -> None:
    for bad in ("{auth: {apiKey: abc}}", "{url: 'https://me:pw@host'}"):
        with pytest.raises(UserError, match="environment"):
            load_spec("clicks", [f"observe.openlineage.transport={bad}"])


@pytest.mark.parametrize(
    ("uri", "namespace", "name"),
    [
        ("file:///data/a%20b", "file", "/data/a b"),
        ("/data/a", "file", "/data/a"),
        ("s3a://bucket/a/b", "s3://bucket", "a/b"),
        ("gs://bucket/a", "gs://bucket", "a"),
        ("abfss://box@account.dfs.core.windows.net/a", "abfss://box@account.dfs.core.windows.net", "/a"),
        ("wasbs://box@account.blob.core.windows.net/a", "wasbs://box@account.blob.core.windows.net", "a"),
        ("ftp://user:secret@host/a", "ftp://host", "/a"),
        ("hdfs://namenode:8020/a/b", "hdfs://namenode:8020", "/a/b"),
    ],
)
def test_names_of_files(uri: str, namespace: str, name: str) -> None:
    assert of_location(uri) == DatasetName(namespace, name)


def test_nothing_is_asked_for_where_there_is_neither_home_nor_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing_folder() -> Any:
        raise FileNotFoundError("cwd")

    def homeless() -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.cwd", missing_folder)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert not is_enabled(None)
    assert is_enabled(OpenLineage())


def test_names_of_days_of_a_source_table_are_the_tables(ws: Workspace) -> None:
    for part in ("2026-01-01", "before"):
        assert name_of(ws, "table", f"/lake/clicks/{part}") == DatasetName("file", "/lake/clicks")
        assert name_of(ws, "table", f"s3://lake/clicks/{part}") == DatasetName("s3://lake", "clicks")


@pytest.mark.parametrize(
    ("warehouse", "label", "namespace", "name"),
    [
        ("{kind: postgres, host: db, database: shop}", "public.s", "postgres://db:5432", "shop.public.s"),
        ("{kind: clickhouse, host: ch, database: d}", "d.s", "clickhouse://ch:8443", "d.s"),
        ("{kind: sqlalchemy, url: 'mysql+pymysql://u@h:3306/d'}", "s", "mysql://h:3306", "d.s"),
        ("{kind: delta}", "/wh/public/s", "file", "/wh/public/s"),
        ("{kind: duckdb, path: /wh/a.db}", "public.s", "duckdb:///wh/a.db", "public.s"),
    ],
)
def test_names_of_warehouses(ws: Workspace, warehouse: str, label: str, namespace: str, name: str) -> None:
    spec = load_spec("clicks", [f"publish.warehouse={warehouse}"])
    facts = {"table": label, "warehouse": "/wh/a.db" if "duckdb" in warehouse else "files"}
    manifest = Manifest(stage="publish", pipeline="clicks", ds=DS, key="k", spec_hash="s", facts=facts)
    manifest = manifest.model_copy(update={"outputs": (Output(kind="x", name=label, version="k"),)})
    assert of_warehouse(spec, ws, manifest) == DatasetName(namespace, name)


def test_run_ids_are_uuids_that_sort_by_time() -> None:
    ids = []
    for _ in range(20):
        ids.append(new_run_id())
        time.sleep(0.002)
    assert ids == sorted(ids)
    assert len(set(ids)) == 20
    assert {(UUID(i).version, UUID(i).variant) for i in ids} == {(7, "specified in RFC 4122")}
