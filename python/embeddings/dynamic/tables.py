"""Embedding tables of raw 64-bit ids: no vocabulary, rows are admitted when ids are seen and evicted for others.

    tables = DynamicEmbeddings([DynamicSpec("user", 16, admit_after=3, max_rows=1_000_000)], collective, seed=1)
    embeddings = ShardedEmbeddings(plan, collective, seed=1, dynamic=tables)   # an empty plan is one, too
    tables.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad"))
    prepared = embeddings.prepare(codes, raw=[ids])     # any int64 [N]
    embeddings(prepared)
    ((vectors, found),) = prepared.found                # float32 [N, D], bool [N]

Ids are divided among the ranks by their hash, so any world holds the same rows. An id gets a row when it has been seen
`admit_after` times in training (or, each time, with a probability); until then, and in scoring when it is unknown, its
vector is zeros, learns nothing, and `found` says so. Where rows run out, those seen least often (or longest ago) make
room. A row starts where its id says, so a row that was evicted and comes again starts as it started before.

Ids, vectors and gradients travel in the messages of the planned tables (headrace.embeddings.exchange). Ids may travel
ahead; they are counted, admitted and looked up when the lookup starts, after the step before.

The ways of others: TorchRec's managed collisions (ZCH) remap ids into a fixed table and evict by score; HugeCTR's and
DynamicEmb's hash tables grow and evict by frequency or age; here both, and the limit is in rows or memory of each rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.comm.base import Collective
from headrace.config.embeddings import EmbeddingOptimizer
from headrace.embeddings.addressing import RawIdRequest, UniqueRawIds
from headrace.embeddings.dynamic.rows import DynamicReport, TrainableRows
from headrace.embeddings.dynamic.rows_cpu import HostRows
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.storage import INIT_BOUND


@dataclass(frozen=True)
class DynamicLookup:
    """Answer of one table in a lookup."""

    #: float32 [M, D]; zeros where there is no row.
    vectors: Tensor
    #: Row of each id, -1 if it has none: int64 [M], an array, or a tensor of a GPU.
    rows: Any
    #: Ids of the rows: int64 [M].
    ids: Tensor
    #: `HostRows.numbering` then.
    numbering: int

    @property
    def has_row(self) -> Tensor:
        """True for ids that have a row: bool [M]."""
        return torch.as_tensor(self.rows >= 0)

    def with_found_flags(self) -> Tensor:
        """Return the message to the asking rank: vectors and, in one more column, 1 where there is a row: float32 [M, D
        + 1].
        """
        return torch.cat([self.vectors, self.has_row.float().unsqueeze(1)], dim=1)


class DynamicEmbeddings(nn.Module):
    """This rank's rows of tables of raw ids. ShardedEmbeddings brings the ids of all ranks here, and returns the
    vectors.

    In training (`self.training`) ids are counted and admitted; in scoring nothing changes. With `device="cuda"` rows,
    counts and hash tables live on the GPU.
    """

    def __init__(
        self,
        specs: Sequence[DynamicSpec],
        collective: Collective,
        seed: int,
        *,
        init_bound: float = INIT_BOUND,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        self.collective = collective
        self.device = torch.device(device)
        dispatch.check(self.device)
        #: HostRows, or DeviceRows, which take tensors where those take arrays.
        self.tables: list[Any] = [self._rows_of(s, seed, init_bound) for s in specs]
        #: True if gradients are clipped by norm; True if the waiting ones were.
        self._clips = self._is_clipped = False

    def _rows_of(self, spec: DynamicSpec, seed: int, init_bound: float) -> TrainableRows:
        if self.device.type == "cpu":
            return HostRows(spec, self.collective.world, seed, init_bound=init_bound)
        from headrace.embeddings.dynamic.rows_gpu import DeviceRows  # and Triton with it

        return DeviceRows(spec, self.collective.world, seed, self.device, init_bound=init_bound)

    @property
    def has_pending(self) -> bool:
        """True if gradients wait for `step`."""
        return any(t.has_pending for t in self.tables)

    def configure_optimizer(self, optimizer: EmbeddingOptimizer) -> None:
        """Choose the optimizer of all tables and make its states, at zero; `optimizer.tables` has exceptions by name.

        Raises:
            UserError: a table's limit of memory has no room for a row.
        """
        self._clips, self._is_clipped = optimizer.clip_norm is not None, False
        for t in self.tables:
            t.configure_optimizer(optimizer)

    def unique_ids(self, ids: Sequence[Tensor]) -> list[UniqueRawIds]:
        """Return the distinct ids that a lookup requests from the owners, by table, of ids int64 [N]."""
        if len(ids) != len(self.tables):
            raise ValueError(f"ids of {len(ids)} tables, not of {len(self.tables)}")
        for x in ids:
            if x.ndim != 1 or x.dtype != torch.int64:
                raise ValueError(f"ids must be int64 [N], not {x.dtype} {list(x.shape)}")
        return [UniqueRawIds.from_ids(x, self.collective.world.size) for x in ids]

    def answer(self, requests: Sequence[RawIdRequest]) -> list[DynamicLookup]:
        """Look up, by table, the ids that the ranks request; in training ids are counted and admitted."""
        lookups = []
        for t, request in zip(self.tables, requests, strict=True):
            arrays = request.ids, request.counts
            rows = t.look_up(*([x.numpy() for x in arrays] if isinstance(t, HostRows) else arrays), self.training)
            lookups.append(DynamicLookup(t.rows_at(rows), rows, request.ids, t.numbering))
        return lookups

    def add_gradients(self, answers: Sequence[DynamicLookup], grads: Sequence[Tensor]) -> None:
        """Store the gradients float32 [M, D] of answered lookups, by table, for `step`."""
        for t, answer, grad in zip(self.tables, answers, grads, strict=True):
            t.add_gradient(torch.as_tensor(answer.rows), answer.ids, grad, answer.numbering)

    def squares(self) -> Tensor:
        """Return the sum of squares of this rank's waiting gradients, summed by row first: float64 [1]."""
        self._is_clipped = True
        return sum((t.squares() for t in self.tables), torch.zeros(1, dtype=torch.float64, device=self.device))

    def scale_gradients(self, by: float) -> None:
        """Multiply the gradients that wait."""
        for t in self.tables:
            t.scale_gradients(by)

    def step(self, lr: float | None = None) -> None:
        """Apply the gradients since the last step to the rows that they touch. No exchange.

        Where several forward and backward passes make a step, those after the first may let rows go: the gradient of an
        id whose row is gone is of nobody.

        Raises:
            RuntimeError: gradients are to be clipped, which ShardedEmbeddings.step does, and that was not called.
        """
        if self._clips and not self._is_clipped:
            raise RuntimeError("clip_norm is over all tables: ShardedEmbeddings.step comes before this one")
        self._is_clipped = False
        for t in self.tables:
            t.step(lr)

    def age_state(self, factor: float) -> None:
        """Multiply the states that never shrink by `kept`."""
        for t in self.tables:
            t.age_state(factor)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._is_clipped = False
        for t in self.tables:
            t.drop_gradients()

    def train(self, mode: bool = True) -> DynamicEmbeddings:
        """Switch between training and evaluation; an evaluation counts its lookups from 0."""
        if not mode:
            for t in self.tables:
                t.begin_evaluation()
        super().train(mode)
        return self

    def report(self) -> dict[str, DynamicReport]:
        """Return size and counters over all ranks, by table. Collective; the same on every rank."""
        local_report = torch.tensor([astuple(t.report) for t in self.tables], dtype=torch.float64)
        ranks = self.collective.all_gather(local_report.reshape(1, -1)).view(
            -1, len(self.tables), local_report.shape[1]
        )
        reports = {}
        for i, t in enumerate(self.tables):
            reports[t.spec.name] = total([DynamicReport(*_as_integers(r)) for r in ranks[:, i].tolist()])
        return reports

    def snapshot(self) -> DynamicEmbeddings:
        """Return a copy of this rank's current rows, to be saved while training goes on."""
        twin = copy.copy(self)
        twin.tables = [t.snapshot() for t in self.tables]
        return twin


def total(reports: Sequence[DynamicReport]) -> DynamicReport:
    """Sum the ranks' reports; `load` is that of the fullest rank."""
    sums = [sum(column) for column in zip(*map(astuple, reports), strict=True)]
    fields: Mapping[str, Any] = dict(zip(DynamicReport.__dataclass_fields__, sums, strict=True))
    return DynamicReport(**{**fields, "load": max(r.load for r in reports)})


def _as_integers(values: Sequence[float]) -> list[Any]:
    """Convert a report's numbers back to integers: counts are exact in float64 up to 2^53."""
    return [v if name == "load" else int(v) for name, v in zip(DynamicReport.__dataclass_fields__, values, strict=True)]
