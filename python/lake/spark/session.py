"""Spark sessions: the configuration, start and end of a stage's application."""

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
from headrace.config.operations import read_properties
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.stores import require_room
from headrace.errors.translate import own_errors
from headrace.lake.spark.requirements import ACCESSED, require_java, store_jars, store_properties
from headrace.stage.resources import REMOTE, Spent
from headrace.storage import Location, location_of
from headrace.storage.lease import HeldFolder
from headrace.udfs.library import udf_jars

#: Time zone of casts between texts, dates and timestamps.
_TIME_ZONE = "spark.sql.session.timeZone"
#: If true, a job treats files that it cannot read as empty, and succeeds.
_SKIPPING_FILES = ("spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles")
#: With simplified tracebacks the cause of a task's error, such as a store's outage, would not reach the driver.
_FULL_TRACEBACKS = {"spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false"}
_LOCAL_DIR = "spark.local.dir"
_PLUGIN = "com.nvidia.spark.SQLPlugin"
#: Prefix of Iceberg's classes in properties of catalogs and extensions.
_ICEBERG = "org.apache.iceberg."
_ICEBERG_JAR = "iceberg-spark-runtime"
#: Bytes that Spark's start and a small job write, besides copies of jars.
_START_BYTES = 4 << 20
#: Seconds to wait for the end of a JVM, where a failure may come from it.
_JVM_END_SECONDS = 0.5
#: Defaults for local masters, which a profile overrides. On a cluster, executors must reach the driver's address, and
#: there are more cores than these partitions.
_LOCAL = {
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    # Spark's default of 200 mostly empty shuffle partitions makes small days slow on a few cores.
    "spark.sql.shuffle.partitions": "4",
}
#: Comma-separated properties, to which the user's values are appended.
_LISTS = {ACCESSED, "spark.jars"}
_CLASS_PATHS = ("spark.driver.extraClassPath", "spark.executor.extraClassPath")
#: This process's folders for temporary files, by their parent folder.
_process_folders: dict[Path, HeldFolder] = {}
#: Module of the process that forks Python workers. (A cluster's executors may lack it before a task brings it.)
_DAEMON = "headrace.lake.spark.worker_daemon"
#: JVM options that delay the JIT's second compiler, which takes a quarter of a small day's processor time for code that
#: runs a few seconds. It starts at 40 times the usual counts of calls and loops: a loop over a million rows soon
#: reaches them.
_LATE_C2_OPTIONS = (
    "-XX:Tier4InvocationThreshold=200000 -XX:Tier4MinInvocationThreshold=24000 "
    "-XX:Tier4CompileThreshold=600000 -XX:Tier4BackEdgeThreshold=1600000"
)
_ARCHIVES = "spark.archives"
_FETCHED_SCHEME = "s3://"
#: Property of the session that holds `spark.driver_python_mib` of the spec.
_DRIVER_PYTHON_MIB = "spark.headrace.driverPythonMib"


def properties(conf: Spark, ws: Workspace) -> dict[str, str]:
    """Return all Spark properties of an application: the profile's, the installation's and the spec's.

    Later ones override earlier ones: local defaults, the profile, the installation, then `spark.properties` of the
    spec. Lists of jars and file systems are joined. The user's class path follows headrace's.

    Args:
        conf: the section `spark` of the spec.
        ws: the workspace, whose stores need jars and properties.

    Raises:
        UserError: jars were not fetched, or `spark.properties` changes the time zone or lets Spark skip damaged files.
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
        # Executors fetch these jars from the driver, since this host's paths need not exist on other hosts. Iceberg's
        # jar is not on the class path that the class archive covers: it is far larger than all others together.
        "spark.jars": ",".join([*jars, *stores, *map(str, [*udf_jars(rapids), *_iceberg_jars(conf.properties)])]),
        "spark.sql.warehouse.dir": str(ws.spark_local / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={shlex.quote(log4j.as_uri())} "
        f"-Dderby.system.home={shlex.quote(str(ws.spark_local))}",
        # The class archive covers only jars on this path, and Hadoop looks for file systems on it.
        "spark.driver.extraClassPath": ":".join([*jars, *stores]),
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
    }
    props |= store_properties(ws, os.environ, bool(stores))
    if conf.is_local:
        props[_LOCAL_DIR] = str(spark_scratch(ws))
        props["spark.driver.extraJavaOptions"] += f" {_LATE_C2_OPTIONS}"
        props["spark.python.daemon.module"] = _DAEMON
        if not ws.is_local:
            from headrace.storage.objects import copies

            # Tasks of a local master run on this host and share the driver's copies of files.
            props[f"spark.executorEnv.{copies.VARIABLE}"] = str(copies.folder())
    archive = class_archive(with_s3=bool(stores))
    if archive.is_file():
        # Loading classes takes a third of a short application's processor time. With these options the JVM silently
        # ignores an archive of other jars or of another Java.
        props["spark.driver.defaultJavaOptions"] = (
            f"-XX:SharedArchiveFile={shlex.quote(str(archive))} -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
        )
    if rapids:
        props |= _gpu_properties(props, log4j.with_name("gpu-discovery.sh"))
        if conf.is_local:
            # The driver is the only executor of a local master: it takes the first GPU, so tasks must not request one.
            props = {k: v for k, v in props.items() if ".resource.gpu." not in k}
    user_properties = dict(conf.properties)
    # Keep the user's other values, such as those for a table that is read in place.
    for key in (_LISTS & user_properties.keys()) & props.keys():
        user_properties[key] = ",".join(dict.fromkeys([*props[key].split(","), *user_properties[key].split(",")]))
    if _ARCHIVES in user_properties:
        user_properties[_ARCHIVES] = local_archives(user_properties[_ARCHIVES], conf.master)
    # The user's class path follows headrace's, which has Delta and the stores.
    user_properties |= {
        path: f"{props[path]}:{user_properties[path]}"
        for path in _CLASS_PATHS
        if path in user_properties and props.get(path)
    }
    props |= {_TIME_ZONE: "UTC"} | dict.fromkeys(_SKIPPING_FILES, "false") | _FULL_TRACEBACKS | user_properties
    if props[_TIME_ZONE] != "UTC":
        raise UserError(
            f"spark.properties: {_TIME_ZONE} is '{props[_TIME_ZONE]}', and the lake's timestamps and days are of UTC: "
            f"leave it out. The time zone of landing files is source.timezone"
        )
    for key in _SKIPPING_FILES:
        if props[key].strip().lower() != "false":
            raise UserError(
                f"spark.properties: {key} is '{props[key]}', which makes a file that cannot be read, be it that its "
                f"store is away, one without rows: leave it out"
            )
    return props


def spark_scratch(ws: Workspace) -> Location:
    """Return the parent of this host's folders of Spark's temporary files, one a process."""
    return ws.spark_local / "local"


def process_scratch(ws: Workspace) -> Path:
    """Return this process's folder for Spark's temporary files; it is removed when the process ends.

    `headrace gc` removes the folders of killed processes, not those of live ones.
    """
    parent = spark_scratch(ws).local_path()
    if parent not in _process_folders:
        _process_folders[parent] = HeldFolder(parent)
        atexit.register(_process_folders[parent].release)
    return _process_folders[parent].path


def rapids_jars() -> list[Path]:
    """Return the plugin's jar, if it was fetched."""
    return sorted(rapids_dir().glob("rapids-4-spark_*.jar"))


def iceberg_jars() -> list[Path]:
    """Return Iceberg's jar, if it was fetched."""
    return sorted(iceberg_dir().glob(f"{_ICEBERG_JAR}-*.jar"))


def _iceberg_jars(user_properties: Mapping[str, str]) -> list[Path]:
    """Return Iceberg's jar, if properties name a catalog of Iceberg and no other jar of it."""
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

    Its jar is on the class paths as well as in `spark.jars`, since Spark creates the shuffle manager and the serializer
    before it loads jars.
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
    """Yield a session for one stage, and stop it at the end.

    Within `shared_session`, or if a session is active, yield that one and leave it running; it is in UTC and skips no
    file during the block. If Spark has wrapped an error of headrace's, the block raises the original
    (headrace.errors.translate).

    Under spark-submit the JVM already runs with these properties, from the submitter's properties file. Started from
    Python, they take effect here.
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
    settings = {_TIME_ZONE: "UTC"} | dict.fromkeys(_SKIPPING_FILES, "false") | _FULL_TRACEBACKS
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
        # Spark copies its jars there; without room the JVM would fail with long tracebacks.
        needed = sum(jar.stat().st_size for jar in jars_dir().glob("*.jar")) + _START_BYTES
        require_room(Path(ws.spark_local.path), needed, "Spark's start")
    # Workers must run this interpreter (or the spec's), not the `python3` on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", conf.properties.get("spark.pyspark.python", sys.executable))
    if conf.is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    builder = SparkSession.builder.appName(name)
    props = properties(conf, ws)
    if props.get(_LOCAL_DIR) == str(spark_scratch(ws)):
        props[_LOCAL_DIR] = str(process_scratch(ws))
    for key, value in props.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if conf.is_local:
        global _worker
        _worker = Thread(target=_start_worker, args=(spark,), name="python-worker", daemon=True)
        _worker.start()
    else:
        REMOTE.append(lambda: executor_usage(spark))
    return spark


def executor_usage(spark: SparkSession) -> Spent:
    """Return the resources that a session's executors have used so far, from Spark's stage metrics; 0 after its end."""
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
    """Start the daemon that forks Python workers, and one worker, while the driver plans its work.

    Otherwise the first task in Python would wait half a second.
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
    """A session that starts at its first use, in a thread, so that the caller can go on with its imports."""

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

    def release_memory(self) -> None:
        """Free the caches and broadcasts of the stage before, and let the heap shrink."""
        if self._session is None or not self._session.done():
            return
        spark = self.get()
        spark.catalog.clearCache()
        gc.collect()
        # Spark frees broadcasts and shuffles when Java collects the last object that refers to them.
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
    """Make `session` yield the same session everywhere in this block; it starts at its first use.

    Args:
        conf: settings that agree with those of all stages in the block (`headrace.config.operations.settings_agree`).
        ws: the workspace.
        name: name of the Spark application.
        begin: start it now, in a thread.

    Yields:
        a function to call between two stages, which frees the memory of the first one in the session.
    """
    global _shared
    shared = _Shared(lambda: _start(conf, ws, name))
    _shared = shared
    try:
        if begin:
            shared.begin()
        yield shared.release_memory
    finally:
        _shared = None
        shared.stop()


def jvm_exit_code() -> int | None:
    """Return the exit code of this process's JVM, 128 + N if signal N ended it; None: it runs, or there is none."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return None
    with suppress(subprocess.TimeoutExpired):
        code = int(process.wait(_JVM_END_SECONDS))
        return code if code >= 0 else 128 - code
    return None


@contextmanager
def spark_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set properties of the session for this block, and restore the previous values after it."""
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


def local_archives(archives: str, master: str) -> str:
    """Return the value of `spark.archives`, with archives of `s3://` as local files.

    An executor fetches archives (`headrace pack`) before the driver's jars, so it has no file system for S3 by then.
    The driver therefore fetches an archive of `s3://`, and Spark sends it to the executors. YARN's nodes fetch by their
    own Hadoop. Executors fetch archives of `s3a://` themselves, if their hosts have S3A.

    Args:
        archives: the user's value: URIs separated by commas, each with `#FOLDER` to unpack it under another name.
        master: Spark's master URL.

    Raises:
        UserError: an archive does not exist.
    """
    if master == "yarn":
        return archives
    return ",".join(_local_archive(archive.strip()) for archive in archives.split(","))


def _local_archive(archive: str) -> str:
    """Return an archive of `spark.archives`, as a local file if its scheme is `s3://`."""
    uri, mark, folder = archive.partition("#")
    if not uri.startswith(_FETCHED_SCHEME):
        return archive
    try:
        return f"{location_of(uri, _ARCHIVES).as_plain().local_path()}{mark}{folder}"
    except FileNotFoundError as e:
        raise UserError(f"spark.properties: {_ARCHIVES}: there is no {uri}: make it by `headrace pack`") from e


def driver_python_bytes(spark: SparkSession) -> int:
    """Return the bytes that `spark.driver_python_mib` allows; its default in a session that headrace did not start."""
    default = Spark.model_fields["driver_python_mib"].default
    return int(spark.conf.get(_DRIVER_PYTHON_MIB, str(default)) or default) << 20
