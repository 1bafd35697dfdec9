"""Ranks by Horovod on Spark. The only import of horovod.spark.

Where the seconds of a launch go, and what is done about them: Horovod probes all pairs of network interfaces (10 s on
a machine with a second one), so where all ranks are on this machine it is told to use loopback; and it asks whether
Gloo was built (2-3 s; see `_gloo_is_built`). What stays, about 10 s: Spark's tasks 1-2, Horovod's own processes 2-3,
importing torch in each rank 3, and a sleep of 3 at the end.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import horovod.runner.launch
import horovod.spark
from pyspark.sql import SparkSession

from headrace.atomic import write_text
from headrace.errors import UserError
from headrace.train.job import Job, Report, list_steps
from headrace.train.progress import Console, Follower, Tick
from headrace.train.worker import rank_main

log = logging.getLogger("headrace.train")
#: Lines of what the ranks printed that a failed launch shows.
_TAIL = 40
_START_SECONDS = 600
#: glibc gives large blocks back to the kernel at every free, and page faults then cost a tenth of a step: keep them.
_ENVIRONMENT: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
}


def launch(
    job: Job, spark: SparkSession, *, ranks: int, retries: int, on_tick: Callable[[Tick], None] = lambda tick: None
) -> Report:
    """Train on `ranks` Horovod ranks in tasks of this Spark session; a launch that fails is tried again.

    A further try goes on from the last checkpoint.

    Raises:
        UserError: what a rank has to say to the user (not tried again), or fewer cores than ranks.
        RuntimeError: all tries failed.
    """
    _check_cores(spark, ranks)
    for attempt in range(retries + 1):
        try:
            return _launch(job, spark, ranks, on_tick)
        except RuntimeError as e:
            steps = list_steps(job.checkpoints)
            where = f"step {steps[0]}" if steps else "the start"
            if attempt == retries:
                raise
            reason = str(e).splitlines()[0].removesuffix(", which ends:")
            log.warning("%s; try %d of %d goes on from %s", reason, attempt + 2, retries + 1, where)
    raise AssertionError("unreachable")


def _launch(job: Job, spark: SparkSession, ranks: int, on_tick: Callable[[Tick], None]) -> Report:
    job = job.model_copy(update={"token": uuid.uuid4().hex})
    write_text(job.fence, job.token)
    for left in (job.complaint, *job.folder.glob("progress-*.jsonl")):
        left.unlink(missing_ok=True)
    local = _is_local(spark)
    tick = time.perf_counter()
    first: list[float] = []

    def ticked(t: Tick) -> None:
        if not first:
            first.append(time.perf_counter())
            log.info("%d rank(s) started in %.1f s", ranks, first[0] - tick)
        on_tick(t)

    with (
        open(job.folder / "ranks.log", "a", encoding="utf-8") as file,
        Follower(job.voice, Console(), ticked),
        _gloo_is_built(),
        _quiet_thread(),
        _signals() as received,
    ):
        tail = _Tail(file)
        try:
            answers: list[str] = horovod.spark.run(
                rank_main,
                args=(job.model_dump_json(),),
                num_proc=ranks,
                start_timeout=_START_SECONDS,
                use_mpi=False,
                use_gloo=True,
                nics={"lo"} if local else None,
                env=dict(_ENVIRONMENT),
                stdout=tail,
                stderr=tail,
                verbose=0,
            )
        except Exception as e:
            received.raise_again()
            raise_complaint(job.complaint)
            raise RuntimeError(
                f"training on {ranks} ranks failed ({' '.join(str(e).split())}); see {job.folder / 'ranks.log'}, "
                f"which ends:\n{tail.text()}"
            ) from e
        received.raise_again()
    job.voice.unlink(missing_ok=True)
    raise_complaint(job.complaint)
    reports = [Report.model_validate_json(a) for a in answers]
    peaks = {name: mib for r in reports for name, mib in r.peak_memory_mib.items()}
    return reports[0].model_copy(update={"peak_memory_mib": peaks})


def _check_cores(spark: SparkSession, ranks: int) -> None:
    context = spark.sparkContext
    if _is_local(spark) and context.defaultParallelism < ranks:
        raise UserError(
            f"train.ranks is {ranks}, but the Spark session has {context.defaultParallelism} task slots "
            f"({context.master}), and all ranks run at once: set spark.master to local[{ranks}] or lower train.ranks"
        )


def _is_local(spark: SparkSession) -> bool:
    return str(spark.sparkContext.master).startswith("local")


def raise_complaint(path: Path) -> None:
    """Raise a rank's message for the user, if it left one, as UserError."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
    except FileNotFoundError:
        return
    raise UserError(message)


class _Tail:
    """What the ranks print: all of it to a file, the last lines kept."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: deque[str] = deque(maxlen=_TAIL)

    def write(self, text: str) -> int:
        self._lines.extend(line for line in text.splitlines() if line.strip())
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()

    def text(self) -> str:
        return "\n".join(self._lines) or "(none)"


@contextmanager
def _gloo_is_built() -> Iterator[None]:
    """Answer Horovod's question for it.

    It would fork this process and import torch in the child. That is slow, and the child's garbage collector speaks to
    the JVM on this process's socket. Where Gloo is missing, `hvd.init()` fails in the ranks and says so.
    """
    before = horovod.runner.launch.gloo_built
    horovod.runner.launch.gloo_built = lambda verbose=False: True
    try:
        yield
    finally:
        horovod.runner.launch.gloo_built = before


@contextmanager
def _quiet_thread() -> Iterator[None]:
    """Horovod runs the Spark job in a thread, and cancels the job where ranks fail: that one trace says nothing new."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if "SPARK_JOB_CANCELLED" in str(args.exc_value):
            log.debug("the ranks' Spark job was cancelled")
        else:
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


class _Received:
    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader

    def raise_again(self) -> None:
        """Act on a signal that came while Horovod held the handlers: it ends its ranks, and would call that a failure.

        Raises:
            KeyboardInterrupt, SystemExit: as the signal asks.
        """
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return
        if signal.SIGTERM in numbers:
            raise SystemExit(128 + signal.SIGTERM)
        if signal.SIGINT in numbers:
            raise KeyboardInterrupt


@contextmanager
def _signals() -> Iterator[_Received]:
    """Note signals, and give back the handlers of SIGINT and SIGTERM, which Horovod replaces for good."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield _Received(reader)
    finally:
        signal.set_wakeup_fd(fd)
        for s, handler in before.items():
            signal.signal(s, handler)
        reader.close()
        writer.close()
