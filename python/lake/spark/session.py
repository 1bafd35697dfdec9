"""Spark sessions: how a stage's application is configured and started."""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from pyspark import SparkContext
from pyspark.sql import SparkSession

from headrace.config import LOOPBACK, Spark, spark_profile
from headrace.config.installation import class_archive, iceberg_dir, jars_dir, rapids_dir
from headrace.config.spark import read_properties
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.files import require_room
from headrace.errors.translate import own_errors
from headrace.lake.spark.requirements import ACCESSED, require_java, store_jars, store_properties
from headrace.stage.resources import REMOTE, Spent
from headrace.storage import Location, location_of
from headrace.storage.lease import HeldFolder
from headrace.udfs.library import udf_jars

#: Time zone of casts between texts, dates and timestamps.
_TIME_ZONE = "spark.sql.session.timeZone"
#: With these, a file that cannot be read at the moment counts as empty, and the job succeeds.
_PASSING_OVER = ("spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles")
#: Without it the cause of a task's error, such as a store that is away, does not reach the driver.
_WHOLE_TRACES = {"spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false"}
_LOCAL_DIR = "spark.local.dir"
_PLUGIN = "com.nvidia.spark.SQLPlugin"
#: Prefix of Iceberg's classes in properties of catalogs and extensions.
_ICEBERG = "org.apache.iceberg."
_ICEBERG_JAR = "iceberg-spark-runtime"
#: Bytes that a start of Spark and a small job write, besides copies of jars.
_START_BYTES = 4 << 20
#: Seconds to wait for the end of a JVM, where a failure may come from it.
_JVM_END_SECONDS = 0.5
#: Of local masters, below a profile's own: a cluster has an address that its executors reach, a disk of its own on each
#: machine, and more cores than these partitions.
_LOCAL = {
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    # A handful of cores: 200 shuffle partitions of nothing are what makes small days slow.
    "spark.sql.shuffle.partitions": "4",
}
#: Comma-separated properties, to which values of users are added.
_LISTS = {ACCESSED, "spark.jars"}
_CLASS_PATHS = ("spark.driver.extraClassPath", "spark.executor.extraClassPath")
#: This process's folders for temporary files, by the folder above.
_held: dict[Path, HeldFolder] = {}
#: Module of the process that forks Python workers. (A cluster's executors may lack it before a task brings it.)
_DAEMON = "headrace.lake.spark.worker_daemon"
#: On a small day the JIT's second compiler takes a quarter of all processor time for code that runs a few seconds. It
#: begins at 40 times its usual counts of calls and loops, which code that looks at each of a million rows soon reaches.
_LATE_C2 = (
    "-XX:Tier4InvocationThreshold=200000 -XX:Tier4MinInvocationThreshold=24000 "
    "-XX:Tier4CompileThreshold=600000 -XX:Tier4BackEdgeThreshold=1600000"
)
_ARCHIVES = "spark.archives"
_FETCHED_SCHEME = "s3://"
#: Property of the session: the spec's number.
_DRIVER_PYTHON_MIB = "spark.headrace.driverPythonMib"


def properties(conf: Spark, ws: Workspace) -> dict[str, str]:
    """Return all Spark properties of an application: the profile's, the installation's and the spec's.

    Later ones win: local defaults, the profile, the installation, then `spark.properties` of the spec. Lists of jars
    and file systems are joined, and a class path of the user's goes behind ours.

    Args:
        conf: the section `spark` of the spec.
        ws: the workspace, whose stores need jars and properties.

    Raises:
        UserError: jars were not fetched, or `spark.properties` changes the time zone or has damaged files passed over.
    """
    jars = sorted(str(p) for p in jars_dir().glob("*.jar"))
    if not jars:
        raise UserError(f"no jars in {jars_dir()}: run `make jars`")
    log4j = spark_profile(conf.profile).with_name("log4j2.properties")
    props = (_LOCAL if conf.is_local else {}) | read_properties(spark_profile(conf.profile))
    rapids = _PLUGIN in props.get("spark.plugins", "")
    stores = [str(p) for p in store_jars(ws, conf.properties)]
    props |= {
        "spark.master": conf.master,
        "spark.driver.memory": conf.driver_memory,
        _DRIVER_PYTHON_MIB: str(conf.driver_python_mib),
        # Executors fetch them from the driver, since this host's paths need not exist on theirs.
        # Iceberg's is on no class path of the class archive's: it is far larger than all of the others together.
        "spark.jars": ",".join([*jars, *stores, *map(str, [*udf_jars(rapids), *_iceberg_jars(conf.properties)])]),
        "spark.sql.warehouse.dir": str(ws.spark_local / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={shlex.quote(log4j.as_uri())} "
        f"-Dderby.system.home={shlex.quote(str(ws.spark_local))}",
        # The class archive covers jars on it alone; Hadoop looks for file systems there, too.
        "spark.driver.extraClassPath": ":".join([*jars, *stores]),
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
    }
    props |= store_properties(ws, os.environ, bool(stores))
    if conf.is_local:
        props[_LOCAL_DIR] = str(spark_scratch(ws))
        props["spark.driver.extraJavaOptions"] += f" {_LATE_C2}"
        props["spark.python.daemon.module"] = _DAEMON
        if not ws.is_local:
            from headrace.storage.objects import copies

            # Tasks are processes of this host: they share the driver's copies. Other hosts have a folder of their own.
            props[f"spark.executorEnv.{copies.VARIABLE}"] = str(copies.folder())
    archive = class_archive(with_s3=bool(stores))
    if archive.is_file():
        # A third of a short application's processor time goes into loading classes. An archive of other jars or of
        # another Java is passed over by the JVM, without a word as these options have it.
        props["spark.driver.defaultJavaOptions"] = (
            f"-XX:SharedArchiveFile={shlex.quote(str(archive))} -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
        )
    if rapids:
        props |= _gpu_properties(props, log4j.with_name("gpu-discovery.sh"))
        if conf.is_local:
            # A local executor is the driver: it takes the first GPU, and has none to hand out to tasks.
            props = {k: v for k, v in props.items() if ".resource.gpu." not in k}
    user_properties = dict(conf.properties)
    # Keep the user's other values, such as those for a table that is read in place.
    for key in (_LISTS & user_properties.keys()) & props.keys():
        user_properties[key] = ",".join(dict.fromkeys([*props[key].split(","), *user_properties[key].split(",")]))
    if _ARCHIVES in user_properties:
        user_properties[_ARCHIVES] = archives_at_hand(user_properties[_ARCHIVES], conf.master)
    # The user's class path follows ours, which has Delta and the stores.
    user_properties |= {
        path: f"{props[path]}:{user_properties[path]}"
        for path in _CLASS_PATHS
        if path in user_properties and props.get(path)
    }
    props |= {_TIME_ZONE: "UTC"} | dict.fromkeys(_PASSING_OVER, "false") | _WHOLE_TRACES | user_properties
    if props[_TIME_ZONE] != "UTC":
        raise UserError(
            f"spark.properties: {_TIME_ZONE} is '{props[_TIME_ZONE]}', and the lake's timestamps and days are of UTC: "
            f"leave it out. The time zone of landing files is source.timezone"
        )
    for key in _PASSING_OVER:
        if props[key].strip().lower() != "false":
            raise UserError(
                f"spark.properties: {key} is '{props[key]}', which makes a file that cannot be read, be it that its "
                f"store is away, one without rows: leave it out"
            )
    return props


def spark_scratch(ws: Workspace) -> Location:
    """Below which Spark has its temporary files on this host, by process."""
    return ws.spark_local / "local"


def held_scratch(ws: Workspace) -> Path:
    """Return the folder of this process for Spark's temporary files; it goes with the process.

    `headrace gc` removes those of processes that have been killed, and leaves those of live ones alone.
    """
    parent = spark_scratch(ws).local_path()
    if parent not in _held:
        _held[parent] = HeldFolder(parent)
        atexit.register(_held[parent].release)
    return _held[parent].path


def rapids_jars() -> list[Path]:
    """Return the plugin's jar, if it was fetched."""
    return sorted(rapids_dir().glob("rapids-4-spark_*.jar"))


def iceberg_jars() -> list[Path]:
    """Iceberg's jar, if it was fetched."""
    return sorted(iceberg_dir().glob(f"{_ICEBERG_JAR}-*.jar"))


def _iceberg_jars(user_properties: Mapping[str, str]) -> list[Path]:
    """Return Iceberg's jar, if properties name a catalog of Iceberg and bring no jar of their own."""
    if not any(_ICEBERG in value for value in user_properties.values()):
        return []
    if any(_ICEBERG_JAR in user_properties.get(key, "") for key in ("spark.jars", "spark.jars.packages")):
        return []
    jars = iceberg_jars()
    if not jars:
        raise UserError(
            f"a source is an Iceberg table, and Iceberg's jar is not in {iceberg_dir()}: run `make iceberg`"
        )
    return jars[-1:]


def _gpu_properties(props: Mapping[str, str], discovery: Path) -> dict[str, str]:
    """Return the properties by which the RAPIDS plugin finds its jar and the GPUs.

    Its jar is on the class paths besides `spark.jars`: shuffle manager and serializer are made before jars are loaded.
    """
    jars = rapids_jars()
    if not jars:
        raise UserError(
            f"the RAPIDS plugin is not in {rapids_dir()}: run `make rapids` (1 GB), or use the profile 'cpu'"
        )
    jar = str(jars[-1])
    return {
        "spark.jars": f"{props['spark.jars']},{jar}",
        "spark.driver.extraClassPath": f"{props['spark.driver.extraClassPath']}:{jar}",
        "spark.executor.extraClassPath": jar,
        "spark.executor.resource.gpu.discoveryScript": str(discovery),
    }


@contextmanager
def session(conf: Spark, ws: Workspace, name: str) -> Iterator[SparkSession]:
    """Give a session for one stage, stopped at the end. Within `shared_session`, or where one is active, give that one:
    it is left running, in UTC and with no file skipped until the stage is done.

    An error that ends the block is one of headrace's own where Spark has wrapped one (headrace.errors.translate).

    Under spark-submit the JVM is already there with these properties (the submitter wrote them to its properties
    file); started from Python, they take effect here.
    """
    active = SparkSession.getActiveSession() if _shared is None else _shared.get()
    if active is None:
        spark = _start(conf, ws, name)
        try:
            with own_errors(ws.written_folders):
                yield spark
        finally:
            _stop(spark)
        return
    active.sparkContext.setJobDescription(name)
    settings = {_TIME_ZONE: "UTC"} | dict.fromkeys(_PASSING_OVER, "false") | _WHOLE_TRACES
    with spark_settings(active, settings), own_errors(ws.written_folders):
        yield active


def _start(conf: Spark, ws: Workspace, name: str) -> SparkSession:
    """Start a session, and with a local master the daemon of its Python workers.

    Raises:
        UserError: there is no Java, or no jars.
        DiskFull: there is no room for Spark's copies of its jars.
    """
    if SparkContext._active_spark_context is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        require_java()
    (ws.spark_local / "local").make_dir()
    if conf.is_local:
        # Spark copies its jars there, and a JVM without room for them fails with traces.
        needed = sum(jar.stat().st_size for jar in jars_dir().glob("*.jar")) + _START_BYTES
        require_room(Path(ws.spark_local.path), needed, "Spark's start")
    # Workers must run this very interpreter (or the spec's), whatever `python3` is on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", conf.properties.get("spark.pyspark.python", sys.executable))
    if conf.is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    builder = SparkSession.builder.appName(name)
    props = properties(conf, ws)
    if props.get(_LOCAL_DIR) == str(spark_scratch(ws)):
        props[_LOCAL_DIR] = str(held_scratch(ws))
    for key, value in props.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if conf.is_local:
        global _worker
        _worker = Thread(target=_start_worker, args=(spark,), name="python-worker", daemon=True)
        _worker.start()
    else:
        REMOTE.append(lambda: executors_use(spark))
    return spark


def executors_use(spark: SparkSession) -> Spent:
    """Return what a session's executors have used up to now, by Spark's own account of its stages; nothing after its
    end.
    """
    context = spark.sparkContext
    jvm, gateway = context._jvm, context._gateway
    if context._jsc is None or jvm is None or gateway is None:
        return Spent()
    no_quantiles = gateway.new_array(jvm.double, 0)
    store = context._jsc.sc().statusStore()
    stages = store.stageList(None, False, False, no_quantiles, jvm.java.util.ArrayList())
    of_stages = (stages.apply(i) for i in range(stages.size()))
    used = (Spent(s.executorCpuTime() / 1e9, s.inputBytes(), s.outputBytes()) for s in of_stages)
    return sum(used, start=Spent())


def _start_worker(spark: SparkSession) -> None:
    """Start what Python workers are forked from, and one of them: the first task in Python else waits half a second.

    Meanwhile the driver finds out what there is to do.
    """
    # The session may end at once.
    with suppress(Exception):
        spark.sparkContext.setJobDescription("start a Python worker")
        spark.sparkContext.parallelize([0], 1).map(abs).collect()


def _stop(spark: SparkSession) -> None:
    """Stop a session, after the thread that starts its first Python worker has ended."""
    if _worker is not None:
        _worker.join()
    REMOTE.clear()
    spark.stop()


class _Shared:
    """A session that is started when it is first asked for, in a thread: its starter goes on with its imports."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._pool = ThreadPoolExecutor(1, "session")
        self._session: Future[SparkSession] | None = None

    def begin(self) -> None:
        """Start the session in a thread, if it was not begun before."""
        self._session = self._session or self._pool.submit(self._start)

    def get(self) -> SparkSession:
        """Return the session once it is started, as the active one of the calling thread."""
        self.begin()
        assert self._session is not None
        spark = self._session.result()
        # The active session is per thread.
        SparkSession._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)
        return spark

    def tidy(self) -> None:
        """Give back what the stage before has left in memory, but for a heap that is as small as it can be."""
        if self._session is None or not self._session.done():
            return
        spark = self.get()
        spark.catalog.clearCache()
        gc.collect()
        # Broadcasts and shuffles go with the last Java object that refers to them; and the heap shrinks.
        jvm = spark._jvm
        assert jvm is not None
        jvm.java.lang.System.gc()

    def stop(self) -> None:
        """Stop the session, if it was ever started."""
        self._pool.shutdown()
        if self._session is not None and self._session.exception() is None:
            _stop(self._session.result())


_shared: _Shared | None = None


_worker: Thread | None = None


@contextmanager
def shared_session(conf: Spark, ws: Workspace, name: str, begin: bool) -> Iterator[Callable[[], None]]:
    """Make `session` give the same session everywhere in this block. It is started at its first use and stopped at the
    end.

    Args:
        conf: settings that `headrace.config.spark.settings_agree` with those of all stages within.
        ws: the workspace.
        name: of the Spark application.
        begin: start it now, beside what the caller does until it asks for it.

    Yields:
        what to call between two stages: it frees what the first has left in the session's memory.
    """
    global _shared
    shared = _Shared(lambda: _start(conf, ws, name))
    _shared = shared
    try:
        if begin:
            shared.begin()
        yield shared.tidy
    finally:
        _shared = None
        shared.stop()


def jvm_exit_code() -> int | None:
    """Return the exit code of the JVM that this process started, 128 + N where signal N ended it; None: it runs, or
    there is none.
    """
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return None
    with suppress(subprocess.TimeoutExpired):
        code = int(process.wait(_JVM_END_SECONDS))
        return code if code >= 0 else 128 - code
    return None


@contextmanager
def spark_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Give the session these properties in this block, and restore the previous ones after it."""
    previous = {key: spark.conf.get(key, None) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in previous.items():
            if old is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, old)


def archives_at_hand(archives: str, master: str) -> str:
    """Return the value of `spark.archives` for Spark, with archives of `s3://` as files of this host.

    An executor fetches archives (`headrace pack`) before the jars that the driver has for it, so it has no file system
    for S3 by then. The driver therefore fetches an archive of `s3://`, and Spark sends it on. YARN is the exception:
    its nodes fetch by their own Hadoop. An archive of `s3a://` is left to executors whose hosts have S3A themselves.

    Args:
        archives: as the user gave it: URIs with commas between, each with `#FOLDER` where its place has another name.
        master: Spark's.

    Raises:
        UserError: one is not there.
    """
    if master == "yarn":
        return archives
    return ",".join(_local_archive(archive.strip()) for archive in archives.split(","))


def _local_archive(archive: str) -> str:
    """Return one archive of `spark.archives`, fetched where it is of `s3://`."""
    uri, mark, folder = archive.partition("#")
    if not uri.startswith(_FETCHED_SCHEME):
        return archive
    try:
        return f"{location_of(uri, _ARCHIVES).as_plain().local_path()}{mark}{folder}"
    except FileNotFoundError as e:
        raise UserError(f"spark.properties: {_ARCHIVES}: there is no {uri}: make it by `headrace pack`") from e


def driver_python_bytes(spark: SparkSession) -> int:
    """Return the bytes that `spark.driver_python_mib` allows; in a session that nobody gave it, its default."""
    default = Spark.model_fields["driver_python_mib"].default
    return int(spark.conf.get(_DRIVER_PYTHON_MIB, str(default)) or default) << 20
