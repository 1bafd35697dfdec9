"""Files of pairs whose columns `headrace score --input` refuses, before any row is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.score.score_table import _with_columns, csv_rows
from headrace.stage import Context
from headrace.storage import local

DS = "2026-01-03"
NO_SPARK: Any = None


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return Context(load_spec("clicks"), Workspace(tmp_path), DS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "user_id,item,clicked\n1,2,0\n",
            r"pairs\.csv has a column 'item', which table\.columns does not declare.*item_id",
        ),
        ("user_id,nte\n1,2\n", r"pairs\.csv has a column 'nte', which table\.columns does not declare"),
        ("", r"pairs\.csv is empty: its first line must name its columns"),
    ],
)
def test_unknown_columns_are_refused_by_name(ctx: Context, text: str, message: str) -> None:
    file = local(ctx.ws.home / "pairs.csv")
    file.put_text(text)
    with pytest.raises(UserError, match=message), csv_rows(ctx, NO_SPARK, file):
        pytest.fail("rows of a refused file were given")


def test_missing_columns_are_refused_by_name(ctx: Context) -> None:
    """A column that nobody gives; one of items, where the file has no key of them; one for which no day is known."""
    score = ctx.spec.score
    assert score is not None
    source, of_item = local(ctx.ws.home / "pairs.csv"), score.item.columns[0]
    for columns, missing, message in (
        ([score.user.key], ["nobody"], rf"read 'nobody', which {source} lacks \(it has: {score.user.key}\)"),
        ([score.user.key], [of_item], rf"{source} has neither '{of_item}' nor the item's key '{score.item.key}'"),
        ([score.item.key], [of_item], rf"{source} lacks '{of_item}', .*not known for {DS}\. Run: headrace run clicks"),
    ):
        rows: Any = SimpleNamespace(columns=columns)
        with pytest.raises(UserError, match=message):
            with _with_columns(ctx, NO_SPARK, rows, missing, source):
                pytest.fail("rows without their columns were scored")
