"""A saved model as an artifact of a tracking server: what `mlflow.pyfunc.load_model("models:/NAME@champion")` opens.

MLmodel             the flavor python_function: its loader is headrace.library.pyfunc, of the archive below `code`
code/headrace.zip   headrace, which no index of packages has (headrace.registry.code)
requirements.txt    what an environment needs that loads it; python_env.yaml and conda.yaml say it to MLflow's own tools
models/DAY/KEY/...  the saved model, and those that its rows lie upon or that come before it, as in the store
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import yaml
from packaging.version import Version

from headrace.errors import UserError
from headrace.registry.client import first_line
from headrace.registry.code import write_code
from headrace.storage import Location
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

#: The module that opens it (docs/storage.md).
LOADER = "headrace.library.pyfunc"
#: Below the run's artifacts.
FOLDER = "model"
_MODELS = "models"
_CODE = "code/headrace.zip"
_REQUIREMENTS, _PYTHON_ENV, _CONDA_ENV = "requirements.txt", "python_env.yaml", "conda.yaml"
#: What loading and predicting import, besides headrace.
_NEEDS = ("mlflow", "numpy", "pandas", "pyarrow", "pydantic", "PyYAML", "safetensors", "torch", "xgboost")


def staging(ws: Workspace, name: str) -> Location:
    """Where artifacts of a registered model are on this host while they go to the server, or come from it."""
    return ws.scratch / "registry" / name


def log_model(ws: Workspace, client: MlflowClient, run_id: str, name: str, key: str, model: Location) -> str:
    """Upload a saved model, with those without which it cannot be opened, to a run; the artifact's URI.

    A repeated upload writes the same files.

    Args:
        ws: its scratch holds the files meanwhile: links of a store on the same file system, else copies.
        name: the registered model's.
        key: the training run's.
        model: the saved model's folder.

    Raises:
        UserError: the model, or one that it needs, is not whole; or the server, or the place that it has for artifacts,
            does not take it.
    """
    # Both take long to import, and every command imports this module.
    import mlflow.pyfunc
    from mlflow.models import Model

    from headrace.models.predictor import needed_models

    needed = needed_models(model)
    # As far apart as in the store: one names another by its path from its own folder.
    above = os.path.commonpath([str(m.path.parent.parent.parent) for m in needed])
    with (staging(ws, name) / key).new_folder() as folder:
        for one in needed:
            (folder / _MODELS / os.path.relpath(one.path, above)).copy_from(one, share=True)
        described = Model(artifact_path=FOLDER, run_id=run_id)
        mlflow.pyfunc.add_to_model(
            described,
            loader_module=LOADER,
            data=f"{_MODELS}/{os.path.relpath(model.path, above)}",
            code=_CODE,
            conda_env=_CONDA_ENV,
            python_env=_PYTHON_ENV,
        )
        (folder / "MLmodel").put_text(described.to_yaml())
        for file, text in _environment().items():
            (folder / file).put_text(text)
        with (folder / _CODE).new_file() as code:
            write_code(code)
        try:
            client.log_artifacts(run_id, str(folder.local_path()), FOLDER)
        except Exception as e:  # of MLflow, or of the client of whatever store has the server's artifacts
            raise UserError(
                f"the model registry {ws.registry_uri}: artifacts cannot be uploaded: {first_line(e)}. See whether the "
                f"server takes artifacts, and whether this host may write where it keeps them, then run the stage again"
            ) from e
    (staging(ws, name) / key).remove_quietly()
    return f"{client.get_run(run_id).info.artifact_uri}/{FOLDER}"


def _environment() -> dict[str, str]:
    """What describes an environment for pip, and for MLflow's managers of environments: texts by file."""
    lines, python = _requirements(), platform.python_version()
    virtual = {"python": python, "dependencies": [f"-r {_REQUIREMENTS}"]}
    conda = {"channels": ["conda-forge"], "dependencies": [f"python={python}", "pip", {"pip": lines}]}
    return {
        _REQUIREMENTS: "".join(f"{line}\n" for line in lines),
        _PYTHON_ENV: yaml.safe_dump(virtual, sort_keys=False),
        _CONDA_ENV: yaml.safe_dump({"name": "mlflow-env", **conda}, sort_keys=False),
    }


def _requirements() -> list[str]:
    found = []
    for name in _NEEDS:
        try:
            # Of 2.13.0+cpu what an index knows.
            found.append(f"{name}=={Version(version(name)).public}")
        except PackageNotFoundError:
            continue
    return found
