"""XGBoost baseline as a saved model: its input matrix, how it is written, how it is read.

A saved model is one folder: `model.json` (what it is), `model.ubj` (XGBoost's own binary JSON: data, never code) and
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

    Raw ids are left out: they have no order that a threshold could cut, and float32 would not hold them.
    """
    return (*schema.of(Kind.CONTINUOUS), *(f for f in schema.of(Kind.CATEGORICAL) if not f.dynamic))


def matrix(schema: DatasetSchema, columns: FeatureColumns) -> NDArray[np.float32]:
    """Return the float32 [n, F] matrix of features by name; a list has as many columns as it may have values.

    Continuous values go in as they are, NaN where they are missing. A categorical code goes in as a number: codes are
    given by frequency, so a threshold on one cuts popular values from rare ones. Trees that were told so split codes
    into two sets instead (`baseline.enable_categorical`); one that training had not seen then goes left. Code 0 says
    that there is no value (a null, or the padding of a list), so it goes in as missing, for which XGBoost learns the
    better side of every split (Chen and Guestrin, 2016, section 3.4). Values that the vocabulary lacks have a code, 1,
    and so are a value like others. float32 holds codes exactly up to 2^24; XGBoost knows no wider type.

    Raises:
        KeyError: a column is not there.
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
    """Click probabilities by boosted trees; of trees for ranking the scores of lists, of regression numbers."""

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
        """Return predictions of the one label, `label`: float32 [n]."""
        return {"label": self.predict(columns)}


def importance(booster: xgb.Booster, schema: DatasetSchema, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the importance of logical features, greatest gain first.

    gain: how much a split on it lowers the loss, the mean over its splits. cover: the sum of second derivatives (of
    squared error: rows) that go through a split, the mean over its splits. weight: splits.

    The booster names its columns `f0`, `f1`, ..., as XGBoost does where it is given no names. A list is one feature:
    means over the splits of all its columns. A feature never split on has 0. `more`: what columns behind those of
    `matrix` are called.
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
    """Fill `folder` (there and empty; its atomic commit is the caller's) with a self-contained saved model.

    Args:
        folder: where `model.json`, `model.ubj` and `workflow/` go.
        booster: trained on `matrix(schema, ...)`.
        schema: the dataset's.
        workflow: the dataset's `workflow` folder, copied.
        meta: what else model.json says (pipeline, ds, key, metrics, settings), and its `kind` where it is another.
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
        schema: from its model.json.
        files: the records of its files, from there too.
        threads: of XGBoost; None: all cores.

    Raises:
        UserError: the file is damaged, or was trained on another number of columns.
    """
    return XGBoostPredictor(schema, load_booster(folder, schema, files, threads))


def load_booster(
    folder: Location, schema: DatasetSchema, files: Sequence[Mapping[str, Any]], threads: int | None, more: int = 0
) -> xgb.Booster:
    """Read the trees of a saved model, see `load`; `more`: columns after those of `matrix`."""
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
