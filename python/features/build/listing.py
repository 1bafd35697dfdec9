"""What a dataset is made of: its listing, and the facts of the stage's manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.dataset.parquet.layout import LISTING
from headrace.features.layout.files import ColumnCounts, WrittenDataset, WrittenFile
from headrace.features.layout.split import SplitRows
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.schema import Kind
from headrace.storage import Location


def complete(folder: Location, files: list[WrittenFile], counts: Mapping[str, int]) -> None:
    """Check that every row was written once, clear away what killed tasks left, list the files."""
    for split, rows in counts.items():
        found = sum(f.rows for f in files if f.name.startswith(f"{split}/"))
        if found != rows:
            raise RuntimeError(f"split '{split}' has {rows} rows, but {found} were written")
    wanted = {folder / f.name for f in files}
    for split in counts:
        (folder / split).discard_unfinished()
        for path in (folder / split).entries():
            if path not in wanted:
                path.remove()
    listed = [{"name": f.name, "size": f.size, "rows": f.rows, "row_groups": f.row_groups} for f in files]
    listed += [{"name": path.below(folder), "size": path.size()} for path in (folder / "workflow").files()]
    (folder / LISTING).put_text(json.dumps(listed, indent=1) + "\n")


def facts_of(
    fitted: FittedWorkflow,
    vocabularies: VocabularyTable,
    rows: SplitRows,
    counts: Mapping[str, int],
    written: WrittenDataset,
) -> dict[str, Any]:
    """What the manifest says of a dataset: splits, vocabularies, and rates of what is missing and out of vocabulary."""
    by_split = {s: [f for f in written.files if f.name.startswith(f"{s}/")] for s in rows.splits}
    columns = []
    for feature in fitted.features:
        entry: dict[str, Any] = {"name": feature.name, "kind": feature.kind.value, "sources": list(feature.sources)}
        has_oov = feature.kind is Kind.CATEGORICAL and feature.vocabulary is not None
        found = {s: columns_of[feature.name] for s, columns_of in written.counts.items()}
        entry |= _rates(sum(found.values(), ColumnCounts()), sum(counts.values()), has_oov)
        entry["splits"] = {s: _rates(mine, counts[s], has_oov) for s, mine in found.items()}
        columns.append(entry)
    return {
        "splits": {
            s: {"rows": sum(f.rows for f in mine), "row_groups": sum(f.row_groups for f in mine), "files": len(mine)}
            for s, mine in by_split.items()
        },
        "vocabulary_version": vocabularies.version,
        "vocabularies": {
            name: {"size": len(v), "new": vocabularies.added.get(name, 0)} for name, v in fitted.vocabularies.items()
        },
        "columns": columns,
        **{f"{split}_range": list(days) if days else None for split, days in rows.ranges.items()},
    }


def _rates(found: ColumnCounts, rows: int, has_oov: bool) -> dict[str, float | None]:
    """missing_rate: of the rows, those that lack a value of the feature's columns; oov_rate: of the values, those that
    the vocabulary lacks."""
    return {
        "missing_rate": found.missing / rows if rows else 0.0,
        "oov_rate": (found.oov / found.coded if found.coded else 0.0) if has_oov else None,
    }
