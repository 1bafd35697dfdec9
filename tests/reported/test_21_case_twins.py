"""Columns whose names differ in case alone.

Reported as https://github.com/duckdb/duckdb/issues/13053 and https://github.com/databrickslabs/overwatch/issues/419.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastavro import parse_schema, writer
from pyarrow import orc
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import ingest, pipeline, read_table

USER: dict[str, Any] = {"name": "userId", "type": "bigint"}


def twins(rows: pd.DataFrame) -> pa.Table:
    """`userId` and `userid`, and the same in a struct."""
    named = rows.rename(columns={"user_id": "userId"})
    app = pa.array([f"app-{u}" for u in rows.user_id])
    inner = pa.StructArray.from_arrays([app, pa.array(rows.user_id)], ["Id", "id"])
    return utc(named, userid=app, inner=inner)


def declared(*users: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(c for c in COLUMNS if c["name"] != "user_id"), *users]


@pytest.mark.parametrize("day", [{"time": "ts"}, {"partition": "dt"}], ids=["time", "partition"])
def test_the_declared_spelling_is_read(spark: SparkSession, ws: Workspace, tmp_path: Path, day: dict[str, str]) -> None:
    rows = click_log()
    tables = {d: twins(part) for d, part in by_day(rows).items()}
    write_days(tmp_path / "data", tables, day.get("partition"))
    source = {"format": "parquet", "path": str(tmp_path / "data"), "day": day}
    columns = declared(USER, {"name": "inner_id", "type": "bigint", "path": "inner.id"})
    actual = kept_rows(spark, pipeline(source, columns), ws, DAYS[2])
    assert actual.event_id.tolist() == rows.event_id.tolist()
    assert actual.userId.tolist() == rows.user_id.tolist() == actual.inner_id.tolist()
    assert actual.ts.tolist() == rows.ts.tolist()
    twin = kept_rows(spark, pipeline(source, declared({"name": "userid"})), Workspace(ws.home / "o"), DAYS[2])
    assert twin.userid.tolist() == [f"app-{u}" for u in rows.user_id]


def test_what_may_mean_either_is_refused(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    rows = click_log()
    write_days(tmp_path / "data", {d: twins(part) for d, part in by_day(rows).items()})
    source = {"format": "parquet", "path": str(tmp_path / "data")}
    with pytest.raises(UserError, match="'USERID' may mean 'userId' or 'userid'"):
        ingest(pipeline(source, declared({"name": "USERID"})), ws, DAYS[2])
    # A file that has the other one alone.
    lone = twins(by_day(rows)[DAYS[1]]).drop_columns(["userId"])
    pq.write_table(lone, tmp_path / "data" / f"part-{DAYS[1]}.parquet")
    with pytest.raises(UserError, match=rf"part-{DAYS[1]}\.parquet has none that is spelled 'userId'"):
        ingest(pipeline(source, declared(USER)), Workspace(ws.home / "lone"), DAYS[2])


def pairs(rows: int = 40) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return rows with `Price` and `price`, and rows with `Price` alone."""
    both = pd.DataFrame({"event_id": range(rows), "clicked": [n % 2 for n in range(rows)]})
    both = both.assign(Price=both.event_id + 0.5, price=both.event_id * 2.0, inner=[f"i{n}" for n in range(rows)])
    lone = both.drop(columns="price").assign(event_id=both.event_id + 1000, Price=both.event_id + 0.25)
    return both, lone


def write_table(rows: pd.DataFrame, file: Path) -> None:
    """Write rows in the format that the file's name says."""
    form = file.name.removesuffix(".zst").rpartition(".")[2]
    if form == "csv":
        rows.to_csv(file, index=False, compression=None)
    elif form == "jsonl":
        rows.to_json(file, orient="records", lines=True, compression=None)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pandas(rows, preserve_index=False), file)
    elif form == "orc":
        orc.write_table(pa.Table.from_pandas(rows, preserve_index=False), str(file))
    else:
        types = {"event_id": "long", "clicked": "long", "inner": "string"}
        fields = [{"name": name, "type": ["null", types.get(name, "double")]} for name in rows.columns]
        with open(file, "wb") as opened:
            schema = parse_schema({"type": "record", "name": "row", "fields": fields})
            writer(opened, schema, rows.to_dict("records"))
    if file.name.endswith(".zst"):
        file.write_bytes(pa.compress(file.read_bytes(), "zstd", asbytes=True))


EVENT: list[dict[str, Any]] = [{"name": "event_id", "type": "bigint"}, {"name": "clicked", "type": "int"}]
PRICE: dict[str, Any] = {"name": "price", "type": "double"}
LIST_PRICE: dict[str, Any] = {"name": "list_price", "type": "double", "path": "Price"}
NET_PRICE: dict[str, Any] = {"name": "net_price", "type": "double", "path": "price"}
FORMS = ["jsonl", "orc", *(pytest.param(form, marks=pytest.mark.slow) for form in ("csv", "csv.zst", "jsonl.zst"))]
FORMS += [pytest.param(form, marks=pytest.mark.slow) for form in ("parquet", "avro")]


@pytest.mark.parametrize("form", FORMS)
def test_both_of_a_pair_are_read_in_every_format(spark: SparkSession, tmp_path: Path, form: str) -> None:
    """Against the pandas rows that were written: both, one beside the other's own name, and one without the other."""
    (tmp_path / "in").mkdir()
    both, lone = pairs()
    write_table(both, tmp_path / "in" / f"both.{form}")
    write_table(lone, tmp_path / "in" / f"lone.{form}")
    is_table = form in ("parquet", "orc", "avro")
    source = {"format": form.removesuffix(".zst"), "path": str(tmp_path / "in" / ("" if is_table else f"*.{form}"))}
    keys = {"keys": ["event_id"]}

    def values(columns: list[dict[str, Any]], **table: Any) -> pd.DataFrame:
        home = Workspace(tmp_path / f"home-{columns[-1]['name']}-{len(columns)}")
        spec = pipeline(source, [*EVENT, *columns], table=keys | table)
        if is_table:
            return kept_rows(spark, spec, home, DAYS[0])
        ingest(spec, home, DAYS[0])
        return read_table(spark, home).sort_values("event_id", ignore_index=True)

    every = pd.concat([both, lone], ignore_index=True)
    actual = values([NET_PRICE, LIST_PRICE])
    assert actual.event_id.tolist() == every.event_id.tolist()
    pd.testing.assert_series_equal(actual.list_price, every.Price, check_names=False)
    pd.testing.assert_series_equal(actual.net_price, every.price, check_names=False)
    if form == "csv.zst":
        return  # the rest is what csv and jsonl.zst show
    actual = values([PRICE, LIST_PRICE])
    pd.testing.assert_series_equal(actual.list_price, every.Price, check_names=False)
    pd.testing.assert_series_equal(actual.price, every.price, check_names=False)
    if is_table:  # neither of them is declared
        assert values([{"name": "inner"}]).inner.tolist() == every.inner.tolist()
    else:
        # The other one of the pair is no new column of the table.
        (tmp_path / "in" / f"lone.{form}").unlink()
        actual = values([{"name": "inner"}, PRICE], new_columns="accept")
        pd.testing.assert_series_equal(actual.price, both.price, check_names=False)
        assert "Price" not in actual.columns
    with pytest.raises(UserError) as refused:
        values([{"name": "PRICE", "type": "double"}])
    message = str(refused.value)
    if form.startswith("jsonl"):
        assert "PRICE: several fields have this name or differ from it in case alone; name one" in message
    else:
        assert "(table.columns: {name: price_1, path: Price}, {name: price_2, path: price})" in message
        assert "\n" not in message


def test_fields_of_a_record_that_are_a_pair(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Both are read from Parquet and Avro; of ORC files, whose columns Spark finds by their places, none is."""
    upper, lower = [f"A{n}" for n in range(20)], list(range(20))
    inner = pa.StructArray.from_arrays([pa.array(upper), pa.array(lower)], ["Id", "id"])
    table = pa.table({"event_id": lower, "clicked": lower, "inner": inner})
    for form in ("parquet", "orc", "avro"):
        (tmp_path / form).mkdir()
    pq.write_table(table, tmp_path / "parquet" / "a.parquet")
    orc.write_table(table, str(tmp_path / "orc" / "a.orc"))
    fields = [{"name": "Id", "type": "string"}, {"name": "id", "type": "long"}]
    columns = [{"name": name, "type": "long"} for name in ("event_id", "clicked")]
    columns += [{"name": "inner", "type": {"type": "record", "name": "inner_row", "fields": fields}}]
    with open(tmp_path / "avro" / "a.avro", "wb") as file:
        writer(file, parse_schema({"type": "record", "name": "row", "fields": columns}), table.to_pylist())
    pair = [{"name": "upper", "path": "inner.Id"}, {"name": "lower", "type": "bigint", "path": "inner.id"}]
    for form in ("parquet", "avro"):
        spec = pipeline({"format": form, "path": str(tmp_path / form)}, [*EVENT, *pair], table={"keys": ["event_id"]})
        actual = kept_rows(spark, spec, Workspace(ws.home / form), DAYS[0])
        assert (actual.upper.tolist(), actual.lower.tolist()) == (upper, lower)
    source = {"format": "orc", "path": str(tmp_path / "orc")}
    with pytest.raises(UserError, match=r"column 'inner' of .*a\.orc has fields that differ in case alone"):
        ingest(pipeline(source, [*EVENT, *pair], table={"keys": ["event_id"]}), ws, DAYS[0])
    actual = kept_rows(spark, pipeline(source, EVENT, table={"keys": ["event_id"]}), Workspace(ws.home / "o"), DAYS[0])
    assert actual.event_id.tolist() == lower


def test_a_name_that_changes_its_case(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Names without twins are matched without case, file by file."""
    rows = click_log()
    tables = {d: utc(part) for d, part in by_day(rows).items()}
    tables[DAYS[1]] = tables[DAYS[1]].rename_columns([n.title() for n in tables[DAYS[1]].column_names])
    write_days(tmp_path / "data", tables)
    source = {"format": "parquet", "path": str(tmp_path / "data"), "day": {"time": "ts"}}
    actual = kept_rows(spark, pipeline(source, COLUMNS), ws, DAYS[2])
    for name in ("event_id", "user_id", "price", "clicked"):
        assert actual[name].tolist() == rows[name].tolist()
