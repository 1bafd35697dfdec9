"""A save of the rows that changed since another save, on which it lies: what a day that starts warm adds.

    base = changes_base(before, folder, aged=0.5)    # what it lies upon
    save_changed_rows(embeddings, folder, base, with_optimizer=True)   # each rank; then as after `save_shards`

Rows are compared by their bits with what `load_shards` would read from the base, so that both together are the same as
a whole save, on any number of ranks. While it is written a rank holds what the base says of its rows, beside its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.embeddings.checkpoint.index import (
    Base,
    Chunk,
    OptimizerRecord,
    RankRecord,
    TableRecord,
    rank_file,
    read_chain,
    read_index,
)
from headrace.embeddings.checkpoint.shards import FILE_BYTES, LocalBlock, local_blocks, matrices_of, read_into
from headrace.embeddings.checkpoint.tensors import FileRecord, save_tensors
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.optim.rules import RULES
from headrace.storage import Location


def changes_base(base: Location, folder: Location, aged: float) -> Base:
    """How a save in `folder` names the save `base`, both in one store.

    Args:
        base: the folder of the save to lie upon.
        folder: where the changes will be in the end.
        aged: what the states that never shrink were multiplied by before anything changed (`age_state`).

    Raises:
        UserError: the base is missing or damaged.
    """
    index = read_index(base)
    return Base(
        path=base.seen_from(folder), sha256=index.sha256, aged=aged, depth=1 + (index.base.depth if index.base else 0)
    )


def save_changed_rows(
    embeddings: LocalTables, directory: Location, before: Location, base: Base, with_optimizer: bool
) -> None:
    """`save_shards` of the rows that differ from those of `before`, and of those that it lacks.

    Args:
        embeddings: the tables.
        directory: shared by all ranks, empty at first.
        before: the folder of the save to lie upon.
        base: how that is named; see `changes_base`.
        with_optimizer: as of `save_shards`; the base has states of the same optimizer then.

    Raises:
        RuntimeError: gradients wait for `step`.
        UserError: the base is missing or damaged.
    """
    if embeddings.has_pending:
        raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")
    embeddings.flush()
    world, plan, optimizer = embeddings.collective.world, embeddings.plan, None
    if with_optimizer:
        assert embeddings.optimizer is not None
        rule = RULES[embeddings.optimizer.kind]
        optimizer = OptimizerRecord(kind=embeddings.optimizer.kind, steps=embeddings.steps, states=rule.state)
    chain = read_chain(before)
    known = {t.name: t.rows for t in chain[-1][1].tables}
    files: list[FileRecord] = []
    chunks: list[Chunk] = []
    for state, sources in matrices_of(embeddings, with_optimizer).items():
        old = [torch.empty_like(m) for m in sources]
        read_into(embeddings, {state: old}, chain)
        if optimizer is not None and state in RULES[optimizer.kind].growing:
            for full in old:
                full.mul_(base.aged)
        for block in _saved_here(embeddings, state):
            changed = _changed(block, sources[block.fused], old[block.fused], known.get(block.table, 0))
            if block.replicated:  # all have it: each saves a part
                changed = changed[changed % world.size == world.rank]
            source = sources[block.fused]
            each = max(1, FILE_BYTES // max(1, source.shape[1] * source.element_size()))
            for start in range(0, len(changed), each):
                part = changed[start : start + each]
                name = f"{state}-{world.rank:05d}-{len(files):05d}.safetensors"
                rows = block.rows.start + part * block.rows.step
                places = (block.first + part).to(source.device)
                tensors = {"rows": rows, "values": source.index_select(0, places).cpu()}
                files.append(save_tensors(directory / name, tensors))
                chunks.append(
                    Chunk(
                        table=block.table,
                        state=state,
                        start=0,
                        stop=plan.by_name[block.table].rows,
                        stride=1,
                        file=name,
                        key="values",
                        columns=block.columns,
                        rows_key="rows",
                    )
                )
    record = RankRecord(
        rank=world.rank,
        world_size=world.size,
        optimizer=optimizer,
        files=tuple(files),
        chunks=tuple(chunks),
        tables=tuple(TableRecord(name=t.name, rows=t.rows, dim=t.dim) for t in plan.tables),
        base=base,
    )
    rank_file(directory, world.rank).put_text(record.model_dump_json(indent=1) + "\n")


def _saved_here(embeddings: LocalTables, state: str) -> list[LocalBlock]:
    """The blocks of which this rank saves rows: of a state by row of a table cut by columns the first block's alone."""
    found: list[LocalBlock] = []
    saved: set[tuple[str, int]] = set()
    for held in local_blocks(embeddings, state):
        blocks = embeddings.plan.blocks_of(held.table)
        if not held.replicated and held.columns is None and len(blocks) > 1:
            first = blocks[0].first_rank == embeddings.collective.world.rank
            if not first or (held.table, held.rows.start) in saved:
                continue
            saved.add((held.table, held.rows.start))
        found.append(held)
    return found


def _changed(block: LocalBlock, new: Tensor, old: Tensor, known: int) -> Tensor:
    """Which of a block's rows differ, or are no rows of the base: their places in the block, int64."""
    here = slice(block.first, block.first + len(block.rows))
    differs = (new[here].view(torch.uint8) != old[here].view(torch.uint8)).any(dim=1)
    rows = torch.arange(block.rows.start, block.rows.stop, block.rows.step, device=differs.device)
    return (differs | (rows >= known)).nonzero().flatten().cpu()
