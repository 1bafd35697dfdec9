"""Launch of ranks by Horovod on Spark; the only import of horovod.spark.

Three delays of a launch are avoided. Horovod probes all pairs of network interfaces (10 s on a machine with a second
one), so if all ranks are on this machine it is told to use loopback. It probes whether Gloo was built (2 to 3 s; see
`_gloo_is_built`). It ends each launch 3 s late (headrace.train.launch.hosts). About 7 s remain: Spark's tasks 1 to 2,
Horovod's own processes 2 to 3, and the import of torch in each rank 3.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

import horovod.runner.gloo_run
import horovod.runner.launch
import horovod.spark
import horovod.spark.runner
from horovod.runner.common.util.timeout import TimeoutException
from pyspark.sql import SparkSession

from headrace.errors import UserError
from headrace.errors.stores import DiskFull, disk_full_message, is_full
from headrace.logs import Progress, report_progress
from headrace.storage import Location, StoreAway
from headrace.train.callbacks.progress import ProgressBar, ProgressEvent, ProgressReader
from headrace.train.callbacks.watchdog import describe_failure, has_stalled
from headrace.train.checkpoint.read import list_steps
from headrace.train.job import (
    BEGIN,
    Diverged,
    Job,
    RankError,
    RankResult,
    Stopped,
    StoreFailed,
    TrainingReport,
    phase_seconds,
    show_startup,
)
from headrace.train.launch.hosts import (
    count_slots,
    counting_from_start,
    notice_lost_hosts,
    reached_by_others,
    silence,
    watch_slots,
    without_loopback,
)
from headrace.train.launch.worker import rank_main

log = logging.getLogger("headrace.train")
#: Number of lines of the ranks' output that a failed launch shows.
_TAIL = 40
_STALL_POLL_SECONDS = 1.0
#: Seconds that ranks may always start apart, also with a shorter `train.deadline_seconds`: hosts import at different
#: speeds.
_LEAST_START_SECONDS = 120.0
#: Settings by which glibc keeps freed large blocks. Otherwise page faults take a tenth of a step.
_ENVIRONMENT: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


def launch(
    job: Job,
    spark: SparkSession,
    *,
    ranks: int,
    retries: int,
    on_progress: Callable[[ProgressEvent], None] = lambda tick: None,
    phase_ends: Mapping[str, float] | None = None,
    check_lease: Callable[[], None] = lambda: None,
) -> TrainingReport:
    """Train on `ranks` Horovod ranks in tasks of this Spark session; a launch that fails is attempted again.

    A further attempt resumes from the last checkpoint. Partial files of a failed attempt are removed.

    Args:
        job: settings and folders of the run.
        spark: the session.
        ranks: number of ranks; each takes a task slot.
        retries: number of attempts after the first.
        on_progress: called with the chief's progress.
        phase_ends: end of each phase of the start (headrace.train.job).
        check_lease: called before each attempt, whose ranks end those of any other launch of the run; raises LeaseLost.

    Raises:
        LeaseLost: `check_lease` or a rank has noticed that another process has the run now; its ranks go on.
        UserError: a rank has an error for the user (no further attempt), or there are fewer slots than ranks.
        DiskFull: there was no room for a checkpoint or the model in the last attempt.
        StoreFailed, StoreAway: the store did not answer a rank or this process in the last attempt.
        Diverged: a loss or gradient was not finite in the last attempt, or twice at the same step.
        SystemExit, KeyboardInterrupt: this process was asked to stop; the ranks have written a checkpoint if possible.
        RuntimeError: all attempts failed.
    """
    _check_cores(spark, ranks)
    diverged_at: set[int] = set()
    for attempt in range(retries + 1):
        try:
            check_lease()
            return _launch(
                job, spark, ranks, on_progress, phase_ends if phase_ends and not attempt else {BEGIN: time.time()}
            )
        except Diverged as e:
            if attempt == retries or e.step in diverged_at:
                raise
            diverged_at.add(e.step)
            reason = f"training diverged at step {e.step}"
        except (RuntimeError, Stopped, DiskFull, StoreFailed, StoreAway) as e:
            if attempt == retries:
                raise
            # Stopped: by a signal to a rank, not to this process.
            reason = f"a rank was {e}" if isinstance(e, Stopped) else str(e).splitlines()[0]
        log.warning(
            "%s; attempt %d of %d resumes from %s",
            reason.removesuffix(", which ends:"),
            attempt + 2,
            retries + 1,
            _last_step(job),
        )
    raise AssertionError("unreachable")


def _last_step(job: Job) -> str:
    try:
        steps = list_steps(job.checkpoints)
    except StoreAway:
        return "the last checkpoint"
    return f"step {steps[0]}" if steps else "the start"


def _launch(
    job: Job,
    spark: SparkSession,
    ranks: int,
    on_progress: Callable[[ProgressEvent], None],
    phase_ends: Mapping[str, float],
) -> TrainingReport:
    job = job.model_copy(update={"token": uuid.uuid4().hex})
    try:
        job.fence.put_text(job.token)
    except OSError as e:
        if is_full(e):
            raise DiskFull(disk_full_message(e.strerror or str(e), str(job.folder))) from e
        raise
    # ranks.log stays.
    old = [p for p in job.folder.entries() if p.name.startswith(("progress-", "ranks-"))]
    for leftover in old:
        leftover.remove_quietly()
    job.ranks_folder.make_dir()
    local = _is_local(spark)
    tick = time.perf_counter()
    first: list[float] = []

    def on_event(t: ProgressEvent) -> None:
        if not first:
            first.append(time.perf_counter())
            log.info("%d rank(s) started in %.1f s", ranks, first[0] - tick)
        if t.phase == "train":
            rate = t.samples_per_s / job.train.batch_size
            report_progress(Progress(t.step, t.total, "steps", rate, t.seconds_left))
        on_progress(t)

    with (
        open(_ranks_log(job), "a", encoding="utf-8") as file,
        ProgressReader(job.progress_file, ProgressBar(), on_event),
        _gloo_is_built(),
        _prepared_tasks(),
        without_loopback(),
        notice_lost_hosts(silence(job.train.deadline_seconds)),
        _silence_cancelled_job(),
        _signals(job) as received,
        _clean_partial_files(job),
        watch_slots(lambda: count_slots(spark), ranks, job.train.start_seconds, lambda: bool(first)) as slots,
    ):
        tail = _LogTail(file)
        try:
            texts: list[str] = horovod.spark.run(
                rank_main,
                args=(job.model_dump_json(),),
                num_proc=ranks,
                start_timeout=job.train.start_seconds,
                use_mpi=False,
                use_gloo=True,
                nics={"lo"} if local else None,
                env={**_ENVIRONMENT, **_horovod_timeouts(job.train.deadline_seconds)},
                stdout=tail,
                stderr=tail,
                verbose=0,
                # The executors' path of Python, since they may have an environment of their own (headrace pack).
                executable=spark.sparkContext.pythonExec,
            )
        except Exception as e:
            received.raise_again()
            raise_rank_error(job.error_file)
            if isinstance(e, TimeoutException):
                slots.check(str(spark.sparkContext.master))
            known = describe_failure(job.ranks_folder)
            raise RuntimeError(
                f"training on {ranks} ranks failed ({' '.join(str(e).split())}{f'; {known}' if known else ''}); "
                f"see {job.folder / 'ranks.log'}, which ends:\n{tail.text()}"
            ) from e
        results = [RankResult.model_validate_json(text) for text in texts]
        stopped = next((a.stopped for a in results if a.stopped), None)
        if stopped:
            log.warning(
                "asked to stop: training stopped after step %d of %d with a checkpoint; the same command resumes there",
                *stopped,
            )
        received.raise_again()
        for result in results:
            if result.error is not None:
                raise result.error.exception()
        if stopped:
            raise Stopped(*stopped)
        lost = next((a.lost for a in results if a.lost), None)
        if lost is not None:
            raise RuntimeError(f"training on {ranks} ranks failed ({lost}; {describe_failure(job.ranks_folder)})")
    job.progress_file.remove()
    job.ranks_folder.remove_quietly()
    # The run's file has the lines of the launches' files.
    for of_launch in job.earlier_metrics_files():
        if of_launch != job.metrics_file:
            of_launch.remove_quietly()
    reports = [a.report for a in results if a.report is not None]
    peaks = {name: mib for r in reports for name, mib in r.peak_memory_mib.items()}
    cores = {name: seconds for r in reports for name, seconds in r.core_seconds.items()}
    startup = phase_seconds({**phase_ends, **results[0].phase_ends})
    log.info("%s", show_startup(startup))
    update = {"peak_memory_mib": peaks, "core_seconds": cores, "startup_seconds": startup}
    return reports[0].model_copy(update=update)


def _ranks_log(job: Job) -> Path:
    """Return the path of ranks.log: beside the model if that is on a file system."""
    folder = job.folder if job.folder.scheme == "file" else job.ws.scratch / "ranks" / job.pipeline / job.ds / job.key
    folder.make_dir()
    return (folder / "ranks.log").local_path()


@contextmanager
def _clean_partial_files(job: Job) -> Iterator[None]:
    """Remove the partial files of a failed attempt, whose space the next attempt needs.

    If a newer launch has begun, nothing is removed: its ranks may be writing such files.
    """
    try:
        yield
    except BaseException:
        try:
            if not job.is_overtaken:
                job.checkpoints.discard_unfinished()
                job.folder.discard_unfinished()
        except (OSError, UserError) as e:  # the ranks' error is more important
            log.warning("what the ranks were writing stays for now: %s", str(e).splitlines()[0])
        raise


def _horovod_timeouts(deadline: float) -> dict[str, str]:
    """Return Horovod's own deadlines, for hangs below Python; they are longer than that of the watchdog."""
    later_deadline = deadline + 2 * max(5.0, deadline / 10)
    return {
        # Warn about tensors that some ranks have not submitted, then end the job.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, round(deadline / 2))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(round(later_deadline)),
        # Limit of one message of gloo, including Horovod's own. Its default of 30 s is less than a checkpoint may take.
        # It is also the time that a rank waits in `hvd.init` for later ranks.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(round(max(later_deadline, _LEAST_START_SECONDS))),
    }


def _check_cores(spark: SparkSession, ranks: int) -> None:
    context = spark.sparkContext
    # On a cluster some executors may not have started yet.
    if str(context.master).startswith("local[") and context.defaultParallelism < ranks:
        raise UserError(
            f"train.ranks is {ranks}, but the Spark session has {context.defaultParallelism} task slots "
            f"({context.master}), and all ranks run at once: set spark.master to local[{ranks}] or lower train.ranks"
        )


def _is_local(spark: SparkSession) -> bool:
    return str(spark.sparkContext.master).startswith("local")


def raise_rank_error(path: Location) -> None:
    """Raise a rank's error for the user, if it has written one."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    raise RankError.model_validate_json(text).exception()


class _LogTail:
    """Output of the ranks: a file gets all of it, and the last lines stay in memory."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: deque[str] = deque(maxlen=_TAIL)

    def write(self, text: str) -> int:
        self._lines.extend(line for line in text.splitlines() if line.strip())
        with suppress(OSError):  # Horovod would end the ranks for an error here; they report a full disk themselves
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def text(self) -> str:
        return "\n".join(self._lines) or "(none)"


@contextmanager
def _gloo_is_built() -> Iterator[None]:
    """Skip Horovod's Gloo probe, which forks and imports torch (2 to 3 s).

    The child's garbage collector would also use this process's socket to the JVM. If Gloo is missing, `hvd.init()`
    fails in the ranks with a message.
    """
    original = horovod.runner.launch.gloo_built
    horovod.runner.launch.gloo_built = lambda verbose=False: True
    try:
        yield
    finally:
        horovod.runner.launch.gloo_built = original


@contextmanager
def _prepared_tasks() -> Iterator[None]:
    """Adapt Horovod's Spark tasks by `headrace.train.launch.hosts` in this block."""
    original = horovod.spark.runner._make_mapper
    horovod.spark.runner._make_mapper = lambda *args: reached_by_others(counting_from_start(original(*args)))
    try:
        yield
    finally:
        horovod.spark.runner._make_mapper = original


@contextmanager
def _silence_cancelled_job() -> Iterator[None]:
    """Suppress the traceback of Horovod's thread of the Spark job, which it cancels if ranks fail."""
    original = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if "SPARK_JOB_CANCELLED" in str(args.exc_value):
            log.debug("the ranks' Spark job was cancelled")
        else:
            original(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = original


class _ReceivedSignals:
    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader

    def raise_again(self) -> None:
        """Handle a signal that was received while the ranks ran, after they have ended.

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
def _signals(job: Job) -> Iterator[_ReceivedSignals]:
    """Handle signals in this block, and then restore the handlers of SIGINT and SIGTERM, which Horovod replaces.

    Horovod's handlers kill the ranks. These handlers ask the ranks to stop after the current step and to write a
    checkpoint. A second signal, or `train.stop_seconds` without an end, calls Horovod's handlers.

    Horovod on Spark waits for all ranks after one has failed. Running ranks notice that, but a suspended one does not.
    So when a rank has reported it as missing, all ranks are killed.
    """
    over = threading.Event()

    def register() -> threading.Event:
        kill, stop_asked = threading.Event(), threading.Event()

        def ask(signum: int, frame: FrameType | None) -> None:
            # Do not call a store in a handler: its errors would be raised anywhere in the program.
            if stop_asked.is_set():
                kill.set()
                return
            stop_asked.set()
            timer = threading.Timer(job.train.stop_seconds, kill.set)
            timer.daemon = True
            timer.start()

        def tell_the_ranks() -> None:
            while not over.is_set():
                if not stop_asked.wait(_STALL_POLL_SECONDS):
                    continue
                # If the request cannot be written, the ranks go on until they are killed.
                with suppress(OSError, UserError):
                    job.stop_file.put_text("")
                    return
                over.wait(_STALL_POLL_SECONDS)

        def kill_the_stalled() -> None:
            while not over.wait(_STALL_POLL_SECONDS):
                # A store that is away may come back: try again later.
                with suppress(OSError, UserError):
                    if has_stalled(job.ranks_folder):
                        kill.set()
                        return

        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, ask)
        for work in (kill_the_stalled, tell_the_ranks):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        return kill

    horovods = horovod.runner.gloo_run.register_shutdown_event
    horovod.runner.gloo_run.register_shutdown_event = register
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield _ReceivedSignals(reader)
    finally:
        signal.set_wakeup_fd(fd)
        over.set()
        for s, handler in handlers.items():
            signal.signal(s, handler)
        horovod.runner.gloo_run.register_shutdown_event = horovods
        reader.close()
        writer.close()
