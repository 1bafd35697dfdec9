"""The import path of Spark's Python workers: pyspark as it is installed, not its archives."""

from __future__ import annotations

import zipfile
from pathlib import Path

from headrace.lake.spark.worker_daemon import without_archives


def installed(folder: Path, *packages: str) -> Path:
    """A folder of packages, pyspark's archives in it where it is one of them."""
    for name in packages:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    return folder


def archive(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("pyspark/__init__.py", "")
    return str(path)


def test_archives_of_the_installed_pyspark_are_left_out(tmp_path: Path) -> None:
    site = installed(tmp_path / "site", "pyspark", "py4j")
    bundled = [
        archive(site / "pyspark" / name) for name in ("python/lib/pyspark.zip", "python/lib/py4j-src.zip", "jars/x.jar")
    ]
    users = archive(tmp_path / "users.zip")
    assert without_archives(["", *bundled, users, str(site)]) == ["", users, str(site)]


def test_archives_stay_where_pyspark_is_in_them_alone(tmp_path: Path) -> None:
    home = tmp_path / "spark"
    paths = [archive(home / "python" / "lib" / "pyspark.zip")]
    for site in (installed(tmp_path / "a", "numpy"), installed(tmp_path / "b", "pyspark")):  # b lacks Py4J
        assert without_archives([*paths, str(site)]) == [*paths, str(site)]


def test_archives_of_another_pyspark_stay(tmp_path: Path) -> None:
    site = installed(tmp_path / "site", "pyspark", "py4j")
    paths = [archive(tmp_path / "spark" / "python" / "lib" / "pyspark.zip"), str(site)]
    assert without_archives(paths) == paths
