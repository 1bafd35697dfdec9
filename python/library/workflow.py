"""Workflows over frames: the same operators, codes and files as in a pipeline, without one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import pyarrow as pa

from headrace.config import Chain
from headrace.config.schema import DatasetSchema, TableColumn
from headrace.errors import UserError
from headrace.features.arrow.fit import LakeFit
from headrace.features.arrow.scan import LakeRows
from headrace.features.arrow.write_lake import write_lake_rows
from headrace.features.build.run import complete
from headrace.features.layout.files import plan_files
from headrace.features.ops.base import Chains, Selection, as_chains
from headrace.features.vocabulary.codes import Vocabularies, VocabulariesInMemory
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.workflow import fitted as pipeline
from headrace.features.workflow.workflow import Workflow as CheckedWorkflow
from headrace.library.frames import columns_of, library_of, like, to_arrow
from headrace.library.staging import split_frame, staged_rows
from headrace.storage import local

#: Rows that are transformed at a time.
_BATCH_ROWS = 131_072

Path = str | os.PathLike[str]


class Workflow:
    """Chains of operators over the columns of a frame.

    Fit them once, then transform frames or write a dataset:

        chains = ["user", "item"] >> hr.Categorify() , ["price"] >> hr.FillMissing() >> hr.Log() >> hr.Normalize()
        fitted = hr.Workflow(chains, label="click").fit(frame)
        features = fitted.transform(frame)
        fitted.write_dataset(frame, "dataset")
    """

    def __init__(
        self, chains: Selection | Chains | Sequence[Chain | Selection], label: str, carried: Sequence[str] = ()
    ) -> None:
        """Put chains together; `fit` checks them against a frame's columns.

        Args:
            chains: `columns >> operator >> ...`, one or several.
            label: the column of 0 and 1 that is to be predicted.
            carried: columns taken along unchanged, for evaluation.

        Raises:
            UserError: something that is no chain.
        """
        self.chains, self.label, self.carried = as_chains(chains), label, tuple(carried)

    def bind(self, frame: Any) -> CheckedWorkflow:
        """Check the chains against the columns of a frame, whose data are not looked at.

        Raises:
            UserError: a column is missing or of a type that an operator cannot take; no such parameter; two features of
                one name.
        """
        names = dict.fromkeys([*(c for chain in self.chains for c in chain.columns), self.label, *self.carried])
        return self._checked(columns_of(frame, list(names)))

    def _checked(self, columns: Sequence[TableColumn]) -> CheckedWorkflow:
        return CheckedWorkflow(self.chains, columns, self.label, self.carried, section="workflow")

    def fit(
        self,
        frame: Any,
        *,
        before: FittedWorkflow | None = None,
        vocabulary: Path | None = None,
        day: str | None = None,
        staging: Path | None = None,
    ) -> FittedWorkflow:
        """Learn from the rows of a frame: a Spark, pandas or Polars DataFrame, or an Arrow table.

        Args:
            frame: the training rows.
            before: an earlier fit of this workflow: its values keep their codes, new ones go on after them.
            vocabulary: with a Spark frame, the path of a Delta table that keeps the codes for all who name it; made
                where there is none. None: codes are in memory, and in what `save` writes.
            day: with `vocabulary`, the day (YYYY-MM-DD) under which new values are noted; today.
            staging: with a Spark frame on a cluster, a folder that the executors see.

        Returns:
            the fitted workflow.

        Raises:
            UserError: as `bind`; the frame has no row, or a label that is null or neither 0 nor 1.
        """
        workflow = self.bind(frame)
        with staged_rows(workflow, {"train": frame}, staging) as (rows, spark):
            learn = LakeFit(workflow, rows)
            task = learn.next_task()
            results = rows.scan(spark, task)
            _check(rows, self.label)
            while task is not None:
                learn.merge(results)
                task = learn.next_task()
                if task is not None:
                    results = rows.scan(spark, task)
            keep: Vocabularies = VocabulariesInMemory(before.fitted.vocabularies if before is not None else None)
            if vocabulary is not None:
                if spark is None or before is not None:
                    raise UserError(
                        "vocabulary= keeps codes in a Delta table: give a Spark frame, and not before=, too"
                    )
                keep = VocabularyTable(spark, local(vocabulary), day or date.today().isoformat())
            return FittedWorkflow(learn.finish(keep))


class FittedWorkflow:
    """All that a workflow learned."""

    def __init__(self, fitted: pipeline.FittedWorkflow) -> None:
        """Wrap the result of `Workflow.fit` or `load`."""
        self.fitted = fitted

    @property
    def schema(self) -> DatasetSchema:
        """The features with their kinds, dtypes, cardinalities, tags; the label; the carried columns."""
        return self.fitted.schema

    @property
    def vocabularies(self) -> Mapping[str, pa.Table]:
        """Each vocabulary as a table of value (string) and code (int64)."""
        return {name: vocabulary.table for name, vocabulary in self.fitted.vocabularies.items()}

    def transform(self, frame: Any) -> Any:
        """Return the features of a frame's rows, as a frame of the same library, in the same order.

        Numbers are float32 without nulls, codes int32 (0: null, 1: out of vocabulary), a list of length k is k columns
        `name__0 ...`. Label and carried columns follow where the frame has them. Operators that encode training rows
        out of fold (target_encoding) take all rows for unseen ones; `write_dataset` knows its training rows.

        Raises:
            UserError: a column is missing or has another type.
        """
        workflow = self.fitted.workflow
        untransformed = [c for c in (workflow.label_column, *workflow.carried_columns) if c in _names(frame)]
        label = workflow.label_column
        keep = {n if n == label else self.schema.carried_name(n): n for n in dict.fromkeys(untransformed)}
        if library_of(frame) == "spark":
            from headrace.features.spark.transform import transform

            return transform(self.fitted, frame, keep)
        types = {c.name: c for c in workflow.declared}
        table = to_arrow(frame, [types[name] for name in dict.fromkeys((*workflow.input_columns, *keep.values()))])
        batches = table.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS)
        empty = pa.RecordBatch.from_pylist([], schema=table.schema)
        transformed = pa.Table.from_batches(
            [self.fitted.transform_batch(batch, tuple(keep.values())) for batch in batches or [empty]]
        )
        features = transformed.num_columns - len(keep)
        return like(frame, transformed.rename_columns([*transformed.column_names[:features], *keep]))

    def write_dataset(
        self,
        frame: Any,
        path: Path,
        *,
        valid: float | Any = 0.1,
        row_group_rows: int = 131_072,
        min_row_groups: int = 12,
        overwrite: bool = False,
        staging: Path | None = None,
    ) -> dict[str, int]:
        """Transform rows and write them as a dataset (Parquet), which `load_dataset` and headrace's training read.

        The folder appears when it is whole. Rows are in an order of their own, which has nothing to do with the label.

        Args:
            frame: the training rows, those of `fit` where an operator encodes out of fold.
            path: the dataset's folder.
            valid: rows to validate on: a frame of its own, or the share of the last rows of `frame`; 0: none.
            row_group_rows: most rows of a row group.
            min_row_groups: row groups that a split has at least, where it has the rows.
            overwrite: replace a dataset that is there.
            staging: see `Workflow.fit`.

        Returns:
            rows of each split.

        Raises:
            UserError: a dataset is there and `overwrite` is not set; as `transform`; a label is not 0 or 1.
        """
        final = local(path)
        if final.exists() and not overwrite:
            raise UserError(f"{final} is there already; give another path, or overwrite=True")
        frames = split_frame(frame, valid) if isinstance(valid, (int, float)) else {"train": frame, "valid": valid}
        with staged_rows(self.fitted.workflow, frames, staging) as (rows, spark):
            rows.scan(spark)
            _check(rows, self.fitted.workflow.label_column)
            counts = {split: n for split, n in rows.counts.rows.items() if n}
            with final.new_folder() as folder:
                self.fitted.save(folder / "workflow")
                plans = plan_files(counts, row_group_rows, min_row_groups)
                written = write_lake_rows(self.fitted, rows, plans, folder, folder / "workflow", spark)
                complete(folder, written.files, counts)
        return counts

    def save(self, path: Path) -> None:
        """Write it into a new folder: chains, what was learned, vocabularies. The folder appears when it is whole.

        Raises:
            UserError: an operator is of a class that nobody else can import (`__main__`, a function's).
        """
        for chain in self.fitted.workflow.spec_chains:
            for op in chain.ops:
                if op.op.startswith("__main__:") or "<locals>" in op.op:
                    raise UserError(
                        f"operator '{op.op}' is of a class that no other process can import; move it to a module"
                    )
        with local(path).new_folder() as folder:
            self.fitted.save(folder)

    @staticmethod
    def load(path: Path) -> FittedWorkflow:
        """Load what `save` wrote; or the workflow in the folder of a dataset (`DATASET/workflow`), or of a model.

        Operators that are named as `module:Class` are imported: load what you trust.

        Raises:
            UserError: a file is missing or damaged; an operator cannot be imported.
        """
        return FittedWorkflow(pipeline.FittedWorkflow.load(local(path)))


def _names(frame: Any) -> set[str]:
    if library_of(frame) == "arrow":
        return set(frame.schema.names)
    return {str(c) for c in frame.columns}


def _check(rows: LakeRows, label: str) -> None:
    counts = rows.counts
    if not counts.rows.get("train"):
        raise UserError("the frame has no row to learn from")
    for number, fault in ((counts.null_labels, "null"), (counts.bad_labels, "neither 0 nor 1")):
        if number:
            total = sum(counts.rows.values())
            raise UserError(f"label '{label}' is {fault} in {number:,} of {total:,} rows; leave these rows out")
