"""HDFS and YARN of this machine for tests and scripts: Hadoop's own servers, one process each, on loopback.

`hdfs` starts a NameNode and DataNodes, `yarn` a ResourceManager and a NodeManager whose containers are processes of
this machine. `make hadoop` fetches the servers' jars. Both write what clients need to know into a folder, for
HADOOP_CONF_DIR; given the same one, clients find both.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from headrace.config.installation import checkout

_LOG = """log4j.rootLogger=WARN,out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d{ISO8601} %p %c: %m%n
"""
_SERVERS = {
    "namenode": "org.apache.hadoop.hdfs.server.namenode.NameNode",
    "datanode": "org.apache.hadoop.hdfs.server.datanode.DataNode",
    "resourcemanager": "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager",
    "nodemanager": "org.apache.hadoop.yarn.server.nodemanager.NodeManager",
}
#: Only a limit: on a machine whose cores have other work, a server took more than two minutes.
_START_SECONDS = 900


def jars() -> Path:
    """Return the folder into which `gradle hadoop` puts the servers."""
    return checkout() / "build" / "hadoop"


def require_jars() -> None:
    """Skip the test where the jars were not fetched."""
    if not any(jars().glob("hadoop-yarn-server-resourcemanager-*.jar")):
        pytest.skip("no servers of HDFS and YARN in build/hadoop: run `make hadoop`")


@dataclass
class Server:
    """One of Hadoop's servers: a process that can be stopped, killed and started again.

    Attributes:
        name: a key of the servers' classes.
        conf: the folder of its settings, and of its clients'.
        log: where it says what it does.
        heap: the most that its heap takes, as Java spells it.
    """

    name: str
    conf: Path
    log: Path
    heap: str = "256m"
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, *words: str) -> None:
        """Start its process."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*_java(self.conf, self.heap), _SERVERS[self.name], *words], stdout=log, stderr=log
            )

    def kill(self) -> None:
        """End it at once, as a machine that is lost does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Ask it to end, so that it ends what it has started."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until it answers. Raises RuntimeError where it ends, or takes too long."""
        end = time.monotonic() + _START_SECONDS
        while not _answers(ready):
            if self.process is None or self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the {self.name} does not come up:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)


@dataclass(frozen=True)
class Hdfs:
    """A NameNode and its DataNodes at work."""

    url: str
    web: str
    conf: Path
    namenode: Server
    datanodes: tuple[Server, ...]


@dataclass(frozen=True)
class Yarn:
    """A ResourceManager and a NodeManager at work."""

    rest: str
    conf: Path
    resourcemanager: Server
    nodemanager: Server

    @property
    def environ(self) -> Mapping[str, str]:
        """Return the variables by which spark-submit finds the servers."""
        return {"HADOOP_CONF_DIR": str(self.conf)}

    def kill_application(self, application: str) -> None:
        """Kill an application as `yarn application -kill` does."""
        url = f"{self.rest}/ws/v1/cluster/apps/{application}/state"
        request = urllib.request.Request(
            url, json.dumps({"state": "KILLED"}).encode(), {"Content-Type": "application/json"}, method="PUT"
        )
        urllib.request.urlopen(request, timeout=30).close()

    def restart(self) -> None:
        """Start a ResourceManager that was killed, and wait until it answers; it knows its applications again."""
        self.resourcemanager.start()
        self.resourcemanager.wait(lambda: _get(f"{self.rest}/ws/v1/cluster/info") is not None)


@contextmanager
def hdfs(
    folder: Path,
    conf: Path,
    *,
    port: int = 0,
    web: int = 0,
    datanodes: int = 1,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Hdfs]:
    """HDFS, new and empty, while the block runs.

    Args:
        folder: its blocks, its image and its logs.
        conf: where core-site.xml and hdfs-site.xml are written.
        port: of the NameNode, which clients speak to; 0: a free one.
        web: of its pages and of WebHDFS; 0: a free one.
        datanodes: each with a copy of every block.
        settings: more of hdfs-site.xml.
    """
    require_jars()
    port, web = port or _free_port(), web or _free_port()
    folder.mkdir(parents=True, exist_ok=True)
    _write(conf / "core-site.xml", {"fs.defaultFS": f"hdfs://127.0.0.1:{port}"})
    loopback = {f"dfs.datanode.{name}": "127.0.0.1:0" for name in ("address", "http.address", "ipc.address")}
    defaults = {
        "dfs.namenode.name.dir": f"file://{folder / 'name'}",
        "dfs.namenode.http-address": f"127.0.0.1:{web}",
        "dfs.namenode.rpc-bind-host": "127.0.0.1",
        "dfs.datanode.hostname": "127.0.0.1",
        "dfs.replication": str(datanodes),
        "dfs.permissions.enabled": "false",
        # As soon as a block is reported, instead of 30 s after.
        "dfs.namenode.safemode.extension": "0",
    }
    _write(conf / "hdfs-site.xml", defaults | loopback | dict(settings or {}))
    (conf / "log4j.properties").write_text(_LOG)
    # Their pages are not among the jars; without the folders the servers do not start.
    for name in ("hdfs", "datanode"):
        (conf / "webapps" / name).mkdir(parents=True, exist_ok=True)
    namenode = Server("namenode", conf, folder / "namenode.log", "512m")
    nodes = tuple(Server("datanode", conf, folder / f"datanode{n}.log") for n in range(datanodes))
    namenode.start("-format", "-nonInteractive")
    assert namenode.process is not None
    if namenode.process.wait(_START_SECONDS):
        raise RuntimeError(f"no new file system:\n{namenode.log.read_text()[-3000:]}")
    with ExitStack() as stack:
        for server in (namenode, *nodes):
            stack.callback(server.stop)
        namenode.start()
        for n, node in enumerate(nodes):
            node.start("-D", f"dfs.datanode.data.dir=file://{folder / f'data{n}'}")
        status = f"http://127.0.0.1:{web}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        nodes[-1].wait(lambda: (_get(status) or {})["beans"][0]["NumLiveDataNodes"] == datanodes)  # type: ignore[index]
        yield Hdfs(f"hdfs://127.0.0.1:{port}", f"http://127.0.0.1:{web}", conf, namenode, nodes)


@contextmanager
def yarn(
    folder: Path,
    conf: Path,
    *,
    web: int = 0,
    memory_mb: int = 4096,
    cores: int = 4,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Yarn]:
    """YARN with one node while the block runs. Its state outlives a ResourceManager that is killed.

    Args:
        folder: the containers' files, the applications' state and the logs.
        conf: where yarn-site.xml is written.
        web: port of the ResourceManager's pages and REST API; 0: a free one.
        memory_mb: what the node counts for containers, no more: nothing is held back.
        cores: the same.
        settings: more of yarn-site.xml.
    """
    require_jars()
    web = web or _free_port()
    folder.mkdir(parents=True, exist_ok=True)
    ports = {
        name: _free_port() for name in ("address", "scheduler.address", "resource-tracker.address", "admin.address")
    }
    defaults = {f"yarn.resourcemanager.{name}": f"127.0.0.1:{port}" for name, port in ports.items()} | {
        "yarn.resourcemanager.hostname": "127.0.0.1",
        "yarn.resourcemanager.webapp.address": f"127.0.0.1:{web}",
        "yarn.resourcemanager.recovery.enabled": "true",
        # Kept by its default store, files of Hadoop's file systems.
        "yarn.resourcemanager.fs.state-store.uri": f"file://{folder / 'state'}",
        "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "200",
        # Clients and the NodeManager ask a ResourceManager that is away again, every second.
        "yarn.resourcemanager.connect.retry-interval.ms": "1000",
        "yarn.scheduler.capacity.root.queues": "default",
        "yarn.scheduler.capacity.root.default.capacity": "100",
        "yarn.scheduler.capacity.maximum-am-resource-percent": "1",
        "yarn.scheduler.minimum-allocation-mb": "256",
        "yarn.nodemanager.hostname": "127.0.0.1",
        "yarn.nodemanager.address": "127.0.0.1:0",
        "yarn.nodemanager.localizer.address": f"127.0.0.1:{_free_port()}",
        "yarn.nodemanager.collector-service.address": f"127.0.0.1:{_free_port()}",
        "yarn.nodemanager.webapp.address": f"127.0.0.1:{_free_port()}",
        "yarn.nodemanager.resource.memory-mb": str(memory_mb),
        "yarn.nodemanager.resource.cpu-vcores": str(cores),
        "yarn.nodemanager.pmem-check-enabled": "false",
        "yarn.nodemanager.vmem-check-enabled": "false",
        "yarn.nodemanager.local-dirs": str(folder / "local"),
        "yarn.nodemanager.log-dirs": str(folder / "containers"),
        # A disk that is nearly full is still one.
        "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "99.9",
    }
    _write(conf / "yarn-site.xml", defaults | dict(settings or {}))
    (conf / "log4j.properties").write_text(_LOG)
    manager = Server("resourcemanager", conf, folder / "resourcemanager.log")
    node = Server("nodemanager", conf, folder / "nodemanager.log")
    place = Yarn(f"http://127.0.0.1:{web}", conf, manager, node)
    with ExitStack() as stack:
        for server in (manager, node):
            stack.callback(server.stop)
            server.start()
        metrics = f"{place.rest}/ws/v1/cluster/metrics"
        node.wait(lambda: bool((_get(metrics) or {})["clusterMetrics"]["activeNodes"]))
        yield place


def _java(conf: Path, heap: str) -> list[str]:
    opened = [word for package in ("lang", "util") for word in ("--add-opens", f"java.base/java.{package}=ALL-UNNAMED")]
    # Two compiler threads' worth of machine is shared with what is tested.
    return ["java", f"-Xmx{heap}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *opened, "-cp", f"{conf}:{jars()}/*"]


def _write(path: Path, settings: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    properties = "".join(
        f"<property><name>{k}</name><value>{escape(v)}</value></property>\n" for k, v in settings.items()
    )
    path.write_text(f"<configuration>\n{properties}</configuration>\n")


def _get(url: str) -> dict[str, object] | None:
    with urllib.request.urlopen(url, timeout=10) as answer:
        fields = json.load(answer)
    return fields if isinstance(fields, dict) else None


def _answers(ready: Callable[[], bool]) -> bool:
    try:
        return ready()
    except (OSError, ValueError, LookupError):
        return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
