"""Retrieval and two stages as a Triton server would answer, against NumPy on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import UserError
from headrace.storage import local
from tests.triton_support import PbError, Repository, read_config

support = pytest.importorskip("tests.export_support", reason="ONNX is not installed: run `make onnx`")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
pytest.importorskip("tritonclient", reason="tritonclient is not installed: run `make serve`")
repository = pytest.importorskip("headrace.export.triton.repository")
two_stage = pytest.importorskip("headrace.export.triton.two_stage")

CANDIDATES, LISTED = 8, 5
USERS = pa.RecordBatch.from_pydict(
    {
        "user": pa.array([0, 4, 99, 10]),
        "city": pa.array(["Bern", None, "Rome", "Zürich"]),
        "age": pa.array([20.0, None, 70.5, 33.0]),
        "tags": pa.array([["Bern", None], None, ["Ōsaka"], []], pa.list_(pa.string())),
    }
)


def request(exclude: list[list[str]] | None = None) -> dict[str, Any]:
    inputs: dict[str, Any] = support.request(USERS, ["user", "city", "age", "tags"])
    if exclude is not None:
        width = max(map(len, exclude))
        inputs["exclude"] = np.array([[k.encode() for k in e] + [b""] * (width - len(e)) for e in exclude], object)
    return inputs


def nearest(tables: dict[str, Any], codes: np.ndarray[Any, Any], k: int) -> tuple[Any, Any]:
    """Return the places among codes and the scores of each user's best, by a loop."""
    rows = {n: USERS.column(n) for n in USERS.schema.names} | {"item": pa.nulls(USERS.num_rows, pa.string())}
    users = support.fitted().transform_batch(pa.RecordBatch.from_pydict(rows), only=["user", "city"])
    places, scores = [], []
    for user, city in zip(users.column("user").to_numpy(), users.column("city").to_numpy(), strict=True):
        products = tables["item"][codes] @ (tables["user"][user] + tables["city"][city])
        best = sorted(range(len(codes)), key=lambda i: (-products[i], i))[:k]
        places.append(best)
        scores.append(products[best])
    return np.array(places), np.array(scores)


@pytest.mark.parametrize("index", ["exact", "faiss"])
def test_retrieval_gives_the_nearest_items(index: str, tmp_path: Path) -> None:
    saved, tables = support.retrieval_model(tmp_path / "home", items_from_codes=True)
    exported = tmp_path / "home" / "export-retrieval"
    options = repository.Options(candidates=40 if index == "exact" else 6, index=index)
    repository.write_repository(
        local(exported), local(saved), local(tmp_path / "repo"), name="near", version=2, options=options
    )
    repo = Repository(tmp_path / "repo")
    assert {"near.query.features", "near.query", "near.index", "near.retrieve"} <= {
        p.name for p in repo.folder.iterdir()
    }
    inputs = {n: x for n, x in request().items() if n.partition(".")[0] in ("user", "city")}
    answers = repo.ask("near.retrieve", inputs)
    codes = np.arange(2, 2 + len(support.ITEMS))
    places, scores = nearest(tables, codes, options.candidates)
    width = places.shape[1]
    expected = [[support.ITEMS[i].encode() for i in row] for row in places]
    assert answers["item"][:, :width].tolist() == expected
    np.testing.assert_allclose(answers["item_score"][:, :width], scores, rtol=1e-5)
    assert (answers["item_row"][:, width:] == -1).all()
    assert (answers["item"][:, width:] == b"").all()
    assert np.isneginf(answers["item_score"][:, width:]).all()


@pytest.mark.parametrize("items_from_codes", [True, False], ids=["codes", "graph"])
def test_two_stages_are_the_ranking_of_the_nearest_without_the_excluded(items_from_codes: bool, tmp_path: Path) -> None:
    saved, tables = support.retrieval_model(tmp_path / "home", items_from_codes)
    ranker = support.saved_model(tmp_path / "home")
    # An item that no model knows is in the catalogue: by codes it has no vector.
    keys = [*support.ITEMS[5:25], "unheard of"]
    pq.write_table(pa.table({"item": keys}), tmp_path / "items.parquet")
    catalogue = two_stage.Catalogue.read(local(tmp_path / "items.parquet"), "item")
    two_stage.write_two_stage(
        two_stage.ExportedModel(local(tmp_path / "home" / "export-retrieval"), local(saved), "near"),
        two_stage.ExportedModel(local(tmp_path / "home" / "export-3"), local(ranker), "clicks"),
        catalogue,
        local(tmp_path / "repo"),
        version=4,
        list_length=LISTED,
        options=repository.Options(candidates=CANDIDATES),
    )
    codes = np.array([support.ITEMS.index(k) + 2 if k in support.ITEMS else 1 for k in keys])
    known = np.flatnonzero(codes > 1) if items_from_codes else np.arange(len(keys))
    places, _ = nearest(tables, codes[known], CANDIDATES)
    repo = Repository(tmp_path / "repo")
    exclude = [
        [keys[known[places[0][0]]], keys[known[places[0][3]]], "unknown"],
        [],
        [],
        [keys[i] for i in known[places[3]]],
    ]
    answers = repo.ask("clicks.two_stage", request(exclude))
    for row in range(USERS.num_rows):
        candidates = [keys[i] for i in known[places[row]] if keys[i] not in exclude[row]]
        assert list(answers["listed_item"][row, min(len(candidates), LISTED) :]) == [b""] * (
            LISTED - min(len(candidates), LISTED)
        )
        if not candidates:
            continue
        pairs = pa.RecordBatch.from_pydict(
            {n: USERS.column(n).take(pa.array([row] * len(candidates))) for n in USERS.schema.names}
            | {"item": pa.array(candidates)}
        )
        scores = support.predicted(ranker, pairs)
        best = sorted(range(len(candidates)), key=lambda i: (-scores[i], keys.index(candidates[i])))[:LISTED]
        assert [k.decode() for k in answers["listed_item"][row][: len(best)]] == [candidates[i] for i in best]
        np.testing.assert_allclose(answers["listed_score"][row][: len(best)], scores[best], rtol=1e-5)
    # Nobody has anything left, and the whole request is answered all the same.
    all_excluded = repo.ask("clicks.two_stage", request([keys] * USERS.num_rows))
    assert (all_excluded["listed_item"] == b"").all()
    with pytest.raises(PbError, match="different numbers of users"):
        repo.ask("clicks.two_stage", request([[], [], [], ["x"]]) | {"exclude": np.array([[b"x"]], object)})
    assert read_config(tmp_path / "repo" / "clicks.two_stage").max_batch_size == 0
    assert "clicks" in {p.name for p in repo.folder.iterdir()}  # pairs are answered as they are


def test_catalogues_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file = tmp_path / "items.parquet"
    for table, message in (
        (None, "cannot be read as Parquet"),
        (pa.table({"id": ["a"]}), r"no column 'item' \(there are: id\)"),
        (pa.table({"item": ["a", "a"]}), "must name each item once"),
        (pa.table({"item": pa.array([], pa.string())}), "must name each item once"),
    ):
        file.write_bytes(b"PAR1")
        if table is not None:
            pq.write_table(table, file)
        with pytest.raises(UserError, match=message):
            two_stage.Catalogue.read(local(file), "item")
    saved, _ = support.retrieval_model(tmp_path / "home", items_from_codes=True)
    ranker = support.saved_model(tmp_path / "home")
    near = two_stage.ExportedModel(local(tmp_path / "home" / "export-retrieval"), local(saved), "near")
    rank = two_stage.ExportedModel(local(tmp_path / "home" / "export-3"), local(ranker), "clicks")
    for first, columns, message in (
        (near, {"item": ["nobody knows"]}, "knows no item of the catalogue"),
        (near, {"id": ["a"]}, "has no column 'item', of which 'near'"),
        (rank, {"item": ["item 1"]}, r"'clicks' \(deepfm\) is in no retrieval form"),
    ):
        catalogue = two_stage.Catalogue(pa.table(columns), next(iter(columns)))
        with pytest.raises(UserError, match=message):
            two_stage.write_two_stage(first, rank, catalogue, local(tmp_path / "repo"), version=1, list_length=2)
    assert not (tmp_path / "repo").exists()
