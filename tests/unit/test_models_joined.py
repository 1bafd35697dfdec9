"""Saved models whose tables no process has whole, against the same models with their tables mapped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import config
from headrace.comm.base import LocalCollective
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.score import ScoreEmbeddings
from headrace.embeddings.sharding_plan import row_wise
from headrace.errors import UserError
from headrace.models.joined import needed_codes, null_codes, read_rows, set_rows, table_bytes, united_codes
from headrace.models.predictor import NetworkPredictor, load_predictor, maps_of, network_of, saved_rows_bytes
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.score.joined_tables import joined_tables
from headrace.storage import Location, local

USERS, ITEMS, TAGS = 30_000, 2_000, 40


def a_feature(name: str, cardinality: int | None = None, **more: Any) -> Feature:
    return Feature(name=name, kind=Kind.CATEGORICAL, dtype="int32", cardinality=cardinality, **more)


SCHEMA = DatasetSchema(
    features=(
        a_feature("user", USERS),
        a_feature("item", ITEMS),
        Feature(name="price", kind=Kind.CONTINUOUS, dtype="float32"),
        a_feature("tags", TAGS, length=3, is_list=True),
        Feature(name="device", kind=Kind.CATEGORICAL, dtype="int64", dynamic=True),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)
DLRM = config.Model(embedding_dim=8, bottom_mlp=(8,), top_mlp=(8,))

TOWERS = config.Model.model_validate(
    {
        "class": "two_tower",
        "embedding_dim": 8,
        "args": {
            "item": "item",
            "user_features": ["user", "tags", "device", "price"],
            "user_mlp": [8],
            "item_mlp": [8],
        },
    }
)


def columns(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "user": rng.integers(0, USERS, n).astype(np.int32),
        "item": rng.integers(0, ITEMS, n).astype(np.int32),
        "price": rng.random(n, dtype=np.float32),
        **{f"tags__{i}": rng.integers(0, TAGS, n).astype(np.int32) for i in range(3)},
        "device": rng.integers(-50, 50, n) * 7919,
    }


def save(folder: Path, shape: config.Model = DLRM, storage: Any = "fp32", schema: DatasetSchema = SCHEMA) -> Location:
    workflow = folder.parent / "workflow"
    workflow.mkdir(exist_ok=True)
    (workflow / "workflow.json").write_text("{}\n")

    def plan(tables, lookups, ranks):  # type: ignore[no-untyped-def]
        return row_wise([replace(t, storage=storage) for t in tables], lookups, ranks)

    model = ShardedModel(schema, shape, LocalCollective(), 3, plan)
    if model.dynamic is not None:
        model.configure_optimizer(config.EmbeddingOptimizer())
        model.train()
        model.dynamic.answer(model.dynamic.unique_ids([torch.arange(-30, 30) * 7919]))
        with torch.no_grad():
            for absent in model.absent if isinstance(model.absent, torch.nn.ParameterList) else [model.absent]:
                torch.nn.init.normal_(absent)
    metadata = {"workflow": local(workflow), "pipeline": "p", "ds": "2026-01-01", "key": "k", "metrics": {}}
    save_model(local(folder), model, **metadata)  # type: ignore[arg-type]
    return local(folder)


@pytest.mark.parametrize(
    ("shape", "storage", "names"),
    [
        (DLRM, "fp32", {"user"}),
        (DLRM, "fp16", {"user", "item", "tags", "device"}),
        (DLRM, "int8", {"user", "device"}),
        (TOWERS, "fp32", {"user", "item", "tags", "device"}),
        (config.Model.model_validate({"class": "deepfm", "embedding_dim": 8}), "bf16", {"user", "tags"}),
    ],
)
def test_predictions_are_those_of_mapped_tables_to_the_bit(
    tmp_path: Path, shape: config.Model, storage: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.embeddings.checkpoint.shards.FILE_BYTES", 100_000)  # many files
    folder = save(tmp_path / "model", shape, storage)
    maps = maps_of(folder, local(tmp_path / "maps"))
    features = columns(700)
    complete = load_predictor(folder, 1, maps=maps)
    predictor = load_predictor(folder, 1, maps=maps, joined=names)
    network = network_of(predictor)
    assert network is not None
    model = network.model
    looked = set(table_bytes(folder))
    for section in (slice(0, 300), slice(300, 700)):  # the rows of a part replace those of the one before
        part = {name: x[section] for name, x in features.items()}
        needed = united_codes([null_codes(model, names), needed_codes(model, names, part)])
        assert set(needed) == names & looked
        for name in names & {"user", "item"} & looked:
            np.testing.assert_array_equal(needed[name], np.unique([0, *part[name]]))
        rows = read_rows(folder, model, names, needed)
        set_rows(model, names, rows)
        fused = zip(model.embeddings.layout.fused_tables, model.embeddings.weights, strict=True)
        held = sum(len(weight) for table, weight in fused if table.joined)
        assert held == sum(len(needed[t]) for t in needed if t != "device") < USERS
        np.testing.assert_array_equal(predictor.predict(part), complete.predict(part))
        if shape is TOWERS:  # an item's vector, where there is no user
            item_alone = {name: x if name == "item" else np.zeros_like(x) for name, x in part.items()}
            assert isinstance(complete, NetworkPredictor)
            np.testing.assert_array_equal(network.vectors(item_alone, "item"), complete.vectors(item_alone, "item"))
    if "device" in names & looked:
        assert rows["device"].codes.tolist() == [c for c in needed["device"].tolist() if -30 <= c // 7919 < 30]
    assert np.std(complete.predict(features)) > 0
    if "user" in names & looked:
        with pytest.raises(RuntimeError, match="were not brought"):
            predictor.predict({name: x[:100] for name, x in features.items()})
    # What is mapped has no joined table.
    (shared_folder,) = (f for f in maps.entries() if f.name.startswith("tables-without-") and f.is_dir())
    sizes = table_bytes(folder)
    assert sum(f.size() for f in shared_folder.entries()) == sum(
        s for n, s in sizes.items() if n not in names | {"device"}
    )


def test_which_tables_are_joined_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, maps = save(tmp_path / "model"), local(tmp_path / "maps")
    sizes = table_bytes(folder)
    assert {name: sizes[name] for name in ("user", "item", "tags")} == {"user": 960_000, "item": 64_000, "tags": 1_280}
    assert sum(sizes.values()) <= saved_rows_bytes(folder) < 1.1 * sum(sizes.values())

    def chosen(rows: str, room: float | None = None) -> frozenset[str]:
        settings = ScoreEmbeddings(rows=rows, mapped_mib=room and room / 2**20)  # type: ignore[arg-type]
        return joined_tables(settings, folder, maps, gpu=False)

    assert chosen("auto") == chosen("mapped") == chosen("auto", sum(sizes.values())) == frozenset()
    with caplog.at_level("INFO", "headrace.score"):
        assert chosen("auto", 100_000) == {"user"}
    assert "rows of user (0.9 MiB) are joined in (a host may map 0.1 MiB)" in caplog.text
    assert chosen("auto", 1_000) == set(sizes)
    assert chosen("joined") == chosen("joined", 10**9) == set(sizes)
    with pytest.raises(UserError, match=r"the tables of the model .* take 1\.0 MiB \(user 0\.9, item 0\.1.*joined\)"):
        chosen("mapped", 100_000)
    with pytest.raises(UserError, match="the tasks compute on GPUs"):
        joined_tables(ScoreEmbeddings(rows="joined"), folder, maps, gpu=True)
    assert joined_tables(ScoreEmbeddings(mapped_mib=0.001), folder, maps, gpu=True) == frozenset()


def test_a_network_that_looks_at_whole_tables_says_so(tmp_path: Path) -> None:
    schema = DatasetSchema(features=(a_feature("user", 300), a_feature("item", 200), SCHEMA.label))
    shape = {"class": "lightgcn", "embedding_dim": 8, "args": {"user": "user", "item": "item"}}
    folder = save(tmp_path / "model", config.Model.model_validate(shape), schema=schema)
    for settings in (ScoreEmbeddings(rows="joined"), ScoreEmbeddings(mapped_mib=0.001)):
        with pytest.raises(UserError, match=r"rows of table 'user' cannot be joined in.*looks at all.*ids 'all'"):
            joined_tables(settings, folder, local(tmp_path / "maps"), gpu=False)
    assert joined_tables(ScoreEmbeddings(mapped_mib=1), folder, local(tmp_path / "maps"), gpu=False) == frozenset()
