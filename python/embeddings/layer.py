"""Sharded embedding layer: tables spread over the ranks by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.addressing import BatchIndexer, CodeBatch, JaggedIndices, batch_to_device
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.kernels.dispatch import default_device
from headrace.embeddings.layout import FusedTable, JoinedRows, TableRows
from headrace.embeddings.lookup.autograd import LookupFunction
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors, is_zero_copy, supports_zero_copy
from headrace.embeddings.sharding_plan import Plan
from headrace.embeddings.storage import INIT_BOUND


class ShardedEmbeddings(LocalTables):
    """The tables of a plan, this rank's blocks of them, looked up and trained together.

    Forward: codes -> float32 [B, F, D] for F features of one width D (`features` gives them apart, of any widths, and
    sequences too; `prepare(zero_copy=True)` says where in memory they are). Codes are int64 [B, S], lists padded, or by
    lookup in plan order any number of each sample's (`JaggedTensor`), or as many of each ([B], [B, L]). B may
    differ between ranks and be 0, but all ranks call forward, backward and step the same number of times: they exchange
    rows. The weights are no torch parameters:
    backward leaves the gradients of touched rows with their owners, summed over the ranks, and `step` applies them.

        embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
        embeddings.configure_optimizer(EmbeddingOptimizer(kind="adagrad", learning_rate=0.05))
        loss_of(embeddings(codes)).backward()   # local loss: sum over the rank's rows / rows of the global batch
        embeddings.step()

    Tables of raw ids (`dynamic`) travel in the same messages: see dynamic.tables. Optimizer, step and
    files are their own.

    Bits: the same ranks give the same bits again. A lookup gives the same bits on any number of ranks and by any plan.
    Gradients are summed in the order rank by rank, so weights after a step differ between worlds by rounding alone.

    With `device="cuda"` the tables live on the GPU, and so do batches (they are copied there), vectors and gradients;
    the kernels of headrace.embeddings.kernels look up and step. Rows of 16 bits are then rounded by chance in a step.
    Tables that the plan says are `cached` are in host memory, their hot rows on the GPU as well; results are the same,
    bit for bit.

    Args:
        plan: where every row lives.
        collective: the ranks; with tables on a GPU it must carry tensors of the GPU.
        seed: of the rows' starts.
        init_bound: rows start uniform in +- this.
        dynamic: tables of raw ids, on the same device.
        device: of this rank's rows.
        matrix: gives the memory of each fused table, [rows, stored width] of its type, as it is; None: new memory, with
            rows at their start.

    Raises:
        UserError: there is no such device.
    """

    def __init__(
        self,
        plan: Plan,
        collective: Collective,
        seed: int,
        *,
        init_bound: float = INIT_BOUND,
        dynamic: DynamicEmbeddings | None = None,
        device: str | torch.device = "cpu",
        matrix: Callable[[FusedTable], Tensor] | None = None,
    ) -> None:
        super().__init__(plan, collective, seed, init_bound=init_bound, dynamic=dynamic, device=device, matrix=matrix)
        with default_device(self.device):
            self._indexer = BatchIndexer(self.layout)
        #: Joined rows by number of the fused table, of tables that no rank holds.
        self._joined = {a.number: JoinedRows(plan, a) for a in self.layout.fused_tables if a.joined}
        #: Widths of the features' vectors.
        self._dims = {plan.by_name[x.table].dim for x in plan.lookups}
        self._is_uniform = len(self._dims) <= 1 and all(x.pooling != "none" for x in plan.lookups)
        self._supports_zero_copy = (
            self.device.type == "cpu"
            and dynamic is None
            and self._is_uniform
            and bool(plan.lookups)
            and supports_zero_copy(self.layout)
        )

    def set_joined(self, rows: Mapping[str, TableRows]) -> None:
        """Set the rows of the plan's joined tables, by name, in place of all earlier ones.

        The next lookups may ask for these rows alone, and give the bits that the whole tables would give. A table that
        is not named has no rows.
        """
        for number, joined in self._joined.items():
            self.weights[number] = joined.set(rows)

    def prepare(
        self, batch: CodeBatch, weights: Tensor | None = None, raw: Sequence[Tensor] = (), *, zero_copy: bool = False
    ) -> LookupHandle:
        """Start a lookup: deduplicate the ids and send them to their owners, who answer later.

        Collective, and cheap to call ahead: while the dense part works on one batch, the ids of the next travel. No
        row is read before `forward`, so the result is the same as without. Rows travel early too where it is asked
        for, still to the same result, bit for bit:

            prepared = embeddings.prepare(codes)
            while True:
                following = embeddings.prepare(next_codes)   # ids travel during the forward pass
                loss = loss_of(embeddings(prepared))
                following.prefetch()                      # rows this step leaves alone: during the backward pass
                loss.backward()
                embeddings.step()
                following.start()                            # the other rows: during what comes before the lookup
                prepared = following

        Args:
            batch: codes int64 [B, S], or by lookup, see above.
            weights: float32 [B, S], where a lookup of padded codes is weighted.
            raw: ids of each table of `dynamic`, int64 [N], any number of them.
            zero_copy: let `forward` give a `ZeroCopyVectors` where it can, in place of a tensor. No step may come
                between the lookup's `start` and its backward pass.
        """
        if self.device.type != "cpu":
            with default_device(self.device):
                raw = [x.to(self.device, non_blocking=True) for x in raw]
                return self._prepare(*batch_to_device(batch, weights, self.device), raw, False)
        return self._prepare(batch, weights, raw, zero_copy)

    def _prepare(
        self, batch: CodeBatch, weights: Tensor | None, raw: Sequence[Tensor], zero_copy: bool
    ) -> LookupHandle:
        if isinstance(batch, Tensor):
            jagged, samples = self._indexer.padded(batch, weights), batch.shape[0]
        else:
            jagged, samples = self._indexer.jagged(batch), _samples_of(batch, self.plan)
        fused_tables = [self.layout.fused_tables[g.fused] for g in self.layout.groups]
        jagged = [self._among_joined(fused, x) for fused, x in zip(fused_tables, jagged, strict=True)]
        zero_copy = zero_copy and self._supports_zero_copy and all(map(is_zero_copy, fused_tables, jagged))
        return LookupHandle(self, samples, jagged, raw, zero_copy, is_padded=isinstance(batch, Tensor))

    def _among_joined(self, fused: FusedTable, jagged: JaggedIndices) -> JaggedIndices:
        """Convert the indices of a joined table to positions among its joined rows."""
        if not fused.joined:
            return jagged
        return replace(jagged, indices=self._joined[fused.number].places(jagged.indices))

    def forward(self, batch: CodeBatch | LookupHandle, weights: Tensor | None = None) -> Tensor | ZeroCopyVectors:
        if not self._is_uniform:
            raise ValueError("the features' vectors differ in width or are sequences: call features()")
        handle = batch if isinstance(batch, LookupHandle) else self.prepare(batch, weights)
        if handle.zero_copy:
            self._register_lookup(handle)
            return ZeroCopyVectors(self, handle)
        out = self.outputs(handle)[0]
        return out.view(out.shape[0], len(self.plan.lookups), max(self._dims, default=0))

    def features(self, batch: CodeBatch | LookupHandle, weights: Tensor | None = None) -> list[Tensor]:
        """Return the vectors of each lookup, in plan order: float32 [B, dim], or of a sequence one for each code.

        These are [N, dim], or [B, length, dim] of padded codes; those of padding are zeros.
        """
        handle = batch if isinstance(batch, LookupHandle) else self.prepare(batch, weights)
        vectors = self.layout.split(self.outputs(handle))
        if handle.is_padded:
            for i in self.layout.sequences:
                vectors[i] = vectors[i].view(handle.samples, self.plan.lookups[i].length, vectors[i].shape[1])
        return vectors

    def configure_all(self, optimizer: EmbeddingOptimizer) -> None:
        """Configure the optimizer of these tables and of those of raw ids, which `optimizer.tables` may name too."""
        if self.dynamic is not None:
            self.dynamic.configure_optimizer(optimizer)
            names = {t.spec.name for t in self.dynamic.tables}
            planned_settings = {name: settings for name, settings in optimizer.tables.items() if name not in names}
            optimizer = optimizer.model_copy(update={"tables": planned_settings})
        self.configure_optimizer(optimizer)

    def step_all(self, lr: float | None = None) -> None:
        """Take a step on these tables, then on those of raw ids."""
        self.step(lr)
        if self.dynamic is not None:
            self.dynamic.step(lr)

    def outputs(self, handle: LookupHandle) -> list[Tensor]:
        """Return the vectors of all pooled lookups side by side, [B, their dims], and of each sequence those of its
        codes.

        Those of raw ids are then in `handle.found`.
        """
        if not self.plan.lookups and not handle.raw:
            return [torch.zeros(handle.samples, 0, device=self.device)]
        self._register_lookup(handle)
        with default_device(self.device):
            results: tuple[Tensor, ...] = LookupFunction.apply(self.anchor, self, handle)  # type: ignore[no-untyped-call]
        outputs = 1 + len(self.layout.sequences)
        raw = results[outputs:]
        handle.raw_vectors = list(zip(raw[: len(handle.raw)], raw[len(handle.raw) :], strict=True))
        return list(results[:outputs])

    def _register_lookup(self, handle: LookupHandle) -> None:
        handle.start()
        if torch.is_grad_enabled():
            self.lookup_count += 1
            if handle.request is not None:
                self.open_requests.append(handle.request)


def _samples_of(batch: Sequence[Tensor | JaggedTensor], plan: Plan) -> int:
    pooled = (x for x, lookup in zip(batch, plan.lookups, strict=True) if lookup.pooling != "none")
    return next((x.samples if isinstance(x, JaggedTensor) else len(x) for x in pooled), 0)
