"""Vocabularies over days: codes are given once, in a stated order, and never change."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.errors import UserError
from headrace.features.spark.fit import fit
from headrace.features.spark.transform import transform
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.delta.log import LOG_RETENTION
from headrace.storage import Location, local

COLUMNS = [
    TableColumn(name="u", type="bigint"),
    TableColumn(name="c", type="string"),
    TableColumn(name="cs", type="array<string>"),
    TableColumn(name="label", type="int"),
]

Rows = list[tuple[int, int | None, str | None, list[str | None] | None]]


def fitted_on(
    spark: SparkSession, path: Path, ds: str, rows: Rows, *, max_size: int | None = None, min_count: int = 2
) -> FittedWorkflow:
    w = Workflow(
        [
            Chain.model_validate(
                {"columns": ["u"], "ops": [{"categorify": {"min_count": min_count, "max_size": max_size}}]}
            ),
            Chain.model_validate({"columns": ["c"], "ops": [{"categorify": {"vocabulary": "words"}}]}),
            Chain.model_validate(
                {"columns": ["cs"], "ops": [{"categorify": {"vocabulary": "words"}}, {"pad": {"length": 2}}]}
            ),
        ],
        COLUMNS,
        label="label",
    )
    frame = spark.createDataFrame(rows, "day int, u bigint, c string, cs array<string>").repartition(3)
    return fit(w, frame, VocabularyTable(spark, local(path), ds), F.col("day"))


def codes(fitted: FittedWorkflow, name: str) -> dict[str, int]:
    table = fitted.vocabularies[name].table.to_pydict()
    return dict(zip(table["value"], table["code"], strict=True))


def version(spark: SparkSession, path: Path) -> int:
    return int(DeltaTable.forPath(spark, str(path)).history(1).collect()[0]["version"])


#: user 5 is most frequent, 9 was there first; 8 is seen once; -1 and 10 tie and go by their text.
DAY1: Rows = [
    (1, 9, "x", ["t", None]),
    (1, 9, "é", None),
    (2, 5, "x", []),
    (2, 5, None, ["x"]),
    (2, 5, "", ["t"]),
    (2, 8, "x", ["t"]),
    (2, None, None, None),
    (2, 10, None, None),
    (2, 10, None, None),
    (2, -1, None, None),
    (2, -1, None, None),
]
DAY2: Rows = [*DAY1, (3, 8, "new", None), (3, 70, "a", ["new"]), (3, 70, "b", ["a", "b"])]


def test_three_days(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary"
    first = fitted_on(spark, path, "2026-01-02", DAY1)
    assert codes(first, "u") == {"9": 2, "5": 3, "-1": 4, "10": 5}
    # First day: x four times in all, t three, é once; then the empty text of day 2.
    assert codes(first, "words") == {"x": 2, "t": 3, "é": 4, "": 5}
    assert version(spark, path) == 0

    second = fitted_on(spark, path, "2026-01-03", DAY2)
    assert codes(second, "u") == {"9": 2, "5": 3, "-1": 4, "10": 5, "8": 6, "70": 7}
    assert codes(second, "words") == {"x": 2, "t": 3, "é": 4, "": 5, "a": 6, "b": 7, "new": 8}
    assert version(spark, path) == 1

    # A day on which old values are gone: they keep their codes; one value comes.
    third = fitted_on(spark, path, "2026-01-04", [(4, 1, "x", None), (4, 1, "zz", None)])
    assert codes(third, "u") == codes(second, "u") | {"1": 8}
    assert codes(third, "words") == codes(second, "words") | {"zz": 9}
    assert version(spark, path) == 2

    # Every rerun adds nothing and gives what it gave, an old day's too: it does not know later days' values.
    for ds, rows, known in (
        ("2026-01-04", [(4, 1, "x", None), (4, 1, "zz", None)], third),
        ("2026-01-02", DAY1, first),
    ):
        fitted_again = fitted_on(spark, path, ds, rows)
        assert codes(fitted_again, "u") == codes(known, "u")
        assert codes(fitted_again, "words") == codes(known, "words")
        assert fitted_again.schema == known.schema
    assert version(spark, path) == 2

    # An old day that counts a value which a later day has named uses that code; a new value goes on at the end.
    late = fitted_on(
        spark,
        path,
        "2026-01-02",
        [*DAY1, (2, 1, None, None), (2, 1, None, None), (2, 6, None, None), (2, 6, None, None)],
    )
    assert codes(late, "u") == codes(first, "u") | {"1": 8, "6": 9}
    assert version(spark, path) == 3

    table = spark.read.format("delta").load(str(path))
    assert table.groupBy("name", "value").count().where("count > 1").count() == 0
    assert table.groupBy("name", "code").count().where("count > 1").count() == 0
    row = table.where("name = 'u' and value = '5'").collect()[0]
    assert (row["code"], row["count"], row["added_ds"]) == (3, 3, "2026-01-02")
    # Spark passes over files by their statistics.
    assert [r["value"] for r in table.where("name = 'u' and code >= 8").orderBy("code").collect()] == ["1", "6"]
    properties = spark.sql(f"DESCRIBE DETAIL delta.`{path}`").collect()[0]["properties"]
    assert properties["delta.logRetentionDuration"] == LOG_RETENTION
    # The session's default.
    assert properties["delta.enableChangeDataFeed"] == "true"

    # What others have asked of the table holds here, too.
    spark.sql(f"ALTER TABLE delta.`{path}` ADD CONSTRAINT few CHECK (name <> 'u' OR code < 10)")
    with pytest.raises(UserError, match=r"1 rows break the constraint 'few' of .*; nothing of them was loaded"):
        fitted_on(spark, path, "2026-01-05", [(5, 2, "x", None), (5, 2, "x", None)])
    assert version(spark, path) == 4
    assert codes(fitted_on(spark, path, "2026-01-05", [(5, 1, "yy", None)]), "words")["yy"] == 10


def test_codes_reach_the_rows(spark: SparkSession, tmp_path: Path) -> None:
    fitted = fitted_on(spark, tmp_path / "v", "2026-01-02", DAY1)
    rows = spark.createDataFrame(
        [(5, "t", ["x", "?"]), (8, "?", None), (None, None, [None, "x", "t"])], "u bigint, c string, cs array<string>"
    )
    coded_rows = [tuple(r) for r in transform(fitted, rows.coalesce(1)).collect()]
    assert coded_rows == [(3, 3, 2, 1), (1, 1, 0, 0), (0, 0, 0, 2)]
    assert [(f.name, f.cardinality) for f in fitted.features] == [("u", 6), ("c", 6), ("cs", 6)]


def test_max_size_keeps_the_most_frequent(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "v"
    first = fitted_on(spark, path, "2026-01-02", DAY1, max_size=2)
    # 5 (three times) and the first by text of those seen twice.
    assert codes(first, "u") == {"5": 2, "-1": 3}
    assert len(codes(fitted_on(spark, path, "2026-01-03", DAY2, max_size=3), "u")) == 3
    assert len(codes(fitted_on(spark, path, "2026-01-04", DAY2, max_size=3), "u")) == 3


class Meeting(VocabularyTable):
    """A table that, the first time, waits between its read and its commit until the other one has read too."""

    def __init__(self, spark: SparkSession, path: Location, ds: str, meet: threading.Barrier) -> None:
        super().__init__(spark, path, ds)
        self._meet = meet
        self.commits = 0

    def _append(self, rows: pa.Table) -> None:
        self.commits += 1
        if self.commits == 1:
            self._meet.wait(60)
        super()._append(rows)


def test_two_writers_at_once_never_share_a_code(spark: SparkSession, tmp_path: Path) -> None:
    """Both have read the table before either commits: when it is not there yet, and when it has a version."""
    path = tmp_path / "v"
    for day in (2, 4):
        meet = threading.Barrier(2)
        tables = [Meeting(spark, local(path), f"2026-01-0{day + i}", meet) for i in range(2)]

        def write(table: Meeting, values: tuple[str, ...]) -> dict[str, pa.Table]:
            n = len(values)
            columns = {"name": ["w"] * n, "value": values, "count": pa.array([1] * n, pa.int64()), "day": [0] * n}
            return table.update(pa.table(columns), {"w": VocabularyRule(min_count=1)})

        new_values = ((f"a{day}", "both", f"x{day}"), (f"b{day}", "both"))
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(write, tables, new_values))
        # The one that came second was refused, and gave its codes again.
        assert sorted(t.commits for t in tables) == [1, 2]
        rows = spark.read.format("delta").load(str(path)).select("value", "code").collect()
        stored_codes = {r["value"]: r["code"] for r in rows}
        assert len(stored_codes) == len(rows)
        assert sorted(stored_codes.values()) == list(range(2, 2 + len(rows)))
        assert {"both", *new_values[0], *new_values[1]} <= stored_codes.keys()
        for values, table in zip(new_values, results, strict=True):
            seen_codes = dict(zip(*table["w"].to_pydict().values(), strict=True))
            assert {v: seen_codes[v] for v in values} == {v: stored_codes[v] for v in values}


@pytest.mark.parametrize("partitions", [1, 5])
def test_order_does_not_depend_on_partitioning(spark: SparkSession, tmp_path: Path, partitions: int) -> None:
    rows: Rows = [(i % 4, i % 37, f"w{i % 11}", [f"w{i % 13}"]) for i in range(300)]
    shuffled = spark.createDataFrame(rows, "day int, u bigint, c string, cs array<string>").repartition(partitions)
    shuffled_fit = fitted_on(spark, tmp_path / "v", "2026-01-02", [tuple(r) for r in shuffled.collect()])  # type: ignore[misc]
    expected: dict[str, tuple[int, int]] = {}
    for day, u, _, _ in rows:
        first, count = expected.get(str(u), (99, 0))
        expected[str(u)] = (min(first, day), count + 1)
    order = sorted(expected, key=lambda v: (expected[v][0], -expected[v][1], v))
    assert codes(shuffled_fit, "u") == {v: i + 2 for i, v in enumerate(order)}
