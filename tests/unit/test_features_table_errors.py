"""Refusals of table operators and their messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.config import build_spec
from headrace.errors import UserError
from headrace.features.table_ops.external import ExternalReader, pin
from headrace.features.workflow.workflow import Workflow
from headrace.workspace import Workspace
from tests.arrow_table_ops import by_arrow
from tests.tables_support import as_table, prepare


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        ({"trailling": {}}, r"features.prepare\[0\]: no table operator 'trailling'; did you mean 'trailing'"),
        ({"trailing": {"keys": ["user"], "window": [1]}}, "unknown parameter 'window'; did you mean 'windows'"),
        ({"trailing": {"keys": ["user"]}}, "parameter 'windows' is missing"),
        ({"trailing": {"keys": ["usr"], "windows": [1]}}, "column 'usr' is not there"),
        ({"trailing": {"keys": ["price"], "windows": [1]}}, "key 'price' is double"),
        ({"trailing": {"keys": ["user"], "windows": [0]}}, "a window is a number of days above 0"),
        ({"trailing": {"keys": ["user"], "windows": [1], "stats": ["mean"]}}, "need `values`"),
        ({"trailing": {"keys": ["user"], "windows": [1], "values": ["item"], "stats": ["sum"]}}, "'item' is string"),
        ({"trailing": {"keys": ["user"], "windows": [1], "where": "n = 'a'"}}, "compares bigint with string"),
        ({"lag": {"keys": ["user"], "values": ["click"]}}, "the row's own would be in the difference"),
        ({"lag": {"keys": ["user"]}}, "give `values`"),
        ({"lag": {"keys": ["user"], "values": ["n"], "shift": -1}}, "shift"),
        ({"history": {"keys": ["user"], "values": ["n"], "length": 4097}}, "length"),
        ({"history": {"keys": ["user"], "values": ["tags"]}}, "'tags' is array<string>"),
        ({"sessions": {"keys": ["flag"]}}, "key 'flag' is boolean"),
        ({"target_encoding_past": {"keys": ["user"]}}, "'delay_hours' is missing"),
        ({"target_encoding_past": {"keys": ["click"], "delay_hours": 0}}, "leaks"),
        ({"filter": {"where": "n = "}}, "ends too early"),
        ({"filter": {"where": "n"}}, "compare it with something"),
        ({"filter": {"where": "1 = 1"}}, "one of them must be a column"),
        ({"filter": {"where": "n = 1 2"}}, "not expected here"),
        ({"filter": {"where": "(n = 1"}}, r"a '\)' is missing"),
        ({"filter": {"where": "n = 1; drop"}}, "not understood"),
        ({"filter": {"where": "ts > 'noon'"}}, "is no timestamp"),
        ({"filter": {"where": "tags = 'a'"}}, "only `is null`"),
        ({"filter": {"where": "n = 9223372036854775808"}}, "does not fit 64 bits"),
        ({"filter": {"where": " "}}, "empty"),
        ({"rename": {"to": {"click": "y"}}}, "is the label"),
        ({"rename": {"to": {"ts": "when"}}}, "is the event's time"),
        ({"rename": {"to": {"n": "item"}}}, "two columns would be named 'item'"),
        ({"rename": {"to": {"n": "_n"}}}, "reserved"),
        ({"dropna": {"subset": ["x"]}}, "column 'x' is not there"),
        ({"lambda": {"add": {"x": {"expression": "click + 1", "type": "int"}}}}, "leaks"),
        ({"lambda": {"add": {"x": {"expression": "`click`", "type": "int"}}}}, "leaks"),
        ({"lambda": {"add": {"x": {"expression": "CLICK * 1.0", "type": "double"}}}}, "leaks"),
        ({"lambda": {"add": {"x": {"expression": "`cLiCk`", "type": "int"}}}}, "leaks"),
        ({"lambda": {"add": {"Click": {"expression": "n", "type": "int"}}}}, "already there as 'click'"),
        ({"rename": {"to": {"n": "Click"}}}, "two columns would be named 'click'"),
        ({"rename": {"to": {"n": "DS"}}}, "reserved name"),
        ({"lambda": {"add": {"x": {"expression": "hash(*)", "type": "int"}}}}, "name the columns"),
        ({"lambda": {"add": {"x": {"expression": "rand()", "type": "double"}}}}, "answers otherwise"),
        ({"lambda": {"add": {"x": {"expression": "current_date", "type": "date"}}}}, "answers otherwise"),
        ({"lambda": {"add": {"x": {"expression": "(select 1)", "type": "int"}}}}, "no function of one row"),
        ({"lambda": {"add": {"n": {"expression": "1", "type": "int"}}}}, "already there"),
        ({"lambda": {"add": {"x": {"expression": "1", "type": "money"}}}}, "add.x.type"),
        ({"join_external": {"path": "t", "keys": ["item"], "add": {"n": "int"}}}, "already there"),
        ({"join_external": {"path": "t", "keys": ["item"], "add": {"x": "int"}, "on_duplicate": "first"}}, "`order`"),
        (
            {
                "join_external": {
                    "path": "t",
                    "keys": ["item"],
                    "add": {"x": "double"},
                    "on_duplicate": "first",
                    "order": ["x"],
                }
            },
            "order: 'x' is double",
        ),
        ({"join_asof": {"path": "t", "keys": ["item"], "valid_from": "item", "add": {"x": "int"}}}, "is a key"),
        ({"negatives": {"item": "item", "exclude_seen": True}}, "exclude_seen needs `user`"),
        ({"negatives": {"item": "item", "alpha": 0.6}}, "roots are the same"),
        ({"negatives": {"item": "item", "item_columns": ["ts"]}}, "'ts' is not of the item"),
    ],
)
def test_mistakes_are_explained(op: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        prepare(op)


def test_a_text_is_no_label_in_an_expression() -> None:
    added = {"x": {"expression": "concat(item, ' click', \"click\")", "type": "string"}}
    assert [c.name for c in prepare({"lambda": {"add": added}}).columns][-1] == "x"


def test_files_that_changed_after_they_were_pinned_are_refused(tmp_path: Path) -> None:
    csv = {"path": "t.csv", "format": "csv", "keys": ["item"], "add": {"x": "int"}}
    p = prepare({"join_external": csv})
    (tmp_path / "t.csv").write_text("item,x\na,1\n")
    pinned = pin(Workspace(tmp_path), p.externals)
    reader = ExternalReader.pinned_by(Workspace(tmp_path), p.externals, pinned)
    reader.check_unchanged()
    (tmp_path / "t.csv").write_text("item,x\na,22\n")
    with pytest.raises(UserError, match=r"t\.csv have changed since the features stage looked"):
        reader.check_unchanged()
    ExternalReader.pinned_by(Workspace(tmp_path), p.externals, pin(Workspace(tmp_path), p.externals)).check_unchanged()
    with pytest.raises(UserError, match=r"names no version of the csv table t\.csv"):
        ExternalReader.pinned_by(Workspace(tmp_path), p.externals, [])


def test_external_files_are_missing(tmp_path: Path) -> None:
    p = prepare({"join_external": {"path": "tables/none", "keys": ["item"], "add": {"x": "int"}}})
    with pytest.raises(UserError, match="there is no delta table"):
        by_arrow(p, as_table([]), ExternalReader(Workspace(tmp_path)))
    assert isinstance(as_table([]), pa.Table)


def test_a_label_that_lambda_makes_leaks_through_none_of_its_columns() -> None:
    spec: dict[str, Any] = {
        "pipeline": "census",
        "source": {"format": "csv", "path": "in.csv"},
        "table": {"columns": [{"name": "age", "type": "int"}, {"name": "Income"}, {"name": "tax", "type": "double"}]},
        "features": {
            "label": "rich",
            "prepare": [{"lambda": {"add": {"rich": {"expression": "income = '>50K tax'", "type": "int"}}}}],
            "workflow": [{"columns": ["age", "tax"], "ops": ["fill_missing"]}],
            "split": {"by": "position"},
        },
    }
    workflow = Workflow.from_spec(build_spec(spec))
    assert (workflow.label_column, workflow.input_columns) == ("rich", ("age", "tax"))
    spec["features"]["workflow"] = [{"columns": ["Income"], "ops": ["categorify"]}]
    with pytest.raises(UserError, match=r"features.workflow\[0\].columns: the label 'rich' is made of 'Income'"):
        Workflow.from_spec(build_spec(spec))
    # As well the label of another task.
    added = {"taxed": {"expression": "tax > 0", "type": "int"}}
    features = spec["features"] | {
        "prepare": [*spec["features"]["prepare"], {"lambda": {"add": added}}],
        "carried": ["taxed"],
        "workflow": [{"columns": ["tax"], "ops": ["fill_missing"]}],
    }
    taxed = spec | {"features": features, "train": {"tasks": {"rich": {}, "taxed": {"label": "taxed"}}}}
    with pytest.raises(UserError, match=r"features.workflow\[0\].columns: the label 'taxed' is made of 'tax'"):
        Workflow.from_spec(build_spec(taxed))
