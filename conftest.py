"""Fixtures that all tests share: one Spark session for the whole run, and a workspace of one's own."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from headrace.config import Spark
from headrace.config.formats import ICEBERG_BY_PATH
from headrace.config.installation import checkout, s3_dir
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.lake.spark.session import iceberg_jars, session, spark_settings
from headrace.stage.manifest import Manifest, Output, fingerprint
from tests.hadoop_servers import Hdfs, hdfs
from tests.lanes import SEED, VARIABLE, LanePlugin
from tests.support import DAY, GENERATED, INTERPRETED, NEXT_DAY, Run, headrace
from tests.users_package import install

# An example's time says how busy the machine is: several processes share its cores.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")

# Most JVMs of the tests live for seconds: the second compiler's work never pays off, and takes a core from Spark's, as
# do the threads of a collector that works beside the program. The session that tests share lives for many minutes: with
# the second compiler it takes a quarter less processor time.
_FIRST_COMPILER_ALONE = "-XX:TieredStopAtLevel=1"
# The first compiler alone is given room for 48 MB of code, and a session of many tests compiles more.
_JVM = f"{_FIRST_COMPILER_ALONE} -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m -XX:NewRatio=1 -XX:MetaspaceSize=192m"
os.environ["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} {_JVM}".strip()

#: Files that share a fixture that takes long, so one process takes them all: by name of the fixture.
_TOGETHER = {
    "hdfs_server": ("tests/unit/test_storage_contract.py", "plugins/headrace-hdfs/tests/test_hdfs.py"),
    "finished_day": ("tests/fault/test_kill.py", "tests/e2e/test_day.py"),
    "shop": tuple(
        f"tests/spark/test_score_{name}.py" for name in ("stage", "lists", "vectors", "registered", "incremental")
    ),
}
#: Which tests begin first when several processes share them: the longest, so that none ends long after the others.
_FIRST = (
    *_TOGETHER["finished_day"],
    *("tests/dags", "tests/fault", "tests/gpu_plan", "tests/dist", "tests/spark", "tests/rack"),
    *(*_TOGETHER["hdfs_server"], "tests/unit/test_export_onnx.py", "tests/unit/test_housekeeping.py"),
)

#: The NameNode waits neither for the disk at each change, nor at the end of a file until DataNodes report its last
#: block: where that comes after the client's question, as it mostly does, the client asks again half a second later.
#: (It waits all the same where there is one copy of each block.)
_HDFS = {"dfs.namenode.edits.noeditlogchannelflush": "true", "dfs.namenode.file.close.num-committed-allowed": "1"}

SHARED_DATA = checkout().parent / "shared" / "data"


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out files of tests; those of `_TOGETHER` as one.

    A session of Spark starts, loads classes and compiles them for a minute of processor time. So one process has none,
    as long as there are files that want none, and the others begin with those that do.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        if os.environ.get(VARIABLE) == "quick" and path.startswith("tests/spark/"):
            return "tests/spark"  # a handful of tests: one session
        return next((fixture for fixture, files in _TOGETHER.items() if path in files), path)

    def _assign_work_unit(self, node: WorkerController) -> None:
        sessions = [worker for worker, work in self.assigned_work.items() if any(map(_asks_for_spark, work))]
        takes_spark = node in sessions or len(sessions) < max(1, self.numnodes - 1)
        next_scope = next((scope for scope in self.workqueue if _asks_for_spark(scope) is takes_spark), None)
        if next_scope is not None:
            self.workqueue.move_to_end(next_scope, last=False)
        super()._assign_work_unit(node)


@cache
def _asks_for_spark(scope: str) -> bool:
    """Return whether tests of a scope use the session: of a file, of a folder, or of the files of `_TOGETHER`."""
    if scope == "tests/spark":
        return True
    files = [checkout() / path for path in _TOGETHER.get(scope, (scope,))]
    return any(path.parent.name == "spark" or "spark: SparkSession" in path.read_text() for path in files)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """For runs of several processes: a file's tests stay in one of them.

    (Groups by mark are not seen: pytest-xdist 3.8 writes them to a field that pytest 9.2 no longer reads.)
    """
    return _ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the lane, and the seed that all processes of this run share."""
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**9)))
    config.pluginmanager.register(LanePlugin(os.environ.get(VARIABLE, "")))


@pytest.fixture
def kill_points(request: pytest.FixtureRequest) -> random.Random:
    """Numbers that decide when a test kills: a function of the run's seed and the test's name."""
    print(f"{SEED}={os.environ[SEED]}")
    return random.Random(f"{os.environ[SEED]} {request.node.nodeid}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files come first."""

    def place(item: pytest.Item) -> int:
        return next((n for n, first in enumerate(_FIRST) if item.nodeid.startswith(first)), len(_FIRST))

    items.sort(key=place)


@pytest.fixture(scope="session")
def hdfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """A NameNode and two DataNodes of this machine, which take seconds to start."""
    pytest.importorskip("hdfs_native")
    folder = tmp_path_factory.mktemp("hdfs")
    with hdfs(folder / "hdfs", folder / "conf", datanodes=2, settings=_HDFS) as server:
        yield server


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for packages that tests install, on the path of this process and of all that it starts."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="session")
def my_package(site: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A user's package, installed."""
    install(tmp_path_factory.mktemp("project") / "my-package", site)


@pytest.fixture(scope="session")
def spark(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A real session with Delta, and Iceberg where its jar is, shared by all tests (9 s to start).

    Stages find it active and use it. It interprets its expressions: where these are what is tested, see
    `generated_code`; applications that tests start generate code, too.
    """
    # With the file system for S3 where its jars are: no bucket is known to it yet.
    reads = ("s3://bucket/folder",) if any(s3_dir().glob("*.jar")) else ()
    ws = Workspace(tmp_path_factory.mktemp("spark-home"), reads=reads)
    properties = INTERPRETED | (ICEBERG_BY_PATH if iceberg_jars() else {})
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            options = os.environ["JAVA_TOOL_OPTIONS"].replace(_FIRST_COMPILER_ALONE, "")
            patch.setenv("JAVA_TOOL_OPTIONS", options)
            shared = stack.enter_context(
                session(Spark(master="local[2]", driver_memory="2g", properties=properties), ws, "tests")
            )
        yield shared


@pytest.fixture(scope="module")
def generated_code(spark: SparkSession) -> Iterator[None]:
    """Spark generates code for its expressions."""
    with spark_settings(spark, GENERATED):
        yield


@pytest.fixture(scope="session")
def finished_day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Run]]:
    """A workspace in which `headrace run` has made one small day, and what it printed. Do not change it: copy it."""
    home = tmp_path_factory.mktemp("day") / "home"
    try:
        generated = headrace(home, "generate", "clicks", "--until", NEXT_DAY)
        assert generated.code == 0, generated.output
        run = headrace(home, "run", "clicks", "--ds", DAY)
        assert run.code == 0, run.output
        yield home, run
    finally:
        headrace(home, "warehouse", "stop", settings={})


@pytest.fixture
def ws(tmp_path: Path) -> Workspace:
    """An empty workspace."""
    return Workspace(tmp_path / "home")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; skips where it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data sets are not here ({SHARED_DATA})")
    return SHARED_DATA


@pytest.fixture(scope="session")
def make_dataset() -> Callable[..., Manifest]:
    """Write a small dataset of clicks in the layout of the features stage; return its manifest.

    `make_dataset(ws, train=4000, valid=800, groups=8)`: clicks drawn from latent tastes, so that a model can learn;
    columns: age, price (continuous), user, item (categorical), tags (a list of 3), click (label), row (carried).
    With `test=n`: also n rows of the split test. With `rank=n`: also n groups of 1 positive and 9 negatives, grouped
    by the carried column `query`.
    """

    def make(
        ws: Workspace,
        *,
        train: int = 4000,
        valid: int = 800,
        test: int = 0,
        rank: int = 0,
        groups: int = 8,
        ds: str = "2026-01-10",
        users: int = 60,
        items: int = 40,
        seed: int = 0,
        pipeline: str = "clicks",
        positives_only: bool = False,
    ) -> Manifest:
        rng = np.random.default_rng(seed)
        truth = np.random.default_rng(1234)
        taste, quality = truth.normal(size=(5000, 4)), truth.normal(size=(5000, 4))

        def rows(n: int, first: int) -> pa.Table:
            user, item = rng.integers(2, users, n), rng.integers(2, items, n)
            age, price = rng.normal(size=n), rng.normal(size=n)
            score = 0.5 * (taste[user] * quality[item]).sum(1) + taste[user, 0] + quality[item, 0] + 0.5 * age - 1.0
            click = (rng.random(n) < 1 / (1 + np.exp(-score))).astype(np.float32)
            if positives_only:
                click[:] = 1
            tags = np.where(np.arange(3) < rng.integers(0, 4, n)[:, None], rng.integers(2, 12, (n, 3)), 0)
            columns = {"age": age.astype(np.float32), "price": price.astype(np.float32)}
            columns |= {"user": user.astype(np.int32), "item": item.astype(np.int32)}
            columns |= {"tags": pa.array([t[t > 0] for t in tags.astype(np.int32)], pa.list_(pa.int32()))}
            return pa.table(
                columns | {"click": click, "row": np.arange(first, first + n), "query": np.zeros(n, np.int64)}
            )

        key = fingerprint({"seed": seed, "train": train, "valid": valid, "test": test, "rank": rank, "groups": groups})
        folder = ws.dataset(pipeline, ds, key).local_path()
        tables = {"train": rows(train, 0), "valid": rows(valid, 1_000_000)}
        if test:
            tables["test"] = rows(test, 3_000_000)
        if rank:
            ranked = rows(10 * rank, 2_000_000)
            labels = (np.arange(10 * rank) % 10 == 0).astype(np.float32)
            ranked = ranked.set_column(ranked.schema.get_field_index("click"), "click", pa.array(labels))
            query = ranked.schema.get_field_index("query")
            tables["rank"] = ranked.set_column(query, "query", pa.array(np.arange(10 * rank) // 10))
        for split, table in tables.items():
            (folder / split).mkdir(parents=True)
            half = -(-table.num_rows // 2)
            for i in range(2):  # two files, so that row groups are counted across files
                pq.write_table(
                    table.slice(i * half, half),
                    folder / split / f"part-{i:04d}.parquet",
                    row_group_size=max(1, -(-half // max(1, groups // 2))),
                    compression="none",
                    use_dictionary=False,
                )
        (folder / "workflow").mkdir()
        (folder / "workflow" / "workflow.json").write_text("{}\n")

        def feature(name: str, kind: Kind, dtype: str, **more: Any) -> Feature:
            return Feature(name=name, kind=kind, dtype=dtype, **more)

        schema = DatasetSchema(
            features=(
                feature("age", Kind.CONTINUOUS, "float32"),
                feature("price", Kind.CONTINUOUS, "float32"),
                feature("user", Kind.CATEGORICAL, "int32", cardinality=users, vocabulary="user"),
                feature("item", Kind.CATEGORICAL, "int32", cardinality=items, vocabulary="item"),
                feature("tags", Kind.CATEGORICAL, "int32", length=3, is_list=True, cardinality=12, vocabulary="tags"),
                feature("click", Kind.LABEL, "float32"),
                feature("row", Kind.CARRIED, "int64"),
                feature("query", Kind.CARRIED, "int64"),
            )
        )
        manifest = Manifest(
            stage="features",
            pipeline=pipeline,
            ds=ds,
            key=key,
            spec_hash="test",
            dataset_schema=schema,
            outputs=(Output(kind="dataset", name=str(folder.relative_to(ws.home)), version=key, rows=train),),
            rows={split: table.num_rows for split, table in tables.items()},
            facts={"splits": {split: {"rows": table.num_rows} for split, table in tables.items()}},
        )
        manifest.save(ws.manifest(pipeline, ds, "features"))
        return manifest

    return make
