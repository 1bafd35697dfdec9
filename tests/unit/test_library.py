"""headrace as a library over pandas and Arrow frames, compared with pandas' own arithmetic."""

from __future__ import annotations

import pickle
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import headrace as hr
from headrace.comm.base import LocalCollective
from headrace.config import Chain, Model
from headrace.features.workflow import fitted as pipeline
from headrace.models.predictor import load_predictor
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.plugins import installed_entry_points
from headrace.storage import local
from tests.plugin_operators import Halve


def frame(rows: int = 3_000, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    price = rng.lognormal(size=rows)
    price[::17] = np.nan
    return pd.DataFrame(
        {
            "user": [f"u{i}" for i in rng.zipf(1.5, rows) % 40],
            "item": rng.integers(0, 30, rows),
            "price": price,
            "at": pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(np.arange(rows), "min"),
            "click": rng.integers(0, 2, rows),
        }
    )


def workflow(**more: Any) -> Any:
    ids = ["user", "item"] >> hr.Categorify(min_count=2) >> hr.AddTags("id")
    numbers = ["price"] >> hr.FillMissing() >> hr.Log() >> hr.Normalize()
    return hr.Workflow(ids + numbers, label="click", **more)


def test_importing_costs_nothing() -> None:
    loaded = "import headrace, sys; print({'torch', 'pyspark', 'pyarrow', 'pydantic', 'pandas'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True).strip() == "set()"


def test_numbers_and_codes_are_what_pandas_counts() -> None:
    df = frame()
    out = workflow().fit(df).transform(df)
    logs = np.log1p(df["price"].fillna(0.0))
    np.testing.assert_allclose(out["price"], (logs - logs.mean()) / logs.std(), rtol=0, atol=1e-5)
    counts = df["user"].value_counts()
    frequent = sorted((v for v in counts.index if counts[v] >= 2), key=lambda v: (-counts[v], v))
    codes = {value: code for code, value in enumerate(frequent, 2)}
    assert out["user"].tolist() == [codes.get(u, 1) for u in df["user"]]
    assert out["click"].tolist() == df["click"].tolist()
    assert out.index.equals(df.index)


def test_every_kind_of_frame_gives_the_same() -> None:
    df = frame(400)
    table = pa.Table.from_pandas(df, preserve_index=False)
    fitted = workflow().fit(df)
    expected = fitted.transform(df)
    # Polars hands its columns to Arrow as large texts, in a table of chunks.
    large = table.set_column(0, "user", table.column("user").cast(pa.large_string()))
    by_text = pa.concat_tables([large.slice(0, 150), large.slice(150)])
    encoded = table.set_column(0, "user", table.column("user").dictionary_encode())
    for other_frame in (table, by_text, encoded):
        refitted = workflow().fit(other_frame)
        assert refitted.fitted.states == fitted.fitted.states
        pd.testing.assert_frame_equal(refitted.transform(other_frame).to_pandas(), expected, check_index_type=False)
    batch = table.to_batches()[0]
    assert isinstance(fitted.transform(batch), pa.RecordBatch)
    assert fitted.transform(table.slice(0, 0)).num_rows == 0


def test_a_later_fit_keeps_the_codes() -> None:
    first = workflow().fit(frame(seed=0))
    later = workflow().fit(frame(seed=1).assign(user=lambda d: d["user"] + "new"), before=first)
    codes_before = dict(zip(*first.vocabularies["user"].to_pydict().values(), strict=True))
    after = dict(zip(*later.vocabularies["user"].to_pydict().values(), strict=True))
    assert codes_before.items() <= after.items()
    assert sorted(after.values()) == list(range(2, 2 + len(after)))
    assert len(after) > len(codes_before)


def test_a_dataset_has_every_row_once_and_the_loader_gives_them(tmp_path: Path) -> None:
    df = frame().assign(row=np.arange(3_000))
    fitted = workflow(carried=["row"]).fit(df)
    assert fitted.write_dataset(df, tmp_path / "data", valid=0.2) == {"train": 2_400, "valid": 600}
    out = fitted.transform(df)
    stored = {
        s: pq.read_table(tmp_path / "data" / s).to_pandas().set_index("row").sort_index() for s in ("train", "valid")
    }
    combined = pd.concat(stored.values())
    assert combined.index.tolist() == list(range(3_000)), "the last rows validate, and none is lost"
    for name in ("user", "item", "price", "click"):
        assert combined[name].tolist() == out[name].tolist(), name

    data = hr.load_dataset(tmp_path / "data", "valid", batch_size=128)
    seen = [(x["item"].tolist(), x["price"].tolist(), y.tolist()) for x, y in data]
    rows = [row for batch in seen for row in zip(*batch, strict=True)]
    assert sorted(rows) == sorted(zip(*(stored["valid"][n].tolist() for n in ("item", "price", "click")), strict=True))

    train = hr.load_dataset(tmp_path / "data", batch_size=64, seed=3)
    epochs = [[y.tolist() for _, y in train] for _ in range(2)]
    assert epochs[0] != epochs[1], "another epoch, another order"
    reloaded = hr.load_dataset(tmp_path / "data", batch_size=64, seed=3)
    assert [y.tolist() for _, y in DataLoader(reloaded, batch_size=None)] == epochs[0]
    halves = [hr.load_dataset(tmp_path / "data", batch_size=64, seed=3, rank=r, world_size=2) for r in range(2)]
    joined = [a.tolist() + b.tolist() for (_, a), (_, b) in zip(*halves, strict=True)]
    assert joined == epochs[0], "two ranks see the steps of one"


def test_decimals_are_numbers_and_texts() -> None:
    price = pa.array([None, Decimal("1.50"), Decimal("-2.75")], pa.decimal128(9, 2))
    chains = (["price"] >> Halve()) + (["price"] >> hr.Rename(suffix="_code") >> hr.Categorify())
    out = hr.Workflow(chains, label="y").fit(table := pa.table({"price": price, "y": [0, 1, 0]})).transform(table)
    assert out.column("price").to_pylist() == [0.0, 0.75, -1.375]
    assert out.column("price_code").to_pylist()[0] == 0


def test_lists_keep_their_width(tmp_path: Path) -> None:
    df = pd.DataFrame({"tags": [["a", "b"], [], None, ["b", "c", "d"]] * 5, "y": [0, 1, 1, 0] * 5})
    fitted = hr.Workflow(["tags"] >> hr.Categorify() >> hr.Pad(length=2), label="y").fit(df)
    fitted.write_dataset(df, tmp_path / "data", valid=0, min_row_groups=1)
    ((features, _),) = list(hr.load_dataset(tmp_path / "data", batch_size=20, shuffle=False))
    assert features["tags"].shape == (20, 2)
    codes = dict(zip(*fitted.vocabularies["tags"].to_pydict().values(), strict=True))
    expected = [[codes["a"], codes["b"]], [0, 0], [0, 0], [codes["b"], codes["c"]]] * 5
    assert sorted(features["tags"].tolist()) == sorted(expected)
    ((features, _),) = list(hr.load_dataset(tmp_path / "data", batch_size=20, shuffle=False, jagged=True))
    tags = features["tags"]
    assert (tags.samples, tags.values.numel()) == (20, 20)
    assert sorted(tags.to_padded(2).tolist()) == sorted(expected)


def test_an_operator_of_ones_own_is_recorded_by_its_class(tmp_path: Path) -> None:
    df = frame(300)
    fitted = hr.Workflow(["price"] >> Halve(by=4.0), label="click").fit(df)
    fitted.save(tmp_path / "workflow")
    assert '"op": "tests.plugin_operators:Halve"' in (tmp_path / "workflow" / "workflow.json").read_text()
    reloaded = hr.FittedWorkflow.load(tmp_path / "workflow").transform(df)
    np.testing.assert_array_equal(reloaded["price"], (df["price"].fillna(0.0) / 4).astype(np.float32))


def test_an_operator_of_an_installed_package_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "halves-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[headrace.operators]\nhalve_it = tests.plugin_operators:Halve\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed_entry_points.cache_clear()
    try:
        chain = Chain.model_validate({"columns": ["price"], "ops": [{"halve_it": {"by": 4}}]})
        df = frame(300)
        transformed = hr.Workflow([chain], label="click").fit(df).transform(df)
        np.testing.assert_array_equal(transformed["price"], (df["price"].fillna(0.0) / 4).astype(np.float32))
        with pytest.raises(hr.UserError, match="no operator 'halv_it'; did you mean 'halve_it'"):
            hr.Workflow([Chain.model_validate({"columns": ["price"], "ops": ["halv_it"]})], label="click").fit(df)
    finally:
        installed_entry_points.cache_clear()


@pytest.mark.parametrize(
    ("chains", "data", "message"),
    [
        (["price"] >> hr.Log(), {"price": [1.0]}, "the frame has no column 'y'"),
        (["prise"] >> hr.Log(), {"price": [1.0], "y": [1]}, "no column 'prise'.*price"),
        (["price"] >> hr.Log(), {"price": [{"a": 1}], "y": [1]}, "column 'price' is struct"),
        (["price"] >> hr.Log(), {"price": [1.0, 2.0], "y": [1, 3]}, "label 'y' is neither 0 nor 1 in 1 of 2 rows"),
        (["price"] >> hr.Log(), {"price": pa.array([], pa.float64()), "y": pa.array([], pa.int64())}, "no row"),
    ],
)
def test_mistakes_are_named(chains: Any, data: Any, message: str) -> None:
    with pytest.raises(hr.UserError, match=message):
        hr.Workflow(chains, label="y").fit(pa.table(data))


def test_names_of_operators_that_are_none() -> None:
    def fit(op: str) -> None:
        hr.Workflow([Chain.model_validate({"columns": ["price"], "ops": [op]})], label="click").fit(frame(20))

    for op, message in (
        ("nowhere.at_all:Thing", "cannot be imported: No module named 'nowhere'"),
        ("tests.plugin_operators:Thing", "has no attribute 'Thing'"),
        ("tests.plugin_operators:Rank", "is no operator: it does not extend headrace.features.ops.base:Op"),
        ("clamp", "no operator 'clamp'.*one of your own: MODULE:CLASS"),
    ):
        with pytest.raises(hr.UserError, match=message):
            fit(op)


def test_a_dataset_that_is_there_stays(tmp_path: Path) -> None:
    df = frame(200)
    fitted = workflow().fit(df)
    fitted.write_dataset(df, tmp_path / "data")
    with pytest.raises(hr.UserError, match="is there already"):
        fitted.write_dataset(df, tmp_path / "data")
    assert fitted.write_dataset(df, tmp_path / "data", overwrite=True)["train"] == 180
    with pytest.raises(hr.UserError, match="is no dataset"):
        hr.load_dataset(tmp_path)
    with pytest.raises(hr.UserError, match="multiple of streams=3"):
        hr.load_dataset(tmp_path / "data", batch_size=10, streams=3)


def test_a_predictor_says_of_frames_what_the_model_says_of_features(tmp_path: Path) -> None:
    df = frame(600)
    table = pa.table(
        {**{c: df[c] for c in ("user", "price", "click")}, "tags": [["a", "b"][: i % 3] for i in df.index]}
    )
    chains = (["user"] >> hr.Categorify()) + (["tags"] >> hr.Categorify() >> hr.Pad(length=2))
    fitted = hr.Workflow(chains + (["price"] >> hr.FillMissing() >> hr.Log()), label="click").fit(table)
    fitted.save(tmp_path / "workflow")
    schema = pipeline.FittedWorkflow.load(local(tmp_path / "workflow")).schema
    model = ShardedModel(schema, Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,)), LocalCollective(), 1)
    folder, workflow = local(tmp_path / "model"), local(tmp_path / "workflow")
    save_model(folder, model, workflow=workflow, pipeline="p", ds="2026-01-01", key="k", metrics={})

    transformed = pa.table(fitted.transform(table))
    expected = load_predictor(folder).predict(
        {c: transformed[c].to_numpy() for c in transformed.column_names if c != "click"}
    )
    predictor = pickle.loads(pickle.dumps(hr.Predictor(tmp_path / "model", column="p", maps=tmp_path / "maps")))
    for input_frame in (table, table.to_pandas()):
        np.testing.assert_allclose(predictor.predict(input_frame), expected, rtol=1e-5)
    predicted = pa.Table.from_batches(predictor.map_in_arrow(table.to_batches(max_chunksize=70)))
    assert predicted.column_names == [*table.column_names, "p"]
    np.testing.assert_allclose(predicted["p"], expected, rtol=1e-5)
    assert np.std(expected) > 0
    with pytest.raises(hr.UserError, match="the frame has no column 'price'"):
        predictor.predict(table.drop(["price"]))
