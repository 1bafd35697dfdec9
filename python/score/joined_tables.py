"""Embedding tables whose rows Spark joins in: the choice of tables, the partition of frames, and the totals."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyspark import Accumulator, SparkContext
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from headrace.config.score import ScoreEmbeddings
from headrace.errors import UserError
from headrace.lake.spark.tasks import ByPartition, this_partition
from headrace.models.predictor import maps_of, network_folder, saved_rows_bytes
from headrace.storage import Location

log = logging.getLogger("headrace.score")

#: Share of the free disk space that mapped tables may take by default.
_SHARE_OF_FREE = 0.8


def joined_tables(settings: ScoreEmbeddings, model: Location, maps: Location, gpu: bool) -> frozenset[str]:
    """Return the tables whose rows are joined; none where all are mapped, or there are none.

    Args:
        settings: of the spec.
        model: the saved model's folder, of any kind.
        maps: where hosts map models; see Workspace.mapped.
        gpu: whether tasks compute on GPUs, which have all tables in their memory.

    Raises:
        UserError: they are to be mapped and there is no room for them, or rows cannot be joined in.
    """
    folder = network_folder(model)
    if folder is None:
        return frozenset()
    if gpu:
        if settings.rows == "joined":
            raise UserError(
                "score.embeddings.rows is 'joined', and the tasks compute on GPUs, which have the whole tables in "
                "their memory: set it to mapped, or score without GPUs"
            )
        return frozenset()
    room = _room(settings, maps_of(model, maps))
    if settings.rows != "joined" and saved_rows_bytes(folder) <= room:  # an upper bound of their size
        return frozenset()
    # Imported here, because a driver whose tables are mapped needs no torch.
    from headrace.models.joined import check_joined, table_bytes, whole_tables

    sizes, whole_names = table_bytes(folder), whole_tables(folder)
    if settings.rows == "joined":
        names = frozenset(sizes)
    elif sum(sizes.values()) <= room:
        return frozenset()
    elif settings.rows == "mapped":
        raise _no_room(folder, sizes, room, maps)
    else:
        names = _too_large(sizes, room, first=frozenset(whole_names))
    check_joined(whole_names, names, folder)
    _log_choice(sizes, names, settings, room)
    return names


def _no_room(folder: Location, sizes: dict[str, int], room: float, maps: Location) -> UserError:
    """Return the error for tables that are to be mapped and do not fit."""
    largest = ", ".join(f"{name} {_mib(sizes[name])}" for name in sorted(sizes, key=sizes.__getitem__)[:-4:-1])
    return UserError(
        f"the tables of the model {folder} take {_mib(sum(sizes.values()))} MiB ({largest}), and a host may map "
        f"{_mib(room)} MiB of them below {maps}: free some disk there, set score.embeddings.mapped_mib, or let Spark "
        f"join the rows in of tables that do not fit (score.embeddings.rows: auto) or of all (joined)"
    )


def _room(settings: ScoreEmbeddings, mapped_folder: Location) -> float:
    """Return the bytes of tables that a host may map."""
    if settings.mapped_mib is not None:
        return settings.mapped_mib * 2**20
    if (mapped_folder / "tables").is_dir():  # already mapped by an earlier run
        return math.inf
    free = mapped_folder.free()
    return math.inf if free is None else _SHARE_OF_FREE * free


def _too_large(sizes: dict[str, int], room: float, first: frozenset[str]) -> frozenset[str]:
    """Return the tables that remain when those that must be mapped, and then the smallest, have taken the room."""
    joined = set()
    for name in sorted(sizes, key=lambda n: (n not in first, sizes[n], n)):
        if sizes[name] <= room:
            room -= sizes[name]
        else:
            joined.add(name)
    return frozenset(joined)


def _log_choice(sizes: dict[str, int], names: frozenset[str], settings: ScoreEmbeddings, room: float) -> None:
    joined_text = ", ".join(f"{name} ({_mib(sizes[name])} MiB)" for name in sorted(names))
    reason = "score.embeddings.rows is 'joined'" if settings.rows == "joined" else f"a host may map {_mib(room)} MiB"
    mapped_bytes = sum(size for name, size in sizes.items() if name not in names)
    log.info(
        "score: the rows of %s are joined in (%s); %s MiB of tables are mapped", joined_text, reason, _mib(mapped_bytes)
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f}"


@dataclass(frozen=True)
class ReceivedRows:
    """Table rows that tasks received, for the manifest."""

    tables: tuple[str, ...]
    #: By partition: rows, their bytes, and the most rows held at once.
    counts: Accumulator[dict[int, tuple[int, int, int]]]

    @staticmethod
    def empty(context: SparkContext, tables: Iterable[str]) -> ReceivedRows:
        """Return counts of zero rows."""
        empty: dict[int, tuple[int, int, int]] = {}
        return ReceivedRows(tuple(sorted(tables)), context.accumulator(empty, ByPartition()))

    def add(self, rows: int, size: int, largest: int) -> None:
        """Call at the end of a task: the rows that it was brought, their bytes, and the most at a time."""
        self.counts.add({this_partition(): (rows, size, largest)})

    def facts(self) -> dict[str, Any]:
        """Return the tables, rows and bytes of all tasks, and the most rows of one."""
        task_counts = list(self.counts.value.values())
        return {
            "tables": list(self.tables),
            "rows": sum(rows for rows, _, _ in task_counts),
            "bytes": sum(size for _, size, _ in task_counts),
            "most_rows_of_a_task": max((most for _, _, most in task_counts), default=0),
        }


#: Parts per core, so that cores finish together; and the largest mean size of a part, in rows.
_PARTS_A_CORE = 4
_PART_ROWS = 1_000_000


@dataclass(frozen=True)
class Partitioning:
    """Cut of a frame into parts: a row's own columns say which part it is in."""

    #: Part of a row: int, from 0.
    number: Column
    count: int
    #: Sort key of the rows within a part.
    order: Column

    @staticmethod
    def by_hash(key: Column, count: int) -> Partitioning:
        """Return parts by a hash of a key, in its order."""
        return Partitioning(F.pmod(F.hash(key), F.lit(count)), count, key)

    @staticmethod
    def by_range(number: Column, end: int, count: int) -> Partitioning:
        """Return parts of rows numbered 0 to `end` - 1, in order: a part's numbers are below those of the next."""
        first = F.floor(number.cast("bigint") * F.lit(count) / F.lit(end))
        return Partitioning(F.least(first, F.lit(count - 1)).cast("int"), count, number)


def parts_of(spark: SparkSession, rows: int) -> int:
    """Return the number of parts of a frame with so many rows, at least one."""
    return max(1, min(rows, max(_PARTS_A_CORE * spark.sparkContext.defaultParallelism, -(-rows // _PART_ROWS))))
