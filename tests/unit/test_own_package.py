"""Warehouses, formats and stores of other packages, as a spec names them: by entry point and as `module:Class`."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headrace import plugins
from headrace.cli import app
from headrace.cli.run import dry_run
from headrace.config import Spec, Warehouse, build_spec
from headrace.config.formats import FILE_FORMATS
from headrace.config.installation import checkout, pipeline_file
from headrace.config.source import LandingSource, TableSource
from headrace.config.warehouse import WAREHOUSES
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_USER_ERROR, UserError
from headrace.storage import Location, location, location_of
from headrace.storage.store import STORE_KINDS
from tests.ingest_support import COLUMNS, D1
from tests.users_package import installed, offering

FEATURES = {"label": "hour", "workflow": [], "split": {"by": "position"}}
#: A store of a package: objects in memory, which all tests of a process share.
STORE = """
from headrace.storage.objects.store import ObjectStore
from obstore.store import MemoryStore

MEMORY = MemoryStore()

class Vault(ObjectStore):
    def __init__(self):
        super().__init__("vault", lambda scheme, name: MEMORY)

class Half:
    def plain(self):
        return self
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed(tmp_path / "site", monkeypatch):
        yield


def pipeline(tmp_path: Path, source: dict[str, Any]) -> Path:
    path = tmp_path / "shop.yaml"
    spec = {"pipeline": "shop", "source": source, "table": {"columns": COLUMNS, "keys": ["id"]}, "features": FEATURES}
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.mark.parametrize("kind", ["acme_ledger", "acme.kinds:Ledger"])
def test_a_warehouse_of_a_package_is_checked_without_being_imported(package: None, kind: str) -> None:
    warehouse = Warehouse(kind=kind, path="/data/ledger.db")
    assert warehouse.known.dataset_name(warehouse, "s") == ("acme", "s")
    assert "acme.kinds" in sys.modules
    assert "acme.ledger" not in sys.modules
    with pytest.raises(ValueError, match=f"kind {kind} needs the key 'path'"):
        Warehouse(kind=kind)


def test_a_warehouse_that_is_none(package: None) -> None:
    with pytest.raises(ValueError, match=r"no warehouse 'acme_leger'; did you mean 'acme_ledger'.*MODULE:CLASS"):
        Warehouse(kind="acme_leger")
    with pytest.raises(ValueError, match=r"acme.kinds:Pipes' is no warehouse: it does not extend headrace.config"):
        Warehouse(kind="acme.kinds:Pipes")
    with pytest.raises(ValueError, match=r"warehouse 'acme.nothing:Ledger' cannot be imported: No module named"):
        Warehouse(kind="acme.nothing:Ledger")


@pytest.mark.parametrize("form", ["acme_pipes", "acme.kinds:Pipes"])
def test_a_format_of_a_package_is_checked_and_planned(package: None, tmp_path: Path, form: str) -> None:
    path = pipeline(tmp_path, {"format": form, "path": "in/{ds}/*.pipes"})
    landing = tmp_path / "home" / "in" / D1 / "a.pipes"
    landing.parent.mkdir(parents=True)
    landing.write_text("e1|2026-03-01T00:00:00Z|7||3||\n")
    (planned,) = dry_run(str(path), Workspace(tmp_path / "home"), D1, [], "ingest", "ingest")
    assert planned.runs
    assert planned.reads[0].startswith(f"landing/shop/{D1} (landing, version ")
    assert "acme.pipes" not in sys.modules


def test_a_format_that_is_none(package: None) -> None:
    with pytest.raises(ValueError, match=r"'acme_pips' is no format; did you mean 'acme_pipes'.; files: clicks, .*"):
        LandingSource(format="acme_pips", path="in/{ds}/*")
    with pytest.raises(ValueError, match=r"'acme.kinds:Ledger' is no format of landing files: it does not extend"):
        LandingSource(format="acme.kinds:Ledger", path="in/{ds}/*")
    with pytest.raises(ValueError, match=r"multiline: a row of format 'acme_pipes' is one line"):
        LandingSource(format="acme_pipes", path="in/{ds}/*", multiline=True)
    with pytest.raises(ValueError, match=r"'acme_pipes' is a format of landing files; tables: delta, "):
        TableSource(format="acme_pipes", path="/t")


def test_a_format_of_tables_of_a_package_makes_the_source_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "acme_tables.py").write_text(
        "from headrace.config.formats import TableFormat\n"
        "class Lance(TableFormat):\n"
        "    opens = 'acme_tables:open_lance'\n"
        "    properties = {'spark.sql.catalog.lance': 'com.acme.Catalog'}\n"
        "def open_lance(source, table, place, days, version):\n"
        "    return (source.path, place.format, version)\n"
    )
    from headrace.lake.tables.opened import find_table, open_table

    def spec_of(form: str) -> Spec:
        source = {"format": form, "path": str(tmp_path / "t")}
        return build_spec({"pipeline": "shop", "source": source, "table": {"columns": COLUMNS}, "features": FEATURES})

    with offering(site, "acme-tables", {"headrace.table_sources": {"lance": "acme_tables:Lance"}}, monkeypatch):
        for form in ("lance", "acme_tables:Lance"):
            spec = spec_of(form)
            assert isinstance(spec.source, TableSource)
            assert spec.spark.properties["spark.sql.catalog.lance"] == "com.acme.Catalog"
            place = find_table(spec.source, Workspace(tmp_path), None)
            assert place is not None
            snapshot: Any = open_table(spec.source, spec.table, place, {}, "5")
            assert snapshot == (str(tmp_path / "t"), form, "5")
    sys.modules.pop("acme_tables")


def test_a_store_of_a_package_is_one_for_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore.store")
    monkeypatch.setattr(location, "STORES", dict(location.STORES))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    site = tmp_path / "site"
    site.mkdir()
    (site / "acme_store.py").write_text(STORE)
    with pytest.raises(UserError, match=r"knows no store of vault: .*known: file, s3, gs, abfss, hdfs"):
        location_of("vault://bucket/in")
    names = {"vault": "acme_store:Vault", "half": "acme_store:Half"}
    with offering(site, "acme-store", {"headrace.stores": names}, monkeypatch):
        with pytest.raises(UserError, match=r"'acme_store:Half' is no store"):
            location_of("half://bucket/in")
        folder = location_of(f"vault://bucket/in/{D1}")
        (folder / "a.jsonl").put_text('{"id": "e1"}\n')
        assert isinstance(folder, Location)
        assert [str(file) for file in location_of(f"vault://bucket/in/{D1}/*.jsonl", glob=True).glob()] == [
            f"vault://bucket/in/{D1}/a.jsonl"
        ]
        path = pipeline(tmp_path, {"format": "jsonl", "path": "vault://bucket/in/{ds}/*.jsonl"})
        (planned,) = dry_run(str(path), Workspace(tmp_path / "home"), D1, [], "ingest", "ingest")
        assert planned.reads[0].startswith(f"vault://bucket/in/{D1}/*.jsonl (landing, version ")
    sys.modules.pop("acme_store")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        *(
            (
                f"publish.warehouse.kind={kind}",
                f"publish.warehouse.kind: warehouse '{kind}' is in a package of its own: pip install headrace-{kind}",
            )
            for kind in ("snowflake", "bigquery", "redshift", "databricks")
        ),
        (
            "source.format=criteo",
            "source.format: format of landing files 'criteo' is in a package of its own: pip install headrace-datasets",
        ),
        ("lake=hdfs://name:8020/a", "lake: store 'hdfs' is in a package of its own: pip install headrace-hdfs"),
    ],
)
def test_a_package_that_is_missing_is_named_in_one_line(
    setting: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "offered", lambda group: {})
    result = CliRunner().invoke(app, ["run", "clicks", "--home", str(tmp_path), "--dry-run", "--set", setting])
    assert result.exit_code == EXIT_USER_ERROR
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_doctor_names_the_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clicks.yaml"
    spec = yaml.safe_load(pipeline_file("clicks").read_text())
    path.write_text(yaml.safe_dump(spec | {"publish": {"warehouse": {"kind": "snowflake"}}}))
    monkeypatch.setattr(plugins, "offered", lambda group: {})
    result = CliRunner().invoke(app, ["doctor", str(path), "--home", str(tmp_path)])
    assert result.exit_code == EXIT_USER_ERROR
    assert "pip install headrace-snowflake" in " ".join(result.output.split())


def test_packages_of_this_repository_are_found_and_headrace_knows_none(tmp_path: Path) -> None:
    folders = sorted((checkout() / "plugins").glob("headrace-*"))
    packages: dict[str, str] = {}
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == folder.name
        ((_, points),) = project["entry-points"].items()
        packages |= dict.fromkeys(points, folder.name)
    assert packages == {**WAREHOUSES.packages, **STORE_KINDS.packages, **FILE_FORMATS.packages}
    for seam in (WAREHOUSES, STORE_KINDS, FILE_FORMATS):
        for name in seam.packages:
            seam.find(name, "kind")
    modules = {folder.name.replace("-", "_") for folder in folders}
    imports = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(modules)})\b", re.M)
    assert [str(f) for f in (checkout() / "python").rglob("*.py") if imports.search(f.read_text())] == []


def test_commands_tell_of_a_warehouse_that_is_none_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "clicks", "--dry-run", "--set", "publish.warehouse.kind=snowflke"])
    assert result.exit_code == EXIT_USER_ERROR
    assert "publish.warehouse.kind: no warehouse 'snowflke'; did you mean 'snowflake'" in result.output
    assert "Traceback" not in result.output
