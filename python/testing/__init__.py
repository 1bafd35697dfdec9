"""Checks for operators of one's own, to be called from one's own tests (docs/library.md).

from headrace.testing import batches, check_operator, check_table_operator

@given(batches({"price": "double", "click": "boolean"}))
def test_halve(spark, batch):
    check_operator(["price"] >> Halve(), batch, label="click", spark=spark)
"""

from headrace.testing.batches import batches
from headrace.testing.operators import check_operator
from headrace.testing.table_operators import check_table_operator

__all__ = ["batches", "check_operator", "check_table_operator"]
