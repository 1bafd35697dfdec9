"""Sums over the rows of all ranks, in every replicate of a bootstrap, that no order and no number of ranks changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from headrace.features.learn import exact_sums
from headrace.train.evaluation.bootstrap import F64, Bootstrap
from headrace.train.evaluation.ranks import I64, Ranks
from headrace.train.evaluation.rows import OVERALL, Dimension

#: Smaller numbers are taken for 0.
_SMALLEST = 2.0**-100


def sum_by_cell(
    ranks: Ranks,
    cells: int,
    cell: I64,
    users: I64 | None,
    integers: Mapping[str, I64],
    reals: Mapping[str, F64],
    bootstrap: Bootstrap,
) -> dict[str, F64]:
    """Add up columns of the rows of all ranks by cell. Collective.

    Real numbers are added as whole numbers (headrace.features.learn.exact_sums) and rounded once, at the end.

    Args:
        cells: how many there are.
        cell: of each row, in [0, cells); int64 [n].
        users: whom a replicate counts the row with; None only without replicates. int64 [n].
        integers: int64 [n] each; a rank's sums are below 2^53.
        reals: float64 [n] each, finite and at most 2^100; what is below 2^-100 is taken for 0.
        bootstrap: the replicates.

    Returns:
        By column: float64 [1 + replicates, cells], the first of the rows as they are.
    """
    if users is None:
        distinct, of_row = np.zeros(1, np.int64), cell
        pair_cell, pair_user = np.arange(cells), np.zeros(cells, np.int64)
    else:
        # Rows of one user in one cell count alike in every replicate: they are added up beforehand.
        distinct, index = np.unique(users, return_inverse=True)
        pair, of_row = np.unique(cell * max(len(distinct), 1) + index, return_inverse=True)
        pair_cell, pair_user = pair // max(len(distinct), 1), pair % max(len(distinct), 1)
    pairs = len(pair_cell)
    names: list[tuple[str, int]] = []
    columns: list[I64] = []
    for name, values in integers.items():
        names.append((name, 0))
        columns.append(np.bincount(of_row, weights=values, minlength=pairs).astype(np.int64))
    for name, real in reals.items():
        x = np.where(np.abs(real) < _SMALLEST, 0.0, real)
        places = _places(ranks, x)
        sums, _ = exact_sums.grouped(x, of_row, pairs, places, squares=False)
        names += [(name, place) for place in places]
        columns += [sums[place] for place in places]
    table = np.stack(columns)
    starts = np.flatnonzero(np.diff(pair_cell, prepend=-1))
    totals = np.zeros((1 + bootstrap.replicates, len(columns), cells), np.int64)
    if pairs:
        for replicate, counts in enumerate(bootstrap.all_counts(distinct)):
            totals[replicate][:, pair_cell[starts]] = np.add.reduceat(table * counts[pair_user], starts, axis=1)
    totals = ranks.add_up(totals)
    found: dict[str, F64] = {}
    for name in [*integers, *reals]:
        mine = {place: totals[:, i].reshape(-1) for i, (n, place) in enumerate(names) if n == name}
        found[name] = exact_sums.floats(mine, (1 + bootstrap.replicates) * cells).reshape(-1, cells)
    return found


def sums_by_slice(
    ranks: Ranks,
    columns: Mapping[str, F64],
    users: I64 | None,
    slices: Sequence[I64],
    dimensions: Sequence[Dimension],
    bootstrap: Bootstrap,
) -> Iterator[dict[str, F64]]:
    """The sums of columns, and `rows`, over all rows, then by the slices of each dimension. Collective.

    Args:
        columns: float64 [n] each, as `reals` of `sum_by_cell`.
        users: whom a replicate counts a row with, int64 [n]; None only without replicates.
        slices: for each dimension the position of the row's value, -1 where it is none; int64 [n].
    """
    n = len(next(iter(columns.values())))
    for number, dimension in enumerate((OVERALL, *dimensions)):
        cell = np.zeros(n, np.int64) if number == 0 else slices[number - 1]
        chosen = cell >= 0
        yield sum_by_cell(
            ranks,
            len(dimension.values),
            cell[chosen],
            None if users is None or not bootstrap.replicates else users[chosen],
            {"rows": np.ones(int(chosen.sum()), np.int64)},
            {name: x[chosen] for name, x in columns.items()},
            bootstrap,
        )


def _places(ranks: Ranks, x: F64) -> range:
    """Places of the digits of the numbers of all ranks."""
    size = np.abs(x)
    size = size[size > 0]
    mine = np.array([size.min(), size.max()] if len(size) else [np.inf, 0.0])
    ranges = ranks.gather(mine.view(np.int64)).view(np.float64)
    return exact_sums.places(float(ranges[:, 0].min()), float(ranges[:, 1].max()))
