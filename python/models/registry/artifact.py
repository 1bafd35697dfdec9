"""Artifacts of a tracking server: saved models that `mlflow.pyfunc.load_model("models:/NAME@champion")` opens.

MLmodel             the flavor python_function: its loader is headrace.library.pyfunc, in the archive below `code`
code/headrace.zip   headrace, which is in no package index (headrace.models.registry.artifact)
requirements.txt    packages that loading needs; python_env.yaml and conda.yaml list them for MLflow's own tools
models/DAY/KEY/...  the saved model and the models that it depends on, as in the store

No package index has headrace, so each logged model contains it, as one file, because MLflow uploads files one by one.
Its layout is that of a checkout, in which headrace.compute.native looks for the libraries:

    headrace/...                  the package
    build/native/[LEVEL/]*.so     the libraries that Python loads
"""

from __future__ import annotations

import os
import platform
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from packaging.version import Version

import headrace
from headrace.config.installation import installation
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.registry.client import first_line
from headrace.storage import Location

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


_SUFFIXES = (".py", ".j2", ".sh")
#: Libraries of build/native that are not packed: those for tests, and those that Spark loads from a jar.
_EXCLUDED_LIBRARIES = ("*_asan.so", "libheadrace_columns*.so")
#: Time of all entries, the earliest of the format, so that the same files give the same bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_code(file: Path) -> None:
    """Write a new archive of this package."""
    with zipfile.ZipFile(file, "x") as archive:
        for name, path in sorted(_files()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, path.read_bytes())


def _files() -> Iterator[tuple[str, Path]]:
    package, native = Path(headrace.__file__).parent, installation() / "build" / "native"
    for path in package.rglob("*"):
        # Other files of a wheel are below `share`.
        if path.suffix in _SUFFIXES and not path.is_relative_to(package / "share"):
            yield f"headrace/{path.relative_to(package)}", path
    for path in native.rglob("libheadrace_*.so"):
        if not any(path.match(pattern) for pattern in _EXCLUDED_LIBRARIES):
            yield f"build/native/{path.relative_to(native)}", path


#: The module that opens the artifact (docs/mlflow.md).
LOADER = "headrace.library.pyfunc"
#: Folder below the run's artifacts.
FOLDER = "model"
_MODELS = "models"
_CODE = "code/headrace.zip"
_REQUIREMENTS, _PYTHON_ENV, _CONDA_ENV = "requirements.txt", "python_env.yaml", "conda.yaml"
#: Packages that loading and predicting import, besides headrace.
_NEEDS = ("mlflow", "numpy", "pandas", "pyarrow", "pydantic", "PyYAML", "safetensors", "torch", "xgboost")


def staging(ws: Workspace, name: str) -> Location:
    """Return the folder on this host for artifacts of a registered model during upload and download."""
    return ws.scratch / "registry" / name


def log_model(ws: Workspace, client: MlflowClient, run_id: str, name: str, key: str, model: Location) -> str:
    """Upload a saved model and the models that it depends on to a run.

    A repeated upload writes the same files.

    Args:
        ws: the workspace; its scratch holds the files during the upload, as links where the store is on the same file
            system, else as copies.
        name: name of the registered model.
        key: key of the training run.
        model: the saved model's folder.

    Returns:
        the artifact's URI.

    Raises:
        UserError: the model, or one that it depends on, is incomplete; or the server or its artifact store refuses the
            upload.
    """
    # Both take long to import, and every command imports this module.
    import mlflow.pyfunc
    from mlflow.models import Model

    from headrace.models.predictor import needed_models

    needed = needed_models(model)
    # The layout of the store is kept: a model names another one by a relative path.
    root = os.path.commonpath([str(m.path.parent.parent.parent) for m in needed])
    with (staging(ws, name) / key).new_folder() as folder:
        for dependency in needed:
            (folder / _MODELS / os.path.relpath(dependency.path, root)).copy_from(dependency, share=True)
        mlmodel = Model(artifact_path=FOLDER, run_id=run_id)
        mlflow.pyfunc.add_to_model(
            mlmodel,
            loader_module=LOADER,
            data=f"{_MODELS}/{os.path.relpath(model.path, root)}",
            code=_CODE,
            conda_env=_CONDA_ENV,
            python_env=_PYTHON_ENV,
        )
        (folder / "MLmodel").put_text(mlmodel.to_yaml())
        for file, text in _environment().items():
            (folder / file).put_text(text)
        with (folder / _CODE).new_file() as code:
            write_code(code)
        try:
            client.log_artifacts(run_id, str(folder.local_path()), FOLDER)
        except Exception as e:  # from MLflow, or from the client of the artifact store
            raise UserError(
                f"the model registry {ws.registry_uri}: artifacts cannot be uploaded: {first_line(e)}. See whether the "
                f"server takes artifacts, and whether this host may write where it keeps them, then run the stage again"
            ) from e
    (staging(ws, name) / key).remove_quietly()
    return f"{client.get_run(run_id).info.artifact_uri}/{FOLDER}"


def _environment() -> dict[str, str]:
    """Return the files that describe the environment for pip and for MLflow's environment managers: text by name."""
    lines, python = _requirements(), platform.python_version()
    virtual = {"python": python, "dependencies": [f"-r {_REQUIREMENTS}"]}
    conda = {"channels": ["conda-forge"], "dependencies": [f"python={python}", "pip", {"pip": lines}]}
    return {
        _REQUIREMENTS: "".join(f"{line}\n" for line in lines),
        _PYTHON_ENV: yaml.safe_dump(virtual, sort_keys=False),
        _CONDA_ENV: yaml.safe_dump({"name": "mlflow-env", **conda}, sort_keys=False),
    }


def _requirements() -> list[str]:
    lines = []
    for name in _NEEDS:
        try:
            # An index knows 2.13.0, not 2.13.0+cpu.
            lines.append(f"{name}=={Version(version(name)).public}")
        except PackageNotFoundError:
            continue
    return lines
