"""`headrace doctor`: installed and missing parts, and how to install them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from headrace.cli.root import VAR, Home, Json, MaybePipeline, Panel, app, examples, workspace
from headrace.cli.screen import out, plain, print_json, table
from headrace.config.installation import iceberg_dir, installation, jars_dir, s3_dir
from headrace.errors import EXIT_DONE, EXIT_FAILURE, UserError

if TYPE_CHECKING:
    from headrace.config.workspace import Workspace


@app.command(rich_help_panel=Panel.SET_UP, epilog=examples("headrace doctor", "headrace doctor clicks"))
def doctor(pipeline: MaybePipeline = None, as_json: Json = False, home: Home = VAR) -> None:
    """Look for everything that headrace needs; exit code 1 when something needed is missing.

    With a pipeline its warehouse is tried, too.
    """
    raise typer.Exit(diagnose(workspace(home), pipeline, as_json))


#: missing: a day cannot run. optional: it can, without this. warning: it can, with less room than is wise.
State = Literal["ok", "missing", "optional", "warning"]
_STYLES = {"ok": "green", "missing": "bold red", "optional": "dim", "warning": "yellow"}
#: Pins that decide whether the stack holds together: a line of their own. The others share one.
_SHOWN_PINS = ("pyspark", "delta-spark", "pyarrow", "numpy", "pandas", "petastorm", "torch", "xgboost", "mlflow")
#: Versions of Python with a lock below requirements/.
_PYTHONS = ((3, 11), (3, 12), (3, 13))
_GIB = 2**30
_SECONDS = 120


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    state: State
    found: str
    todo: str = ""


def diagnose(ws: Workspace, pipeline: str | None = None, as_json: bool = False) -> int:
    """Print the findings; 1 when something needed is missing."""
    findings = list(examine(ws, pipeline))
    missing = [f.what for f in findings if f.state == "missing"]
    if as_json:
        print_json({"findings": [asdict(f) for f in findings], "missing": missing})
        return EXIT_FAILURE if missing else EXIT_DONE
    findings_table = table("what", "state", "found", "what to do")
    for f in findings:
        findings_table.add_row(f.what, plain(f.state, style=_STYLES[f.state]), plain(f.found), plain(f.todo))
    out.print(findings_table)
    out.print()
    out.print(f"missing: {', '.join(missing)}" if missing else "everything that is needed is here", markup=False)
    return EXIT_FAILURE if missing else EXIT_DONE


def examine(ws: Workspace, pipeline: str | None = None) -> Iterator[Finding]:
    """All findings, in the order in which things are installed."""
    from headrace.config import load_spec

    checks: list[Callable[[], Iterator[Finding]]] = [python, java, pins, spark, iceberg, native, horovod, shared_memory]
    for check in checks:
        yield from check()
    yield from s3(ws.of(load_spec(pipeline)) if pipeline else ws)
    yield from disk(ws)
    yield from gpu()
    try:
        yield from warehouse(ws, pipeline)
    except ModuleNotFoundError as e:  # an archive for executors has not all packages
        yield Finding("warehouse", "missing", f"{e.name} is not installed", "`make env`")


def python() -> Iterator[Finding]:
    """Look for a Python that the pins were locked for."""
    installed = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} ({sys.executable})"
    good = sys.version_info[:2] in _PYTHONS
    versions = ", ".join(f"{major}.{minor}" for major, minor in _PYTHONS)
    todo = "" if good else f"a Python of {versions}: `make env PYTHON=python{versions[-4:]}`"
    yield Finding("Python", "ok" if good else "missing", installed, todo)


def java() -> Iterator[Finding]:
    """Look for a JDK 17 or 21 where spark-submit does: JAVA_HOME, then PATH."""
    from headrace.lake.spark.requirements import java_program

    home = os.environ.get("JAVA_HOME")
    program = java_program()
    todo = "install a JDK 17 or 21" + (
        f", or correct JAVA_HOME ({home})" if home else " (Debian: openjdk-17-jdk-headless)"
    )
    try:
        text = subprocess.run(
            [str(program), "-version"], capture_output=True, text=True, timeout=_SECONDS, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError):
        yield Finding("Java", "missing", f"{program} does not run", todo)
        return
    major = java_major(text)
    good = major in (17, 21)
    installed = f"{major or 'unknown version'} ({program})"
    yield Finding("Java", "ok" if good else "missing", installed, "" if good else todo)


def java_major(text: str) -> int | None:
    """Return the major version that `java -version` prints: 17 of `openjdk version "17.0.13"`, 8 of `"1.8.0_392"`."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if match is None:
        return None
    first = int(match[1])
    return int(match[2]) if first == 1 and match[2] else first


def pins() -> Iterator[Finding]:
    """Compare the installed packages with requirements/headrace.in."""
    pinned = requirements(installation() / "requirements" / "headrace.in")
    if pinned is None:
        yield Finding("pins", "warning", "requirements/headrace.in is not here: versions are not compared")
        return
    from packaging.specifiers import SpecifierSet

    other_faults: list[str] = []
    for name, specifier in pinned.items():
        installed = _installed(name)
        good = installed is not None and SpecifierSet(specifier).contains(installed.partition("+")[0], prereleases=True)
        if name in _SHOWN_PINS:
            state: State = "ok" if good else "missing"
            yield Finding(
                name, state, installed or "not installed", "" if good else f"`make env` (pinned: {specifier})"
            )
        elif not good:
            other_faults.append(f"{name} {installed or 'not installed'} (pinned: {specifier})")
    count = len(pinned) - len([n for n in _SHOWN_PINS if n in pinned])
    if other_faults:
        yield Finding("other pins", "missing", "; ".join(other_faults), "`make env`")
    else:
        yield Finding("other pins", "ok", f"{count} packages as requirements/headrace.in has them")


def requirements(path: Path) -> dict[str, str] | None:
    """Return package -> version specifier by the lines of a requirements file for this Python; None without a file."""
    from packaging.requirements import Requirement

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    pinned = [Requirement(line) for line in (line.partition("#")[0].strip() for line in lines) if line]
    return {r.name.lower(): str(r.specifier) for r in pinned if r.marker is None or r.marker.evaluate()}


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def spark() -> Iterator[Finding]:
    """spark-submit of the installed package, and the jars that build.gradle names."""
    from headrace.jobs.submit import spark_home

    try:
        program = spark_home() / "bin" / "spark-submit"
        good = os.access(program, os.X_OK)
        yield Finding("spark-submit", "ok" if good else "missing", str(program), "" if good else "`make env`")
    except UserError as e:
        yield Finding("spark-submit", "missing", str(e), "`make env`")
    present = {p.name for p in jars_dir().glob("*.jar")}
    required = jars(installation() / "build.gradle", "sparkJars")
    missing = sorted(set(required) - present)
    count_text = f"{len(required) - len(missing)} of {len(required)} in {jars_dir()}"
    if missing or not required:
        yield Finding("jars", "missing", f"{count_text}; not there: {', '.join(missing)}", "`make jars`")
    else:
        yield Finding("jars", "ok", count_text)


def jars(gradle: Path, configuration: str) -> list[str]:
    """File names of the jars that a configuration of build.gradle names."""
    try:
        text = gradle.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [f"{name}-{v}.jar" for name, v in re.findall(rf"^\s*{configuration} '[^:']+:([^:']+):([^:']+)'", text, re.M)]


def iceberg() -> Iterator[Finding]:
    """Iceberg's jar: for sources that are Iceberg tables."""
    required = jars(installation() / "build.gradle", "icebergJars")
    present = [name for name in required if (iceberg_dir() / name).is_file()]
    if present:
        yield Finding("Iceberg's jar", "ok", ", ".join(present))
    else:
        yield Finding("Iceberg's jar", "optional", "not here", "`make iceberg` (47 MB), for tables of Iceberg's")


def s3(ws: Workspace) -> Iterator[Finding]:
    """Spark's file system for S3: for a lake, a store or a source there."""
    from headrace.lake.spark.requirements import how_to_get_s3

    name = "Spark's S3A"
    if present := [p.name for p in s3_dir().glob("*.jar")]:
        yield Finding(name, "ok", f"{len(present)} jars in {s3_dir()}")
    elif "s3" in ws.schemes:
        yield Finding(name, "missing", f"not in {s3_dir()}, and lake, store or a source is in S3", how_to_get_s3())
    else:
        yield Finding(name, "optional", "not here", f"{how_to_get_s3()} (9 MB), for lakes in S3")


def native() -> Iterator[Finding]:
    """Yield which libraries of native/ are built: for hashes, native operators, faster embeddings, GPU plans."""
    from headrace.compute import native as cpp
    from headrace.dataset import native as dataset
    from headrace.udfs import library as columns

    loaded = {
        "embeddings": cpp.library() is not None,
        "dataset": dataset.library() is not None,
        "columns": _loads(columns.host),
    }
    missing = sorted(name for name, is_there in loaded.items() if not is_there)
    best, level = next(iter(cpp.levels()), ""), cpp.EMBEDDINGS.path().parent.name
    level = level if level in cpp.levels() else ""
    names_ = {"embeddings": f"embeddings ({level or 'any processor'})", "dataset": "dataset", "columns": "columns"}
    todo = f"`make native` ({', '.join(missing)})" if missing else ""
    if not todo and level != best:
        todo = f"`make native` with a compiler that knows -march={best}: this processor can do more"
    yield Finding(
        "native libraries",
        "missing" if not loaded["columns"] else "optional" if missing else "ok",
        ", ".join(names_[name] for name, is_there in loaded.items() if is_there) or "not built",
        todo,
    )
    if not columns.cuda_path().is_file():
        yield Finding("CUDA objects", "optional", "not built", "`make native-cuda`, for GPUs (builds without one)")
    else:
        targets = ", ".join(columns.cuda_targets(columns.cuda_path()))
        good = _loads(columns.cuda)
        yield Finding("CUDA objects", "ok" if good else "warning", targets, "" if good else "`make native-cuda` again")
    jars_ = columns.udf_jars(rapids=False)
    if not jars_:
        todo = "`make native`, for text_ngrams, feature_cross and minhash in Spark"
        yield Finding("UDF jar", "optional", "not built", todo)
        return
    from zipfile import ZipFile

    with ZipFile(jars_[0]) as jar:
        names = {name.rpartition("/")[2] for name in jar.namelist()}
    sides = {"libheadrace_columns.so": "CPU", "libheadrace_columns_cuda.so": "CUDA", "CudfColumnar.class": "RAPIDS"}
    has = [side for name, side in sides.items() if name in names]
    todo = "" if len(has) == len(sides) else "`make native-cuda`, for GPUs"
    yield Finding("UDF jar", "ok", f"{jars_[0].name} with {', '.join(has)}", todo)


def _loads(load: Callable[[], object]) -> bool:
    try:
        load()
    except UserError:
        return False
    return True


def horovod() -> Iterator[Finding]:
    """Yield how Horovod was built, from a separate process: its libraries and torch take a gibibyte and seconds."""
    if importlib.util.find_spec("horovod") is None:
        yield Finding("Horovod", "missing", "not installed", "`make env` (builds it from source, cached)")
        return
    script = (
        "import horovod, horovod.torch as hvd; "
        "print('headrace', horovod.__version__, hvd.gloo_built(), hvd.nccl_built(), hvd.mpi_built())"
    )
    try:
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        yield Finding("Horovod", "missing", f"did not load in {_SECONDS} s", "try again when the machine is less busy")
        return
    versions_line = next((line.split() for line in ran.stdout.splitlines() if line.startswith("headrace ")), None)
    if ran.returncode or versions_line is None:
        reason = (ran.stderr.strip().splitlines() or ["no reason given"])[-1]
        todo = "`make env` builds it anew; it must match torch and Python"
        yield Finding("Horovod", "missing", f"does not load: {reason}", todo)
        return
    _, number, gloo, nccl, mpi = versions_line
    names = (("Gloo", gloo), (f"NCCL {nccl_version(nccl)}", nccl), ("MPI", mpi))
    flavours = [n for n, v in names if v not in ("False", "0")]
    good = "Gloo" in flavours
    description = f"{number} with {', '.join(flavours) or 'no controller'}"
    todo = "" if good else "build it with HOROVOD_WITH_GLOO=1"
    if good and nccl in ("False", "0") and shutil.which("nvidia-smi"):
        todo = "`make env HOROVOD=nccl`, for ranks on GPUs"
    yield Finding("Horovod", "ok" if good else "missing", description, todo)


def nccl_version(code: str) -> str:
    """2.29.7 of Horovod's 22907."""
    n = int(code) if code.isdigit() else 0
    return f"{n // 10_000}.{n // 100 % 100}.{n % 100}"


def shared_memory() -> Iterator[Finding]:
    """Ranks on one machine talk through it."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Finding("shared memory", "warning", "no /dev/shm", "mount one, or expect slower ranks")
        return
    free = shutil.disk_usage(folder).free
    good = free >= 256 * 2**20
    todo = "" if good else "enlarge it (containers: --shm-size=1g)"
    yield Finding("shared memory", "ok" if good else "warning", f"{free / _GIB:.1f} GiB free in /dev/shm", todo)


def disk(ws: Workspace) -> Iterator[Finding]:
    """Room for the workspace."""
    folder = ws.home
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "missing", f"{folder} cannot be written", "choose another --home")
        return
    state: State = "ok" if free >= 5 * _GIB else "warning" if free >= _GIB else "missing"
    todo = "" if state == "ok" else "make room, or choose another --home"
    yield Finding("disk", state, f"{free / _GIB:.1f} GiB free for {ws.home}", todo)


def gpu() -> Iterator[Finding]:
    """Look for a GPU and the RAPIDS plugin: both optional."""
    program = shutil.which("nvidia-smi")
    names: list[str] = []
    if program:
        ran = subprocess.run(
            [program, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        names = [line.strip() for line in ran.stdout.splitlines() if line.strip()] if ran.returncode == 0 else []
    if not names:
        yield Finding("GPU", "optional", "none; CPU profile is used")
    else:
        yield Finding("GPU", "ok", "; ".join(names))
    plugin = sorted((installation() / "build" / "rapids").glob("rapids-4-spark*.jar"))
    if plugin:
        yield Finding("RAPIDS plugin", "ok", plugin[-1].name)
    else:
        yield Finding(
            "RAPIDS plugin",
            "optional",
            "not here",
            "`make rapids` (1 GB), for GPUs and the GPU-plan gate" if names else "",
        )


def warehouse(ws: Workspace, pipeline: str | None) -> Iterator[Finding]:
    """Look for the embedded server's programs, or ask the pipeline's own warehouse for an answer."""
    from headrace.config import load_spec
    from headrace.publish.opening import open_target
    from headrace.publish.postgres import embedded, processes
    from headrace.publish.postgres.server import connect

    spec = load_spec(pipeline) if pipeline else None
    ws = ws if spec is None else ws.of(spec)
    conf = spec.publish.warehouse if spec and spec.publish else None
    if spec and conf is None:
        yield Finding("warehouse", "optional", f"pipeline '{spec.pipeline}' publishes nothing")
    elif spec and conf and conf.kind not in ("embedded", "postgres"):
        try:
            with open_target(spec, ws) as target:
                days = target.days()
            yield Finding("warehouse", "ok", f"{conf.kind} at {target.address}, {len(days)} days in {target.label}")
        except UserError as e:
            yield Finding("warehouse", "missing", str(e), "see publish.warehouse in the pipeline's file")
    elif conf and conf.kind == "postgres":
        try:
            with connect(conf, ws) as conn:
                row = conn.execute("SHOW server_version").fetchone()
            yield Finding("warehouse", "ok", f"PostgreSQL {row[0] if row else '?'} at {conf.host}")
        except UserError as e:
            yield Finding("warehouse", "missing", str(e), "see publish.warehouse in the pipeline's file")
    else:
        try:
            program = processes.program("postgres")
        except UserError as e:
            yield Finding("warehouse", "missing", str(e), "`make env`, or name a server in publish.warehouse")
            return
        running = embedded.status(ws)
        state = f"runs on port {running.port}" if running.running else "starts when needed"
        yield Finding("warehouse", "ok", f"embedded PostgreSQL, {state} ({program})")
