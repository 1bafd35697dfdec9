"""Rows of older days in a day's training (`retrain.replay`): which datasets, and the loader that draws from them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence

from headrace.config import Spec
from headrace.dataset.loader.candidates import CandidateSampler
from headrace.dataset.loader.loaders import ReplayLoader, TrainLoader
from headrace.dataset.loader.replay import ReplayRows, WithReplay
from headrace.dataset.parquet.layout import SplitLayout, open_split
from headrace.manifest import Input, Manifest
from headrace.schema import DatasetSchema, Kind
from headrace.train.job import Job
from headrace.train.replay_days import replay_days
from headrace.train.setup.older_dataset import misfit
from headrace.workspace import Workspace
from headrace.world import World

log = logging.getLogger("headrace.train")

#: The kind of these datasets among the inputs of a run.
REPLAY = "replay"


def find_replay(
    ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema, begun: Sequence[Input] = ()
) -> tuple[Input, ...]:
    """The older datasets that a training of `ds` draws from, the oldest first.

    A day without one, or whose rows mean something else, is left out.

    Args:
        ws: the workspace.
        spec: the pipeline.
        ds: the day.
        schema: of its dataset.
        begun: what a finished run of the day, which still stands, has read: a dataset that was removed since is among
            its inputs all the same.
    """
    found, carried = [], [f.name for f in schema.of(Kind.CARRIED)]
    for day in replay_days(spec, ds):
        manifest = Manifest.load(ws.manifest(spec.pipeline, day, "features"))
        if manifest is None:
            continue
        output = manifest.output("dataset")
        read = Input(kind=REPLAY, name=output.name, version=output.version)
        reason = None if read in begun else misfit(ws, manifest, schema, carried)
        if reason is None:
            found.append(read)
        else:
            log.info("no rows of %s are replayed: %s", day, reason)
    return tuple(found)


def training_rows(
    job: Job,
    layout: SplitLayout,
    schema: DatasetSchema,
    world: World,
    *,
    start_step: int,
    carried: Sequence[str],
    timed: Callable[[str, Iterator[int]], Iterator[int]],
    candidates: CandidateSampler | None,
) -> TrainLoader | WithReplay:
    """The loader of a run: of the split train, with rows of older days in each step where the job replays some.

    Raises:
        UserError: as TrainLoader; an older dataset is gone or damaged.
    """
    planned = None if job.replay is None else _older_days(job, schema, carried)
    batch_rows = 0 if job.replay is None else job.replay.rows(job.train.batch_size, job.train.streams)
    own = job.train if not planned else job.train.model_copy(update={"batch_size": job.train.batch_size - batch_rows})
    rows = TrainLoader(
        layout, schema, own, world, start_step=start_step, carried=carried, timed=timed, candidates=candidates
    )
    if job.replay is None or not planned:
        return rows
    steps = rows.steps_per_epoch * job.train.epochs
    wanted = batch_rows * min(steps, job.train.max_steps or steps)
    streams, seed = job.train.streams, int.from_bytes(hashlib.sha256(job.key.encode()).digest()[:8])
    plan = ReplayRows.of(planned, wanted, batch_rows, job.replay.by, streams, seed)
    if world.is_chief:
        log.info("%s rows of %d older days in each step of %s", batch_rows, len(planned), job.train.batch_size)
    replayed = ReplayLoader(
        plan.layout,
        schema,
        job.train,
        world,
        batch_rows=batch_rows,
        taken=plan.taken,
        seed=plan.seed,
        start_step=start_step,
        carried=carried,
    )
    return WithReplay(rows, replayed)


def _older_days(job: Job, schema: DatasetSchema, carried: Sequence[str]) -> list[SplitLayout]:
    """A split of each day; none where they have fewer row groups than there are streams."""
    days = [open_split(job.ws.locate(name), "valid", schema, carried) for name in job.replayed]
    groups = sum(len(day.row_groups) for day in days)
    if groups < job.train.streams:
        if days:
            log.info("no rows are replayed: older days have %d row groups, fewer than train.streams", groups)
        return []
    return days
