"""One way to ask any saved model for probabilities: `load_predictor(folder).predict(columns)`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from headrace.errors import UserError
from headrace.schema import DatasetSchema, Kind
from headrace.storage import Location, local

#: What a complete saved model has, by its kind, besides model.json.
_PARTS = {"dlrm": ("dense.safetensors", "embeddings", "workflow"), "xgboost": ("model.ubj", "workflow")}


class Predictor(Protocol):
    """A model that is ready to answer."""

    @property
    def schema(self) -> DatasetSchema:
        """What it was trained on."""
        ...

    @property
    def kind(self) -> str:
        """`dlrm` or `xgboost`."""
        ...

    def predict(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """float32 probabilities [n] for physical columns, each [n] (continuous float, categorical codes)."""
        ...


def load_predictor(folder: Location | Path | str, threads: int | None = None) -> Predictor:
    """Open a saved model of any kind.

        p = load_predictor(ws.model("clicks", ds, key) / "model")
        p.predict({"user_age": np.array([0.3], "f4"), "user_id": np.array([17]), ...})  # -> [0.0421], float32

    Args:
        folder: the saved model.
        threads: of the model's library (torch's setting is the process's); None: as the library has it.

    Raises:
        UserError: the folder is not a complete saved model; names the file.
    """
    folder = folder if isinstance(folder, Location) else local(folder)
    meta = read_meta(folder)
    try:
        schema = DatasetSchema.model_validate(meta.get("schema"))
    except ValidationError as e:
        raise UserError(f"{folder / 'model.json'}: no valid dataset schema ({e.errors()[0]['msg']})") from None
    if meta["kind"] == "xgboost":
        from headrace.models import xgboost_model

        return xgboost_model.load(folder, schema, meta.get("files", ()), threads)
    return _Dlrm(folder, schema, threads)


def read_meta(folder: Location) -> dict[str, Any]:
    """`model.json` of a saved model, after a look at whether all its parts are there, in their recorded sizes.

    Cheap: imports neither torch nor XGBoost, and reads no other file. Checksums are looked at when a model is loaded.

    Raises:
        UserError: a part is missing, model.json is no JSON, or its kind is unknown; names the file.
    """
    path = folder / "model.json"
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} is not a saved model: model.json is missing") from None
    except (ValueError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not JSON: {e}") from None
    kind = meta.get("kind") if isinstance(meta, dict) else None
    if kind not in _PARTS:
        raise UserError(f"{path}: unknown kind of model {kind!r}; known: {', '.join(sorted(_PARTS))}")
    parts = [*_PARTS[kind], *(["dynamic"] if kind == "dlrm" and _has_raw_ids(meta) else [])]
    missing = [part for part in parts if not (folder / part).exists()]
    if missing:
        raise UserError(f"{folder} is not a complete saved model: {', '.join(missing)} missing")
    for record in meta.get("files", ()):
        file = folder / record["name"]
        size = file.size() if file.is_file() else None
        if size != record["bytes"]:
            found = "missing" if size is None else f"damaged: {size} bytes instead of {record['bytes']}"
            raise UserError(f"{file} of a saved model is {found}")
    assert isinstance(meta, dict)
    return meta


def _has_raw_ids(meta: Mapping[str, Any]) -> bool:
    schema = meta.get("schema")
    features = schema.get("features", ()) if isinstance(schema, dict) else ()
    return any(isinstance(f, dict) and f.get("dynamic") for f in features)


class _Dlrm:
    """Click probabilities by a DLRM in one process."""

    kind = "dlrm"

    def __init__(self, folder: Location, schema: DatasetSchema, threads: int | None) -> None:
        # Only here: a process that asks XGBoost must not pay for torch's import, nor the other way round.
        import torch

        from headrace.models.saved import load_dlrm

        if threads is not None:
            torch.set_num_threads(threads)
        self._torch = torch
        self._model = load_dlrm(folder)
        self._model.eval()
        self.schema = schema
        self._continuous = [c for f in schema.of(Kind.CONTINUOUS) for c in f.physical]
        self._codes = [c for f in schema.of(Kind.CATEGORICAL) for c in f.physical]

    def predict(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """float32 probabilities [n]; see `Predictor.predict`."""
        torch = self._torch
        continuous = _stack(columns, self._continuous, np.float32)
        codes = _stack(columns, self._codes, np.int64)
        rows = max(len(continuous), len(codes))
        if not rows:
            return np.empty(0, dtype=np.float32)
        with torch.inference_mode():
            # A schema may have no feature of one kind: its matrix is [n, 0].
            logits = self._model(
                torch.from_numpy(continuous.reshape(rows, -1)), torch.from_numpy(codes.reshape(rows, -1))
            )
            probabilities: NDArray[np.float32] = torch.sigmoid(logits.float()).numpy()
        return probabilities


def _stack(columns: Mapping[str, NDArray[Any]], names: list[str], dtype: Any) -> NDArray[Any]:
    """[n, len(names)] of `dtype`; [0, 0] when there are no names."""
    if not names:
        return np.empty((0, 0), dtype=dtype)
    out = np.empty((len(columns[names[0]]), len(names)), dtype=dtype)
    for i, name in enumerate(names):
        out[:, i] = columns[name]
    return out
