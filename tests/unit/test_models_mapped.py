"""Tables and vocabularies that processes map, against those in a process's memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import config
from headrace.comm.base import LocalCollective
from headrace.config import Spark
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.embeddings.sharding_plan import row_wise
from headrace.errors import UserError
from headrace.features.vocabulary import lookup
from headrace.features.vocabulary.lookup import Lookup, MappedLookup
from headrace.models.predictor import load_predictor, maps_of, maps_of_tasks
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.storage import local
from headrace.storage.host_scratch import RUN, on_this_host
from tests.score_support import shop_spec

USERS = 200_000
SCHEMA = DatasetSchema(
    features=(
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=USERS),
        Feature(name="price", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", cardinality=50, length=3, is_list=True),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)
MODEL = config.Model(embedding_dim=32, bottom_mlp=(8,), top_mlp=(8,))


def columns(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tags = {f"tags__{i}": rng.integers(0, 50, n).astype(np.int32) for i in range(3)}
    return {"user": rng.integers(0, USERS, n).astype(np.int32), "price": rng.random(n, dtype=np.float32), **tags}


def save(folder: Path, storage: str, seed: int = 3) -> Path:
    """A model whose users' table is stored so, the other one as fp32."""
    workflow = folder.parent / "workflow"
    workflow.mkdir(exist_ok=True)
    (workflow / "workflow.json").write_text("{}\n")

    def plan(tables, lookups, ranks):  # type: ignore[no-untyped-def]
        return row_wise([replace(t, storage=storage) if t.name == "user" else t for t in tables], lookups, ranks)

    model = ShardedModel(SCHEMA, MODEL, LocalCollective(), seed, plan)
    save_model(
        local(folder), model, workflow=local(workflow), pipeline="p", ds="2026-01-01", key="k", metrics={"auc": 0.5}
    )
    return folder


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16", "int8"])
def test_mapped_tables_answer_to_the_bit(tmp_path: Path, storage: str) -> None:
    folder = save(tmp_path / "model", storage)
    maps = maps_of(local(folder), local(tmp_path / "maps"))
    expected = load_predictor(folder, 1).predict(columns(500))
    for _ in range(2):  # one that writes the files, one that finds them
        predictions = load_predictor(folder, 1, maps=maps).predict(columns(500))
        np.testing.assert_array_equal(predictions, expected)
    assert np.std(expected) > 0
    # As they were saved: a byte a number and eight for its grid, or two, or four.
    width = {"fp32": 32 * 4, "fp16": 32 * 2, "bf16": 32 * 2, "int8": 32 + 8}[storage]
    sizes = sorted(f.size() for f in (maps / "tables").entries())
    assert sizes == ([USERS * width + 50 * 128] if storage == "fp32" else [50 * 128, USERS * width])


def test_a_model_that_takes_anothers_place_has_files_of_its_own(tmp_path: Path) -> None:
    maps, predictions = local(tmp_path / "maps"), []
    for seed in (3, 4):
        folder = save(tmp_path / "model", "fp32", seed)
        predictions.append(load_predictor(folder, 1, maps=maps_of(local(folder), maps)).predict(columns(50)))
        np.testing.assert_array_equal(predictions[-1], load_predictor(folder, 1).predict(columns(50)))
    assert (predictions[0] != predictions[1]).any()
    assert len(maps.entries()) == 2


def test_a_run_leaves_a_host_the_maps_of_its_own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts share no folder here: tables that a host has stay from run to run, those of other models go."""
    types = {"user": "bigint", "ts": "timestamp", "click": "int"}
    own_scratch = shop_spec(types, {"workflow": []}, spark={"scratch": "own"})
    ws, model = Workspace(tmp_path / "home"), local(save(tmp_path / "model", "fp16"))
    name = maps_of(model, ws.mapped("shop")).name
    (ws.mapped("shop") / "other" / "tables").put_text("x")
    assert on_this_host(maps_of_tasks(ws, own_scratch.model_copy(update={"spark": Spark()}), [model])) == ws.mapped(
        "shop"
    )
    assert ws.mapped("shop").entries() == []

    expected, laid_out = load_predictor(model, 1).predict(columns(50)), set()
    for run in range(3):
        monkeypatch.setenv("HEADRACE_SCRATCH", str(tmp_path / "host"))
        host_folder = tmp_path / "host" / ws.on_hosts(ws.mapped("shop")).below
        (host_folder / f"other-{run}").mkdir(parents=True)
        maps = maps_of_tasks(ws, own_scratch, [model])
        assert (host_folder / f"other-{run}").exists()  # no task has been there
        for _ in range(2):
            host_maps = maps_of(model, on_this_host(maps))
            np.testing.assert_array_equal(load_predictor(model, 1, maps=host_maps).predict(columns(50)), expected)
            (host_folder / "of-another-task").mkdir(exist_ok=True)
        names = sorted(p.name for p in host_folder.iterdir() if not p.name.startswith(RUN))
        assert names == sorted([name, "of-another-task"])
        assert len([p for p in host_folder.glob(f"{RUN}*") if p.is_dir()]) == 1
        laid_out |= {p.stat().st_ino for p in host_folder.glob(f"{name}/tables/*")}
    assert len(laid_out) == 2  # the two tables, once
    assert ws.mapped("shop").entries() == []


def test_damage_is_noticed_before_anything_is_mapped(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "fp16")
    file = next((folder / "embeddings").glob("weight-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(data)
    maps = maps_of(local(folder), local(tmp_path / "maps"))
    with pytest.raises(UserError, match=file.name):
        load_predictor(folder, 1, maps=maps)
    assert not (maps / "tables").exists()


_OWN_MEMORY = """
import sys
import numpy as np
from headrace.models.predictor import load_predictor
from headrace.storage import local

def own():
    lines = open("/proc/self/smaps_rollup").read().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["Private_Clean"] + kib["Private_Dirty"]

rng, rows = np.random.default_rng(0), 4096
tags = {f"tags__{i}": rng.integers(0, 50, rows).astype(np.int32) for i in range(3)}
few = {"price": rng.random(rows, dtype=np.float32), **tags}
maps = local(sys.argv[2]) if sys.argv[2] else None
import headrace.models.saved
before = own()
predictor = load_predictor(sys.argv[1], 1, maps=maps)
for _ in range(60):  # most of the table is looked at
    few["user"] = rng.integers(0, int(sys.argv[3]), rows).astype(np.int32)
    predictor.predict(few)
print(own() - before, flush=True)
input()
"""


def test_workers_share_one_copy(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "fp32")
    maps = maps_of(local(folder), local(tmp_path / "maps"))
    table = USERS * 32 * 4 / 1024
    own_memory = {}
    for maps_folder in (str(maps), ""):
        command = [sys.executable, "-c", _OWN_MEMORY, str(folder), maps_folder, str(USERS)]
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        own_memory[maps_folder] = [int(w.stdout.readline()) for w in workers]  # type: ignore[union-attr]
        for w in workers:
            w.communicate("\n")
    # In KiB. Pages that one worker alone has looked at count as its own, so it is the later one's that are compared.
    assert min(own_memory[str(maps)]) < 0.5 * table
    assert min(own_memory[""]) > 0.9 * table


@settings(max_examples=30)
@given(
    known=st.lists(st.text(max_size=5), unique=True, max_size=40),
    unknown=st.lists(st.text(max_size=5), max_size=10),
    clash=st.booleans(),
    chunk=st.integers(1, 7),
)
def test_mapped_vocabularies_say_what_those_in_memory_say(
    known: list[str], unknown: list[str], clash: bool, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = local(tmp_path_factory.mktemp("v"))
    table = pa.table({"value": pa.array(known, pa.string()), "code": pa.array(range(2, 2 + len(known)), pa.int64())})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_BATCH_ROWS", chunk)
        if clash:  # many values have one hash
            patch.setattr(lookup, "xxhash64_strings", lambda x: np.array([len(v) for v in x.to_pylist()], "i8"))
        MappedLookup.write(lookup.table_batches(Lookup(table).table), len(known), folder)
        mapped, plain = MappedLookup(folder), Lookup(table)
        values = pa.array([*known, None, *unknown, *known[:3]], pa.string())
        np.testing.assert_array_equal(mapped.codes(values), plain.codes(values))
        assert (len(mapped), mapped.cardinality) == (len(plain), plain.cardinality)
        assert mapped.table["value"].to_pylist() == known
        numbers = pa.array([7, None, -3], pa.int64())
        np.testing.assert_array_equal(mapped.codes(numbers), plain.codes(numbers))
