"""Delta tables of the pipeline: rows go, values of vocabularies and of statistics give way to a name for nobody."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import numpy as np
import pyarrow as pa

from headrace.config import Spec
from headrace.features.workflow.workflow import Workflow
from headrace.housekeeping.forget.persons import Persons
from headrace.housekeeping.forget.place import Place
from headrace.housekeeping.forget.values import blanked, vocabularies_of
from headrace.housekeeping.tables import tables_of
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.lake.delta.transaction import claim
from headrace.lake.erase import Change, erase
from headrace.lake.redact import redact_log
from headrace.lake.redact_statistics import Values, exactly
from headrace.storage import Location

_QUARANTINE = "quarantine"


def table_places(state: WorkspaceState, persons: Persons, request: str) -> Iterator[Place]:
    """Of each table that has some: in its newest version, in older ones, in its log.

    Raises:
        UserError: a table that headrace does not read or write, or that another writer changes.
    """
    for table in tables_of(state.ws, state.pipeline):
        kind, change, values = change_of(state.spec, table.name, persons)
        found = erase(table, change, request, delete=False)
        logs = redact_log(table, values, delete=False)
        if not found and not logs:
            continue
        yield Place(
            kind,
            state.ws.name_of(table),
            found.rows,
            found.rewritten + logs,
            found.removed,
            found.size,
            act=partial(_erase, state, table, change, request, values),
        )


def claim_tables(state: WorkspaceState) -> None:
    """Have commits refused that runs which held the pipeline's lease before may still make.

    Raises:
        UserError: a table that headrace does not write.
        LeaseLost: another process is at work by now.
    """
    for table in tables_of(state.ws, state.pipeline):
        claim(table, state.fence)


def change_of(spec: Spec, name: str, persons: Persons) -> tuple[str, Change, Values]:
    """(kind, what becomes of its rows, what must not be in its log) of a table by its name."""
    exact = exactly(persons.texts)
    if name == _QUARANTINE or name.endswith(f"_{_QUARANTINE}"):
        columns = ("_raw", "_reason")
        # The smallest line, and the largest, or how they begin: any value in it, or the beginning of one at its end.
        values = dict.fromkeys(columns, lambda text, cut: persons.said_in(str(text), cut))
        return _QUARANTINE, Change(columns, partial(_without_lines, persons)), values
    if name == "vocabulary":
        names = vocabularies_of(Workflow.from_spec(spec), persons.column)
        return "vocabulary", Change(("name", "value"), partial(_without_values, persons, names)), {"value": exact}
    if name == "statistics":
        return "statistics", Change(("side", "column", "histogram"), partial(_without_bins, spec, persons)), {}
    kind = "events" if name == "events" or name in spec.sources else "table"
    return kind, Change((persons.column,), partial(_without_rows, persons)), {persons.column: exact}


def _erase(state: WorkspaceState, table: Location, change: Change, request: str, values: Values) -> str:
    found = erase(table, change, request, delete=True, fence=state.fence)
    redact_log(table, values, delete=True, check=state.check_lease)
    return "; ".join(found.left)


def _without_rows(persons: Persons, rows: pa.Table) -> tuple[pa.Table, int]:
    gone = persons.mask(rows.column(persons.column))
    return (rows.filter(pa.array(~gone)), int(gone.sum())) if gone.any() else (rows, 0)


def _without_lines(persons: Persons, rows: pa.Table) -> tuple[pa.Table, int]:
    texts = (rows.column(name).to_pylist() for name in ("_raw", "_reason"))
    gone = np.array([any(map(persons.said_in, both)) for both in zip(*texts, strict=True)], np.bool_)
    return (rows.filter(pa.array(~gone)), int(gone.sum())) if gone.any() else (rows, 0)


def _without_values(persons: Persons, names: Collection[str], rows: pa.Table) -> tuple[pa.Table, int]:
    of_name = np.isin(rows.column("name").to_numpy(zero_copy_only=False).astype(str), sorted(names))
    gone = of_name & persons.mask(rows.column("value"))
    if not gone.any():
        return rows, 0
    # Also where the columns that are looked at are all that there is.
    codes = rows.column("code").to_pylist() if "code" in rows.schema.names else range(rows.num_rows)
    at = rows.schema.get_field_index("value")
    values = blanked(rows.column("value").to_pylist(), gone, codes)
    return rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.field(at).type)), int(gone.sum())


def _without_bins(spec: Spec, persons: Persons, rows: pa.Table) -> tuple[pa.Table, int]:
    """The most frequent values of the column, and of the features that were made of it."""
    mine = {("input", persons.column), *(("feature", name) for name in _features_of(spec, persons))}
    found, count = [], 0
    columns = (rows.column(name).to_pylist() for name in ("side", "column", "histogram"))
    for side, column, bins in zip(*columns, strict=True):
        new = bins
        if (side, column) in mine and bins is not None:
            new = [
                b | {"value": blanked([b["value"]], [True], [i])[0]} if b["value"] in persons.texts else b
                for i, b in enumerate(bins)
            ]
            count += sum(a is not b for a, b in zip(new, bins, strict=True))
        found.append(new)
    if not count:
        return rows, 0
    at = rows.schema.get_field_index("histogram")
    return rows.set_column(at, rows.schema.field(at), pa.array(found, rows.schema.field(at).type)), count


def _features_of(spec: Spec, persons: Persons) -> set[str]:
    """Features in whose statistics values of the column can be: by their names, where there is a vocabulary.

    Without one a feature's categories are codes, which are numbers as integers are.
    """
    return {
        name
        for chain in Workflow.from_spec(spec).chains
        for name, made in chain.outputs.items()
        if persons.column in chain.sources[name] and (made.vocabulary or not persons.integers)
    }
