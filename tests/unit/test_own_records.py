"""Records that a newer release has written: refused with their place and the key, not read in part, not damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UserError
from headrace.jobs.housekeeping.forget.proof import ErasureRequest
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.log_files import erased_rows, erasure_text, first_kept, replacements
from headrace.lake.forgotten import ForgottenValues, listed_in
from headrace.lake.landing import table_days
from headrace.lake.landing.load_history import LoadHistory, LoadRecord
from headrace.lake.landing.table_days import TakenDay, TakenDays
from headrace.publish.files import Record
from headrace.publish.tables.spark_table import Records
from headrace.storage import local
from tests.unit.test_lake_log import commit

DS = "2026-03-01"


def with_key(text: str, *path: str) -> str:
    """A record's JSON with a key that no release has, in the mapping below `path`."""
    record = json.loads(text)
    node: Any = record
    for name in path:
        node = node[int(name)] if isinstance(node, list) else node[name]
    node["colour"] = "red"
    return json.dumps(record)


def log_of(folder: Path, metadata: str) -> DeltaLog:
    commit(folder, 0, {"metaData": {"schemaString": '{"fields": []}'}})
    commit(folder, 1, {"commitInfo": {"operation": "WRITE", "userMetadata": metadata}})
    return DeltaLog(local(folder))


def loaded(folder: Path, change: Callable[..., str]) -> object:
    record = LoadRecord(ds=DS, key="k", declared="d", judged="j", files=[], rows={"kept": 5})
    return LoadHistory(log_of(folder, change(record.metadata(), "headrace.ingest"))).records


def taken(folder: Path, change: Callable[..., str], *path: str) -> object:
    day = TakenDay(DS, "k", "f", "1", "d", "j", {"read": 5, "kept": 5})
    text = table_days.metadata([day], {}, {})
    return TakenDays.read(log_of(folder, change(text, "headrace.ingest.table", *path))).days


def replaced(folder: Path, change: Callable[..., str]) -> object:
    file = local(folder) / "_delta_log" / "_headrace_erased.json"
    file.put_text(change(json.dumps({"a.parquet": {"add": {"path": "b.parquet"}, "rows": 1}}), "a.parquet"))
    return replacements(local(folder))


def listed(folder: Path, change: Callable[..., str]) -> object:
    file = local(folder) / "values.json"
    file.put_text(change(ForgottenValues.new().having("user", ["7"]).to_text()))
    # What it does not know it would not write again.
    return listed_in(file, "user", ["8"]).columns


def requested(folder: Path, change: Callable[..., str]) -> object:
    fields = {
        "id": "i",
        "pipeline": "p",
        "column": "user",
        "values": 1,
        "sha256": "s",
        "by": "me",
        "begun": f"{DS}T00:00Z",
    }
    file = local(folder) / "request.json"
    file.put_text(change(json.dumps(fields)))
    return ErasureRequest.load(file)


def published(folder: Path, change: Callable[..., str]) -> object:
    records = Records(local(folder))
    records.save(DS, Record("k", 5, "m", "s", []))
    file = folder / f"{DS}.json"
    file.write_text(change(file.read_text()))
    return records.published(DS)


@pytest.mark.parametrize(
    ("read", "subject"),
    [
        (loaded, f"the load record of {DS} (version 1 of the events' table)"),
        (taken, "the record of days that were taken (version 1 of the quarantine table)"),
        (lambda f, change: taken(f, change, "days", "0"), "the record of days that were taken (version 1 of the"),
        (replaced, "_delta_log/_headrace_erased.json"),
        (lambda _, change: erased_rows(change(erasure_text("r7", {DS: 3}), "headrace.erasure")), "of the erasure r7"),
        (
            lambda _, change: first_kept(
                change('{"headrace.retention": {"first": "2026-03-01"}}', "headrace.retention")
            ),
            "the record of days that were removed",
        ),
        (listed, "values.json"),
        (requested, "request.json"),
        (published, f"{DS}.json"),
    ],
)
def test_a_record_of_a_newer_release(read: Callable[..., object], subject: str, tmp_path: Path) -> None:
    assert read(tmp_path / "ours", lambda text, *path: text)
    with pytest.raises(UserError) as refused:
        read(tmp_path / "newer", with_key)
    message = str(refused.value)
    assert subject in message.partition(" was written by a newer headrace: ")[0]
    assert "it has the key 'colour', which " in message
    assert "damaged" not in message


def test_a_request_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"request\.json is damaged \(Field required\): remove it, and run headrace forget"
    ):
        ErasureRequest.load(local(tmp_path / "request.json"))
