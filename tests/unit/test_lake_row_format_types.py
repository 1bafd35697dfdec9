"""Types of columns of ORC and Avro files, whose footers and headers are read before Spark is asked."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastavro import parse_schema, writer
from pyarrow import orc

from headrace.errors import UserError
from headrace.lake.tables.folder import check_same_types, read_schema, with_aliases
from headrace.lake.tables.snapshot import TableFile
from headrace.storage import local


def table_file(path: Path) -> TableFile:
    identity = f"{path.stat().st_size}@{path.stat().st_mtime_ns}"
    return TableFile(path.name, local(path), path.stat().st_size, identity, "", "")


def orc_file(path: Path, **columns: pa.Array) -> TableFile:
    orc.write_table(pa.table(columns), str(path))
    return table_file(path)


def avro_file(path: Path, **types: Any) -> TableFile:
    fields = [{"name": name, "type": type_} for name, type_ in types.items()]
    with open(path, "wb") as file:
        writer(file, parse_schema({"type": "record", "name": "row", "fields": fields}), [])
    return table_file(path)


def record(**types: Any) -> dict[str, Any]:
    fields = [{"name": name, "type": type_} for name, type_ in types.items()]
    return {"type": "record", "name": "who", "fields": fields}


def struct(**values: Any) -> pa.Array:
    return pa.StructArray.from_arrays(list(values.values()), list(values))


INTS, LONGS = pa.array([1], pa.int32()), pa.array([1], pa.int64())
DIFFERENT: dict[str, tuple[pa.Array, pa.Array, str]] = {
    "int and long": (INTS, LONGS, "'x' is int32 in .*a.orc and int64 in .*b.orc"),
    "in a list": (pa.array([[1]], pa.list_(pa.int32())), pa.array([["1"]]), r"'x\[\]' is int32 in .* and string in "),
    "in a struct": (struct(id=INTS), struct(id=pa.array([1.5])), r"'x\.id' is int32 in .* and double in "),
    "a struct or not": (struct(id=INTS), INTS, "'x' is struct in .* and int32 in "),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_orc_files_that_differ(tmp_path: Path, case: str) -> None:
    first, second, message = DIFFERENT[case]
    files = [orc_file(tmp_path / "a.orc", x=first, y=LONGS), orc_file(tmp_path / "b.orc", x=second)]
    with pytest.raises(UserError, match=message) as refused:
        check_same_types(files, "orc")
    assert "\n" not in str(refused.value)


def test_orc_files_that_spark_merges(tmp_path: Path) -> None:
    narrow = pa.array([None], pa.decimal128(6, 2))
    files = [
        orc_file(tmp_path / "a.orc", x=struct(id=INTS), price=narrow),
        orc_file(tmp_path / "b.orc", x=struct(id=INTS, more=LONGS), price=narrow.cast(pa.decimal128(12, 2)), new=INTS),
    ]
    (tmp_path / "c.orc").write_bytes(b"ORC cut off")  # Spark says what is wrong with it
    check_same_types([*files, table_file(tmp_path / "c.orc")], "orc")


AVRO: dict[str, tuple[Any, Any, str]] = {
    "int and long": ("int", ["null", "long"], "'x' is int in .*a.avro and long in .*b.avro"),
    "a time or not": ({"type": "long", "logicalType": "timestamp-micros"}, "long", r"is long \(timestamp-micros\) in"),
    "in a list": ({"type": "array", "items": "int"}, {"type": "array", "items": "string"}, r"'x\[\]' is int in "),
    "in a record": (record(id="int"), record(id="double"), r"'x\.id' is int in .* and double in "),
    "a record or not": (["null", record(id="int")], "int", "'x' is record in .* and int in "),
}


@pytest.mark.parametrize("case", AVRO)
def test_avro_files_that_differ(tmp_path: Path, case: str) -> None:
    first, second, message = AVRO[case]
    files = [avro_file(tmp_path / "a.avro", x=first, y="long"), avro_file(tmp_path / "b.avro", x=second)]
    with pytest.raises(UserError, match=message):
        check_same_types(files, "avro")


def test_avro_files_that_are_alike(tmp_path: Path) -> None:
    files = [
        avro_file(tmp_path / "a.avro", x=["null", "int"], who=record(id="int")),
        avro_file(tmp_path / "b.avro", x="int", who=["null", record(id="int", more="long")], new="string"),
    ]
    (tmp_path / "c.avro").write_bytes(b"Obj cut off")
    check_same_types([*files, table_file(tmp_path / "c.avro")], "avro")


def test_a_damaged_header_of_an_avro_file_is_a_fault_and_no_trace(tmp_path: Path) -> None:
    """Bytes drawn anew, and files that end within."""
    form = "avro"
    avro_file(tmp_path / "whole", x="long", who=record(id="long", name=["null", "string"]))
    intact = (tmp_path / "whole").read_bytes()
    seed = random.randrange(2**32)
    rng, faults = random.Random(seed), 0
    for number in range(300):
        data = bytearray(intact)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path = tmp_path / f"{number}.{form}"
        path.write_bytes(data[: rng.randrange(len(data))] if number % 3 == 0 else data)
        schema = read_schema(local(path), str(number), form)
        assert schema.fault is None or (schema.fault and "\n" not in schema.fault), seed
        faults += schema.fault is not None
    assert faults > 100
    assert read_schema(local(tmp_path / "whole"), "", form).fault is None


def test_avro_fields_that_differ_in_case_alone_have_aliases() -> None:
    inner = {"type": "record", "name": "who", "fields": [{"name": "Id", "type": "long"}, {"name": "id", "type": "int"}]}
    fields = [{"name": "a", "type": ["null", inner]}, {"name": "A", "type": {"type": "array", "items": "string"}}]
    schema = json.loads(with_aliases(json.dumps({"type": "record", "name": "row", "fields": fields})))
    assert [(f["name"], f.get("aliases")) for f in schema["fields"]] == [("a", None), ("A_2", ["A"])]
    of_inner = schema["fields"][0]["type"][1]["fields"]
    assert [(f["name"], f.get("aliases")) for f in of_inner] == [("Id", None), ("id_2", ["id"])]
