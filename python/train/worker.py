"""What runs in a rank's process: a few lines around the loop. No heavy import at the top: the driver imports this too.

A message for the user is no failure: the rank leaves it in a file and ends well, and so do the others when their next
exchange finds it gone. So the driver shows that message, and no trace of Spark's or Horovod's about tasks that failed.
A stop that was asked for is none either: the answer says at which step.
"""

from __future__ import annotations

import json
import logging
import os

from headrace.atomic import write_text
from headrace.errors import UserError
from headrace.train.job import Diverged, Job, Stopped


def rank_main(job_json: str) -> str:
    """Train as one Horovod rank. Text in, text out: Job and Report as JSON; nothing where a complaint was left.

    Where the ranks were asked to stop: `{"stopped": step, "total": steps}`.
    """
    job = Job.model_validate_json(job_json)
    threads = job.threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")))
    # Read by the libraries when they are first imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)

    import horovod.torch as hvd
    import pyarrow as pa
    import torch
    from horovod.common.exceptions import HorovodInternalError

    from headrace.embeddings.collective_horovod import HorovodCollective
    from headrace.train.loop import train
    from headrace.train.progress import Speaker
    from headrace.train.watch import Watch

    torch.set_num_threads(threads)
    pa.set_cpu_count(threads)
    hvd.init()
    collective = HorovodCollective()
    chief = collective.world.is_chief
    watch = Watch(
        job.ranks_folder, collective.world, job.train.deadline_seconds, stop_file=job.stop_file if chief else None
    )
    watch.on_signals()
    speaker = Speaker(job.voice) if chief else None
    logging.basicConfig(handlers=[speaker or logging.StreamHandler()], level=logging.INFO if chief else logging.WARNING)
    try:
        return train(job, collective, speaker.say if speaker else lambda tick: None, watch).model_dump_json()
    except Stopped as e:
        return json.dumps({"stopped": e.step, "total": e.total})
    except UserError as e:
        complaint = {"rank": collective.world.rank, "message": str(e)}
        if isinstance(e, Diverged):
            complaint["diverged_at"] = e.step
        write_text(job.complaint, json.dumps(complaint))
        return ""
    except HorovodInternalError:
        # Another rank is gone. It says why before it goes, unless it was killed.
        if job.complaint.is_file():
            return ""
        raise
    finally:
        hvd.shutdown()
        watch.close()
