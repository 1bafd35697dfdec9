"""Input 17: names as people's tables have them go through every stage, keys of users and items among them."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.jobs.housekeeping.forget.erase import forget
from headrace.jobs.housekeeping.forget.persons import read_persons
from headrace.jobs.stages import load_stage
from headrace.publish.postgres.server import connect
from headrace.score.score_table import score_table
from headrace.score.scoring_model import scoring_model
from headrace.stage import Context, run_stage
from headrace.stage.manifest import Manifest
from headrace.storage import local, location_of

STAGES = ("ingest", "features", "drift", "train", "promote", "score", "publish", "report")
DAYS = ["2026-01-06", "2026-01-07", "2026-01-08"]
NOON = datetime(2026, 1, 8, 12, tzinfo=UTC)
LONG = "average basket value, " * 9 + "%s"
#: Role -> name: dots, dashes, blanks, quotes of all kinds, `%`, umlauts, reserved words, about 200 characters.
NAMES = {
    "event": "event-id.1",
    "time": "Event Time",
    "user": "Kunden-Nr.",
    "item": 'the "best" `item` 100%',
    "device": "service.name",
    "price": "price [EUR] <net>",
    "size": "größe;cm, it's",
    "kind": "select",
    "member": "Is Member?",
    "long": LONG,
    "clicked": "Order by \\ %s {x} $y",
}


def events(names: dict[str, str]) -> pd.DataFrame:
    """1,500 events of 40 users and 25 items; users like items of their own parity."""
    rng = np.random.default_rng(3)
    n = 1500
    user, item = rng.integers(0, 40, n), rng.integers(0, 25, n)
    frame = pd.DataFrame(
        {
            "event": [f"e{i}" for i in range(n)],
            "time": pd.Timestamp(DAYS[0], tz="UTC") + pd.to_timedelta(rng.integers(0, 3 * 86400, n), unit="s"),
            "user": [f"kunde-{u:04d}" for u in user],
            "item": item,
            "device": rng.choice(["phone", "tv", "it's"], n),
            "price": rng.gamma(2, 5, n),
            "size": rng.gamma(2, 5, n),
            "kind": [f"k{i % 4}" for i in item],
            "member": user % 2 == 0,
            "long": rng.normal(0, 1, n),
            "clicked": (rng.random(n) < np.where(user % 2 == item % 2, 0.6, 0.1)).astype(np.int32),
        }
    )
    return frame.sort_values("time").rename(columns=names)


def pipeline(names: dict[str, str], folder: Path, **more: Any) -> Spec:
    types = {"time": "timestamp", "item": "bigint", "price": "double", "size": "double", "member": "boolean"}
    types |= {"long": "double", "clicked": "int"}
    n = names
    return build_spec(
        {
            "pipeline": "names",
            "source": {"format": "parquet", "path": str(folder), "day": {"time": n["time"]}},
            "table": {
                "keys": [n["event"]],
                "event_time": n["time"],
                "columns": [{"name": name, "type": types.get(role, "string")} for role, name in n.items()],
                "expectations": {"ranges": {n["clicked"]: [0, 1]}, "null_rate": {n["device"]: 0.5}},
            },
            "features": {
                "label": n["clicked"],
                "split": {"by": "time", "valid_days": 1},
                "window_days": 2,
                "carried": [n["user"], n["event"]],
                "workflow": [
                    {"columns": [n["time"]], "ops": [{"cyclic": {"of": ["hour"]}}]},
                    {"columns": [n["user"], n["item"]], "ops": ["categorify"]},
                    {"columns": [n["device"], n["kind"], n["member"]], "ops": ["categorify"]},
                    {"columns": [n["price"], n["size"], n["long"]], "ops": ["fill_missing", "log", "normalize"]},
                ],
            },
            "drift": {},
            "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
            "train": {"ranks": 1, "batch_size": 256, "streams": 2, "epochs": 1, "evaluation": {"user": n["user"]}},
            "score": {
                "user": {"key": n["user"], "columns": [n["member"]]},
                "item": {"key": n["item"], "columns": [n["kind"]]},
                "context": {n["time"]: NOON, n["device"]: "tv", n["price"]: 5.0, n["size"]: 5.0, n["long"]: 0.5},
                "top_k": 3,
            },
            "publish": {},
            **more,
        }
    )


def write(frame: pd.DataFrame, folder: Path, time: str) -> None:
    folder.mkdir()
    for day, part in frame.groupby(frame[time].dt.date.astype(str)):
        table = pa.Table.from_pandas(
            part.assign(**{time: part[time].astype("datetime64[us, UTC]")}), preserve_index=False
        )
        pq.write_table(table, folder / f"{day}.parquet")


@dataclass(frozen=True)
class Day:
    """A finished day of hostile names: what came in, what came out."""

    spec: Spec
    ws: Workspace
    folder: Path
    frame: pd.DataFrame
    done: dict[str, Manifest]
    #: Rows of the warehouse.
    scores: pd.DataFrame

    @property
    def pairs(self) -> pd.DataFrame:
        """The scored pairs, with the columns that the model was given for them."""
        user, item = self.scores[NAMES["user"]], self.scores[NAMES["item"]]
        context = {"time": NOON, "device": "tv", "price": 5.0, "size": 5.0, "long": 0.5}
        columns = {NAMES[role]: value for role, value in context.items()}
        members = user.str[-4:].astype(int) % 2 == 0
        kinds = [f"k{i % 4}" for i in item]
        return self.scores[[NAMES["user"], NAMES["item"]]].assign(
            **columns, **{NAMES["member"]: members, NAMES["kind"]: kinds}
        )


@pytest.fixture(scope="module")
def day(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Day:
    folder, frame = tmp_path_factory.mktemp("names"), events(NAMES)
    write(frame, folder / "in", NAMES["time"])
    online = {"kind": "lmdb", "path": f"{folder}/top.lmdb"}
    spec, ws = pipeline(NAMES, folder / "in", publish={"online": online}), Workspace(folder / "home")
    for ds in DAYS[:-1]:
        run_stage(load_stage("ingest"), spec, ws, ds)
    done = {name: run_stage(load_stage(name), spec, ws, DAYS[-1]).manifest for name in STAGES}
    assert spec.publish is not None
    with connect(spec.publish.warehouse, ws) as conn:
        cursor = conn.execute("SELECT * FROM names_scores")
        rows = pd.DataFrame(cursor.fetchall(), columns=[c.name for c in cursor.description or ()])
    return Day(spec, ws, folder, frame, done, rows)


@pytest.mark.slow
def test_a_day_of_hostile_names(day: Day) -> None:
    frame, rows = day.frame, day.scores
    assert day.done["features"].rows["train"] + day.done["features"].rows["valid"] == len(frame)
    users = set(frame[NAMES["user"]])
    assert {NAMES["user"], NAMES["item"]} < set(rows.columns)
    assert len(rows) == len(users) * 3
    assert set(rows[NAMES["user"]]) == users
    assert set(rows[NAMES["item"]]) <= set(frame[NAMES["item"]])
    with lmdb.open(f"{day.folder}/top.lmdb", subdir=False, readonly=True, lock=False) as env, env.begin() as reading:
        for user, of_user in rows.sort_values("rank").groupby(NAMES["user"]):
            assert [r["item"] for r in json.loads(reading.get(user.encode()))] == list(of_user[NAMES["item"]])
    assert html.escape(NAMES["user"]) in day.ws.report("names", DAYS[-1]).read_text()


@pytest.mark.slow
def test_drift_counts_the_columns(day: Day) -> None:
    """Against pandas: missing values and means of both sides."""
    seen = {(c["side"], c["column"]): c for c in day.done["drift"].facts["columns"]}
    is_new = (day.frame[NAMES["time"]] >= pd.Timestamp(DAYS[-1], tz="UTC")).to_numpy()
    for role in ("price", "size", "long"):
        values = day.frame[NAMES[role]]
        fact = seen["input", NAMES[role]]
        np.testing.assert_allclose(fact["mean"], [values[~is_new].mean(), values[is_new].mean()], rtol=1e-6)
        assert tuple(fact["values"]) == ((~is_new).sum(), is_new.sum())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pairs.csv", "pairs.parquet", "whole.csv", "whole.parquet"])
def test_rows_of_a_file_get_the_published_scores(day: Day, spark: SparkSession, tmp_path: Path, form: str) -> None:
    """`headrace score --input`: keys alone, or all columns of the features."""
    input_rows = day.pairs if form.startswith("whole") else day.pairs[[NAMES["user"], NAMES["item"]]]
    file = tmp_path / form
    if form.endswith("csv"):
        input_rows.to_csv(file, index=False, date_format="%Y-%m-%dT%H:%M:%SZ")
    else:
        time = (
            {NAMES["time"]: input_rows[NAMES["time"]].astype("datetime64[us, UTC]")}
            if NAMES["time"] in input_rows
            else {}
        )
        pq.write_table(pa.Table.from_pandas(input_rows.assign(**time), preserve_index=False), file)
    ctx = Context(day.spec, day.ws, DAYS[-1], day.done)
    count = score_table(ctx, scoring_model(ctx), spark, location_of(str(file), "--input"), local(tmp_path / "out"))
    assert count == len(input_rows)
    keys = [NAMES["user"], NAMES["item"]]
    scored = pd.read_parquet(tmp_path / "out")
    assert list(scored.columns) == [*input_rows.columns, "score", "model_version"]
    merged = scored.merge(day.scores, on=keys, validate="one_to_one", suffixes=("", " published"))
    np.testing.assert_allclose(merged["score"], merged["score published"], rtol=1e-6)


@pytest.fixture(scope="module")
def exported(day: Day) -> Path:
    """A repository of `headrace serve` with the day's model."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
    from headrace.cli.export import export_model

    export_model(day.ws, pipeline_path(day), "1", local(day.folder / "models" / "names" / "1"), "fp32")
    return day.folder / "models"


def pipeline_path(day: Day) -> str:
    file = day.folder / "names.yaml"
    file.write_text(yaml.safe_dump(day.spec.model_dump(mode="json", exclude_defaults=True), allow_unicode=True))
    return str(file)


def request_of(day: Day) -> dict[str, np.ndarray[Any, Any]]:
    """Raw columns as tensors, without the project's own conversion."""
    pairs = day.pairs
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for role in ("user", "item", "device", "kind", "member", "price", "size", "long", "time"):
        column = pairs[NAMES[role]]
        if role == "time":
            values = column.astype("datetime64[us, UTC]").astype("int64").to_numpy()
        else:
            values = column.to_numpy(object if column.dtype == object or str(column.dtype) == "str" else None)
        tensors[NAMES[role]] = values
        if values.dtype != np.float64:
            tensors[f"{NAMES[role]}.missing"] = np.zeros(len(values), bool)
    return tensors


@pytest.mark.slow
def test_an_export_takes_and_gives_the_columns(day: Day, exported: Path) -> None:
    """Graphs of features and model one after the other in onnxruntime."""
    import onnxruntime

    folder = exported / "names" / "1"
    features = onnxruntime.InferenceSession(folder / "features.onnx", providers=["CPUExecutionProvider"])
    request = request_of(day)
    inputs = {x.name: request[x.name] for x in features.get_inputs()}
    feature_values = dict(zip([x.name for x in features.get_outputs()], features.run(None, inputs), strict=True))
    model = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [x.name for x in model.get_inputs()]
    assert {NAMES["user"], NAMES["item"], NAMES["device"], NAMES["price"], NAMES["long"]} <= set(names)
    (label,) = model.run(None, {name: feature_values[f"{name}.feature"] for name in names})
    np.testing.assert_allclose(label.ravel(), day.scores["score"], rtol=1e-5)


@pytest.mark.slow
def test_triton_takes_the_columns(day: Day, exported: Path) -> None:
    from headrace.cli.export import export_triton
    from headrace.export.triton.config import Options
    from tests.triton_support import Repository, read_config

    repository = day.folder / "triton"
    export_triton(day.ws, pipeline_path(day), "1", local(repository), "fp32", Options())
    values = {
        name: (np.array([v.encode() for v in x], object) if x.dtype == object else x)[:, None]
        for name, x in request_of(day).items()
    }
    config = read_config(repository / "names")
    inputs = {x.name: values[x.name] for x in config.input}
    (label,) = Repository(repository).ask("names", inputs).values()
    np.testing.assert_allclose(label.ravel(), day.scores["score"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.service
def test_requests_name_the_columns(day: Day, exported: Path, tmp_path: Path) -> None:
    """JSON over HTTP written by hand, and gRPC by Triton's own client."""
    pytest.importorskip("grpc", reason="grpcio is not installed: run `make serve`")
    over_grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: run `make serve`")
    from tests.serve_support import running

    request, types = request_of(day), {"i": "INT64", "f": "FP64", "O": "BYTES", "b": "BOOL"}
    with running(exported, tmp_path / "log") as server:
        metadata = json.loads(server.get("/v2/models/names")[1])
        request_inputs = {x["name"]: request[x["name"]] for x in metadata["inputs"]}
        assert {NAMES["user"], NAMES["price"], f"{NAMES['kind']}.missing"} <= request_inputs.keys()
        inputs = [
            {"name": name, "shape": list(x.shape), "datatype": types[x.dtype.kind], "data": x.tolist()}
            for name, x in request_inputs.items()
        ]
        status, answer = server.infer("names", {"inputs": inputs})
        assert status == 200, answer
        np.testing.assert_allclose(answer["outputs"][0]["data"], day.scores["score"], rtol=1e-5)
        tensors = [over_grpc.InferInput(name, list(x.shape), types[x.dtype.kind]) for name, x in request_inputs.items()]
        for tensor, x in zip(tensors, request_inputs.values(), strict=True):
            tensor.set_data_from_numpy(x)
        with over_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            label = client.infer("names", tensors).as_numpy("label")
        np.testing.assert_allclose(label.ravel(), day.scores["score"], rtol=1e-5)


def text_of(file: Path) -> str:
    """Return all of a file as text: rows of a Parquet file, the bytes of another one."""
    if file.suffix == ".parquet" and file.read_bytes()[:4] == b"PAR1":
        return str(pq.ParquetFile(file).read().to_pylist())
    return file.read_bytes().decode("latin-1")


def files_with(day: Day, persons: list[str]) -> set[str]:
    """Return the files of the home, and the store of top lists, that have one of the persons anywhere."""
    files = [f for f in day.ws.home.rglob("*") if f.is_file() and not f.is_symlink()]
    store = day.folder / "top.lmdb"
    return {str(f.relative_to(day.folder)) for f in [*files, store] if any(p in text_of(f) for p in persons)}


def rows_with(day: Day, persons: list[str]) -> dict[str, int]:
    """Return by table of the warehouse how many of its rows have one of the persons in any column."""
    assert day.spec.publish is not None
    tables = "SELECT quote_ident(table_schema) || '.' || quote_ident(table_name) FROM information_schema.tables "
    tables += "WHERE table_schema NOT IN ('pg_catalog', 'information_schema') AND table_type = 'BASE TABLE'"
    with connect(day.spec.publish.warehouse, day.ws) as conn:
        counts = {}
        for (name,) in conn.execute(tables).fetchall():
            query = f"SELECT count(*) FROM {name} AS t WHERE t::text ~ %s"
            counts[str(name)] = conn.execute(query, ["|".join(persons)]).fetchall()[0][0]
    return {name: count for name, count in counts.items() if count}


@pytest.mark.slow
def test_nothing_of_forgotten_persons_is_found(day: Day) -> None:
    """The last test of the day, which changes it: searched with other means than those of `headrace forget`."""
    column = NAMES["user"]
    persons = sorted(day.frame[column].unique())[3:23:10]
    assert any(name.endswith(".parquet") for name in files_with(day, persons))
    assert "top.lmdb" in files_with(day, persons)
    assert rows_with(day, persons).keys() >= {"public.names_scores"}
    values = day.folder / "persons.txt"
    values.write_text("".join(f"{person}\n" for person in persons))
    *places, (request, _) = forget(day.spec, day.ws, read_persons(day.spec, column, values), datetime.now(UTC))
    assert {place.kind for place in places} >= {"dataset", "model", "vocabulary", "warehouse", "online", "source"}
    assert request.finished is not None
    assert files_with(day, persons) == set()
    assert rows_with(day, persons) == {}
    # Everybody else's lists are as they were.
    assert day.spec.publish is not None
    with connect(day.spec.publish.warehouse, day.ws) as conn:
        cursor = conn.execute("SELECT * FROM names_scores")
        rows = pd.DataFrame(cursor.fetchall(), columns=[c.name for c in cursor.description or ()])
    order = [column, "rank"]
    remaining = day.scores[~day.scores[column].isin(persons)].sort_values(order, ignore_index=True)
    pd.testing.assert_frame_equal(rows.sort_values(order, ignore_index=True), remaining)
