"""Files of headrace itself: of the checkout, or of the wheel that is installed."""

from __future__ import annotations

from pathlib import Path

import headrace


def checkout() -> Path:
    """Return the folder that holds `python/`, `conf/`, `build/`, `docs/` and `bench/`."""
    return Path(headrace.__file__).resolve().parent.parent


def installation() -> Path:
    """Return the folder that holds `conf/`, `build/` and `requirements/`: the checkout, or `share` of a wheel."""
    share = Path(headrace.__file__).resolve().parent / "share"
    return share if share.is_dir() else checkout()


def jars_dir() -> Path:
    """Return the folder into which `build.gradle` puts the jars."""
    return installation() / "build" / "jars"


def class_archive(*, with_s3: bool = False) -> Path:
    """Return the JVM's class-data archive of Spark; it need not exist.

    A JVM maps an archive only if its class path begins with that of the archive.

    Args:
        with_s3: the archive for a class path with the jars of S3, which `make s3` builds; else that of `make env`.
    """
    return installation() / "build" / "spark" / ("classes-s3.jsa" if with_s3 else "classes.jsa")


def rapids_dir() -> Path:
    """Return the folder into which `gradle rapids` puts the RAPIDS plugin."""
    return installation() / "build" / "rapids"


def iceberg_dir() -> Path:
    """Return the folder into which `gradle iceberg` puts Iceberg's jar for Spark."""
    return installation() / "build" / "iceberg"


def s3_dir() -> Path:
    """Return the folder into which `gradle s3` puts Spark's file system for S3."""
    return installation() / "build" / "s3"


def pipeline_file(name: str) -> Path:
    """Return the YAML file of a shipped pipeline."""
    return installation() / "conf" / "pipelines" / f"{name}.yaml"
