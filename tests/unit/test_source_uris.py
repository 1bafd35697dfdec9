"""A source in any store: wherever a path of a spec is taken, its URI is, and what is made of it is one name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.init import write_pipeline
from headrace.cli.scaffold.roles import Named
from headrace.config import LandingSource, Spec, TableSource, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_USER_ERROR
from headrace.features.table_ops.preparation import ExternalReader, Preparation, pin
from headrace.jobs.observe.openlineage.names import DatasetName, name_of
from headrace.lake.landing.files import find_files, marker_places
from headrace.lake.landing.source_context import SourceContext, source_contexts
from headrace.lake.spark.requirements import ACCESSED, store_properties
from headrace.lake.tables.opened import find_table, open_table, table_name
from headrace.lake.tables.snapshot import TablePlace
from headrace.score.candidates.shared_lists import tables_of_score
from headrace.stage import Context
from headrace.storage import local, location_of
from tests.scaffold_support import clicks
from tests.storage_support import memory_home

DS = "2026-03-02"


@dataclass(frozen=True)
class Spelling:
    """A folder as a user writes it, as headrace names it, as Spark opens it, and as OpenLineage calls it."""

    written: str
    name: str
    spark: str
    openlineage: DatasetName

    @property
    def scheme(self) -> str:
        return self.name.partition(":")[0]


def spelling(written: str, name: str, spark: str = "", slash: str = "") -> Spelling:
    scheme, _, rest = name.partition("://")
    authority, _, path = rest.partition("/")
    return Spelling(written, name, spark or name, DatasetName(f"{scheme}://{authority}", slash + path))


_AZURE = "box@account.dfs.core.windows.net/a b/of=x%20y"
SPELLINGS = [
    spelling("s3://bucket/a b/of=x%20y", "s3://bucket/a b/of=x%20y", "s3a://bucket/a b/of=x%20y"),
    spelling("s3a://bucket//events/", "s3://bucket/events", "s3a://bucket/events"),
    spelling("S3://bucket/é/a", "s3://bucket/é/a", "s3a://bucket/é/a"),
    spelling("gs://bucket/a b/of=x%20y", "gs://bucket/a b/of=x%20y"),
    spelling("gcs://bucket/events", "gs://bucket/events"),
    spelling("gs:/bucket/events", "gs://bucket/events"),
    spelling(f"abfss://{_AZURE}", f"abfss://{_AZURE}", slash="/"),
    spelling(f"abfs://{_AZURE}", f"abfss://{_AZURE}", slash="/"),
    spelling("hdfs://namenode:8020/a b/of=x%20y", "hdfs://namenode:8020/a b/of=x%20y", slash="/"),
    spelling("hdfs://nameservice/events", "hdfs://nameservice/events", slash="/"),
]


@pytest.fixture(params=SPELLINGS, ids=lambda s: s.written)
def place(request: pytest.FixtureRequest) -> Spelling:
    current: Spelling = request.param
    return current


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Objects in memory that the URIs of all stores reach."""
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3", "gs", "abfss", "hdfs"))


def pipeline(tmp_path: Path, **sections: Any) -> Spec:
    """The shipped pipeline with other sections, from a file, as `headrace run` reads it."""
    shipped = yaml.safe_load(Path("conf/pipelines/clicks.yaml").read_text()) | sections
    del shipped["generate"]
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(shipped, sort_keys=False))
    spec = load_spec(file)
    # What is handed to another process, as JSON, is the same.
    assert Spec.model_validate(json.loads(spec.model_dump_json(by_alias=True, exclude_unset=True))) == spec
    return spec


def context(spec: Spec, tmp_path: Path) -> SourceContext:
    ws = Workspace(tmp_path / "home").of(spec)
    (source_context,) = source_contexts(Context(spec, ws, DS))
    return source_context


def test_tables(place: Spelling, tmp_path: Path) -> None:
    for form in ("delta", "iceberg", "parquet", "orc", "avro"):
        spec = pipeline(tmp_path, source={"format": form, "path": place.written, "day": {"time": "ts"}})
        assert isinstance(spec.source, TableSource)
        assert spec.reads == (place.written,)
        ws = context(spec, tmp_path).ws
        table_place = find_table(spec.source, ws, None)
        assert table_place == TablePlace(form, place.name)
        assert table_name(spec.source, ws, table_place) == place.name
    assert load_spec(tmp_path / "p.yaml", [f"source.path={place.written}"]).source == spec.source
    assert [str(external) for external in ws.external_places] == [place.name]
    assert ws.schemes == {"file", place.scheme}
    # What the manifest's name leads to, and what Spark is given for it.
    assert str(ws.locate(place.name)) == place.name
    assert ws.locate(place.name).plain
    assert ws.locate(place.name).uri == place.spark
    assert name_of(ws, "table", f"{place.name}/{DS}") == place.openlineage
    tokens = place.openlineage.namespace if place.scheme == "hdfs" else None
    assert store_properties(ws, {}, has_s3a=False).get(ACCESSED) == tokens


def test_landing_files(place: Spelling, stores: None, tmp_path: Path) -> None:
    prefix = place.written.rstrip("/")
    pattern, marker, control = f"{prefix}/{{ds}}/[ab]?.csv*", f"{prefix}/{{ds}}.done", f"{prefix}/{{ds}}.json"
    complete = {"marker": marker, "control": {"path": control, "key": "rows"}}
    spec = pipeline(tmp_path, source={"format": "csv", "path": pattern, "complete": complete})
    assert isinstance(spec.source, LandingSource)
    assert spec.reads == (pattern, marker, control)
    ctx = context(spec, tmp_path)
    folder = location_of(place.name)
    for name in (f"{DS}/a1.csv", f"{DS}/b#.csv.gz", f"{DS}/c1.csv", f"{DS}.done", f"{DS}.json"):
        (folder / name).put_text("x")
    listing = find_files(spec.source, ctx.ws, DS)
    assert [f.name for f in listing.files] == [f"{place.name}/{DS}/a1.csv", f"{place.name}/{DS}/b#.csv.gz"]
    assert [f.path for f in listing.files] == [folder / DS / "a1.csv", folder / DS / "b#.csv.gz"]
    assert marker_places(marker, ctx.ws, DS) == (folder / f"{DS}.done",)
    assert marker_places(control, ctx.ws, DS) == (folder / f"{DS}.json",)
    assert ctx.input_name(DS) == f"{place.name}/{DS}/[ab]?.csv*"
    expected = DatasetName(place.openlineage.namespace, f"{place.openlineage.name}/{DS}/[ab]?.csv*")
    assert name_of(ctx.ws, "landing", ctx.input_name(DS)) == expected


def test_tables_that_are_joined_list_candidates_or_filter_them(place: Spelling, stores: None, tmp_path: Path) -> None:
    folder = location_of(place.name)
    (folder / "_delta_log" / f"{0:020}.json").put_text("{}")
    joined = {"path": place.written, "keys": ["item_id"], "add": {"of": "double"}}
    listed = {"kind": "table", "path": place.written, "item": "item_id"}
    shipped = yaml.safe_load(Path("conf/pipelines/clicks.yaml").read_text())
    spec = pipeline(
        tmp_path,
        features=shipped["features"] | {"prepare": [{"join_external": joined}]},
        score=shipped["score"] | {"candidates": {"sources": {"a": listed}}, "filters": [listed]},
    )
    assert spec.score is not None
    assert spec.reads == (place.written,)
    ws = Workspace(tmp_path / "home").of(spec)
    for table in {*Preparation.from_spec(spec).externals, *tables_of_score(spec.score)}:
        (pinned,) = pin(ws, [table])
        assert (pinned.name, pinned.version) == (place.written, "0")
        reader = ExternalReader.pinned_by(ws, [table], [pinned])
        assert reader.path(table) == folder
        assert reader.path(table).plain
        assert name_of(ws, pinned.kind, pinned.name) == place.openlineage


@pytest.mark.parametrize("form", ["delta", "csv"])
@pytest.mark.parametrize("place", [SPELLINGS[i] for i in (1, 4, 7, 8)], ids=lambda s: s.written)
def test_init_and_what_it_writes(place: Spelling, stores: None, tmp_path: Path, form: str) -> None:
    data = clicks(300, 2)
    folder = location_of(place.name)
    if form == "csv":
        (folder / f"{DS}.csv").put_bytes(data.to_csv(index=False).encode())
        (folder / "2026-03-03.csv").put_bytes(data.to_csv(index=False).encode())
    else:
        rows = pa.Table.from_pandas(data.assign(ts=pd.to_datetime(data["ts"])), preserve_index=False)
        deltalake.write_deltalake(str(tmp_path / "events"), rows)
        folder.copy_from(local(tmp_path / "events"))
    write_pipeline(place.written, tmp_path / "init.yaml", "shop", Named(), force=False)
    source = load_spec(tmp_path / "init.yaml").source
    if isinstance(source, LandingSource):
        assert source.path == f"{place.name}/{{ds}}.csv"
        files = find_files(source, Workspace(tmp_path), DS).files
        assert [f.path for f in files] == [folder / f"{DS}.csv"]
    else:
        assert isinstance(source, TableSource)
        place_ = find_table(source, Workspace(tmp_path), None)
        assert place_ == TablePlace("delta", place.name)
        table = open_table(source, load_spec(tmp_path / "init.yaml").table, place_, {})
        assert all(f.path.is_below(folder) for f in table.files)


def test_rows_that_are_scored(place: Spelling) -> None:
    result = CliRunner().invoke(
        app, ["score", "clicks", "--input", place.written, "--output", f"{place.written}/scored"]
    )
    assert result.exit_code == EXIT_USER_ERROR
    assert f"--output: '{place.written}/scored' is a URI, and this takes a path" in " ".join(result.stderr.split())
