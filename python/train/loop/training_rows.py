"""Training rows of a run: their loader, rows of older days, shares of items, and networks that observe the rows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace import config
from headrace.comm import World
from headrace.config.schema import DatasetSchema
from headrace.dataset.candidates import CandidateSampler
from headrace.dataset.layout import SplitLayout, open_split
from headrace.dataset.loaders import EvalLoader, ReplayLoader, ReplayRows, TrainLoader, WithReplay
from headrace.dataset.negatives import drawn_column
from headrace.errors import UserError
from headrace.models.categorical import CategoricalBatch
from headrace.models.inputs import ShareOf
from headrace.models.sharded_model import ShardedModel
from headrace.train.evaluation.ranking import Occurrences, count_occurrences
from headrace.train.evaluation.ranks import Ranks
from headrace.train.evaluation.request import coded_feature
from headrace.train.job import Job
from headrace.train.micro_batch import MicroBatch

log = logging.getLogger("headrace.train")


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
    """Return the loader of a run: the split `train`, with rows of older days in each step if the job replays some.

    Raises:
        UserError: see TrainLoader; or an older dataset is missing or damaged.
    """
    planned = None if job.replay is None else _older_days(job, schema, carried)
    batch_rows = 0 if job.replay is None else job.replay.rows(job.train.batch_size, job.train.streams)
    settings = (
        job.train if not planned else job.train.model_copy(update={"batch_size": job.train.batch_size - batch_rows})
    )
    rows = TrainLoader(
        layout, schema, settings, world, start_step=start_step, carried=carried, timed=timed, candidates=candidates
    )
    if job.replay is None or not planned:
        return rows
    steps = rows.steps_per_epoch * job.train.epochs
    replay_total = batch_rows * min(steps, job.train.max_steps or steps)
    streams, seed = job.train.streams, int.from_bytes(hashlib.sha256(job.key.encode()).digest()[:8])
    plan = ReplayRows.plan(planned, replay_total, batch_rows, job.replay.by, streams, seed)
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
    """Return the splits of the replayed days; none if they have fewer row groups than there are streams."""
    days = [open_split(job.ws.locate(name), "valid", schema, carried) for name in job.replayed]
    groups = sum(len(day.row_groups) for day in days)
    if groups < job.train.streams:
        if days:
            log.info("no rows are replayed: older days have %d row groups, fewer than train.streams", groups)
        return []
    return days


class ItemShares:
    """Shares of codes in the split `train`. Methods are collective at the first call for a feature.

    Args:
        ranks: the ranks; each counts its part of the row groups.
        layout: layout of the split `train`.
        schema: schema of the dataset.
        train: settings with `negatives` and `seed`.
    """

    def __init__(self, ranks: Ranks, layout: SplitLayout, schema: DatasetSchema, train: config.Train) -> None:
        self._ranks, self._layout, self._schema, self._train = ranks, layout, schema, train
        self._counts: dict[str, Occurrences] = {}
        self._logs: dict[tuple[str, ShareOf], Tensor] = {}

    def sampler(self) -> CandidateSampler | None:
        """Return the sampler of the candidates of `train.negatives`, or None.

        Raises:
            UserError: see CandidateSampler.from_config.
        """
        negatives = self._train.negatives
        if negatives is None or negatives.form != "candidates":
            return None
        counts = self._occurrences(negatives.column).positives if negatives.method == "popularity" else None
        return CandidateSampler.from_config(self._schema, negatives, self._train.seed, counts)

    def log_share(self, feature: str, share_of: ShareOf) -> Tensor:
        """Return `Inputs.log_q` of all codes: float32 [cardinality].

        Raises:
            UserError: the feature does not have one code a row, or candidates are not drawn from it.
        """
        if (feature, share_of) not in self._logs:
            counts = self._occurrences(feature)
            if share_of == "negatives":
                weights = self._weights_of_draws(feature, counts)
            else:
                weights = (counts.rows if share_of == "rows" else counts.positives).astype(np.float64)
            # A code that never occurs counts as occurring once, since it may be in the loss all the same.
            shares = np.maximum(weights, 1.0) / max(weights.sum(), 1.0)
            self._logs[feature, share_of] = torch.from_numpy(np.log(shares).astype(np.float32))
        return self._logs[feature, share_of]

    def _weights_of_draws(self, feature: str, counts: Occurrences) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        negatives = self._train.negatives
        if negatives is None or negatives.form != "candidates" or negatives.column != feature:
            raise UserError(
                f"the model asks how likely a draw of '{feature}' is: set train.negatives to candidates of it"
            )
        known, _ = drawn_column(self._schema, negatives)
        weights = counts.positives.astype(np.float64)
        if negatives.method == "uniform":
            weights[:] = 1.0
        elif negatives.method == "popularity":
            weights **= negatives.exponent
        weights[: known.first_code] = 0.0
        return weights

    def _occurrences(self, feature: str) -> Occurrences:
        if feature not in self._counts:
            name = coded_feature(self._schema, feature, "the share of an item").name
            self._counts |= count_occurrences(self._ranks, self._layout, self._schema, [name])
        return self._counts[feature]


#: Rows that a network sees at a time.
_OBSERVED_ROWS = 65_536


def observe_training_rows(model: ShardedModel, train: SplitLayout) -> None:
    """Show all rows of the split, once and in one order on all ranks, to a network with a method `observe`.

    Each rank reads the complete split, without communication.
    """
    if not hasattr(model.network, "observe"):
        return

    def rows() -> Iterator[tuple[Tensor, CategoricalBatch, Tensor]]:
        with EvalLoader(train, model.schema, World(), batch_size=_OBSERVED_ROWS, streams=1) as source:
            for batch in source:
                tensors = MicroBatch.from_batch(batch)
                yield tensors.continuous, tensors.categorical, tensors.labels

    model.observe(rows())
