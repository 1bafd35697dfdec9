"""The source `vectors`: each user's items of the greatest dot products."""

from __future__ import annotations

import logging
from functools import cached_property, partial
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType

from headrace.config import Score, VectorSource
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.score.candidates.source import BLOCKED, FETCH, SourceContext
from headrace.score.candidates.vectors.item_vectors import ItemVectors
from headrace.score.candidates.vectors.ivf import IvfIndex
from headrace.score.candidates.vectors.search import BuildIndex, FindItems, MeasureRecall, Searched
from headrace.score.items import ITEM_ROW
from headrace.score.joined.choice import joined_tables
from headrace.score.joined.parts import Parts, parts_of
from headrace.score.rank.blocks import ITEMS
from headrace.score.rank.pair_features import context_scalars
from headrace.score.vectors.map_vectors import map_vectors
from headrace.score.vectors.model_vectors import ModelVectors, Side
from headrace.storage import Location

log = logging.getLogger("headrace.score")

#: `index: auto`: from so many items on there is an index: it takes 0.6 of the time of a comparison of all, or less.
_AUTO_ITEMS = 1_000_000
#: Users among whom those are looked for by whom recall is measured: of many that a table lists no model knows anything.
_SAMPLE_USERS = 16_384


class VectorItems:
    """See the module, and headrace.score.candidates.source.ItemRanking."""

    def __init__(self, context: SourceContext, source: VectorSource, where: str) -> None:
        self._context, self._source, self._where = context, source, where
        #: How it was searched, for the manifest.
        self.facts: dict[str, Any] = {}

    @property
    def leaves_out_blocked(self) -> bool:
        """See ItemRanking. A comparison of all items does; of an index some more are asked for instead."""
        return self._searched.index is None

    def first(self, users: DataFrame, most: int) -> DataFrame:
        """See ItemRanking."""
        if not self._searched.items.rows:
            return users.withColumn(ITEMS, F.array().cast("array<int>"))
        # mapInArrow reads a dot in a column's name as a field's: numbers travel, the task knows the names.
        numbered = users.toDF(*[f"c{i}" for i in range(len(users.columns))])
        schema = StructType([*numbered.schema.fields, StructField("items", ArrayType(IntegerType()))])
        blocked = BLOCKED if BLOCKED in users.columns else None
        vectors = self._vectors("user")
        work = FindItems(FETCH, vectors, self._searched, blocked)
        cut = partial(self._parts, numbered, users)
        found = map_vectors(self._context.spark, vectors, numbered, users.columns, cut, work, schema)
        return found.toDF(*users.columns, ITEMS)

    def _parts(self, numbered: DataFrame, users: DataFrame) -> Parts:
        """Users are cut by their keys, in as many parts as all of them have."""
        key = F.col(numbered.columns[users.columns.index(self._score.user.key)])
        return Parts.by_hash(key, parts_of(self._context.spark, self._users))

    @cached_property
    def _users(self) -> int:
        return self._context.users.count()

    @cached_property
    def _searched(self) -> Searched:
        items = self._items
        self.facts |= {"items": items.rows, "unknown_items": items.unknown, "dimensions": items.width, "index": "exact"}
        if items.unknown:
            log.info("%s: %s items of which the model learned nothing are left out", self._where, f"{items.unknown:,}")
        exact = Searched(items, self._threads)
        wanted = self._source.index == "ivf" or (self._source.index == "auto" and items.rows >= _AUTO_ITEMS)
        return self._with_index(exact) if wanted and items.rows else exact

    @cached_property
    def _items(self) -> ItemVectors:
        score = self._score
        return ItemVectors.write(
            self._context.spark,
            self._context.items,
            ITEM_ROW,
            (score.item.key, *score.item.columns),
            self._vectors("item"),
            self._context.run_folder / f"vectors-{self._where}",
        )

    def _with_index(self, exact: Searched) -> Searched:
        """The index, with as many probes as its recall needs."""
        spark, items = self._context.spark, exact.items
        # The task is alone: it has what all tasks of its executor would have.
        cores = int(spark.sparkContext.getConf().get("spark.executor.cores") or spark.sparkContext.defaultParallelism)
        (built,) = (
            spark.range(0, 1, 1, 1)
            .mapInArrow(BuildIndex(items, cores), "file string, cells int, bytes long, seconds double")
            .collect()
        )
        file = items.folder.parent / built["file"]
        index = IvfIndex(items, file, built["cells"])
        log.info(
            "%s: an index of %s items in %s cells, %.0f MiB, in %.1f s",
            self._where,
            f"{items.rows:,}",
            f"{index.cells:,}",
            built["bytes"] / 2**20,
            built["seconds"],
        )
        key = col(self._score.user.key)
        sample = self._context.users.orderBy(F.xxhash64(key), key).limit(_SAMPLE_USERS)
        numbered = sample.toDF(*[f"c{i}" for i in range(len(sample.columns))])
        vectors = self._vectors("user")
        measured = MeasureRecall(
            vectors, Searched(items, self._threads, index), min(self._source.k, items.rows), self._source.min_recall
        )
        schema = "users int, probes int, recall double, seconds double, exact_seconds double"
        alone = Parts(F.lit(0), 1, F.xxhash64(numbered.columns[sample.columns.index(self._score.user.key)]))
        made = map_vectors(spark, vectors, numbered.coalesce(1), sample.columns, lambda: alone, measured, schema)
        (found,) = made.collect()
        if found["recall"] is None:
            # So few users are known that few will be searched for.
            log.info(
                "%s: all items are compared: the model knows %d of %d users, too few to measure an index by",
                self._where,
                found["users"],
                _SAMPLE_USERS,
            )
            file.remove_quietly()
            self.facts["recall_users"] = found["users"]
            return exact
        reached, users = round(found["recall"], 4), found["users"]
        self.facts |= {
            "index": "ivf",
            "cells": index.cells,
            "probes": found["probes"],
            "bytes": built["bytes"],
            "build_seconds": round(built["seconds"], 2),
            "recall": reached,
            "recall_at": measured.k,
            "recall_users": found["users"],
            "users_per_second": {
                "index": round(users / found["seconds"], 1),
                "exact": round(users / found["exact_seconds"], 1),
            },
        }
        if found["probes"] is None:
            raise UserError(
                f"{self._where}: the index finds {reached} of the best {measured.k} items even when it looks at all "
                f"of its cells, less than min_recall {self._source.min_recall}: set index: exact"
            )
        log.info(
            "%s: recall at %d of %d users is %.4f, with %d of %d cells; %.0f users/s, all items compared: %.0f users/s",
            self._where,
            measured.k,
            found["users"],
            reached,
            found["probes"],
            index.cells,
            users / found["seconds"],
            users / found["exact_seconds"],
        )
        return Searched(items, self._threads, index, found["probes"])

    @property
    def _score(self) -> Score:
        assert self._context.ctx.spec.score is not None
        return self._context.ctx.spec.score

    @property
    def _threads(self) -> int:
        return int(self._context.spark.sparkContext.getConf().get("spark.task.cpus") or 1)

    @property
    def _model(self) -> Location:
        """The saved model's folder."""
        ctx, chosen = self._context.ctx, self._context.model
        # Trees have no vectors: the day's network behind or beside them has.
        trees = chosen.stage in ("baseline", "second_stage")
        return ctx.ws.locate((ctx.upstream["train"].output("model") if trees else chosen.output).name)

    @cached_property
    def _joined(self) -> frozenset[str]:
        ctx = self._context.ctx
        return joined_tables(self._score.embeddings, self._model, ctx.ws.mapped(ctx.spec.pipeline), gpu=False)

    def _vectors(self, side: Side) -> ModelVectors:
        ctx, score = self._context.ctx, self._score
        return ModelVectors(
            model=self._model,
            threads=self._threads,
            side=side,
            user_columns=(score.user.key, *score.user.columns),
            item_columns=(score.item.key, *score.item.columns),
            context=context_scalars(ctx.spec, score),
            maps=self._context.maps,
            joined=self._joined,
        )
