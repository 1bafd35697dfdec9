"""A lookup on its way: ids to their owners, rows back, some of them early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.embeddings.dynamic.tables import Answer
from headrace.embeddings.exchange.pooled import Parts, cut_bags
from headrace.embeddings.exchange.prefetch import Ahead
from headrace.embeddings.exchange.remote_rows import Posted
from headrace.embeddings.exchange.row_exchange import Mail, Request
from headrace.embeddings.input.addressing import Occurrences
from headrace.embeddings.kernels.dispatch import placing
from headrace.embeddings.kernels.duplicates import Duplicates, find_duplicates
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.sharding.layout import Arena


@dataclass
class Part:
    """What a lookup needs from one arena."""

    #: Of all groups of the arena, one after the other: int32 or int64 [N].
    addresses: Tensor
    #: Groups of the arena: their number, and where their occurrences begin and end.
    groups: list[tuple[int, int, int]]
    #: None: not sorted yet (a lookup in this rank's own matrix needs that for gradients only).
    duplicates: Duplicates | None = None
    #: How to sort: see `find_duplicates`.
    ends: Tensor | None = None
    #: Of an arena whose owners sum bags (it has one group).
    bags: Parts | None = None

    def sorted(self) -> Duplicates:
        if self.duplicates is None:
            self.duplicates = find_duplicates(self.addresses, self.ends)
        return self.duplicates


class Prepared:
    """A lookup that has begun: `ShardedEmbeddings.prepare`. Used once by `forward` or `features`."""

    def __init__(
        self,
        embeddings: LocalTables,
        samples: int,
        occurrences: Sequence[Occurrences],
        raw: Sequence[Tensor],
        in_place: bool,
    ) -> None:
        self.samples = samples
        #: Whether `forward` gives a `Placed`.
        self.in_place = in_place
        #: Steps when the rows were asked for.
        self.started_at = 0
        self.occurrences = list(occurrences)
        self.parts = [self._part(embeddings, a) for a in embeddings.layout.arenas]
        self._embeddings = embeddings
        dynamic = embeddings.dynamic
        #: By table of raw ids: what is wanted; what was answered here, once `start` was called.
        self.raw = [] if dynamic is None else dynamic.want(raw)
        self.answers: list[Answer] = []
        #: By table of raw ids, after the lookup: vectors float32 [N, D] (zeros: no row), which have a row: bool [N].
        self.found: list[tuple[Tensor, Tensor]] = []
        #: What the ranks asked each other for, once the answer is here; None also where nothing is sent.
        self.request: Request | None = None
        self._ahead: Ahead | None = None
        #: Lookups and steps when rows were fetched ahead.
        self._known = (0, 0)
        self._wait: Callable[[], Request] | None = None
        self._rows: Callable[[], list[Tensor]] | None = None
        if embeddings.mail is not None:
            self._wait = embeddings.mail.send_ids([self._wanted(a) for a in embeddings.remote], self.raw)

    def fetch_ahead(self) -> None:
        """Begin to fetch those rows that the step after the lookups so far cannot change. Collective.

        To be called after the forward pass of the lookup before, before its backward pass. Rows that are changed
        otherwise than by `step` meanwhile (a load) would be old. A lookup between this and the step that changes other
        rows than known here is noticed, and all rows are fetched again. Messages by machines (`Plan.hop`) carry ids
        ahead alone, as do tables on a GPU.
        """
        mail, embeddings = self._embeddings.mail, self._embeddings
        if not isinstance(mail, Mail) or not embeddings.remote or self._rows is not None:
            return
        if embeddings.device.type != "cpu" or any(c is not None for c in embeddings.caches):
            return
        request = self._answered()
        touched = [[r.touched(i) for r in embeddings.open_requests] for i in range(len(request.rows))]
        self._ahead = Ahead(mail, embeddings.collective, request, self._remote_weights(), touched)
        self._known = embeddings.opened, embeddings.steps

    def start(self) -> None:
        """Begin to fetch the rows (those that are not here yet), as they are now. Collective; once, then it is done.

        Raw ids are counted, and admitted, now.
        """
        if self._rows is None:
            self.started_at = self._embeddings.steps
            with placing(self._embeddings.device):
                self._rows = self._answer()
            if isinstance(self._rows, Posted) and not self.in_place:
                self._rows.bring_own()

    @property
    def posted(self) -> Posted | None:
        """The rows of a lookup in place, where they come through shared memory. After `start`."""
        return self._rows if self.in_place and isinstance(self._rows, Posted) else None

    def _answer(self) -> Callable[[], list[Tensor]]:
        """Look up what was asked here, and begin to fetch what was asked for; what waits for that."""
        mail, dynamic = self._embeddings.mail, self._embeddings.dynamic
        if mail is None:  # one rank asks itself
            self.answers = [] if dynamic is None else dynamic.answer(self.raw)
            return list
        request, ahead = self._answered(), self._ahead
        self.answers = [] if dynamic is None else dynamic.answer(request.raw)
        answers = [a.marked() for a in self.answers]
        opened, steps = self._known
        if ahead is not None and opened != self._embeddings.opened and steps != self._embeddings.steps:
            ahead.drop()
            ahead = None
        if ahead is not None:
            return ahead.start_rest(answers)
        return mail.start_rows(*self._asked_here(request), answers)

    def rows(self) -> list[Tensor]:
        """Rows by remote arena, as stored, and behind them marked vectors by table of raw ids. After `start`."""
        return [] if self._rows is None else self._rows()

    def drop(self) -> None:
        """Receive what is on its way, for nothing. Collective; in place of the lookup."""
        if self._rows is not None:
            self._rows()
        elif self._embeddings.mail is not None:
            self._answered()
            if self._ahead is not None:
                self._ahead.drop()

    def _answered(self) -> Request:
        if self.request is None:
            assert self._wait is not None
            with placing(self._embeddings.device):
                self.request = self._wait()
        return self.request

    def _remote_weights(self) -> list[Tensor]:
        return [self._embeddings.weights[a.number] for a in self._embeddings.remote]

    def _asked_here(self, request: Request) -> tuple[Request, list[Tensor]]:
        """Where rows are that were asked for here: the request, by rows of these matrices, by remote arena."""
        weights, rows, embeddings = self._remote_weights(), list(request.rows), self._embeddings
        for i, arena in enumerate(embeddings.remote):
            cache = embeddings.caches[arena.number]
            if cache is not None:
                found = request.duplicates(i)
                weights[i], rows[i] = cache.look_up(found, embeddings.training), found.inverse()
        return replace(request, rows=rows), weights

    def _wanted(self, arena: Arena) -> Tensor | Parts:
        part = self.parts[arena.number]
        if not arena.pooled or not part.groups:
            return part.sorted().unique
        part.bags = cut_bags(arena, self.occurrences[part.groups[0][0]])
        return part.bags

    def _part(self, embeddings: LocalTables, arena: Arena) -> Part:
        found, pieces, end = [], [], 0
        for number, group in enumerate(embeddings.layout.groups):
            if group.arena == arena.number:
                addresses = self.occurrences[number].addresses
                found.append((number, end, end + addresses.numel()))
                end += addresses.numel()
                pieces.append(addresses)
        if not pieces:  # a table that no feature looks up
            return Part(torch.empty(0, dtype=arena.index_dtype), [])
        # By owner; each owner's in the order of the batch.
        ends = None if arena.local else arena.rank_starts[1:]
        return Part(pieces[0] if len(pieces) == 1 else torch.cat(pieces), found, ends=ends)
