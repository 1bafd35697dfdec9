"""An existing table of scores and the columns that a day brings."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from headrace.errors import UserError
from headrace.score.day_table import check_columns
from headrace.storage import local

OPTIONAL = {"source": "string", "reason": "string"}


def table(path: Path, *names: str) -> None:
    write_deltalake(str(path), pa.table({n: pa.array([], pa.string()) for n in names}))


@pytest.mark.parametrize("key", ["user", "source", "reason"])
def test_a_key_may_have_the_name_of_an_optional_column(tmp_path: Path, key: str) -> None:
    table(tmp_path / "scores", "ds", key)
    check_columns(local(tmp_path / "scores"), {"ds": "string", key: "string"}, "", OPTIONAL)
    other_key = "items" if key == "user" else "user"
    with pytest.raises(UserError, match="has the columns"):
        check_columns(
            local(tmp_path / "scores"), {"ds": "string", other_key: "string"}, "its keys were others", OPTIONAL
        )


def test_days_may_have_optional_columns_or_not(tmp_path: Path) -> None:
    table(tmp_path / "scores", "ds", "user", "source")
    check_columns(local(tmp_path / "scores"), {"ds": "string", "user": "string"}, "", OPTIONAL)
    with pytest.raises(UserError, match="its keys were others"):
        check_columns(local(tmp_path / "scores"), {"ds": "string", "item": "string"}, "its keys were others", OPTIONAL)
