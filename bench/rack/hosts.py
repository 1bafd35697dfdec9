"""Hosts on one machine: namespaces of Linux with a cable each to a switch.

    with rack(folder, 3) as hosts:
        hosts[0].run(["curl", "http://host1:8081"])
        hosts[2].cut()

A host has a network of its own (eth0, 10.77.0.N), a process table, a name, and its own mounts: it sees the machine's
root file system read-only, so that programs and the checkout are there and no file that one host writes is seen by
another; of its own are /tmp (which is /var/tmp), /dev/shm, /run and, in it, PRIVATE. A bare host has Spark at SPARK,
and neither the checkout nor its environment. No namespace has a name, so two racks cannot clash: they are held by a
process of each host, its first, and are gone with it; the kernel ends the others of that host then. The first processes
end with the one that made the rack, however that ends.

Links are shaped by tbf on both ends. A cut link keeps its carrier and loses each frame, as where a switch between two
hosts dies: no FIN, no RST, no error at either end.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.installation import checkout
from headrace.jobs.submit import spark_home
from headrace.storage import local

#: Where a host's own files are, seen from within: its HOME, and the scratch of what runs there.
PRIVATE = Path("/run/rack")
#: Where a bare host has Spark.
SPARK = Path("/run/spark")
MBIT = 1000
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
_BRIDGE = "br0"
_START_SECONDS = 30.0
#: What the system's tools say where a process may make no namespaces or mounts in them, and `ip` and `tc` where the
#: kernel has no bridges, no pairs of devices, or no shaping.
_REFUSALS = ("operation not permitted", "permission denied", "unknown device type", "qdisc kind is unknown")
_KINDS = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--propagation", "private"]
#: A host's first process: it takes what is left by others, as the first one of a machine does.
_FIRST = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
print("up", flush=True)
while True:
    signal.sigwait([signal.SIGCHLD])
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


class NoRack(Exception):
    """This machine gives no namespaces, and why."""


@dataclass
class Host:
    """One of them."""

    number: int
    #: Its first process, as this machine numbers it.
    process: int
    #: That of the switch.
    switch: int
    #: PRIVATE, seen from outside.
    folder: Path
    #: Whether it has the machine's programs and Spark, and nothing of the checkout's.
    bare: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"host{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    @property
    def spark_home(self) -> Path:
        """Return the folder in which the host sees Spark."""
        return SPARK if self.bare else spark_home()

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """Return the command line, for this machine, of a command on the host.

        It ends with the process that starts it.
        """
        return [*_enter(self.process), "setpriv", "--pdeathsig", "KILL", *map(str, words)]

    def start(
        self, words: Sequence[str | Path], log: Path, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command whose output is appended to a file of this machine's."""
        with open(log, "ab") as file:
            started = subprocess.Popen(
                self.command(words),
                env={**self.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._running.append(started)
        return started

    def run(
        self, words: Sequence[str | Path], environ: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> str:
        """Run a command on the host and return what it printed.

        Raises:
            RuntimeError: its exit code is not 0; the message ends with what it printed.
        """
        done = subprocess.run(
            self.command(words),
            env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{shlex.join(map(str, words))} on {self.name}: {done.returncode}\n{done.stdout[-4000:]}"
            )
        return done.stdout

    def wait_for(self, port: int, seconds: float = 120.0) -> None:
        """Wait until something on this host listens.

        Raises:
            RuntimeError: nothing did.
        """
        ask = f"until (exec 3<>/dev/tcp/{self.address}/{port}) 2>/dev/null; do sleep 0.2; done"
        try:
            self.run(["bash", "-c", ask], timeout=seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"nothing listens at port {port} of {self.name} after {seconds:g} s") from None

    def cut(self) -> None:
        """Lose every frame from and to it."""
        _run([*_enter(self.switch, "--net"), "ip", "link", "set", f"v{self.number}", "nomaster"])

    def restore(self) -> None:
        """Undo `cut`."""
        _run([*_enter(self.switch, "--net"), "ip", "link", "set", f"v{self.number}", "master", _BRIDGE])

    def shape(self, mbit: float) -> None:
        """Let the link carry so many Mbit/s in each direction."""
        kbit = round(mbit * 1000)
        # A burst of 2 ms at least: the kernel's clock gives out no smaller portions.
        burst = max(16_000, kbit * 1000 // 8 // 500)
        bucket = ["root", "tbf", "rate", f"{kbit}kbit", "burst", str(burst), "latency", "50ms"]
        _run([*_enter(self.process, "--net"), "tc", "qdisc", "replace", "dev", "eth0", *bucket])
        _run([*_enter(self.switch, "--net"), "tc", "qdisc", "replace", "dev", f"v{self.number}", *bucket])

    def set_network(self, name: str, value: int) -> None:
        """Set a value of its kernel for TCP: one of /proc/sys/net/ipv4, of which each network has its own."""
        self.run(["bash", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}"])

    def end_all(self) -> None:
        """End all that runs on it but its first process."""
        # Itself the shell leaves out; with nothing else there it fails.
        self.run(["bash", "-c", "kill -KILL -1 || true"])
        for started in self._running:
            started.wait()
        self._running.clear()

    def die(self) -> None:
        """End all that runs on it, at once; nobody hears of it, since the link was cut before."""
        self.cut()
        os.kill(self.process, signal.SIGKILL)
        for started in self._running:
            started.wait()
        self._running.clear()


def _enter(process: int, *kinds: str) -> list[str]:
    """Return the words that begin a command in the namespaces of a process; all of a host's unless they are named."""
    kinds = kinds or ("--net", "--mount", "--uts", "--ipc", "--pid")
    return ["nsenter", "-t", str(process), *kinds, *(["--wd=/"] if "--mount" in kinds else []), "--"]


def _run(words: Sequence[str]) -> None:
    """Run a command. Raises NoRack where the kernel has no such thing or lets nobody have it, else RuntimeError."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failure(words, done.stderr.strip() or str(done.returncode))


def _failure(words: Sequence[str], output: str) -> Exception:
    """Return the error that a failed command means: that this machine has no racks, or a fault."""
    refused = any(text in output.lower() for text in _REFUSALS)
    return (NoRack if refused else RuntimeError)(f"{shlex.join(words)}: {output}")


def why_not() -> str | None:
    """Return the reason why this machine cannot have a rack, as far as one can tell without trying."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces of hosts are root's, on Linux"
    paths = [*os.environ.get("PATH", "").split(":"), "/usr/sbin", "/sbin"]
    missing = [p for p in _PROGRAMS if not any(Path(folder, p).exists() for folder in paths)]
    return f"not installed: {', '.join(missing)} (iproute2, util-linux)" if missing else None


@contextmanager
def rack(folder: Path, count: int, mbit: float = MBIT, bare: Collection[int] = ()) -> Iterator[list[Host]]:
    """Start hosts host0, host1, ...; all that runs on them ends with the block.

    Args:
        folder: new, for their own files; they do not see it, and each sees the part that is its own as PRIVATE.
        count: how many.
        mbit: what each link carries.
        bare: numbers of the hosts that have nothing of the checkout's.

    Raises:
        NoRack: the machine does not let us.
        RuntimeError: something else is wrong.
    """
    if reason := why_not():
        raise NoRack(reason)
    folder = folder.absolute()
    local(folder).make_dir()
    names = [f"10.77.0.{n + 1} host{n}" for n in range(count)]
    with ExitStack() as stack:
        switch = _first_process(stack, folder / "switch.log", ["--net"], "true")
        inside = _enter(switch, "--net")
        _run([*inside, "ip", "link", "add", _BRIDGE, "type", "bridge"])
        _run([*inside, "ip", "link", "set", _BRIDGE, "up"])
        hosts = []
        for n in range(count):
            host_folder = folder / f"host{n}"
            for name in ("tmp", "private/home"):
                (local(host_folder) / name).make_dir()
            (local(host_folder) / "hosts").put_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
            process = _first_process(
                stack, host_folder / "log", _KINDS, _mounts(folder, host_folder, f"host{n}", n in bare)
            )
            host = Host(n, process, switch, host_folder / "private", n in bare, _environ())
            _run([*inside, "ip", "link", "add", f"v{n}", "type", "veth", "peer", "name", "eth0", "netns", str(process)])
            _run([*inside, "ip", "link", "set", f"v{n}", "master", _BRIDGE, "up"])
            net = _enter(process, "--net")
            _run([*net, "ip", "address", "add", f"{host.address}/24", "dev", "eth0"])
            for device in ("lo", "eth0"):
                _run([*net, "ip", "link", "set", device, "up"])
            host.shape(mbit)
            hosts.append(host)
        yield hosts


def _mounts(folder: Path, host_folder: Path, name: str, bare: bool) -> str:
    """Return the shell's words that make a host's own view of the files, before its first process begins."""
    hidden = (Path("/tmp"), Path("/var/tmp"))
    program_folders = {checkout(), Path(sys.prefix)}
    needed = {Path(sys.base_prefix)} | (set() if bare else program_folders)
    lines = ["set -e", "mount -t tmpfs none /run", f"mkdir {PRIVATE}"]
    lines += [
        f"mount --bind {_quote(host_folder / part)} {target}"
        for part, target in (("private", PRIVATE), ("hosts", "/etc/hosts"))
    ]
    lines += [f"chmod 1777 {_quote(host_folder)}/tmp", f"mount --bind {_quote(host_folder)}/tmp /var/tmp"]
    # From here on nothing of the other hosts is to be seen.
    lines += [f"mount -t tmpfs none {_quote(folder)}"]
    for path in sorted(p for p in needed if any(p.is_relative_to(h) for h in hidden)):
        seen = Path("/var/tmp") / path.relative_to(next(h for h in hidden if path.is_relative_to(h)))
        lines += [f"mkdir -p {_quote(seen)}", f"mount --rbind -o ro {_quote(path)} {_quote(seen)}"]
    if bare:
        lines += [f"mkdir {SPARK}", f"mount --rbind -o ro {_quote(spark_home())} {SPARK}"]
        lines += [f"! test -d {_quote(path)} || mount -t tmpfs none {_quote(path)}" for path in sorted(program_folders)]
    lines += ["mount --rbind /var/tmp /tmp", "mount -t tmpfs -o mode=1777 none /dev/shm", "mount -t proc none /proc"]
    return "\n".join([*lines, "mount -o remount,bind,ro /", f"hostname {name}"])


def _quote(path: Path) -> str:
    """Quote a path for the shell."""
    return shlex.quote(str(path))


def _first_process(stack: ExitStack, log: Path, kinds: Sequence[str], preparation: str) -> int:
    """Start what holds new namespaces; the first process in them, as this machine numbers it."""
    then = f'{preparation}\nexec "$0" -I -S -c "$1"'
    # Not the environment's, which a bare host does not have.
    python = os.path.realpath(sys.executable)
    line = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "bash", "-c", then, python, _FIRST]
    with open(log, "wb") as log_file:
        holder = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.STDOUT)
    stack.callback(_end, holder)
    end = time.monotonic() + _START_SECONDS
    while log.read_bytes() != b"up\n":
        if holder.poll() is not None or time.monotonic() > end:
            raise _failure(["unshare", *kinds], log.read_text().strip() or f"nothing after {_START_SECONDS:g} s")
        time.sleep(0.02)
    if "--fork" not in kinds:
        return holder.pid
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    return int(children[0])


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()


def _environ() -> dict[str, str]:
    """Return the environment of every command: this machine's programs, and nothing that says where its own files or
    services are.
    """
    keep = ("PATH", "JAVA_HOME", "LANG", "LC_ALL", "PYENV_ROOT", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")
    # Tests keep their JVMs' compilers and collectors small by it.
    keep += ("JAVA_TOOL_OPTIONS",)
    environ = {key: os.environ[key] for key in keep if key in os.environ}
    environ["PATH"] = f"{environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    return {**environ, "HOME": str(PRIVATE / "home"), "PYTHONUNBUFFERED": "1"}
