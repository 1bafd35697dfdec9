"""Predictions by any saved model: `load_predictor(folder).predict(columns)`.

`maps_of_tasks` names the host folder in which the tasks of a run map saved models.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from headrace.compute.jagged import FeatureColumns, jagged_of, matrix_of, row_count
from headrace.config import Spec
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.errors import UserError, nearest
from headrace.storage import Location, StoreAway, local
from headrace.storage.host_scratch import OF_WORKSPACE, HostPlace, RunFolder

#: Name of the label of a model without `train.tasks`.
ONLY_TASK = "label"
#: Parts of a complete saved model besides model.json.
_XGBOOST, _SECOND_STAGE, _XGBOOST_PARTS = "xgboost", "second_stage", ("model.ubj", "workflow")
#: Parts of a model with embeddings, of any class.
_NETWORK_PARTS = ("dense.safetensors", "embeddings", "workflow")
#: Files whose checksums are computed at once: hashing releases the interpreter's lock.
_CHECKED_AT_ONCE = 4


class Predictor(Protocol):
    """A loaded model."""

    @property
    def schema(self) -> DatasetSchema:
        """Schema of the training data."""
        ...

    @property
    def kind(self) -> str:
        """`xgboost`, `second_stage`, or the class of a model with embeddings (`dlrm`, ...)."""
        ...

    def predict(self, columns: FeatureColumns) -> NDArray[np.float32]:
        """Predict from features by name (continuous float, categorical codes): probabilities or numbers, float32 [n].

        For a model that only orders items, it is the logistic function of its scores.
        """
        ...

    def predict_tasks(self, columns: FeatureColumns) -> dict[str, NDArray[np.float32]]:
        """Predict each label of the model, by the task's name (`train.tasks`): float32 [n].

        Values are probabilities, or expected values for a task with squared error. `predict` returns the first task. A
        model of one label has one task, `label`.
        """
        ...


def load_predictor(
    folder: Location | Path | str,
    threads: int | None = None,
    output: str | None = None,
    maps: Location | None = None,
    device: str = "cpu",
    joined: Collection[str] = (),
) -> Predictor:
    """Open a saved model of any kind.

        p = load_predictor(ws.model("clicks", ds, key) / "model")
        p.predict({"user_age": np.array([0.3], "f4"), "user_id": np.array([17]), ...})  # -> [0.0421], float32

    Args:
        folder: the saved model.
        threads: number of threads of the model's library (torch's setting applies to the process); None: its default.
        output: the task that `predict` returns; None: the first one.
        maps: for a model with embeddings, a folder of `maps_of`, from which all processes of the host map its tables.
            None: the tables are in this process's memory.
        device: for a model with embeddings, the device that computes. On another device than the CPU its tables are
            loaded there, and nothing is mapped. Trees compute on the CPU.
        joined: tables that are not mapped, whose rows the caller sets before each call (headrace.models.joined). Only
            with `maps`.

    Raises:
        UserError: the folder is not a complete saved model (the message names the file), or the model has no such
            output.
    """
    folder = folder if isinstance(folder, Location) else local(folder)
    meta = read_meta(folder)
    try:
        schema = DatasetSchema.model_validate(meta.get("schema"))
    except ValidationError as e:
        raise UserError(f"{folder / 'model.json'}: no valid dataset schema ({e.errors()[0]['msg']})") from None
    tasks = list(meta.get("tasks", {})) or [ONLY_TASK]
    if output is not None and output not in tasks:
        raise UserError(
            f"the model {folder} has no output '{output}'{nearest(output, tasks)}; it has: {', '.join(tasks)}"
        )
    if meta["kind"] == _XGBOOST:
        from headrace.models import xgboost_model

        return xgboost_model.load(folder, schema, meta.get("files", ()), threads)
    if meta["kind"] == _SECOND_STAGE:
        from headrace.models import second_stage

        first = load_predictor(first_model(folder, meta), threads, maps=maps, device=device, joined=joined)
        return second_stage.load(folder, schema, meta, first, threads)
    return NetworkPredictor(folder, schema, threads, output, maps, device, joined)


def stages_of(predictor: Predictor) -> tuple[Predictor, ...]:
    """Return the models of a predictor in order: a second stage follows its first model, and ranks fewer items."""
    first: Predictor | None = getattr(predictor, "first", None)
    return (predictor,) if first is None else (first, predictor)


def network_of(predictor: Predictor) -> NetworkPredictor | None:
    """Return the predictor's model with embeddings, which may be the first model of a second stage; None for trees."""
    return next((stage for stage in stages_of(predictor) if isinstance(stage, NetworkPredictor)), None)


def network_folder(folder: Location) -> Location | None:
    """Return the folder of a saved model with embeddings, or of a second stage's first model; None for trees.

    Raises:
        UserError: a folder is not a complete saved model.
    """
    meta = read_meta(folder)
    if meta["kind"] == _SECOND_STAGE:
        return first_model(folder, meta)
    return None if meta["kind"] == _XGBOOST else folder


def maps_of(folder: Location, maps: Location) -> Location:
    """Return the folder in which this host maps a saved model: below `maps`, named after the model.

    Two models that are saved in one folder, one after the other, have different names.
    """
    return maps / model_digest(folder)[:16]


def model_digest(folder: Location) -> str:
    """Return a digest of a saved model's record and index, in hex; these have checksums of all other files."""
    index = folder / "embeddings" / "index.json"
    content = (folder / "model.json").read_bytes() + (index.read_bytes() if index.is_file() else b"")
    return hashlib.sha256(content).hexdigest()


def read_meta(folder: Location) -> dict[str, Any]:
    """Read `model.json` of a saved model, and check that all its parts are there, in their recorded sizes.

    This is cheap: it imports neither torch nor XGBoost and reads no other file, except the indexes of both models if
    the rows are changes to another model's. Other checksums are compared when a model is loaded.

    Raises:
        UserError: a part is missing, or model.json is not a model's record (the message names the file). Or a model
            that this one needs, the first model of a second stage or the base of its rows, is missing or has changed.
    """
    path = folder / "model.json"
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} is not a saved model: model.json is missing") from None
    except (ValueError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not JSON: {e}") from None
    kind = meta.get("kind") if isinstance(meta, dict) else None
    parts = list(_XGBOOST_PARTS)
    if kind not in (_XGBOOST, _SECOND_STAGE):
        if not isinstance(meta, dict) or not isinstance(meta.get("model"), dict):
            raise UserError(f"{path}: unknown kind of model {kind!r}: it has no settings of a network")
        parts = [*_NETWORK_PARTS, *(["dynamic"] if _has_raw_ids(meta) else [])]
    missing = [part for part in parts if not (folder / part).exists()]
    if missing:
        raise UserError(f"{folder} is not a complete saved model: {', '.join(missing)} missing")
    for record in meta.get("files", ()):
        file = folder / record["name"]
        size = file.size() if file.is_file() else None
        if size != record["bytes"]:
            state = "missing" if size is None else f"damaged: {size} bytes instead of {record['bytes']}"
            raise UserError(f"{file} of a saved model is {state}")
    assert isinstance(meta, dict)
    if kind == _SECOND_STAGE:
        first_model(folder, meta)
    if meta.get("base") is not None:
        base_model(folder, meta)
    return meta


def damaged_model(folder: Location) -> str | None:
    """Return why a saved model cannot be opened, or None. Checks parts, sizes and checksums of all files.

    In a store of objects only sizes are compared: objects do not change, and a file's checksum is compared when it is
    fetched.
    """
    try:
        meta = read_meta(folder)
        if folder.scheme != "file":
            return None
        files = [(folder, record) for record in meta.get("files", ())]
        if meta["kind"] not in (_XGBOOST, _SECOND_STAGE):
            files += [(folder / "embeddings", record) for record in _index_of(folder).get("files", ())]
    except UserError as e:
        return str(e)
    with ThreadPoolExecutor(_CHECKED_AT_ONCE, "check") as pool:
        return next(
            (reason for reason in pool.map(_damaged_file, *zip(*files, strict=True)) if reason is not None), None
        )


def _damaged_file(folder: Location, record: Mapping[str, Any]) -> str | None:
    file = folder / str(record["name"])
    digest = hashlib.sha256()
    try:
        with file.open() as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
            size = stream.tell()
    except FileNotFoundError:
        return f"{file} of a saved model is missing"
    if size != record["bytes"]:
        return f"{file} of a saved model is damaged: {size} bytes instead of {record['bytes']}"
    if digest.hexdigest() != record["sha256"]:
        return f"{file} of a saved model is damaged: its {size} bytes have another checksum than when it was saved"
    return None


def base_model(folder: Location, meta: Mapping[str, Any]) -> Location:
    """Return the folder of the model to which this one's rows are changes (`base` in `model.json`).

    Raises:
        UserError: it is missing or incomplete, or another model than the rows were saved for: a training with the same
            key may have written it again, for example on another number of ranks.
    """
    base = folder.following(str(meta["base"]))
    message = f"{folder} holds the rows that changed since the model {base}"
    try:
        read_meta(base)
        upon = _index_of(folder).get("base")
        index = _index_of(base)
        now = index.get("sha256"), index.get("saved_as")
    except UserError as e:
        raise UserError(f"{message}, which cannot be opened: {e}") from None
    if not isinstance(upon, dict) or upon.get("sha256") not in now:
        raise UserError(f"{message}, and that is another save by now: restore it, or train the day again")
    return base


def _index_of(folder: Location) -> dict[str, Any]:
    """Read the index of a saved model's rows (`embeddings.checkpoint.index`, which imports torch) as plain JSON."""
    path = folder / "embeddings" / "index.json"
    try:
        index = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the save did not finish or was damaged") from None
    except (ValueError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not JSON: {e}") from None
    if not isinstance(index, dict):
        raise UserError(f"{path} is damaged: it is no index of saved rows")
    return index


def needed_models(folder: Location) -> tuple[Location, ...]:
    """Return the folders of saved models that this one needs, its own first.

    It needs the models to which its rows are changes. A second stage needs its first model and that model's bases.

    Raises:
        UserError: one of them is missing or incomplete.
    """
    meta = read_meta(folder)
    below: tuple[Location, ...] = ()
    if meta["kind"] == _SECOND_STAGE:
        below = needed_models(first_model(folder, meta))
    elif meta.get("base") is not None:
        below = needed_models(base_model(folder, meta))
    return (folder, *below)


def first_model(folder: Location, meta: Mapping[str, Any]) -> Location:
    """Return the folder of the model whose predictions a second stage uses; it is in the folder of its own run.

    Args:
        folder: the second stage's saved model.
        meta: its model.json.

    Raises:
        UserError: it is missing or incomplete, or another model than the trees were trained with.
    """
    named = meta["first"]
    first: Location = folder.parent.parent / str(named["key"]) / "model"
    try:
        meta = read_meta(first)
    except UserError as e:
        raise UserError(f"{folder} looks at the predictions of the model {named['key']}, which is gone: {e}") from None
    if named["sha256"] not in (file_digest(first / "model.json"), meta.get("saved_as")):
        raise UserError(
            f"{folder} looks at the predictions of the model {named['key']}, and {first} is another one by now: run "
            f"the stage second_stage again"
        )
    return first


def file_digest(path: Location) -> str:
    """Return the SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _has_raw_ids(meta: Mapping[str, Any]) -> bool:
    schema = meta.get("schema")
    features = schema.get("features", ()) if isinstance(schema, dict) else ()
    return any(isinstance(f, dict) and f.get("dynamic") for f in features)


class NetworkPredictor:
    """Predictions by a model with embeddings, in one process."""

    def __init__(
        self,
        folder: Location,
        schema: DatasetSchema,
        threads: int | None,
        output: str | None,
        maps: Location | None = None,
        device: str = "cpu",
        joined: Collection[str] = (),
    ) -> None:
        # Imported here, so that a process that only uses XGBoost does not import torch.
        import torch

        from headrace.embeddings.jagged import JaggedTensor
        from headrace.models.categorical import CategoricalBatch, moved_in_one_copy
        from headrace.models.mapped import load_mapped
        from headrace.models.saved import load_model

        if threads is not None:
            torch.set_num_threads(threads)
        self._torch, self._batch, self._jagged = torch, CategoricalBatch, JaggedTensor
        self._device, self._moved = torch.device(device), moved_in_one_copy
        if maps is None or self._device.type != "cpu":
            self._model = load_model(folder, device=self._device)
        else:
            self._model = load_mapped(folder, maps, joined)
        self._model.eval()
        self.kind = self._model.config.kind
        self.schema = schema
        self._output = output

    @property
    def model(self) -> Any:
        """The ShardedModel: tables and network."""
        return self._model

    def predict(self, columns: FeatureColumns) -> NDArray[np.float32]:
        """Predict float32 [n]; see `Predictor.predict`."""
        if not row_count(columns):
            return np.empty(0, dtype=np.float32)
        outputs = self._outputs(columns)
        if self._output is None:
            return self._numbers(self._model.value(outputs["logits"]))
        return self._numbers(self._model.tasks.value(self._output, outputs[self._output]))

    def predict_tasks(self, columns: FeatureColumns) -> dict[str, NDArray[np.float32]]:
        """Predict all tasks; see `Predictor.predict_tasks`."""
        tasks = self._model.tasks
        if not tasks.specs:
            return {ONLY_TASK: self.predict(columns)}
        if not row_count(columns):
            return {name: np.empty(0, dtype=np.float32) for name in tasks.specs}
        outputs = self._outputs(columns)
        return {name: self._numbers(tasks.value(name, outputs[name])) for name in tasks.specs}

    def _numbers(self, values: Any) -> NDArray[np.float32]:
        array: NDArray[np.float32] = values.cpu().numpy()
        return array

    def _outputs(self, columns: FeatureColumns) -> dict[str, Any]:
        """Return the model's outputs by name, tensors float32 [n], for at least one row."""
        with self._torch.inference_mode():
            return self._model.outputs_of(*self._tensors(columns))

    def vectors(self, columns: FeatureColumns, side: Literal["user", "item"]) -> NDArray[np.float32]:
        """Return the vectors of users, or of items, of a model in retrieval form: float32 [n, D].

        A pair's logit is the dot product of its user's vector and its item's.

        Args:
            columns: all features by name; those of the other side are ignored.
            side: whether to return vectors of users or of items.

        Raises:
            UserError: the model has no retrieval form.
        """
        from headrace.models.retrieval import item_feature, query_vectors, row_item_vectors

        item_feature(self._model.network, self.schema, "a table of vectors")
        vectors_of = query_vectors if side == "user" else row_item_vectors
        return self._numbers(vectors_of(self._model, *self._tensors(columns)))

    def _tensors(self, columns: FeatureColumns) -> tuple[Any, Any]:
        """Return continuous features float32 [n, C], and the categorical ones as a CategoricalBatch, on the model's
        device.
        """
        rows = row_count(columns)
        torch = self._torch
        continuous, categorical = self.schema.of(Kind.CONTINUOUS), self.schema.of(Kind.CATEGORICAL)
        numbers = _matrix(columns, continuous, rows, np.float32)
        codes = _matrix(columns, [f for f in categorical if not f.is_list], rows, np.int64)
        lists = [jagged_of(columns, f) for f in categorical if f.is_list]
        # Arrow's memory is read-only, of which torch warns.
        parts = [y for x in lists for y in (np.require(x.values, requirements="W"), x.offsets.astype(np.int64))]
        tensors = [torch.from_numpy(x) for x in (numbers, codes, *parts)]
        if self._device.type != "cpu":
            tensors = self._moved(tensors, self._device)
        jagged = [self._jagged(v, o) for v, o in zip(tensors[2::2], tensors[3::2], strict=True)]
        return tensors[0], self._batch(tensors[1], jagged)


def _matrix(columns: FeatureColumns, features: Sequence[Feature], rows: int, dtype: Any) -> NDArray[Any]:
    """Return features side by side, [rows, their columns] of `dtype`."""
    out = np.empty((rows, sum(f.length for f in features)), dtype=dtype)
    column = 0
    for f in features:
        out[:, column : column + f.length] = matrix_of(columns, f)
        column += f.length
    return out


_RAW_IDS, _TRAINING = "dynamic", "-training.safetensors"


def saved_rows_bytes(folder: Location) -> int:
    """Return the bytes of the files with rows of a saved model with embeddings and of its bases.

    The tables are no larger, since each row is in at least one file.

    Raises:
        UserError: a record is missing or damaged.
    """
    total = 0
    for model in needed_models(folder):
        path = model / "embeddings" / "index.json"
        try:
            index = json.loads(path.read_text())
            files = {c["file"] for c in index["chunks"] if c["state"] == "weight"}
            total += sum(f["bytes"] for f in index["files"] if f["name"] in files)
        except StoreAway:
            raise
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path} is missing or damaged: {e}") from None
    raw = folder / _RAW_IDS
    if raw.is_dir():
        names = [f for f in raw.entries() if f.suffix == ".safetensors" and not f.name.endswith(_TRAINING)]
        total += sum(f.size() for f in names)
    return total


def maps_of_tasks(ws: Workspace, spec: Spec, folders: Sequence[Location]) -> HostPlace:
    """Return the folder for `maps_of` on any host, and remove maps of other models from it.

    On this host they are removed now, on hosts with scratch of their own before the run's first task there. A process
    that has a map open keeps it.

    Args:
        ws: the workspace.
        spec: the pipeline, whose `spark.scratch` tells whether executors share this host's folder.
        folders: folders of the run's models.
    """
    maps = ws.mapped(spec.pipeline)
    own_names = tuple(maps_of(folder, maps).name for folder in folders)
    for mapped_folder in maps.entries():
        if mapped_folder.name not in own_names and not mapped_folder.name.startswith(OF_WORKSPACE):
            mapped_folder.remove_quietly()
    return RunFolder(ws.on_hosts(maps), uuid.uuid4().hex[:8], own_names) if spec.spark.own_scratch else maps
