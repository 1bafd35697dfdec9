"""XGBoost baseline as a saved model: its input matrix, its files, and prediction.

A saved model is one folder: `model.json` (its record), `model.ubj` (XGBoost's own binary JSON: data, never code) and
`workflow/` (the fitted features that it was trained on).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from headrace import __version__
from headrace.compute.jagged import FeatureColumns, matrix_of, row_count
from headrace.config.schema import NULL_CODE, DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.storage import Location

KIND = "xgboost"
MODEL_FILE = "model.ubj"
META_FILE = "model.json"
WORKFLOW = "workflow"


def matrix_columns(schema: DatasetSchema) -> tuple[str, ...]:
    """Return the physical columns of the trees' matrix, in order: continuous, then categorical."""
    return tuple(column for f in matrix_features(schema) for column in f.physical)


def matrix_features(schema: DatasetSchema) -> tuple[Feature, ...]:
    """Return the features of the trees' matrix.

    Raw ids are left out: they have no order for thresholds, and float32 cannot hold them.
    """
    return (*schema.of(Kind.CONTINUOUS), *(f for f in schema.of(Kind.CATEGORICAL) if not f.dynamic))


def matrix(schema: DatasetSchema, columns: FeatureColumns) -> NDArray[np.float32]:
    """Return the matrix float32 [n, F] of features by name; a list has a column for each of its possible values.

    Continuous values are copied, NaN where they are missing. A categorical code is a number: codes are ordered by
    frequency, so a threshold separates popular values from rare ones. With `baseline.enable_categorical` trees split
    the codes into two sets instead, and a code that training had not seen goes left.

    Code 0 (a null, or padding of a list) is missing in the matrix; XGBoost learns the better side for missing values
    at every split (Chen and Guestrin, 2016, section 3.4). Values outside the vocabulary have the code 1, a value like
    others. float32, XGBoost's widest type, holds codes exactly up to 2^24.

    Raises:
        KeyError: a column is missing.
    """
    out = np.empty((row_count(columns), len(matrix_columns(schema))), dtype=np.float32)
    column = 0
    for f in matrix_features(schema):
        part = out[:, column : column + f.length]
        part[:] = matrix_of(columns, f)
        if f.kind is Kind.CATEGORICAL:
            part[part == NULL_CODE] = np.nan
        column += f.length
    return out


@dataclass(frozen=True)
class XGBoostPredictor:
    """Predictor by boosted trees: probabilities, scores of trees for ranking, or numbers of a regression."""

    schema: DatasetSchema
    booster: xgb.Booster
    kind: str = KIND

    def predict(self, columns: FeatureColumns) -> NDArray[np.float32]:
        """Predict float32 [n] from features by name. A row's result does not depend on the others."""
        data = matrix(self.schema, columns)
        if not len(data):
            return np.empty(0, dtype=np.float32)
        return np.asarray(self.booster.inplace_predict(data, validate_features=False), dtype=np.float32)

    def predict_tasks(self, columns: FeatureColumns) -> dict[str, NDArray[np.float32]]:
        """Return the predictions of the only task, `label`: float32 [n]."""
        return {"label": self.predict(columns)}


def importance(booster: xgb.Booster, schema: DatasetSchema, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the importance of logical features, greatest gain first.

    gain: mean decrease of the loss by a split on the feature. cover: mean sum of second derivatives in a split (for
    squared error: its rows). weight: number of splits.

    The booster has XGBoost's default names of columns, `f0`, `f1`, ... A list is one feature, with means over the
    splits of all its columns. A feature without splits has 0. `more`: names of the columns after those of `matrix`.
    """
    gains, covers, splits = (booster.get_score(importance_type=t) for t in ("total_gain", "total_cover", "weight"))
    features_by_gain: list[dict[str, Any]] = []
    position = 0
    features = [*((f.name, f.length) for f in matrix_features(schema)), *((name, 1) for name in more)]
    for feature, length in features:
        names = [f"f{position + i}" for i in range(length)]
        position += length
        gain, cover, number = (sum(scores.get(name, 0.0) for name in names) for scores in (gains, covers, splits))
        mean_gain, mean_cover = (gain / number, cover / number) if number else (0.0, 0.0)
        features_by_gain.append({"feature": feature, "gain": mean_gain, "cover": mean_cover, "weight": int(number)})
    features_by_gain.sort(key=lambda scores: (-scores["gain"], scores["feature"]))
    return [
        {**scores, "gain": round(scores["gain"], 4), "cover": round(scores["cover"], 4)} for scores in features_by_gain
    ]


def save(
    folder: Location, booster: xgb.Booster, schema: DatasetSchema, workflow: Location, meta: Mapping[str, Any]
) -> None:
    """Write a self-contained saved model to an existing, empty folder, which the caller then commits.

    Args:
        folder: the folder of `model.json`, `model.ubj` and `workflow/`.
        booster: trained on `matrix(schema, ...)`.
        schema: schema of the dataset.
        workflow: the dataset's `workflow` folder, which is copied.
        meta: further fields of model.json (pipeline, ds, key, metrics, settings), and `kind` if it is not `xgboost`.
            JSON values.

    Raises:
        UserError: the dataset has no workflow folder.
    """
    if not workflow.is_dir():
        raise UserError(f"{workflow} is missing: the dataset is damaged; run the features stage again")
    trees = bytes(booster.save_raw("ubj"))
    (folder / MODEL_FILE).put_bytes(trees)
    (folder / WORKFLOW).copy_from(workflow)
    copied = (folder / WORKFLOW).files()
    files = [_record(MODEL_FILE, trees), *(_record(p.below(folder), p.read_bytes()) for p in copied)]
    content = {
        "kind": KIND,
        **meta,
        "schema": schema.model_dump(mode="json"),
        "files": files,
        "code_version": __version__,
    }
    (folder / META_FILE).put_text(json.dumps(content, indent=1) + "\n")


def _record(name: str, content: bytes) -> dict[str, Any]:
    """Return the record of a file, as in saved models with embeddings."""
    return {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def load(
    folder: Location, schema: DatasetSchema, files: Sequence[Mapping[str, Any]] = (), threads: int | None = None
) -> XGBoostPredictor:
    """Read `model.ubj` of a saved model.

    Args:
        folder: the saved model.
        schema: schema in its model.json.
        files: records of its files, in its model.json.
        threads: number of XGBoost's threads; None: all cores.

    Raises:
        UserError: the file is damaged, or was trained on another number of columns.
    """
    return XGBoostPredictor(schema, load_booster(folder, schema, files, threads))


def load_booster(
    folder: Location, schema: DatasetSchema, files: Sequence[Mapping[str, Any]], threads: int | None, more: int = 0
) -> xgb.Booster:
    """Read the trees of a saved model, see `load`; `more`: number of columns after those of `matrix`."""
    path = folder / MODEL_FILE
    for record in files:
        if _record(record["name"], (folder / record["name"]).read_bytes()) != record:
            raise UserError(
                f"{folder / record['name']} is damaged (its checksum differs); run the stage that made it again"
            )
    booster = xgb.Booster()
    try:
        booster.load_model(path.local_path())
    except xgb.core.XGBoostError as e:
        raise UserError(f"{path} is damaged ({str(e).splitlines()[0]}); run the stage that made it again") from None
    expected = len(matrix_columns(schema)) + more
    if booster.num_features() != expected:
        raise UserError(
            f"{path} was trained on {booster.num_features()} columns, but {folder / META_FILE} lists {expected}; "
            f"run the stage that made it again"
        )
    if threads is not None:
        booster.set_param({"nthread": threads})
    return booster
