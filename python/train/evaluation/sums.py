"""Sums over the rows of all ranks, in every replicate of a bootstrap, that no order and no number of ranks changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from headrace.features.learn import exact_sums
from headrace.train.evaluation.bootstrap import F64, Bootstrap
from headrace.train.evaluation.ranks import I64, Ranks
from headrace.train.evaluation.rows import OVERALL, Dimension

#: Smaller numbers are taken for 0.
_SMALLEST = 2.0**-100
#: Columns of so many rows are in memory at once, where there are no more cells.
ROWS_AT_ONCE = 1 << 20
#: Of some rows the columns of whole and of real numbers, by name: int64 [m] and float64 [m] each.
Columns = Callable[[slice], tuple[Mapping[str, I64], Mapping[str, F64]]]


def sum_by_cell(
    ranks: Ranks,
    cells: int,
    cell: I64,
    users: I64 | None,
    integers: Mapping[str, I64],
    reals: Mapping[str, F64],
    bootstrap: Bootstrap,
) -> dict[str, F64]:
    """`sum_columns` of columns that are there: int64 [n] and float64 [n] each. Collective."""

    def of(rows: slice) -> tuple[dict[str, I64], dict[str, F64]]:
        return {name: x[rows] for name, x in integers.items()}, {name: x[rows] for name, x in reals.items()}

    return sum_columns(ranks, cells, cell, users, of, bootstrap)


def sum_columns(
    ranks: Ranks, cells: int, cell: I64, users: I64 | None, columns: Columns, bootstrap: Bootstrap
) -> dict[str, F64]:
    """Add up columns of the rows of all ranks by cell. Collective.

    Real numbers are added as whole numbers (headrace.features.learn.exact_sums) and rounded once, at the end.

    Args:
        cells: how many there are.
        cell: of each row, in [0, cells); int64 [n].
        users: whom a replicate counts the row with; None only without replicates. int64 [n].
        columns: gives the columns of some rows, asked for more than once. A rank's sums of whole numbers are below
            2^53; real numbers are finite and at most 2^100, what is below 2^-100 is taken for 0.
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
    step = max(ROWS_AT_ONCE, pairs)
    parts = [slice(start, start + step) for start in range(0, max(len(cell), 1), step)]
    if len(parts) == 1:
        columns = _once(columns(parts[0]))
    names, table = _added_up(ranks, parts, of_row, pairs, columns)
    starts = np.flatnonzero(np.diff(pair_cell, prepend=-1))
    totals = np.zeros((1 + bootstrap.replicates, len(table), cells), np.int64)
    if pairs:
        for replicate, counts in enumerate(bootstrap.all_counts(distinct)):
            totals[replicate][:, pair_cell[starts]] = np.add.reduceat(table * counts[pair_user], starts, axis=1)
    totals = ranks.add_up(totals)
    found: dict[str, F64] = {}
    for name in dict.fromkeys(name for name, _ in names):
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


def _once(found: tuple[Mapping[str, I64], Mapping[str, F64]]) -> Columns:
    return lambda _: found


def _added_up(
    ranks: Ranks, parts: Sequence[slice], of_row: I64, pairs: int, columns: Columns
) -> tuple[list[tuple[str, int]], I64]:
    """By (column, place of its digits; 0 of whole numbers) the sums of each pair, int64 [columns and places, pairs]."""
    ends: dict[str, list[float]] = {}
    for part in parts:
        for name, x in columns(part)[1].items():
            size = np.abs(x)
            size = size[size >= _SMALLEST]
            least, most = ends.setdefault(name, [np.inf, 0.0])
            if len(size):
                ends[name] = [min(least, float(size.min())), max(most, float(size.max()))]
    places = {name: _places(ranks, *mine) for name, mine in ends.items()}
    sums: dict[tuple[str, int], I64] = {}
    for part in parts:
        integers, reals = columns(part)
        for name, values in integers.items():
            found = np.bincount(of_row[part], weights=values, minlength=pairs).astype(np.int64)
            sums[name, 0] = sums[name, 0] + found if (name, 0) in sums else found
        for name, real in reals.items():
            x = np.where(np.abs(real) < _SMALLEST, 0.0, real)
            of_place, _ = exact_sums.grouped(x, of_row[part], pairs, places[name], squares=False)
            for place in places[name]:
                more = of_place[place]
                sums[name, place] = sums[name, place] + more if (name, place) in sums else more
    return list(sums), np.stack(list(sums.values()))


def _places(ranks: Ranks, least: float, most: float) -> range:
    """Places of the digits of the numbers of all ranks, of which this one's sizes are from `least` to `most`."""
    ranges = ranks.gather(np.array([least, most]).view(np.int64)).view(np.float64)
    return exact_sums.places(float(ranges[:, 0].min()), float(ranges[:, 1].max()))
