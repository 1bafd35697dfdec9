"""Process of a rank, around the training loop. It has no heavy imports at the top, since the driver imports it too.

An error for the user does not fail the rank's task: the rank returns it in its result and ends normally. So do other
ranks when their next exchange finds it gone. The driver then shows that error, not tracebacks of Spark's or Horovod's
tasks. A file has it too, in case another rank dies meanwhile. A requested stop does not fail the task either: the
result names the step.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from headrace import logs
from headrace.errors import EXIT_USER_ERROR, UserError
from headrace.errors.stores import ChangedInPlace, StoreError, file_error_message, free_in, is_full
from headrace.errors.translate import own_error, store_away
from headrace.logs import redact
from headrace.storage import LeaseLost
from headrace.storage.objects import copies
from headrace.train.checkpoint.write import CheckpointUnwritten
from headrace.train.job import Diverged, Job, RankError, RankResult, Stopped, end_phase, process_began


def rank_main(job_json: str) -> str:
    """Train as one Horovod rank. Text in, text out: Job and RankResult as JSON."""
    phase_ends = {"ranks": process_began()}
    job = Job.model_validate_json(job_json)
    place_copies(job)
    threads = job.threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")))
    # The libraries read these variables at their first import.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)

    if job.train.device == "cuda":
        from horovod.spark.task import get_available_devices

        from headrace.lake.spark.gpus import show_assigned_gpu

        show_assigned_gpu(get_available_devices())

    import horovod.torch as hvd
    import pyarrow as pa
    import torch
    from horovod.common.exceptions import HorovodInternalError

    from headrace import comm
    from headrace.comm.base import PeerLost
    from headrace.comm.shared_memory import ByHostCollective, SharedCollective
    from headrace.train.callbacks.progress import ProgressEvent, ProgressWriter
    from headrace.train.callbacks.watchdog import Watchdog
    from headrace.train.loop.run import train

    torch.set_num_threads(threads)
    pa.set_cpu_count(threads)
    end_phase(phase_ends, "imports")
    hvd.init()
    end_phase(phase_ends, "horovod")
    collective = comm.horovod()
    chief = collective.world.is_chief
    writer = ProgressWriter(job.progress_file) if chief else None
    logs.configure(writer, text=logging.BASIC_FORMAT, level=logging.INFO if chief else logging.WARNING)

    def on_progress(event: ProgressEvent) -> None:
        end_phase(phase_ends, "first_step")
        if writer is not None:
            writer.write(event)

    result = RankResult()
    watchdog: Watchdog | None = None
    try:
        watchdog = Watchdog(
            job.ranks_folder, collective.world, job.train.deadline_seconds, stop_file=job.stop_file if chief else None
        )
        watchdog.on_signals()
        result.report = train(job, collective, on_progress, watchdog)
    except Stopped as e:
        result.stopped = e.step, e.total
    except (UserError, StoreError, ChangedInPlace) as e:
        result.error = _rank_error(collective.world.rank, e)
    except OSError as e:
        result.error = _file_error(collective.world.rank, e, job)
        if result.error is None:
            raise
    except (HorovodInternalError, PeerLost) as e:
        # Another rank is gone. It reports the reason itself, unless it was killed, which its exit code shows.
        result.lost = str(e)
        print(logs.visible(redact(f"rank {collective.world.rank}: {e}")), file=sys.stderr)
    finally:
        if result.error is not None:
            with suppress(OSError):  # the result has the error too
                job.error_file.put_text(result.error.model_dump_json())
        if isinstance(collective, SharedCollective | ByHostCollective):
            collective.close()
        hvd.shutdown()
        if watchdog is not None:
            watchdog.close()
    if watchdog is not None and "train" in watchdog.phase_starts:
        phase_ends["model"] = watchdog.phase_starts["train"]
    return result.model_copy(update={"phase_ends": phase_ends}).model_dump_json()


def place_copies(job: Job) -> None:
    """Place this process's copies of a store's files below scratch.

    If scratch would be below the driver's home, which this host lacks, they are placed as in Spark's other tasks.
    """
    if job.scratch is None and not os.access(job.home, os.W_OK):
        copies.use_folder(copies.folder())


def _rank_error(rank: int, e: UserError | StoreError | ChangedInPlace) -> RankError:
    if (away := store_away(e)) is not None:
        return RankError(rank=rank, message=str(away), store_failed=True, store_away=True)
    if isinstance(e, StoreError):
        return RankError(rank=rank, message=f"the store does not answer as it should: {e}", store_failed=True)
    if isinstance(e, LeaseLost):
        return RankError(rank=rank, message=str(e), lease_lost=True)
    if isinstance(e, ChangedInPlace):
        return RankError(rank=rank, message=str(own_error(e)))
    return RankError(rank=rank, message=str(e), diverged_at=e.step if isinstance(e, Diverged) else None)


def _file_error(rank: int, e: OSError, job: Job) -> RankError | None:
    """Return the report of a file's error; None if it is another error, or a bug of the program."""
    if is_full(e):
        path_text, is_local = f": {e.filename}" if e.filename else "", job.folder.scheme == "file"
        # If the run is in a store of objects, the full disk is that of this host's copies.
        full = Path(job.folder.path) if is_local else copies.folder()
        room = f"{job.folder}, or lower train.keep ({job.train.keep})" if is_local else str(full)
        free = "" if isinstance(e, CheckpointUnwritten) else f" ({free_in(full)})"
        return RankError(rank=rank, message=f"{e.strerror}{path_text}{free}. Make room below {room}", full_disk=True)
    if (away := store_away(e)) is not None:
        return RankError(rank=rank, message=str(away), store_failed=True, store_away=True)
    if (explained := file_error_message(e)) is None:
        return None
    message, code = explained
    return RankError(rank=rank, message=message, store_failed=code != EXIT_USER_ERROR)
