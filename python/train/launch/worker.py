"""What runs in a rank's process: a few lines around the loop. No heavy import at the top: the driver imports this too.

A message for the user is no failure: the rank says it in its answer and ends well, and so do the others when their next
exchange finds it gone. So the driver shows that message, and no trace of Spark's or Horovod's about tasks that failed.
It is left in a file as well, for the case that yet another rank dies on the way. A stop that was asked for is no
failure either: the answer says at which step.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

from headrace.errors import UserError
from headrace.storage import local
from headrace.train.job import Answer, Complaint, Diverged, Job, Stopped, is_full
from headrace.train.launch.startup import mark, process_began


def rank_main(job_json: str) -> str:
    """Train as one Horovod rank. Text in, text out: Job and Answer as JSON."""
    marks = {"ranks": process_began()}
    job = Job.model_validate_json(job_json)
    threads = job.threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")))
    # Read by the libraries when they are first imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)

    import horovod.torch as hvd
    import pyarrow as pa
    import torch
    from horovod.common.exceptions import HorovodInternalError

    from headrace.comm.base import PeerLost
    from headrace.comm.horovod import HorovodCollective
    from headrace.comm.shared_memory import SharedCollective, shared
    from headrace.train.callbacks.progress import Speaker, Tick
    from headrace.train.callbacks.watchdog import Watch
    from headrace.train.loop.run import train

    torch.set_num_threads(threads)
    pa.set_cpu_count(threads)
    mark(marks, "imports")
    hvd.init()
    mark(marks, "horovod")
    collective = shared(HorovodCollective())
    chief = collective.world.is_chief
    watch = Watch(
        job.ranks_folder, collective.world, job.train.deadline_seconds, stop_file=job.stop_file if chief else None
    )
    watch.on_signals()
    speaker = Speaker(job.voice) if chief else None
    logging.basicConfig(handlers=[speaker or logging.StreamHandler()], level=logging.INFO if chief else logging.WARNING)

    def say(tick: Tick) -> None:
        mark(marks, "first_step")
        if speaker is not None:
            speaker.say(tick)

    answer = Answer()
    try:
        answer.report = train(job, collective, say, watch)
    except Stopped as e:
        answer.stopped = e.step, e.total
    except UserError as e:
        at = e.step if isinstance(e, Diverged) else None
        answer.complaint = Complaint(rank=collective.world.rank, message=str(e), diverged_at=at)
    except OSError as e:
        if not is_full(e):
            raise
        where = f": {e.filename}" if e.filename else ""
        message = f"{e.strerror}{where}. Make room below {job.folder}, or lower train.keep ({job.train.keep})"
        answer.complaint = Complaint(rank=collective.world.rank, message=message, full_disk=True)
    except (HorovodInternalError, PeerLost) as e:
        # Another rank is gone. It says why before it goes, unless it was killed: then its exit code does.
        answer.lost = str(e)
        print(f"rank {collective.world.rank}: {e}", file=sys.stderr)
    finally:
        if answer.complaint is not None:
            with suppress(OSError):  # the answer has it, too
                local(job.complaint).put_text(answer.complaint.model_dump_json())
        if isinstance(collective, SharedCollective):
            collective.close()
        hvd.shutdown()
        watch.close()
    if "train" in watch.began:
        marks["model"] = watch.began["train"]
    return answer.model_copy(update={"marks": marks}).model_dump_json()
