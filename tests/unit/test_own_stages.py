"""Stages and models of other packages: found by entry point or as `module:Class`, run by the real commands, refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from openlineage.client.event_v2 import RunState
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.run import dry_run
from headrace.config import Spec, build_spec, load_spec
from headrace.config.installation import pipeline_file
from headrace.config.model import Model
from headrace.config.stages import ORDER
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from headrace.jobs.check_specs import answer_of
from headrace.jobs.housekeeping.collect import collect
from headrace.jobs.observe.openlineage.events import event
from headrace.jobs.observe.openlineage.names import Run, new_run_id
from headrace.jobs.observe.prometheus import newest
from headrace.jobs.stages import load_stage
from headrace.quality.report import overview
from headrace.quality.report.blocks import Day
from headrace.quality.report.report import page
from headrace.stage import plan_run, run_stage, stage_entries, stage_entry, stage_order
from headrace.stage.manifest import Manifest, Output
from tests.ingest_support import COLUMNS, D1
from tests.users_package import installed, offering

STAGE = "acme_row_counts"
SPLITS = {"train": 80, "valid": 15, "test": 5}
#: Stages of a package: one of each kind of mistake, and some that come behind others.
STAGES = """
from pydantic import BaseModel
from headrace.stage import PackageStage, Result

class Good(PackageStage):
    needs = ("features",)
    def verify(self, ctx, manifest): return None
    def run(self, ctx): return Result()

class Picky(Good):
    def __init__(self, name, args):
        super().__init__(name, args)
        if args: raise ValueError("there are none")

class Later(Good):
    needs = ("good",)

class AfterGate(Good):
    needs = ("gate",)

class AfterTrain(Good):
    needs = ("train", "challenger?")

class Loop(Good):
    needs = ("later",)

class First(Good):
    needs = ()

class Lost(Good):
    needs = ("cook",)

class Lacking(PackageStage):
    needs = ("features",)
    def run(self, ctx): return Result()

class Nothing:
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    site = tmp_path / "site"
    with installed(site, monkeypatch):
        yield site


@pytest.fixture
def kitchen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `kitchen` with the classes of STAGES; it offers two of them."""
    site = tmp_path / "kitchen"
    site.mkdir()
    (site / "kitchen.py").write_text(STAGES)
    with offering(site, "kitchen", {"headrace.stages": {"good": "kitchen:Good", "gone": "kitchen:Gone"}}, monkeypatch):
        yield
    sys.modules.pop("kitchen", None)


def clicks(stages: dict[str, Any], **sections: Any) -> dict[str, Any]:
    spec = yaml.safe_load(pipeline_file("clicks").read_text())
    return {**spec, "stages": stages, **sections}


def shop(tmp_path: Path, stages: dict[str, Any], days: Sequence[str] = (D1,)) -> tuple[Path, Workspace]:
    """A pipeline of a file whose stage `features` is done for some days, and its workspace."""
    path = tmp_path / "shop.yaml"
    features = {"label": "hour", "workflow": [], "split": {"by": "position"}}
    source = {"format": "csv", "path": "in/{ds}/*.csv"}
    spec = {"pipeline": "shop", "source": source, "table": {"columns": COLUMNS}, "features": features}
    path.write_text(yaml.safe_dump({**spec, "stages": stages}))
    ws = Workspace(tmp_path / "home")
    for ds in days:
        done = Manifest(stage="features", pipeline="shop", ds=ds, key="k", spec_hash="x", rows=SPLITS)
        done.save(ws.manifest("shop", ds, "features"))
    return path, ws


def command(home: Path, *words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--home", str(home)])


@pytest.mark.parametrize("stage", [{}, {"class": "acme.row_counts:RowCounts"}])
def test_commands_run_a_stage_of_a_package(
    stage: dict[str, Any], package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`headrace run` has it run in another process; status, lineage and metrics see it; it is done only once."""
    monkeypatch.setenv("PYTHONPATH", str(package))
    name = "counts" if stage else STAGE
    path, ws = shop(tmp_path, {name: {**stage, "args": {"delimiter": ";"}}})
    (planned,) = dry_run(str(path), ws, D1, [], name, name)
    assert (planned.runs, planned.writes) == (True, (f"exports/shop/{D1}.csv",))
    words = ("run", str(path), "--ds", D1, "--from", name, "--to", name)
    result = command(ws.home, *words)
    assert result.exit_code == EXIT_DONE, result.output
    file = ws.home / "exports" / "shop" / f"{D1}.csv"
    assert file.read_text() == "train;80\nvalid;15\ntest;5\n"
    manifest = Manifest.load(ws.manifest("shop", D1, name))
    assert manifest is not None
    assert (manifest.stage, manifest.rows, [i.name for i in manifest.inputs]) == (name, {"splits": 3}, ["features"])
    assert "nothing to do" in command(ws.home, *words).output
    states = json.loads(command(ws.home, "status", str(path), "--json").output)["stages"]
    assert {s["stage"]: s["state"] for s in states if s["key"]} == {"features": "stale", name: "done"}
    states = json.loads(command(ws.home, "status", "--json").output)["stages"]
    assert [s["stage"] for s in states if s["state"] == "done"] == ["features", name]
    assert f"{name} {D1}" in command(ws.home, "lineage", f"exports/shop/{D1}.csv").output
    assert list(newest(ws, "shop")) == ["features", name]
    # What it made is looked at, and its settings are part of its key.
    file.write_text("")
    assert "was changed" in command(ws.home, "status", str(path), "--verify").output
    again = dry_run(str(path), ws, D1, [f"stages.{name}.args.delimiter='|'"], name, name)
    assert again[0].reason == "its inputs or its part of the spec have changed"


def test_a_stage_is_planned_with_the_day(package: Path, tmp_path: Path) -> None:
    spec = build_spec(clicks({STAGE: {}}))
    names = list(stage_entries(spec))
    assert names[names.index("features") + 1] == STAGE
    entry = stage_entry(spec, STAGE)
    assert (entry.dag, entry.spark, entry.lease) == ("retrain", False, None)
    assert entry.help == "Write the rows of the day's dataset, by split, to a CSV file."
    now = datetime(2026, 3, 1, tzinfo=UTC)
    sent = event(RunState.START, Run("clicks", D1, STAGE, new_run_id()), entry, "n", now)
    assert sent.job.facets["documentation"].description == entry.help
    assert sent.run.facets["processing_engine"].name == "headrace"


@pytest.mark.parametrize(
    ("stages", "order"),
    [
        ({"good": "Good", "later": "Later"}, ["features", "good", "later", "drift", "train"]),
        ({"later": "Later", "good": "Good"}, ["features", "good", "later", "drift", "train"]),
        ({"b": "Good", "a": "Good"}, ["features", "b", "a", "drift", "train"]),
        # Airflow skips the stage behind a gate that refuses, and runs stages with leases of their own at once.
        ({"x": "AfterGate"}, ["gate", "promote", "x", "score"]),
        ({"x": "AfterTrain"}, ["train", "baseline", "x", "evaluate"]),
    ],
)
def test_a_stage_comes_behind_those_that_it_needs(kitchen: None, stages: dict[str, str], order: list[str]) -> None:
    spec = build_spec(clicks({name: {"class": f"kitchen:{kind}"} for name, kind in stages.items()}, gate={}))
    names = list(stage_entries(spec))
    start = names.index(order[0])
    assert names[start : start + len(order)] == order
    assert [name for name in stage_order(spec) if name not in spec.stages] == list(ORDER)
    assert [name for name in stage_order(spec) if stage_entry(spec, name).applies(spec)] == names


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"train": {}}, "stages: 'train' is a stage of headrace's own: give yours another name"),
        ({"Audit": {}}, r"stages: 'Audit' must match \[a-z\]"),
        ({"goood": {}}, "stages.goood: no stage 'goood'; did you mean 'good'"),
        ({"gone": {}}, "stages.gone: stage 'kitchen:Gone' cannot be imported: module 'kitchen' has no attribute"),
        ({"x": {"class": "kitchn:Good"}}, "stages.x: stage 'kitchn:Good' cannot be imported: No module named 'kitchn'"),
        ({"x": {"class": "kitchen:Nothing"}}, "'kitchen:Nothing' is no stage: it does not extend headrace.stage:Pack"),
        ({"x": {"class": "kitchen:Lacking"}}, "stages.x: 'kitchen:Lacking' is no stage: it lacks verify"),
        ({"x": {"class": "kitchen:First"}}, "stages.x: 'kitchen:First' needs no stage: name some of ingest, "),
        ({"x": {"class": "kitchen:Lost"}}, "stages.x: 'kitchen:Lost' needs 'cook', which is no stage before it"),
        ({"x": {"class": "kitchen:AfterGate"}}, "stages.x needs 'gate', and pipeline 'clicks' has no such stage"),
        ({"x": {"class": "kitchen:Picky", "args": {"a": 1}}}, "stages.x.args: there are none"),
        ({"x": {"class": "acme.row_counts:RowCounts", "args": {"delim": ";"}}}, "unknown parameter 'delim'; did you m"),
        ({"x": {"clas": "kitchen:Good"}}, "unknown key 'stages.x.clas'; did you mean 'class'"),
        ({"later": {"class": "kitchen:Loop"}}, "stages.later: 'kitchen:Loop' needs 'later', which is no stage before"),
        (
            {"good": {"class": "kitchen:Loop"}, "later": {"class": "kitchen:Later"}},
            "stages: good and later need each other",
        ),
    ],
)
def test_a_stage_that_is_none_is_refused_in_one_line(
    kitchen: None, package: Path, tmp_path: Path, stages: dict[str, Any], message: str
) -> None:
    path = tmp_path / "clicks.yaml"
    path.write_text(yaml.safe_dump(clicks(stages)))
    with pytest.raises(UserError, match=message):
        dry_run(str(path), Workspace(tmp_path / "home"), D1, [], "ingest", "report")
    result = command(tmp_path / "home", "run", str(path), "--ds", D1, "--dry-run")
    assert result.exit_code == EXIT_USER_ERROR
    assert "Traceback" not in result.output
    answer = answer_of(str(path))
    assert answer["stages"] == []
    assert "\n" not in answer["fault"]


def test_the_dag_parser_is_told_of_stages_of_packages_alone(kitchen: None, tmp_path: Path) -> None:
    assert answer_of("clicks") == {"fault": None, "stages": []}
    path = tmp_path / "clicks.yaml"
    path.write_text(yaml.safe_dump(clicks({"good": {}})))
    answer = json.loads(json.dumps(answer_of(str(path))))
    assert [entry["name"] for entry in answer["stages"]] == list(stage_entries(load_spec(path)))
    assert {entry["name"]: entry["dag"] for entry in answer["stages"]}["good"] == "retrain"


def test_two_packages_that_offer_one_name_are_named(
    kitchen: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "other"
    site.mkdir()
    spec = build_spec(clicks({"good": {}}))
    with (
        offering(site, "other", {"headrace.stages": {"good": "other:Good"}}, monkeypatch),
        pytest.raises(UserError, match=r"two installed packages offer 'good' in headrace.stages: .*Uninstall one"),
    ):
        stage_entries(spec)


def test_a_model_of_a_package_has_a_name(package: Path) -> None:
    from headrace.models.classes import make_network
    from headrace.models.inputs import InputFeatures

    features = InputFeatures({"price": 1}, ("user", "item"), 3)
    model = Model.model_validate({"class": "acme_factors", "args": {"user": "user", "item": "item", "dim": 3}})
    network = make_network(model, features, seed=1)
    assert type(network).__module__ == "acme.nets"
    assert [lookup.dim for lookup in network.lookups] == [3, 3, 1]
    with pytest.raises(ValueError, match=r"no class 'acme_factor' \(known: dlrm, .*acme_factors; one of your own"):
        Model.model_validate({"class": "acme_factor"})
    with pytest.raises(UserError, match=r"model.args of 'acme_factors': .*'dims'; did you mean 'dim'"):
        make_network(Model.model_validate({"class": "acme_factors", "args": {"dims": 3}}), features, 1)


def test_a_spec_without_stages_of_packages_is_as_before() -> None:
    spec: Spec = load_spec("clicks")
    assert stage_order(spec) == ORDER
    assert spec.stages == {}


@pytest.mark.parametrize(
    ("group", "name", "noun"),
    [
        ("headrace.warehouses", "delta", "the warehouse 'delta'"),
        ("headrace.sources", "csv", "the format of landing files 'csv'"),
        ("headrace.table_sources", "csv", "the format of tables 'csv'"),
        ("headrace.operators", "categorify", "the operator 'categorify'"),
        ("headrace.models", "deepfm", "the model 'deepfm'"),
        ("headrace.models", "dlrm", "the model 'dlrm'"),
        ("headrace.stages", "train", "the stage 'train'"),
    ],
)
def test_a_package_that_takes_a_name_of_headrace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str, noun: str
) -> None:
    """The class is never asked, so that it need not exist."""
    site = tmp_path / "site"
    site.mkdir()
    with offering(site, "greedy-kinds", {group: {name: "greedy:Kind"}}, monkeypatch):
        result = command(tmp_path / "home", "run", "clicks", "--ds", D1, "--dry-run")
        assert result.exit_code == EXIT_USER_ERROR
        fault = answer_of("clicks")["fault"]
    assert fault.startswith(
        f"the installed package greedy-kinds offers {noun} ({group}), which is a name of headrace's"
    )


def test_the_report_has_stages_of_packages(package: Path, tmp_path: Path) -> None:
    _, ws = shop(tmp_path, {STAGE: {}})
    spec = load_spec(str(tmp_path / "shop.yaml"))
    run_stage(load_stage(STAGE, spec), spec, ws, D1)
    plan = plan_run(load_stage("report", spec), spec, ws, D1)
    assert STAGE in plan.ctx.upstream
    manifests = plan.ctx.upstream
    text = page(Day(spec, D1, manifests))
    chip = next(chip for chip in overview.chips(Day(spec, D1, manifests)) if chip.name == STAGE)
    assert chip.state == "done"
    assert [c.name for c in overview.chips(Day(spec, D1, manifests))][:3] == ["ingest", "features", STAGE]
    assert f"exports/shop/{D1}.csv" in text
    assert "Stages of packages" in text
    own_manifests = {name: manifest for name, manifest in manifests.items() if name != STAGE}
    assert f"Not run: {STAGE}" in page(Day(spec, D1, own_manifests))


def test_gc_knows_what_a_stage_of_a_package_writes(package: Path, tmp_path: Path) -> None:
    """Outputs of kept days stay; those of older days, and what no manifest names, go."""
    days = ["2026-01-10", "2026-01-11", "2026-01-12"]
    _, ws = shop(tmp_path, {STAGE: {"keep_days": 2}}, days)
    spec = load_spec(str(tmp_path / "shop.yaml"))
    for ds in days:
        run_stage(load_stage(STAGE, spec), spec, ws, ds)
    exports = ws.store / "exports" / "shop"
    # A run that was killed, whose day was never done; a folder of another pipeline; what the pattern does not cover.
    for name in ("2025-12-31.csv", "2026-01-01.txt"):
        (exports / name).put_text("left over")
    (ws.store / "exports" / "other" / "2025-12-31.csv").put_text("of another pipeline")
    # Files of packages in headrace's own folders are named, too: by kinds of their own.
    for ds, folder in (("2026-01-12", "datasets"), ("2026-01-12", "models")):
        (ws.store / folder / "shop" / ds / "mine" / "table.bin").put_text("live")
    manifest = Manifest.load(ws.manifest("shop", "2026-01-12", STAGE))
    assert manifest is not None
    names = [f"{folder}/shop/2026-01-12/mine/table.bin" for folder in ("datasets", "models")]
    extra = tuple(Output(kind="acme", name=name, version="1") for name in names)
    saved = manifest.model_copy(update={"outputs": (*manifest.outputs, *extra)})
    saved.save(ws.manifest("shop", "2026-01-12", STAGE))
    soon = datetime.now(UTC) + timedelta(days=30)
    listed = {(step.kind, step.name) for step in collect(spec, ws, soon, delete=False)}
    assert listed == {("output", "exports/shop/2026-01-10.csv"), ("unfinished", "exports/shop/2025-12-31.csv")}
    assert len(exports.entries()) == 5
    assert {(step.kind, step.name) for step in collect(spec, ws, soon, delete=True)} == listed
    assert [entry.name for entry in exports.entries()] == ["2026-01-01.txt", "2026-01-11.csv", "2026-01-12.csv"]
    removed = Manifest.load(ws.manifest("shop", "2026-01-10", STAGE))
    assert removed is not None
    assert [r.name for r in removed.removed] == ["exports/shop/2026-01-10.csv"]
    assert not [*collect(spec, ws, soon, delete=True)]
    # Young files may be of a run that is at work: nobody has its lock outside of `delete`.
    (exports / "2025-12-30.csv").put_text("young")
    assert not [*collect(spec, ws, datetime.now(UTC), delete=False)]
