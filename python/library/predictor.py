"""A saved model for rows of frames: in this process, or in a user's own `mapInArrow`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.errors import UserError
from headrace.features.functions.arrays import one_batch
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.library.frames import library_of, to_arrow
from headrace.models import predictor as predictors
from headrace.score.loaded_model import loaded_model, predict_rows
from headrace.storage import local


class Predictor:
    """Predictions of a saved model for rows that have the columns of its features, as the lake has them.

        p = hr.Predictor("var/models/clicks/2026-01-08/3f2a/model")
        p.predict(frame)                                        # float32 [rows]
        spark_frame.mapInArrow(p.map_in_arrow, p.schema_of(spark_frame))

    Small and picklable: the model is opened where it is first asked, once in a process, and its tables are mapped from
    `maps` by all processes of a host.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        output: str | None = None,
        column: str = "score",
        threads: int = 1,
        maps: str | os.PathLike[str] | None = None,
    ) -> None:
        """Name a saved model; nothing is opened yet.

        Args:
            model: its folder, `models/PIPELINE/DAY/KEY/model` below a workspace; executors see it, too.
            output: the task that is asked; None: the model's first.
            column: what `map_in_arrow` calls the predictions.
            threads: of the model's library, in this process.
            maps: a folder of each host's own disk for the files that its processes map; None: each has the tables in
                its memory.
        """
        self.model, self.output, self.column, self.threads = Path(model), output, column, threads
        self.maps = None if maps is None else Path(maps)

    def predict(self, frame: Any) -> Any:
        """Return predictions for the rows of a pandas, Polars or Arrow frame: probabilities or numbers, float32 [rows].

        Raises:
            UserError: the model is incomplete or damaged, or the frame lacks a column or has it in another type.
        """
        predictor, fitted = self._loaded()
        if library_of(frame) == "spark":
            raise UserError("of a Spark frame: frame.mapInArrow(predictor.map_in_arrow, predictor.schema_of(frame))")
        required = set(fitted.input_columns)
        batch = one_batch(to_arrow(frame, [c for c in fitted.workflow.declared if c.name in required]))
        return predict_rows(predictor, fitted, batch, {})

    def map_in_arrow(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of Spark's `mapInArrow` with the column of predictions behind their own (float32).

        Raises:
            UserError: see `predict`.
        """
        predictor, fitted = self._loaded()
        for batch in batches:
            predictions = pa.array(predict_rows(predictor, fitted, batch, {}), pa.float32())
            yield pa.RecordBatch.from_arrays([*batch.columns, predictions], [*batch.schema.names, self.column])

    def schema_of(self, frame: Any) -> Any:
        """Return Spark's schema of what `map_in_arrow` makes of a Spark frame."""
        from pyspark.sql.types import FloatType, StructField, StructType

        return StructType([*frame.schema.fields, StructField(self.column, FloatType())])

    def _loaded(self) -> tuple[predictors.Predictor, FittedWorkflow]:
        return loaded_model(
            local(self.model), self.threads, self.output, None if self.maps is None else local(self.maps)
        )
