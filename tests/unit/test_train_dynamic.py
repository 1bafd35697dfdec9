"""Features of raw ids through the loop: against codes, on ranks, through kills, from day to day, in a saved model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from headrace.cli.plan import plan_sharding
from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import DynamicTable, EmbeddingOptimizer, Model, Negatives, Optimizer, Spec, Train
from headrace.config.schema import DatasetSchema
from headrace.config.workspace import Workspace
from headrace.dataset.negatives import NegativeSampler
from headrace.embeddings.dynamic.rows import DynamicReport, bytes_for
from headrace.errors import UserError
from headrace.models.predictor import load_predictor
from headrace.models.saved import load_model
from headrace.models.sharded_model import ShardedModel
from headrace.models.xgboost_model import matrix_columns
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.run import train, train_local
from headrace.train.setup.earlier_days import model_misfit
from tests.train_support import Stopped, read_padded, stop_at

MODEL = Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(16,))
ALL, PARTLY_RAW = ("user", "item", "tags"), ("user", "tags")
#: Few rows, so that many are evicted.
TIGHT = {"user": DynamicTable(admit_after=2, max_rows=40), "item": DynamicTable(max_rows=16, evict="lru")}


def settings(dynamic: dict[str, DynamicTable] | None = None, clip_norm: float | None = None, **more: Any) -> Train:
    optimizer = EmbeddingOptimizer(kind="adagrad", learning_rate=0.1, clip_norm=clip_norm, dynamic=dynamic or {})
    base: dict[str, Any] = {"batch_size": 200, "streams": 4, "epochs": 1, "seed": 3, "checkpoint_steps": 5, "keep": 2}
    return Train(**{**base, **more}, dense=Optimizer(kind="adam", learning_rate=0.01), embeddings=optimizer)


def raw(schema: DatasetSchema, names: tuple[str, ...]) -> DatasetSchema:
    """The same features, some of raw ids: the codes are taken for ids."""
    as_raw = {"dynamic": True, "dtype": "int64", "cardinality": None, "vocabulary": None}
    return DatasetSchema(features=tuple(f.model_copy(update=as_raw) if f.name in names else f for f in schema.features))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    torch.set_num_threads(1)
    return Workspace(tmp_path_factory.mktemp("dynamic"))


@pytest.fixture(scope="module")
def coded(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=3_000, valid=400)


def job_of(home: Workspace, coded: Manifest, key: str, conf: Train, names: tuple[str, ...] = ALL, **more: Any) -> Job:
    assert coded.dataset_schema is not None
    features = coded.model_copy(update={"dataset_schema": raw(coded.dataset_schema, names)})
    return Job(
        home=home.home,
        pipeline="clicks",
        ds=coded.ds,
        key=key,
        features=features,
        model=MODEL,
        train=conf,
        progress_seconds=0.0,
        **more,
    )


def losses(report: TrainingReport) -> list[float]:
    return [p["loss"] for p in report.curve]


def valid_columns(job: Job) -> dict[str, np.ndarray]:
    path = job.ws.home / job.features.output("dataset").name / "valid" / "part-0000.parquet"
    assert job.features.dataset_schema is not None
    table = read_padded([path], job.features.dataset_schema)
    return {name: table[name].to_numpy() for name in table.columns}


def predictions(job: Job, columns: dict[str, np.ndarray] | None = None) -> np.ndarray:
    return load_predictor(job.saved_model).predict(columns or valid_columns(job))


@pytest.mark.parametrize(("pooling", "more"), [("sum", {"clip_norm": 0.01}), ("mean", {}), ("max", {"accumulate": 3})])
def test_with_every_id_admitted_it_is_the_model_of_codes(
    home: Workspace, coded: Manifest, pooling: Any, more: dict[str, Any]
) -> None:
    runs = {}
    for names in (ALL, PARTLY_RAW, ()):
        job = job_of(home, coded, f"equal-{pooling}-{len(names)}", settings(**more), names)
        job = job.model_copy(update={"model": MODEL.model_copy(update={"pooling": pooling})})
        runs[names] = train_local(job), predictions(job)
    report, expected = runs[()]
    assert losses(report)[-1] < losses(report)[0]
    for names in (ALL, PARTLY_RAW):
        np.testing.assert_allclose(losses(runs[names][0]), losses(report), rtol=1e-4)
        np.testing.assert_allclose(runs[names][1], expected, atol=1e-3)
        assert runs[names][0].dynamic.keys() == set(names)
    assert report.dynamic == {}
    figures = runs[ALL][0].dynamic["user"]
    assert (figures["rows"], figures["evicted"], figures["oov_share"]) == (58, 0, 0.0)  # ids 2..59, all seen


@pytest.fixture(scope="module")
def tight(home: Workspace, coded: Manifest) -> tuple[Job, TrainingReport]:
    job = job_of(home, coded, "tight", settings(TIGHT), (*PARTLY_RAW, "item"))
    return job, train_local(job)


def test_the_limits_hold_and_are_told(tight: tuple[Job, TrainingReport]) -> None:
    figures = tight[1].dynamic
    assert figures["user"]["rows"] <= 40
    assert figures["item"]["rows"] <= 16
    for name in TIGHT:
        assert figures[name]["admitted"] - figures[name]["evicted"] == figures[name]["rows"]
        assert figures[name]["evicted"] > 10
        assert 0 < figures[name]["oov_share"] < 1
        assert 0 < figures[name]["hit_share"] < 1
    # From the saved model and the definition.
    job, _ = tight
    columns = valid_columns(job)
    tables = [pq.read_table(p) for p in sorted((job.ws.home / job.features.output("dataset").name / "valid").iterdir())]
    users = np.concatenate([t.column("user").to_numpy() for t in tables])
    model = load_model(job.saved_model)
    assert model.dynamic is not None
    rows = model.dynamic.tables[0]
    assert figures["user"]["oov_share"] == pytest.approx(1 - np.isin(users, rows.ids).mean(), abs=1e-6)
    # Ids without a row are all alike, whatever they are; and they are not like one with a row.
    strangers = {**columns, "user": np.full(len(columns["user"]), -(2**63), dtype=np.int64)}
    other_strangers = {**columns, "user": 2**62 + np.arange(len(columns["user"]), dtype=np.int64)}
    assert np.array_equal(predictions(job, strangers), predictions(job, other_strangers))
    assert not np.allclose(predictions(job, strangers), predictions(job, columns), atol=1e-3)
    assert model.absent is not None
    assert float(model.absent[0].detach().abs().max()) > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_same_steps(home: Workspace, coded: Manifest, ranks: int) -> None:
    conf = settings({"user": DynamicTable(admit_after=3), "item": DynamicTable(admit_chance=0.5)})
    one_rank = train_local(job_of(home, coded, f"alone-{ranks}", conf))
    job = job_of(home, coded, f"ranks-{ranks}", conf)
    for report in run_ranks(ranks, lambda c: train(job, c)):
        np.testing.assert_allclose(losses(report), losses(one_rank), rtol=2e-4)
        for name in ALL:
            for figure in ("rows", "waiting", "admitted", "hit_share", "oov_share"):
                assert report.dynamic[name][figure] == one_rank.dynamic[name][figure], (name, figure)


@pytest.mark.parametrize(("ranks", "background"), [(1, False), (1, True), (2, False)])
def test_stopped_and_gone_on_equals_undisturbed(
    home: Workspace, coded: Manifest, tight: tuple[Job, TrainingReport], ranks: int, background: bool
) -> None:
    conf = settings(TIGHT, background_checkpoints=background, accumulate=ranks)
    complete, stopped = (job_of(home, coded, f"{n}-{ranks}-{background}", conf) for n in ("whole", "stopped"))
    expected = run_ranks(ranks, lambda c: train(complete, c))[0]
    with pytest.raises(Stopped):
        run_ranks(ranks, lambda c: train(stopped, c, stop_at(8)))
    report = run_ranks(ranks, lambda c: train(stopped, c))[0]
    assert report.resumed_from_step == 5
    assert losses(report) == losses(expected)
    assert report.metrics == expected.metrics
    unsized = [
        {n: {k: v for k, v in t.items() if k not in ("load", "mib")} for n, t in r.dynamic.items()}
        for r in (report, expected)
    ]
    assert unsized[0] == unsized[1]
    for path in sorted((complete.saved_model / "dynamic" / "*.safetensors").glob()):
        assert path.read_bytes() == (stopped.saved_model / "dynamic" / path.name).read_bytes()
    if ranks == 1:
        assert losses(expected) == losses(tight[1])


@pytest.mark.parametrize("name", ["user-00000.safetensors", "item-00000-training.safetensors", "tags-00000.json"])
def test_a_checkpoint_with_a_damaged_table_is_refused_by_name_and_the_one_before_is_used(
    home: Workspace, coded: Manifest, tight: tuple[Job, TrainingReport], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    source_job = tight[0]
    job = job_of(home, coded, f"damaged-{name}", settings(TIGHT))
    shutil.copytree(source_job.checkpoints, job.checkpoints)
    path = (job.checkpoints / "step-00000015" / "dynamic" / name).local_path()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    report = train_local(job)
    assert report.resumed_from_step == 10
    assert "step-00000015 is refused" in caplog.text
    assert name in caplog.text
    for file in sorted((source_job.saved_model / "dynamic" / "*.safetensors").glob()):
        assert file.read_bytes() == (job.saved_model / "dynamic" / file.name).read_bytes()


def test_saved_on_two_answers_alike_on_three_and_on_one(home: Workspace, coded: Manifest) -> None:
    job = job_of(home, coded, "reshard", settings(TIGHT))
    run_ranks(2, lambda c: train(job, c))
    columns = valid_columns(job)
    continuous = torch.from_numpy(np.stack([columns["age"], columns["price"]], axis=1))
    names = ("user", "item", "tags__0", "tags__1", "tags__2")
    codes = torch.from_numpy(np.stack([columns[n].astype(np.int64) for n in names], axis=1))

    def answer(folder: Path) -> Callable[[Collective], torch.Tensor]:
        def ask(c: Collective) -> torch.Tensor:
            with torch.no_grad():
                return load_model(local(folder), c)(continuous, codes)

        return ask

    expected = run_ranks(2, answer(job.saved_model))[0]
    for got in [*run_ranks(3, answer(job.saved_model)), answer(job.saved_model)(LocalCollective())]:
        assert torch.equal(got, expected)


def test_a_day_starts_from_the_table_of_the_day_before(
    home: Workspace, tight: tuple[Job, TrainingReport], make_dataset: Callable[..., Manifest]
) -> None:
    tomorrow = make_dataset(home, train=1_000, valid=200, users=400, ds="2026-01-11", seed=1)
    conf = settings({"user": DynamicTable(admit_after=2)}, max_steps=1)
    still = conf.model_copy(update={"embeddings": conf.embeddings.model_copy(update={"learning_rate": 1e-12})})
    job = job_of(home, tomorrow, "warm", still, warm_start=str(tight[0].saved_model))
    report = train_local(job)
    old, new = (load_model(local(j.saved_model)).dynamic for j in (tight[0], job))
    assert old is not None
    assert new is not None
    rows_before, rows_after = (
        {int(i): w for i, w in zip(d.tables[0].ids, d.tables[0].weight, strict=True)} for d in (old, new)
    )
    assert rows_before.keys() < rows_after.keys()
    assert all(float((rows_after[i] - w).abs().max()) < 1e-9 for i, w in rows_before.items())
    newcomers = [i for i in rows_after if i > 60]
    assert newcomers
    # Counts came along: of tables, and of who waited.
    assert report.dynamic["user"]["admitted"] == tight[1].dynamic["user"]["admitted"] + len(rows_after) - len(
        rows_before
    )
    cold = train_local(job_of(home, tomorrow, "cold", still))
    assert report.dynamic["user"]["rows"] > cold.dynamic["user"]["rows"]


def test_a_plan_names_the_tables_beside_it(
    home: Workspace, coded: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coded.dataset_schema is not None
    mixed = coded.model_copy(update={"dataset_schema": raw(coded.dataset_schema, PARTLY_RAW)})
    mixed.save(home.manifest("clicks", coded.ds, "features"))
    try:
        limits = "train.embeddings.dynamic={user: {max_rows: 1000, memory_mib: 64}}"
        planned = plan_sharding(home, "clicks", None, coded.ds, 4, None, [limits])
    finally:
        coded.save(home.manifest("clicks", coded.ds, "features"))
    assert [t.name for t in planned.plan.tables] == ["item"]
    output = " ".join(capsys.readouterr().out.split())
    most = bytes_for(250, planned.plan.tables[0].dim, planned.work.optimizer) / 2**20
    assert f"raw ids of user, dealt by their hash: at most {most:,.1f} MiB a rank" in output
    assert "raw ids of tags, dealt by their hash: no limit" in output


def test_a_model_of_codes_is_no_start(coded: Manifest) -> None:
    schema = coded.dataset_schema
    assert schema is not None
    meta = {"model": MODEL.model_dump(mode="json"), "schema": schema.model_dump(mode="json")}
    spec = Spec.model_construct(model=MODEL)
    assert model_misfit(meta, spec, schema) is None
    assert model_misfit(meta, spec, raw(schema, ("item",))) == "its feature 'item' has another form"


def test_what_cannot_be_is_said(home: Workspace, coded: Manifest) -> None:
    schema = coded.dataset_schema
    assert schema is not None
    partly_raw = raw(schema, PARTLY_RAW)

    def model(**more: Any) -> ShardedModel:
        return ShardedModel(partly_raw, MODEL, LocalCollective(), 1, settings=EmbeddingOptimizer(**more))

    with pytest.raises(UserError, match=r"train\.embeddings\.dynamic: 'usr' is not .*did you mean 'user'"):
        model(dynamic={"usr": DynamicTable()})
    with pytest.raises(UserError, match=r"'user' has raw ids, and so no vocabulary .*method to in_batch"):
        NegativeSampler.from_config(partly_raw, Negatives(column="user"))
    assert "user" not in matrix_columns(partly_raw)
    assert "item" in matrix_columns(partly_raw)


def test_a_saved_model_without_its_table_is_refused(
    home: Workspace, tight: tuple[Job, TrainingReport], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tight[0].saved_model, folder)
    (folder / "dynamic" / "user-00000.json").unlink()
    with pytest.raises(UserError, match=r"user-00000\.json is missing"):
        load_predictor(folder)
    shutil.rmtree(folder / "dynamic")
    with pytest.raises(UserError, match="not a complete saved model: dynamic missing"):
        load_predictor(folder)


def test_a_report_without_lookups_has_no_share() -> None:
    assert DynamicReport(0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0).oov_share is None
