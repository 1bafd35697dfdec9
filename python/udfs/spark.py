"""The column functions as Spark columns, and their names in SQL.

They are Java UDFs (native/src/main/java): on CPUs Spark calls them row by row, on GPUs the RAPIDS plugin calls them
batch by batch, with the same bits. Their jar is one of a session's jars (headrace.lake.spark.session).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, IntegerType, LongType

from headrace.errors import UserError

#: Name in SQL -> class of the jar, type that comes out. What they take and give: docs/native.md.
FUNCTIONS: dict[str, tuple[str, DataType]] = {
    "headrace_ngrams": ("headrace.udf.TextNgrams", ArrayType(IntegerType(), False)),
    "headrace_cross": ("headrace.udf.FeatureCross", ArrayType(IntegerType(), False)),
    "headrace_minhash": ("headrace.udf.MinHash", ArrayType(LongType(), False)),
}


def register(spark: SparkSession) -> None:
    """Make the functions known to a session, by the names of `FUNCTIONS`. Again costs nothing.

    Raises:
        UserError: the jar is not one of the session's.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    registry = spark._jsparkSession.sessionState().functionRegistry()
    for name, (path, types) in FUNCTIONS.items():
        if registry.functionExists(jvm.org.apache.spark.sql.catalyst.FunctionIdentifier(name)):
            continue
        try:
            spark.udf.registerJavaFunction(name, path, types)
        except Exception as e:
            if "CANNOT_LOAD_FUNCTION_CLASS" not in str(e) and "ClassNotFound" not in str(e):
                raise
            raise UserError(
                f"the session has no {path}: run `make native`, or add build/udfs/*.jar to spark.jars"
            ) from None


def ngrams(text: Column, n: int, buckets: int, most: int = 0) -> Column:
    """`headrace.udfs.arrow.ngrams` of a string column: array<int>, null for null. `most` 0: all of a row."""
    return _call("headrace_ngrams", text.cast("binary"), F.lit(n), F.lit(most), F.lit(buckets))


def cross(columns: Sequence[Column], buckets: int, most: int) -> Column:
    """`headrace.udfs.arrow.cross` of bigint and array<bigint> columns: array<int>, null where one of them is."""
    named = [x.alias(f"c{i}") for i, x in enumerate(columns)]
    return _call("headrace_cross", F.struct(*named), F.lit(most), F.lit(buckets))


def minhash(ids: Column, hashes: int) -> Column:
    """`headrace.udfs.arrow.minhash` of an array<bigint> column: array<bigint>, null where it has no id."""
    return _call("headrace_minhash", ids, F.lit(hashes))


def _call(name: str, *columns: Column) -> Column:
    spark = SparkSession.getActiveSession()
    if spark is None:
        raise RuntimeError("a column of this function needs an active session")
    register(spark)
    return F.call_function(name, *columns)
