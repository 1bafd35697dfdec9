"""Embedding tables of raw 64-bit ids: no vocabulary, rows come with the ids that are seen and go when others need room.

    tables = DynamicEmbeddings([DynamicSpec("user", 16, admit_after=3, max_rows=1_000_000)], collective, seed=1)
    tables.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad"))
    ((vectors, found),) = tables([ids])     # any int64 [N] -> float32 [N, D], bool [N]

Ids are dealt to the ranks by their hash, so any world holds the same rows. An id gets a row when it has been seen
`admit_after` times in training (or, each time, with a probability); until then, and in scoring when it is unknown, its
vector is zeros, learns nothing, and `found` says so. Where rows run out, those seen least often (or longest ago) make
room. A row starts where its id says, so a row that was evicted and comes again starts as it started before.

All tables of a step travel together: ids with their counts in one all-to-all, vectors back in one, gradients in one.

The ways of others: TorchRec's managed collisions (ZCH) remap ids into a fixed table and evict by score; HugeCTR's and
DynamicEmb's hash tables grow and evict by frequency or age; here both, and the limit is in rows or memory of each rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.config import EmbeddingOptimizer
from headrace.embeddings.collective import Collective
from headrace.embeddings.duplicates import find_duplicates, gather
from headrace.embeddings.dynamic_files import load_rows, owners, save_rows
from headrace.embeddings.dynamic_rows import DynamicReport, DynamicRows
from headrace.embeddings.dynamic_spec import DynamicSpec
from headrace.embeddings.id_map import Ids
from headrace.embeddings.initial import INIT_BOUND


class DynamicEmbeddings(nn.Module):
    """Tables, each sharded by the hash of the id. Ids int64 [N_t] of each -> (float32 [N_t, D_t], bool [N_t]) of each.

    Collective like ShardedEmbeddings: all ranks call forward, backward and step the same number of times, N may differ
    and be 0. In training (`self.training`) ids are counted and admitted; in scoring nothing changes.
    """

    def __init__(
        self, specs: Sequence[DynamicSpec], collective: Collective, seed: int, *, init_bound: float = INIT_BOUND
    ) -> None:
        super().__init__()
        self.collective = collective
        self.tables = [DynamicRows(s, collective.world, seed, init_bound=init_bound) for s in specs]
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def has_pending(self) -> bool:
        """Whether gradients wait for `step`."""
        return any(t.has_pending for t in self.tables)

    def configure_optimizer(self, optimizer: EmbeddingOptimizer) -> None:
        """Choose the optimizer of all tables and make its states, at zero; `optimizer.tables` has exceptions by name.

        Raises:
            UserError: a table's limit of memory has no room for a row.
        """
        for t in self.tables:
            t.configure_optimizer(optimizer)

    def forward(self, ids: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        if len(ids) != len(self.tables):
            raise ValueError(f"ids of {len(ids)} tables, not of {len(self.tables)}")
        for x in ids:
            if x.ndim != 1 or x.dtype != torch.int64:
                raise ValueError(f"ids must be int64 [N], not {x.dtype} {list(x.shape)}")
        out: tuple[Tensor, ...] = _LookUp.apply(self._anchor, self, *ids)  # type: ignore[no-untyped-call]
        return list(zip(out[: len(ids)], out[len(ids) :], strict=True))

    def step(self, lr: float | None = None) -> None:
        """Apply the gradients since the last step to the rows that they touch. No exchange."""
        for t in self.tables:
            t.step(lr)

    def age_state(self, kept: float) -> None:
        """Multiply the states that never shrink by `kept`."""
        for t in self.tables:
            t.age_state(kept)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        for t in self.tables:
            t.drop_gradients()

    def train(self, mode: bool = True) -> DynamicEmbeddings:
        """As every module's; an evaluation counts its lookups from 0."""
        if not mode:
            for t in self.tables:
                t.begin_evaluation()
        super().train(mode)
        return self

    def report(self) -> dict[str, DynamicReport]:
        """What all ranks together hold and have done, by table. Collective; the same on every rank."""
        mine = torch.tensor([astuple(t.report) for t in self.tables], dtype=torch.float64)
        ranks = self.collective.all_gather(mine.reshape(1, -1)).view(-1, len(self.tables), mine.shape[1])
        found = {}
        for i, t in enumerate(self.tables):
            found[t.spec.name] = total([DynamicReport(*_whole(r)) for r in ranks[:, i].tolist()])
        return found

    # --- on disk ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> DynamicEmbeddings:
        """A copy of this rank's rows as they are now, to be saved while this goes on."""
        twin = copy.copy(self)
        twin.tables = [t.snapshot() for t in self.tables]
        return twin

    def save(self, folder: Path) -> None:
        """Write this rank's rows, states and counts, and what is waiting. Speaks to no other rank."""
        folder.mkdir(parents=True, exist_ok=True)
        for t in self.tables:
            save_rows(t, folder)

    def load(self, folder: Path, with_optimizer: bool) -> None:
        """Read this rank's ids, saved by any number of ranks, in place of all that it holds; see `load_rows`.

        Raises:
            UserError: a file is missing or damaged, or another dim or optimizer.
        """
        for t in self.tables:
            load_rows(t, folder, with_optimizer)


class _LookUp(torch.autograd.Function):
    """(anchor, module, ids of each table [N]) -> vectors of each [N, D], found of each [N].

    Two all-to-alls forward (ids with counts; vectors), one backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: DynamicEmbeddings, *ids: Tensor) -> tuple[Tensor, ...]:
        tables, collective = module.tables, module.collective
        questions = [_Question.of(x, collective.world.size) for x in ids]
        asked = _ask(collective, questions)
        rows = [t.look_up(i, n, module.training) for t, (i, n, _) in zip(tables, asked, strict=True)]
        answers = [(t.rows_at(r), torch.from_numpy(r >= 0)) for t, r in zip(tables, rows, strict=True)]
        received, sent = [counts for _, _, counts in asked], [q.sent for q in questions]
        if collective.world.size > 1:
            # A vector and, in one more column, whether there is one.
            told = [torch.cat([v, there.float().unsqueeze(1)], dim=1) for v, there in answers]
            answers = [(g[:, :-1].contiguous(), g[:, -1] > 0) for g in _swap(collective, told, received, sent)]
        ctx.module, ctx.rows, ctx.received, ctx.questions = module, rows, received, questions
        ctx.numbering = [t.numbering for t in tables]
        vectors = [gather(v, q.place) for (v, _), q in zip(answers, questions, strict=True)]
        found = [there.index_select(0, q.place) for (_, there), q in zip(answers, questions, strict=True)]
        ctx.mark_non_differentiable(*found)
        return (*vectors, *found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        module: DynamicEmbeddings = ctx.module
        # Each distinct id is there once at least, so the sums are in the order of the distinct ids.
        sums = [
            find_duplicates(q.place.to(torch.int32)).sum_rows(grad.contiguous())
            for q, grad in zip(ctx.questions, grads, strict=False)
        ]
        back = _swap(module.collective, sums, [q.sent for q in ctx.questions], ctx.received)
        for t, rows, grad, numbering in zip(module.tables, ctx.rows, back, ctx.numbering, strict=True):
            if t.numbering != numbering:
                raise RuntimeError(
                    "rows were evicted by another forward before this backward: take a step after each forward"
                )
            t.add_gradient(rows, grad)
        return (None,) * (2 + len(ctx.questions))


class _Question:
    """The distinct ids of a lookup in one table, in order of their owners."""

    def __init__(self, ids: Tensor, counts: Tensor, sent: list[int], place: Tensor) -> None:
        #: Distinct ids and how often this rank has each: int64 [U].
        self.ids, self.counts = ids, counts
        #: How many go to each rank.
        self.sent = sent
        #: Where each of the lookup's ids is among them: int64 [N].
        self.place = place

    @staticmethod
    def of(ids: Tensor, ranks: int) -> _Question:
        distinct, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        if ranks == 1:
            return _Question(distinct, counts, [len(distinct)], inverse)
        owner = torch.from_numpy(owners(distinct.numpy(), ranks))
        order = torch.argsort(owner, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        return _Question(
            distinct[order], counts[order], torch.bincount(owner, minlength=ranks).tolist(), place[inverse]
        )


def _ask(collective: Collective, questions: Sequence[_Question]) -> list[tuple[Ids, Ids, list[int]]]:
    """Send ids and their counts to the owners, all tables in one message.

    Returns:
        By table, what the ranks ask of this one, in their order: ids [M], counts [M], and how many each rank sent.
    """
    world = collective.world.size
    if world == 1:
        return [(q.ids.numpy(), q.counts.numpy(), q.sent) for q in questions]
    pieces: list[Tensor] = []
    lengths = []
    split = [(torch.split(q.ids, q.sent), torch.split(q.counts, q.sent)) for q in questions]
    for rank in range(world):
        # How many of each table, then their ids and counts.
        pieces.append(torch.tensor([q.sent[rank] for q in questions], dtype=torch.int64))
        for ids, counts in split:
            pieces += [ids[rank], counts[rank]]
        lengths.append(len(questions) + 2 * sum(q.sent[rank] for q in questions))
    got, received = collective.all_to_all(torch.cat(pieces), lengths)
    asked: list[tuple[list[Ids], list[Ids], list[int]]] = [([], [], []) for _ in questions]
    for message in torch.split(got, received):
        numbers = message.numpy()
        at = len(questions)
        for table, n in enumerate(numbers[: len(questions)].tolist()):
            asked[table][0].append(numbers[at : at + n])
            asked[table][1].append(numbers[at + n : at + 2 * n])
            asked[table][2].append(n)
            at += 2 * n
    return [(np.concatenate(ids), np.concatenate(counts), sizes) for ids, counts, sizes in asked]


def _swap(
    collective: Collective, parts: Sequence[Tensor], sent: Sequence[list[int]], received: Sequence[list[int]]
) -> list[Tensor]:
    """Send float32 rows of each table [N, W] to the ranks, receive theirs: one all-to-all."""
    if collective.world.size == 1:
        return list(parts)
    widths = [p.shape[1] for p in parts]
    by_rank = [torch.split(p, n) for p, n in zip(parts, sent, strict=True)]
    flat = [of_table[rank].reshape(-1) for rank in range(collective.world.size) for of_table in by_rank]
    lengths = [sum(n * w for n, w in zip(ns, widths, strict=True)) for ns in zip(*sent, strict=True)]
    got, _ = collective.all_to_all(torch.cat(flat), lengths)
    sizes = [n * w for ns in zip(*received, strict=True) for n, w in zip(ns, widths, strict=True)]
    pieces = torch.split(got, sizes)
    return [torch.cat(pieces[i :: len(parts)]).view(-1, w) for i, w in enumerate(widths)]


def total(reports: Sequence[DynamicReport]) -> DynamicReport:
    """The ranks' reports as one; `load` is that of the fullest."""
    sums = [sum(column) for column in zip(*map(astuple, reports), strict=True)]
    fields: Mapping[str, Any] = dict(zip(DynamicReport.__dataclass_fields__, sums, strict=True))
    return DynamicReport(**{**fields, "load": max(r.load for r in reports)})


def _whole(values: Sequence[float]) -> list[Any]:
    """A report's numbers as they went in: counts are exact in float64 up to 2^53."""
    return [v if name == "load" else int(v) for name, v in zip(DynamicReport.__dataclass_fields__, values, strict=True)]
