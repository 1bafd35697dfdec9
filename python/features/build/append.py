"""A day's dataset from yesterday's: files of days whose rows are the same are taken over, the others are written.

Files are by day, and a file of the dataset never changes, so the new version links those of the old one (copies them
where the file system cannot link): each version is a complete folder of its own, and removing one takes nothing from
another. A day's rows are the same when the same data files of the lake, which never change either, hold the same
number of them.

Numbers learned (normalize and the like) stay as they were on the day that wrote everything, the base: a file written
then and one written now mean the same. Vocabularies go on growing; what was out of vocabulary in a file stays so there.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from functools import cached_property
from typing import Any

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.arrow.scan import LakeRows
from headrace.features.layout.files import (
    ColumnCounts,
    DatasetFile,
    FilePlan,
    TimeRule,
    WrittenDataset,
    day_name,
    day_number,
    plan_files,
)
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.stage import Context
from headrace.stage.manifest import Input, Manifest, fingerprint
from headrace.storage import Location, StoreAway

_LOG = logging.getLogger("headrace.features")

#: File in a dataset by days: for each day the origin of its rows, its files and their counts.
DAYS_FILE = "_days.json"


@dataclass(frozen=True)
class DatasetDay:
    """A day of a dataset."""

    #: Fingerprint of the lake's data files with its rows, and their numbers of rows.
    rows_of: str
    files: tuple[DatasetFile, ...]
    counts: Mapping[str, ColumnCounts]

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files)


@dataclass(frozen=True)
class BaseDataset:
    """The dataset that a new one takes over from."""

    folder: Location
    #: The day that wrote the whole dataset: operators have learned from its training range.
    learned: str
    days: Mapping[str, DatasetDay]

    @cached_property
    def fitted(self) -> FittedWorkflow:
        """The workflow that it was written with; vocabularies stay in their files."""
        return FittedWorkflow.load(self.folder / "workflow", most_values=0)


def base_input(ctx: Context, spec_part: Mapping[str, Any], version: int) -> Input | None:
    """Return yesterday's dataset if it can be appended to; looks at its manifest alone. None: all is written anew.

    Args:
        spec_part: what the stage depends on; another one yesterday means other files.
        version: of the stage.
    """
    append = ctx.spec.features.append
    if append is None:
        return None
    yesterday = (date.fromisoformat(ctx.ds) - timedelta(days=1)).isoformat()
    manifest = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, yesterday, "features"))
    facts = manifest.facts.get("append") if manifest is not None else None
    if manifest is None or facts is None or manifest.spec_hash != fingerprint(spec_part) or facts["version"] != version:
        return None
    if (date.fromisoformat(ctx.ds) - date.fromisoformat(facts["learned"])).days >= append.rebase_days:
        return None
    return Input(kind="dataset", name=manifest.output("dataset").name, version=manifest.key)


def open_base(ctx: Context, dataset_input: Input | None) -> BaseDataset | None:
    """Return the base if all of it is present; else None, and log the reason."""
    if dataset_input is None:
        _LOG.info("append: no dataset of yesterday with this spec and young enough: everything is written anew")
        return None
    folder = ctx.ws.locate(dataset_input.name)
    try:
        saved = json.loads((folder / DAYS_FILE).read_text())
        days = {
            name: DatasetDay(
                d["rows_of"],
                tuple(DatasetFile(**f) for f in d["files"]),
                {feature: ColumnCounts(**c) for feature, c in d["counts"].items()},
            )
            for name, d in saved["days"].items()
        }
        torn = [f.name for d in days.values() for f in d.files if (folder / f.name).size() != f.size]
        base = BaseDataset(folder, saved["learned"], days)
        _ = base.fitted
    except StoreAway:
        raise
    except (OSError, ValueError, KeyError, TypeError, UserError) as e:
        _LOG.warning("append: %s is gone or incomplete (%s): everything is written anew", folder, e)
        return None
    if torn:
        _LOG.warning("append: %s has another size than it had: everything is written anew", folder / torn[0])
        return None
    return base


@dataclass(frozen=True)
class AppendPlan:
    """The days of the window that are taken over, and those that are written."""

    base: BaseDataset | None
    rows_of: Mapping[str, str]
    #: Days taken over.
    retained: Mapping[str, DatasetDay]
    #: The other days' parts.
    plans: list[FilePlan]
    #: The lake files of these parts.
    sources: LakeRows


def plan_days(
    base: BaseDataset | None,
    files: LakeRows,
    ws: Workspace,
    row_group_rows: int,
    min_row_groups: int,
    window: Sequence[int],
) -> AppendPlan:
    """Decide which days are taken over and which are written.

    A day's parts depend on its rows alone, not on its split: tomorrow its valid files are training files.

    Args:
        files: measured, by day.
        ws: the workspace, below which the lake's files are named.
        window: days of each split. Each alone has `min_row_groups` row groups where it has the rows.
    """
    rule = files.splitter.rule
    assert isinstance(rule, TimeRule)
    least = math.ceil(min_row_groups / min(window))
    rows_of: dict[str, str] = {}
    retained: dict[str, DatasetDay] = {}
    plans: list[FilePlan] = []
    file_numbers: set[int] = set()
    for number, by_file in sorted(files.counts.days.items()):
        day = day_name(number)
        # Names relative to the workspace, which may move.
        named = {ws.name_of(files.files[i].path): n for i, n in by_file.items()}
        rows_of[day] = fingerprint(named)
        known = base.days.get(day) if base is not None else None
        if known is not None and known.rows_of == rows_of[day]:
            retained[day] = known
            continue
        split = rule.split_of(number)
        parts = plan_files({split: sum(by_file.values())}, row_group_rows, least)
        plans += [replace(p, day=day) for p in parts]
        file_numbers |= by_file.keys()
    sources = replace(files, files=[f for i, f in enumerate(files.files) if i in file_numbers])
    return AppendPlan(base, rows_of, retained, plans, sources)


def link_kept(plan: AppendPlan, folder: Location, rule: TimeRule) -> WrittenDataset:
    """Link the kept days' files into a new folder, each into the split that its day is in now."""
    days: dict[str, tuple[list[DatasetFile], dict[str, ColumnCounts]]] = {}
    counts: dict[str, dict[str, ColumnCounts]] = {}
    for day, known in plan.retained.items():
        assert plan.base is not None
        split = rule.split_of(day_number(day))
        day_files = []
        for file in known.files:
            name = f"{split}/{file.name.rpartition('/')[2]}"
            (folder / name).copy_from(plan.base.folder / file.name, share=True)
            day_files.append(replace(file, name=name))
        days[day] = (day_files, dict(known.counts))
        sums = counts.setdefault(split, {})
        for feature, day_counts in known.counts.items():
            sums[feature] = sums.get(feature, ColumnCounts()) + day_counts
    return WrittenDataset([f for day_files, _ in days.values() for f in day_files], counts, days)


def merge(a: WrittenDataset, b: WrittenDataset) -> WrittenDataset:
    """Return two writes into one folder as one."""
    counts = {split: dict(by_feature) for split, by_feature in a.counts.items()}
    for split, by_feature in b.counts.items():
        sums = counts.setdefault(split, {})
        for feature, split_counts in by_feature.items():
            sums[feature] = sums.get(feature, ColumnCounts()) + split_counts
    return WrittenDataset(sorted([*a.files, *b.files], key=lambda f: f.name), counts, {**a.days, **b.days})


def save_days(folder: Location, plan: AppendPlan, written: WrittenDataset, learned: str) -> None:
    """Write `_days.json`, from which tomorrow's run knows what it can take over."""
    days = {
        day: {
            "rows_of": plan.rows_of[day],
            "files": [asdict(f) for f in sorted(files, key=lambda f: f.name)],
            "counts": {feature: asdict(c) for feature, c in counts.items()},
        }
        for day, (files, counts) in sorted(written.days.items())
    }
    (folder / DAYS_FILE).put_text(json.dumps({"learned": learned, "days": days}, indent=1) + "\n")
