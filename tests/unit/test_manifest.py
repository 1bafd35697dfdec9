"""Manifests: round trip, refusal of what is none, and fingerprints."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.manifest import Input, Manifest, Output, fingerprint
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.storage import local


def _manifest() -> Manifest:
    schema = DatasetSchema(
        features=(
            Feature(name="y", kind=Kind.LABEL, dtype="float32"),
            Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", length=3, is_list=True, cardinality=9),
        )
    )
    return Manifest(
        stage="features",
        pipeline="p",
        ds="2026-01-01",
        key="k",
        spec_hash="s",
        inputs=(Input(kind="delta", name="lake/p/events", version="3"),),
        outputs=(Output(kind="dataset", name="d", version="k", rows=5),),
        rows={"train": 5},
        facts={"a": [1, {"b": None}]},
        dataset_schema=schema,
    )


def test_round_trip(tmp_path: Path) -> None:
    path = local(tmp_path / "m.json")
    _manifest().save(path)
    loaded = Manifest.load(path)
    assert loaded is not None
    assert loaded.model_dump(exclude={"started"}) == _manifest().model_dump(exclude={"started"})
    assert loaded.dataset_schema is not None
    assert loaded.dataset_schema.features[1].physical == ("tags__0", "tags__1", "tags__2")
    assert loaded.dataset_schema.label.name == "y"


def test_missing_is_none_and_damaged_is_refused(tmp_path: Path) -> None:
    assert Manifest.load(local(tmp_path / "none.json")) is None
    bad = tmp_path / "bad.json"
    bad.write_text('{"stage": "x"')
    with pytest.raises(UserError, match=r"bad\.json is not a manifest"):
        Manifest.load(local(bad))


def test_output_by_kind() -> None:
    assert _manifest().output("dataset").rows == 5
    with pytest.raises(KeyError, match="0 outputs of kind 'model'"):
        _manifest().output("model")


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=5))
def test_fingerprint_ignores_order_and_sees_values(parts: dict[str, object]) -> None:
    shuffled = dict(reversed(list(parts.items())))
    assert fingerprint(parts) == fingerprint(shuffled)
    assert fingerprint({**parts, "zzzzzz": 1}) != fingerprint({**parts, "zzzzzz": 2})
